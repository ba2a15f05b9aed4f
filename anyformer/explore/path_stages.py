"""View `stage`: the numbers of one stage of the path (`path_outline.py`), for one token, layer and head.

Every answer has `token`, `position` and `check`: the largest difference between the last numbers of the stage,
recomputed in float64 from those before, and the model's own.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anyformer.config import ConfigError, Fault, pattern_of
from anyformer.config.visibility import EVERYTHING
from anyformer.explore.formulas import embed_formula, layers_formula, position_formula
from anyformer.explore.layer_stages import HEAD_STAGES, LAYER_STAGES, norm_stage
from anyformer.explore.outputs import position
from anyformer.explore.path_outline import ATTENTION, LAYER_STAGES as IN_LAYER, PathView
from anyformer.explore.path_place import PathPlace, source_position
from anyformer.explore.requests import StageRequest
from anyformer.explore.trace import Trace, last_side
from anyformer.explore.vectors import gap, kind_of, rounded
from anyformer.explore.view import SavedText, TextView
from anyformer.explore.views import logits_by_layer
from anyformer.nn.feature_inputs import PatchInput
from anyformer.nn.inputs import InputModule, TokenInput
from anyformer.nn.inspection.residual_stream import layer_input
from anyformer.nn.inspection.sublayers import stacks_of
from anyformer.nn.norm import normed


class StageView(TextView):
    """The numbers of a stage."""

    kind: Literal["stage"] = "stage"
    request = StageRequest

    @torch.no_grad()
    def answer(self, trace: Trace, request: StageRequest) -> dict[str, Any]:
        kind, _, name = request.stage.partition(".")
        at = position(trace, request.at)
        if request.stage == "encoder.tokens" and last_side(trace.run) == "decoder" and request.key == -1:
            return {"token": None, "position": None, "layer": 0} | _tokens(PathPlace(trace, kind, at, request))
        if kind == "encoder" and last_side(trace.run) == "decoder":
            at = source_position(trace, request.key, at)
        if kind == "head" and name in HEAD_STAGES:
            return {"token": trace.reading.tokens[last_side(trace.run)][at], "position": at} | HEAD_STAGES[name](
                trace, at
            )
        place = PathPlace(trace, kind, at, request)
        if kind not in (*stacks_of(trace.run.model), "cross") or not _known(trace, place, request.stage):
            raise ConfigError(
                [Fault("stage", f"= '{request.stage}': this model has no such stage in layer {request.layer}")]
            )
        found = STAGES[name](place)
        return {"token": trace.reading.tokens[place.side][at], "position": at, "layer": place.layer} | found

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield from self._all(saved, 0, 0)
        yield from ({"stage": stage, "at": -1} for stage in saved.outline["head"])

    def clicked(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        sides = saved.outline["sides"]
        depth, heads = (max(max(side["heads"]) for side in sides), max(len(side["layers"]) for side in sides))[::-1]
        for layer, head in product(range(depth), range(max(heads, 1))):
            yield from self._all(saved, layer, head)

    def _all(self, saved: SavedText, layer: int, head: int) -> Iterator[dict[str, Any]]:
        """Yield the requests of all stages of the path, as `stageRequest` in path.js makes them."""
        outline = saved.outline
        for side in outline["sides"]:
            own = side["layers"][min(layer, len(side["layers"]) - 1)]
            for stage in [*side["begin"], *own, *side["end"]]:
                kind, _, name = stage.partition(".")
                request = {"stage": stage, "at": -1}
                if kind == "encoder" and outline["last"] == "decoder":
                    request["key"] = -1
                if name in IN_LAYER:
                    request["layer"] = layer
                if name in ATTENTION:
                    request["head"] = head
                yield request


def _known(trace: Trace, place: PathPlace, stage: str) -> bool:
    for one in PathView().answer(trace, place.request)["sides"]:
        if one["side"] == place.side:
            return stage in (*one["begin"], *one["layers"][place.layer], *one["end"])
    return False


# -- input ------------------------------------------------------------------------------------------------------------


def _tokens(place: PathPlace) -> dict[str, Any]:
    reading = place.trace.reading
    patches = isinstance(_module(place), PatchInput)
    ids = reading.distinct_ids(place.side)[0].tolist()
    return {
        "tokens": reading.tokens[place.side],
        "ids": ids,
        "patches": patches,
        "media": bool(reading.segments.get(place.side)) and not patches,
    }


def _module(place: PathPlace) -> InputModule:
    model = place.trace.run.model
    module = model.source if place.side == "encoder" else model.target
    assert module is not None
    return module


def _embedded(place: PathPlace) -> tuple[Tensor, Tensor]:
    """Return the vector of the token before and after positions are added to it."""
    model, side, seen = place.trace.run.model, place.side, list[Tensor]()
    inputs, layout = model.read_sides(*place.trace.reading.inputs, **place.trace.reading.options)[side]
    module, stack = _module(place), stacks_of(model)[side]

    def embed(x: Tensor) -> Tensor:
        seen.extend((x, stack.embed(x, layout)))
        return seen[1]

    if model.image_tower is not None:
        inputs = inputs._replace(media=None)
    module(inputs, model.table(module), embed, layout)
    return seen[0][0, place.at].double(), seen[1][0, place.at].double()


def _embed(place: PathPlace) -> dict[str, Any]:
    module = _module(place)
    before, _ = _embedded(place)
    tokens = module.vocab > 0
    extra = {"scale": module.scale, "vocab": module.vocab} if isinstance(module, TokenInput) else {}
    id = int(place.trace.reading.distinct_ids(place.side)[0, place.at])
    patch = _patch(place)
    return {
        "formula": embed_formula(module, id if tokens and id >= 0 else None, patch is not None),
        "vector": rounded(before),
        "id": id if tokens and id >= 0 else None,
        "first": isinstance(module, PatchInput) and patch is None,
        "patch": None if patch is None else rounded(patch),
        **extra,
    }


def _patch(place: PathPlace) -> Tensor | None:
    """Return the pixels of a patch as the model reads them, if its vector is a projection of them alone."""
    module = _module(place)
    if not isinstance(module, PatchInput):
        return None
    at = place.at - (module.class_token is not None)
    return module.cut(place.trace.reading.inputs[0])[0, at] if at >= 0 else None


def _position(place: PathPlace) -> dict[str, Any]:
    config = place.trace.run.config
    module = _module(place)
    before, after = _embedded(place)
    result = place.trace.activations[f"{place.side}.embed"][0, place.at].double()
    scheme = config.stacks[place.side].position
    types = module.types if isinstance(module, TokenInput) else None
    norm, typed = getattr(module, "norm", nn.Identity()), None
    layout, total = place.trace.layout(place.side), after
    if types is not None:
        given = place.trace.reading.options.get("types")
        typed = types.weight[0 if given is None else int(given[0, place.at])].double()
        total = total + typed
    model_total = normed(norm, total.float()[None, None], layout)[0, 0]
    if (last := module.last_linear()) is not None:
        model_total = last(model_total)
    return {
        "formula": position_formula(module, scheme.embeds(), typed is not None),
        "order": _order(place),
        "scheme": scheme.kind,
        "before": rounded(before),
        "added": rounded(after - before) if scheme.embeds() else None,
        "types": None if typed is None else rounded(typed),
        "norm": kind_of(norm),
        "result": rounded(result),
        "check": gap(model_total, result),
    }


def _order(place: PathPlace) -> str:
    """Return what shows the order of tokens without added positions: nothing ("set"), the mask, or parts ("mixer")."""
    stack = place.trace.run.config.stacks[place.side]
    attentions = [a for block in stack.unrolled() if (a := block.attention) and a.position is None]
    if len(attentions) < stack.depth or stack.pooling is not None:
        return "mixer"
    return "set" if all(pattern_of(one, place.side).as_window == EVERYTHING for one in attentions) else "mask"


# -- layers -----------------------------------------------------------------------------------------------------------


def _layers(place: PathPlace) -> dict[str, Any]:
    """Return the length of the stream after each layer, of what the sublayers added, and the prediction there."""
    trace, side, seen = place.trace, place.side, place.trace.activations
    stack, rows = stacks_of(trace.run.model)[side], list[dict[str, Any]]()
    for i in range(len(stack.runs)):
        at = place.at // (stack.pooling.factor ** stack.levels[i] if stack.pooling else 1)
        parts = [name for name in ("mixer", "cross", "feedforward") if f"{side}.{i}.{name}.out" in seen]
        added = {name: float(seen[f"{side}.{i}.{name}.out"][0, at].double().norm()) for name in parts}
        rows.append({"layer": i, "length": float(seen[f"{side}.{i}.out"][0, at].double().norm()), "added": added})
    first, tops = float(seen[f"{side}.embed"][0, place.at].double().norm()), None
    if side == last_side(trace.run) and trace.predicts_tokens and stack.pooling is None:
        best = logits_by_layer(trace, place.at).double().softmax(dim=-1).max(dim=-1)
        tops = [
            [trace.run.tokenizer.token(i), p] for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    shared = len(stack.blocks) < len(stack.runs)
    return {"formula": layers_formula(stack), "shared": shared, "rows": rows, "first": first, "tops": tops}


def _final(place: PathPlace) -> dict[str, Any]:
    trace, side = place.trace, place.side
    stack = stacks_of(trace.run.model)[side]
    x = layer_input(trace.run.model, side, trace.activations, len(stack.runs), trace.layout(side))
    return norm_stage(stack.final_norm, x[0, place.at], trace.activations[f"{side}.final"][0, place.at])


STAGES: dict[str, Callable[[PathPlace], dict[str, Any]]] = {
    "tokens": _tokens,
    "embed": _embed,
    "position": _position,
    **LAYER_STAGES,
    "layers": _layers,
    "final": _final,
}

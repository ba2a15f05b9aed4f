"""Views `lens` and `cell`: the most probable output after each layer, at every position (the logit lens as a grid)."""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import Count
from anyformer.explore.outputs import has_probabilities, logits_after, output_names, probabilities_of, separate_labels
from anyformer.explore.requests import StrictInt, TextRequest
from anyformer.explore.trace import Trace, last_side
from anyformer.explore.view import SavedText, TextView
from anyformer.nn.inspection.sublayers import stacks_of
from anyformer.runs.run import Run

PAGE = 64  # positions of one answer: logits of a long text are large
TOP_OUTPUTS = 12


class LensRequest(TextRequest):
    """The most probable output after each layer, for a page of positions from `first` on."""

    first: Count = 0


class CellRequest(TextRequest):
    """The most probable outputs after one layer (-1: the embeddings) at one position."""

    layer: StrictInt
    at: Count


class LensView(TextView):
    """The top output and its probability for each layer and position, from position `first` on."""

    kind: Literal["lens"] = "lens"
    request = LensRequest
    group, place, key = "prediction", 2, "g"

    def answer(self, trace: Trace, request: LensRequest) -> dict[str, Any]:
        _check(trace)
        columns, depth = _columns(trace), _depth(trace)
        if request.first >= len(columns):
            raise ConfigError([Fault("first", f"= {request.first}: there are {len(columns)} tokens, from 0")])
        stop, names = min(request.first + PAGE, len(columns)), output_names(trace)
        rows = []
        for layer in range(-1, depth):
            best = probabilities_of(trace, logits_after(trace, layer, request.first, stop)).max(dim=-1)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            rows.append([[names(id), p, id] for id, p in pairs])
        return {
            "layers": list(range(-1, depth)),
            "first": request.first,
            "page": PAGE,
            "count": len(columns),
            "columns": columns[request.first : stop],
            "rows": rows,
        }

    def fits(self, run: Run) -> bool:
        return has_probabilities(run)

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield {"first": 0}

    def clicked(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        found = saved.lens
        yield from ({"first": at} for at in range(PAGE, found["count"] if found else 0, PAGE))


class CellView(TextView):
    """The most probable outputs after one layer at one position, and the entropy of all."""

    kind: Literal["cell"] = "cell"
    request = CellRequest

    def answer(self, trace: Trace, request: CellRequest) -> dict[str, Any]:
        _check(trace)
        columns, depth = _columns(trace), _depth(trace)
        for field, at, low, high in (("layer", request.layer, -1, depth), ("at", request.at, 0, len(columns))):
            if not low <= at < high:
                raise ConfigError([Fault(field, f"= {at}: must be {low} to {high - 1}")])
        (p,) = probabilities_of(trace, logits_after(trace, request.layer, request.at, request.at + 1))
        best, names = p.topk(min(TOP_OUTPUTS, len(p))), output_names(trace)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return {
            "layer": request.layer,
            "at": request.at,
            "token": columns[request.at],
            "top": [[names(id), value] for id, value in pairs],
            "count": len(p),
            "entropy": None if separate_labels(trace) else float(torch.special.entr(p).sum()),
        }

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        if found := saved.lens:
            yield {"layer": found["layers"][-1], "at": min(saved.reading["at"], found["count"] - 1)}

    def clicked(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        if saved.is_cheap and (found := saved.lens):
            yield from ({"layer": n, "at": at} for n in reversed(found["layers"]) for at in range(found["count"]))


def _check(trace: Trace) -> None:
    if not has_probabilities(trace.run):
        why = f"its head {trace.run.config.head.kind} has no probabilities to show after each layer"
        raise ConfigError([Fault("run", why)])
    if stacks_of(trace.run.model)[last_side(trace.run)].pooling is not None:
        raise ConfigError([Fault("run", "its encoder pools tokens: layers have different numbers of positions")])


def _columns(trace: Trace) -> list[str]:
    """Return the tokens at which there is a prediction; "" for one prediction of the whole text."""
    whole = trace.run.config.head.per_row
    return [""] if whole else trace.reading.tokens[last_side(trace.run)]


def _depth(trace: Trace) -> int:
    return len(stacks_of(trace.run.model)[last_side(trace.run)].runs)

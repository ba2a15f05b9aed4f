"""The model as a diagram with the cost of each part, and the growth of its KV cache, from the config alone."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.cache.states import StateCache
from anyformer.config import (
    Block,
    ConfigError,
    Fault,
    Input,
    ModelConfig,
    Norm,
    Side,
    Spec,
    Stack,
    pattern_across,
    pattern_of,
    position_of,
)
from anyformer.config.cost import Cost
from anyformer.explore.requests import TextRequest
from anyformer.explore.trace import Trace, count_text
from anyformer.explore.view import TextView
from anyformer.nn.inspection.cost_rules import adapter_cost, block_costs
from anyformer.runs.run import Run

CURVE_POINTS = 64


class BlockView(TextView):
    """The view `block`: every part with its parameters and FLOPs, which add up to those of `count`."""

    kind: Literal["block"] = "block"
    group, place, key = "build", 1, "7"

    def answer(self, trace: Trace, request: TextRequest) -> dict[str, Any]:
        config, table = trace.run.config, count_text(trace)
        rows = {row.part: row for row in table.rows}

        def cost(part: str) -> dict[str, int]:
            return {"parameters": rows[part].parameters, "flops": rows[part].flops} if part in rows else _costs(Cost())

        lengths: dict[Side, int] = {"encoder": table.source_length or table.length, "decoder": table.length}
        inputs = {"encoder": ("source", config.source), "decoder": ("target", config.target)}
        stacks, read = [], {}
        for side, stack in config.stacks.items():
            name, spec = inputs[side]
            assert spec is not None
            read[side] = {"name": name, "details": details(spec), **_input_steps(spec), **cost(f"{name} embeddings")}
            stacks.append(
                {
                    "side": side,
                    "depth": stack.depth,
                    "share": stack.share,
                    "position": {"name": stack.position.kind, "details": details(stack.position)}
                    | cost(f"{side} positions"),
                    "final_norm": {"name": stack.final_norm.kind, **cost(f"{side} final norm")},
                    "layers": list(_layers(config, side, stack, lengths[side], lengths["encoder"])),
                }
            )
        return {
            "width": config.width,
            "stacks": stacks,
            "input": read,
            "head": {"name": config.head.kind, "details": details(config.head), "tied": config.tie, **cost("head")},
            "length": table.length,
            "source_length": table.source_length,
            "total": {"parameters": table.parameters, "flops": table.flops},
        }


class CacheView(TextView):
    """The view `cache`: bytes by number of tokens, and the bytes of one token in each layer."""

    kind: Literal["cache"] = "cache"
    group, place, key = "build", 2, "8"

    def answer(self, trace: Trace, request: TextRequest) -> dict[str, Any]:
        config, model = trace.run.config, trace.run.model
        if config.decoder is None:
            raise ConfigError([Fault("run", "its model has no decoder: only a decoder has a KV cache")])
        now, limit = len(trace.reading.tokens["decoder"]), config.decoder.limit
        every = max(1, -(-now // CURVE_POINTS))
        steps = sorted({*range(every, now + 1, every), 1, now})
        kinds: dict[str, list[int]] = {"self": [], "cross": []}
        for n in steps:
            rows = count_text(trace, n).rows
            cross = sum(row.cache_bytes for row in rows if row.part in ("decoder cross-attention", "encoder states"))
            kinds["cross"].append(cross)
            kinds["self"].append(sum(row.cache_bytes for row in rows) - cross)
        max_tokens = limit or config.context
        return {
            "steps": steps,
            "kinds": kinds,
            "now": now,
            "limit": max_tokens,
            "capacity": None if max_tokens is None else count_text(trace, max_tokens).cache_bytes,
            "layers": list(_cache_layers(model.new_cache(1, max(now, 2), kind="auto"), max(now, 2))),
        }

    def fits(self, run: Run) -> bool:
        return run.config.shape != "encoder"


def _cache_layers(cache: Cache, tokens: int) -> Iterator[dict[str, Any]]:
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, StateCache):  # as one slot, which every token overwrites
            yield {"layer": i, "bytes": layer.states.nbytes + layer.inputs.nbytes, "slots": 1}
            continue
        tensors = [x for x in layer.own() if x.numel()]
        slots = min((x.shape[2] for x in tensors), default=0)
        size = sum(x[:, :, :1].nbytes for x in tensors)
        yield {"layer": i, "bytes": size, "slots": None if slots == tokens else slots}


# -- blocks -----------------------------------------------------------------------------------------------------------


def _layers(config: ModelConfig, side: Side, stack: Stack, t: int, s: int) -> Iterator[dict[str, Any]]:
    """Yield the layers of a stack; equal neighbours become one entry with a range."""
    layers = []
    own = len(stack.prefix) + len(stack.blocks) if stack.share else stack.depth
    for i, (spec, level) in enumerate(zip(stack.unrolled(), stack.levels, strict=True)):
        read = -(-t // stack.pooling.factor**level) if stack.pooling else t
        at = f"{side}.blocks.{stack.runs[i]}"
        layers.append(_block(config, side, stack, spec, read, s, at, weights=i < own))
    for _, equal in groupby(enumerate(layers), lambda pair: pair[1]):
        numbers = list(equal)
        yield {"from": numbers[0][0], "to": numbers[-1][0], **numbers[0][1]}


def _block(
    config: ModelConfig, side: Side, stack: Stack, spec: Block, t: int, s: int, at: str, weights: bool
) -> dict[str, Any]:
    """Return one layer; without `weights` it shares those of an earlier layer, and its parameters count as 0."""
    placed = spec.on(side, stack.position)
    costs = {part: _costs(cost, weights) for part, cost in block_costs(placed, config.width, 1, t, s, side)}
    norms = costs.pop("norms")
    sublayers: list[tuple[str, str, str, dict[str, Any]]] = []
    if not spec.mixer.is_none:
        sublayers.append(("mixer", spec.mixer.describe(), next(iter(costs)), _mixer_details(spec, side, stack)))
    if spec.cross is not None:
        across = _settings("pattern", pattern_across(spec.cross))
        sublayers.append(("cross", spec.cross.describe(across=True), "cross-attention", details(spec.cross) | across))
    if not spec.feedforward.is_none:
        sublayers.append(("feedforward", spec.feedforward.describe(), "feed-forward", details(spec.feedforward)))
    parallel, shared, place = spec.is_parallel, spec.shares_norm, spec.placement
    kind = None if spec.norm.is_none else spec.norm.kind
    norm_kinds = {
        "in": kind if place in ("pre", "sandwich") and not shared else None,
        "branch": kind if place in ("branch", "sandwich") else None,
        "sum": kind if place == "post" and not parallel else None,
    }
    adapters = Cost()
    if config.adapter is not None:
        adapters = adapter_cost(config.adapter, at, spec, config.width, t, s)
    return {
        "sublayers": [
            {"name": name, "norms": norm_kinds, "residual": spec.residual, "inner": described}
            | {"details": settings, **costs[part]}
            for name, described, part, settings in sublayers
        ],
        "placement": place,
        "parallel": parallel,
        "norms": {"name": kind, "shared": shared, "sum": parallel and place == "post", **norms},
        "adapters": _costs(adapters, weights),
        "shared": not weights,
        "tokens": t,
    }


def _mixer_details(block: Block, side: Side, stack: Stack) -> dict[str, Any]:
    shown = details(block.mixer)
    if (attention := block.attention) is not None:
        shown |= _settings("pattern", pattern_of(attention, side))
        shown |= _settings("position", position_of(attention, stack))
    return shown


def _settings(name: str, spec: Spec) -> dict[str, Any]:
    """Return the kind of a nested spec, and its settings: {"pattern": "window", "pattern.before": 128}."""
    return {name: dict(spec)["kind"]} | {f"{name}.{field}": value for field, value in details(spec).items()}


def _input_steps(spec: Input) -> dict[str, Any]:
    """Return the steps after the positions of embeddings: the number of token types, and the kind of norm."""
    norm = getattr(spec, "norm", Norm.none())
    return {"types": spec.token_types, "norm": None if norm.is_none else norm.kind}


def _costs(cost: Cost, weights: bool = True) -> dict[str, int]:
    return {"parameters": cost.parameters if weights else 0, "flops": cost.flops}


def details(spec: Spec) -> dict[str, Any]:
    """Return the settings of a part; a nested spec is given by its kind."""
    settings: dict[str, Any] = {}
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if name != "kind" and value is not None and value != ():
            settings[name] = dict(value).get("kind") if isinstance(value, Spec) else value
    return {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}

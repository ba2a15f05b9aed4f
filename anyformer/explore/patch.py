"""View `patch`: activations of a second text in place of the first text's, one layer and position at a time.

Activation patching (Meng et al. 2022, Wang et al. 2022): the cells that move the output to that of the second text hold
the difference between both.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, Side
from anyformer.explore.outputs import has_probabilities, output_names, position, probabilities_of
from anyformer.explore.requests import StrictInt, TextRequest
from anyformer.explore.trace import Trace, last_side, passes_allowed, reads_on
from anyformer.explore.view import TextView
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.inspection.ablation import disable_heads
from anyformer.nn.inspection.sublayers import stacks_of
from anyformer.nn.inspection.taps import run_with_patches, run_with_taps
from anyformer.runs.run import Run
from anyformer.runs.run_inspection import Reading, read

MAX_OUTPUT_ELEMENTS = 2**26  # of one batch of patched passes


class PatchRequest(TextRequest):
    """Activations of the text `donor` in place of those of `text`, for each layer and position of a stack.

    `at` is as in the view `next`; -1 is the first position at which both texts have different outputs.
    """

    donor: str
    donor_target: str | None = None
    side: Literal["encoder", "decoder"] | None = None
    at: StrictInt = -1


class PatchView(TextView):
    """How far each patched activation moves the output of text A towards that of text B: 0 none, 1 all of it.

    The effect is (m - m_A) / (m_B - m_A) with m the difference of the two answers' outputs before the softmax.
    """

    kind: Literal["patch"] = "patch"
    request = PatchRequest
    group, place, key = "prediction", 5, "a"

    def answer(self, trace: Trace, request: PatchRequest) -> dict[str, Any]:
        side = _check(trace, request)
        run, a = trace.run, trace.reading
        with evaluating(run.model), disable_heads(run.model, trace.off):
            b = _donor(trace, request)
            counts = {one: (len(a.tokens[one]), len(b.tokens[one])) for one in a.tokens}
            if any(first != second for first, second in counts.values()):
                return {"fits": False, "counts": counts}
            names = [f"{side}.embed", *(f"{side}.{i}.out" for i in range(len(stacks_of(run.model)[side].runs)))]
            before = run.model(*a.inputs, **a.options)
            after, donors = run_with_taps(run.model, names, *b.inputs, **b.options)
            differ = _differences(trace, before, after)
            at = _position(trace, request.at, differ)
            outputs = {"a": _at(before, at)[0], "b": _at(after, at)[0]}
            best = {which: int(values.argmax()) for which, values in outputs.items()}
            answer = {
                "fits": True,
                "at": at,
                "differ": differ,
                "side": side,
                "sides": list(a.tokens),
                "tokens": a.tokens,
                "donor": b.tokens,
                **{which: _named(trace, values, best) for which, values in outputs.items()},
            }
            if best["a"] == best["b"]:
                return answer | {"layers": [], "positions": [], "cells": [], "limited": False}
            positions, limited = _positions(trace, b, side, at, len(names))
            size = max(1, MAX_OUTPUT_ELEMENTS // before.numel())
            parts = [positions[begin : begin + size] for begin in range(0, len(positions), size)]
            rows = [torch.cat([_patched(trace, name, donors[name], part, at) for part in parts]) for name in names]
        low, high = (float(values[best["b"]] - values[best["a"]]) for values in outputs.values())
        cells = [[_cell(trace, values, best, low, high) for values in row] for row in rows]
        return answer | {
            "layers": list(range(-1, len(names) - 1)),
            "positions": positions,
            "cells": cells,
            "limited": limited,
        }

    def fits(self, run: Run) -> bool:
        return has_probabilities(run)


def _check(trace: Trace, request: PatchRequest) -> Side:
    run = trace.run
    sides = list(trace.reading.tokens)
    if not has_probabilities(run):
        raise ConfigError([Fault("run", f"its head {run.config.head.kind} has no answers to move between")])
    if request.side is not None and request.side not in sides:
        raise ConfigError([Fault("side", f"= '{request.side}': the stacks are {' and '.join(sides)}")])
    side = request.side or sides[0]
    if stacks_of(run.model)[side].pooling is not None:
        raise ConfigError([Fault("run", "its encoder pools tokens: layers have different numbers of positions")])
    if any(not isinstance(value, Tensor) for value in trace.reading.options.values()):
        raise ConfigError([Fault("text", "has images or sounds: patching reads texts alone")])
    return side


def _donor(trace: Trace, request: PatchRequest) -> Reading:
    """Return text B; without a target, it continues with the tokens that the decoder reads for A."""
    run, a, text, target = trace.run, trace.reading, request.donor, request.donor_target or None
    if run.spec.joins_pairs and target is not None:
        text, target = f"{text}\t{target}", None
    b = read(run, text, target)
    if target is not None or a.begins is None:
        return b
    if len(a.inputs) == 2:
        return replace(b, inputs=(b.inputs[0], a.inputs[1]), tokens={**b.tokens, "decoder": a.tokens["decoder"]})
    assert b.begins is not None
    ids = torch.cat((b.inputs[0][:, : b.begins], a.inputs[0][:, a.begins :]), dim=1)
    tokens: dict[Side, list[str]] = {"decoder": b.tokens["decoder"][: b.begins] + a.tokens["decoder"][a.begins :]}
    same = {"marks": a.options["marks"]} if "marks" in a.options else {}  # of A: its answer is read
    return replace(b, inputs=(ids,), options={**b.options, **same}, tokens=tokens)


def _differences(trace: Trace, before: Tensor, after: Tensor) -> list[int]:
    """Return the positions at which A and B have different outputs; for an answer, those that predict it."""
    if before.dim() == 2:
        return [0] if int(before.argmax()) != int(after.argmax()) else []
    first = 0 if _is_text(trace) else max(0, (trace.reading.begins or 1) - 1)
    different = (before[0].argmax(dim=-1) != after[0].argmax(dim=-1)).nonzero()[:, 0].tolist()
    return [at for at in different if at >= first]


def _position(trace: Trace, at: int, differ: list[int]) -> int:
    first = position(trace, at)
    if at >= 0:
        return at
    if trace.run.config.head.output == "masked_lm" or not differ or first in differ:
        return first
    return differ[-1 if _is_text(trace) else 0]


def _is_text(trace: Trace) -> bool:
    """Return whether every position counts: of a text, not of an answer after a prompt."""
    return last_side(trace.run) == "encoder" or reads_on(trace.run)


def _positions(trace: Trace, b: Reading, side: Side, at: int, rows: int) -> tuple[list[int], bool]:
    """Return the positions to patch, and whether some are left out to save time.

    In a decoder alone, tokens before the first difference have equal activations; those after `at` have no effect.
    """
    a, length = trace.reading, len(trace.reading.tokens[side])
    low, high = 0, length
    if side == "decoder":
        high = min(length, max(at + 1, a.begins or 0))
        if len(a.tokens) == 1:
            same = (a.distinct_ids(side) == b.distinct_ids(side))[0].tolist()
            low = same.index(False) if False in same else 0
            low = low if "marks" not in a.options else 0
    most = max(1, passes_allowed(trace) // rows)
    all_ = list(range(low, max(high, low + 1)))
    if len(all_) <= most:
        return all_, False
    return sorted({*all_[: (most + 1) // 2], *all_[len(all_) - most // 2 :]}), True


def _patched(trace: Trace, name: str, donor: Tensor, positions: list[int], at: int) -> Tensor:
    """Return the outputs [positions, outputs] at `at` of passes with one position of an activation from B each."""
    reading, rows = trace.reading, range(len(positions))

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[rows, positions] = donor[0, positions]
        return x

    inputs = [ids.expand(len(rows), *ids.shape[1:]) for ids in reading.inputs]
    options = {key: value.expand(len(rows), *value.shape[1:]) for key, value in reading.options.items()}
    return _at(run_with_patches(trace.run.model, {name: change}, *inputs, **options), at)


def _at(output: Tensor, at: int) -> Tensor:
    """Return the outputs [b, outputs] at a position, or of the text."""
    return (output[:, at] if output.dim() == 3 else output).double().cpu()


def _named(trace: Trace, values: Tensor, best: dict[str, int]) -> dict[str, Any]:
    """Return the answer of a text, and the probabilities of both answers."""
    p, own = probabilities_of(trace, values), int(values.argmax())
    return {"name": output_names(trace)(own), "id": own, "pa": float(p[best["a"]]), "pb": float(p[best["b"]])}


def _cell(trace: Trace, values: Tensor, best: dict[str, int], low: float, high: float) -> dict[str, Any]:
    p, top = probabilities_of(trace, values), int(values.argmax())
    moved = float(values[best["b"]] - values[best["a"]])
    return {
        "effect": (moved - low) / (high - low),
        "pa": float(p[best["a"]]),
        "pb": float(p[best["b"]]),
        "top": output_names(trace)(top),
        "p": float(p[top]),
    }

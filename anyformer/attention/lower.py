"""Which kernel runs, and what it is told: from a pattern and two layouts to a relation, once per forward pass.

sdpa     torch's dense kernels; where no mask is needed, the fastest there is
varlen   documents one after the other, no mask: CUDA, half precision, long rows whose documents the layout knows
decode   few queries of a cache, each group of heads reading it once: CUDA, half precision, no gradients
flex     blocks of keys that nothing sees are never computed: CUDA, long sequences
eager    the reference, for what no kernel can
"""

from typing import Literal, NamedTuple

import torch

from anyformer.attention import flex, varlen
from anyformer.attention.attend import Normalizer, needs_eager
from anyformer.attention.few_queries import FEW, WIDEST
from anyformer.attention.layout import Layout, Relation, Role, lower_dense, without_mask
from anyformer.attention.position_tables import Positions
from anyformer.config import Attention, Full, Pattern, Scheme
from anyformer.kernels.runtime import HALF, HAS_TRITON, Runtime

LONG = 1024 * 1024  # pairs from which `flex` repays what it costs to start
ROOM = 512  # tokens of a row from which `varlen` repays a start for each document: below, a mask over all is faster


class Demand(NamedTuple):
    """What a layer asks of a kernel, beside the pattern."""

    key_width: int
    value_width: int
    normalizer: Normalizer = "softmax"
    dropout: bool = False
    cap: float | None = None
    sinks: bool = False

    @classmethod
    def of(cls, spec: Attention, width: int) -> "Demand":
        return cls(*spec.widths(width), spec.normalizer, spec.dropout > 0, spec.cap, spec.sinks)


class Choice(NamedTuple):
    kernel: Literal["eager", "sdpa", "flex", "varlen", "decode"]
    why: str


def choose(
    backend: str, pattern: Pattern, q: Layout, k: Layout, role: Role, scheme: Scheme, demand: Demand, at: Runtime
) -> Choice:
    """What was asked for if it can, else what can; `auto`: the fastest that can."""
    obstacles = {
        "decode": _no_decode(q, role, demand, at),
        "varlen": _no_varlen(pattern, q, k, role, scheme, demand, at),
        "flex": _no_flex(role, scheme, demand, at),
        "sdpa": needs_eager(demand.normalizer, demand.cap, demand.sinks),
    }
    match backend:
        case "eager":
            return Choice("eager", "asked for")
        case "sdpa" | "flex" | "varlen" | "decode":
            if (obstacle := obstacles[backend]) is None:
                return Choice(backend, "asked for")
            why = f"not {backend}: {obstacle}"
        case "auto":
            if obstacles["decode"] is None:
                return Choice("decode", "few queries read what a cache holds")
            if not obstacles["sdpa"] and not biases(scheme) and without_mask(pattern, q, k, role) is not None:
                return Choice("sdpa", "no mask is needed")
            if obstacles["varlen"] is None and max(q.positions.shape[1], k.positions.shape[1]) >= ROOM:
                return Choice("varlen", "the layout knows its documents")
            pays = at.device == "cuda" and q.positions.shape[1] * k.positions.shape[1] >= LONG
            if obstacles["flex"] is None and pays:
                return Choice("flex", "a mask between many tokens")
            why = f"not flex: {obstacles['flex'] or 'it pays on CUDA, between many tokens'}"
        case _:
            raise ValueError(f"backend = {backend!r}: must be 'auto', 'eager', 'sdpa', 'flex', 'varlen' or 'decode'")
    obstacle = obstacles["sdpa"]
    return Choice("sdpa", why) if obstacle is None else Choice("eager", f"{why}; {obstacle}")


def biases(scheme: Scheme) -> bool:
    """Whether a scheme adds to the scores."""
    return type(scheme).bias is not Scheme.bias or type(scheme).score is not Scheme.score


def _no_decode(q: Layout, role: Role, demand: Demand, at: Runtime) -> str | None:
    if at.device != "cuda" or not HAS_TRITON:
        return "it needs CUDA, and Triton"
    if at.dtype not in HALF:
        return f"in half precision only, not in {at.dtype}"
    if role == "self" or q.positions.shape[1] > FEW:
        return f"for up to {FEW} queries of a cache, or across"
    if torch.is_grad_enabled():
        return "it has no backward pass"
    if (obstacle := needs_eager(demand.normalizer, demand.cap, demand.sinks)) is not None:
        return obstacle.replace("sdpa", "it")
    if max(demand.key_width, demand.value_width) > WIDEST:
        return f"heads of {demand.key_width} and {demand.value_width}: it takes up to {WIDEST}"
    return None


def _no_flex(role: Role, scheme: Scheme, demand: Demand, at: Runtime) -> str | None:
    if demand.normalizer != "softmax":
        return "no kernel normalises by ReLU"
    if demand.dropout and at.training:
        return "it has no dropout on weights"
    if role == "cached":
        return "a cache is read by few queries"
    if type(scheme).bias is not Scheme.bias:
        return f"{scheme.kind} positions have no score function"
    if at.device == "cpu":
        return "it has no backward pass on the CPU" if torch.is_grad_enabled() else None
    if at.device != "cuda":
        return f"not on {at.device}"
    if at.dtype not in (*HALF, torch.float32):
        return f"not in {at.dtype}"
    if not all(16 <= width <= 256 for width in (demand.key_width, demand.value_width)):
        return f"heads of {demand.key_width} and {demand.value_width}: it takes 16 to 256"
    return None


def _no_varlen(
    pattern: Pattern, q: Layout, k: Layout, role: Role, scheme: Scheme, demand: Demand, at: Runtime
) -> str | None:
    if at.device != "cuda" or not {"window_size", "scale"} <= varlen.OPTIONS:
        return "it needs CUDA, and a torch that has it"
    if at.dtype not in HALF:
        return f"in half precision only, not in {at.dtype}"
    if (obstacle := needs_eager(demand.normalizer, demand.cap, demand.sinks)) is not None:
        return obstacle.replace("sdpa", "it")
    if demand.dropout and at.training:
        return "it has no dropout on weights"
    known = all(side.ordered and side.documents is not None and side.segments is not None for side in (q, k))
    if not known or role == "cached" or (role == "self" and q is not k):
        return "the layout does not know its documents"
    if role == "cross" and not isinstance(pattern, Full):
        return "across texts every key of a document only"
    if q.marks is not None or k.marks is not None or biases(scheme) or varlen.window_of(pattern) is None:
        return "full, causal and window patterns only, without marks or biases"
    if demand.key_width != demand.value_width or demand.key_width % 8 or demand.key_width > 256:
        return f"heads of {demand.key_width} and {demand.value_width}: it takes equal multiples of 8 up to 256"
    return None


def lower(
    pattern: Pattern, q: Layout, k: Layout, role: Role, positions: Positions, demand: Demand, at: Runtime, backend: str
) -> Relation:
    """A pattern between two layouts, for the kernel that runs."""
    causal = not pattern.looks_ahead
    choice = choose(backend, pattern, q, k, role, positions.scheme, demand, at)

    def dense() -> Relation:
        return lower_dense(pattern, q, k, role, positions.bias(q.positions, k.positions, causal))

    match choice.kernel:
        case "flex":
            levels = positions.levels(causal, q.positions.device)
            return Relation(blocks=flex.lower(pattern, q, k, positions.scheme, levels), make=dense)
        case "varlen":
            return Relation(documents=varlen.lower(pattern, q, k), make=dense)
        case "decode":
            return dense()._replace(few=True)
        case "eager" | "sdpa":
            return dense()

"""The choice of an attention kernel, from Python facts only: once per forward pass for all layers that share a mask.

sdpa     torch's dense kernels; the fastest for longer rows that need no mask
short    rows of up to 128 tokens that need a mask, or of up to 64 that do not: training on CUDA in bf16, compiled whole
varlen   concatenated documents without a mask: CUDA, half precision, long rows whose layout knows its documents
decode   few queries of a KV cache, which each group of heads reads once: CUDA, half precision, no gradients
flex     skips blocks of keys that no query sees: CUDA, long sequences
eager    the reference, for what no kernel supports
"""

from functools import lru_cache
from typing import NamedTuple

import torch

from anyformer.attention import short_rows, varlen
from anyformer.attention.few_queries import MAX_HEAD_WIDTH, MAX_QUERIES
from anyformer.attention.layout import Facts, Layout, Role
from anyformer.attention.lowered import Dense, KernelChoice
from anyformer.attention.scores import Normalizer
from anyformer.config import Attention, Pattern, Position
from anyformer.config.visibility import EVERYTHING, PAST
from anyformer.kernels.runtime import HALF, Runtime

FLEX_MIN_PAIRS = 1024 * 1024  # queries × keys from which `flex` repays its start-up cost
SHORT_MAX_MASKLESS_ROW = 64  # tokens of a row where no mask is needed; at 128 the forward pass of `sdpa` is faster
VARLEN_MIN_ROW = 512  # tokens of a row from which `varlen` repays its cost per document: below, a dense mask is faster


class LatentCost(NamedTuple):
    """Widths and multiplications per head of latent attention that reads compressed vectors as a single head."""

    key_width: int  # rank + rotary_width
    value_width: int  # rank
    extra: int  # multiplications of a query with each cached token, beyond those of expanded keys and values
    expansion: int  # multiplications to expand the keys and values of a cached token


class Requirements(NamedTuple):
    """Requirements of a layer on its kernel, apart from its pattern and position scheme."""

    key_width: int
    value_width: int
    normalizer: Normalizer = "softmax"
    dropout: bool = False
    cap: float | None = None
    sinks: bool = False
    latent: LatentCost | None = None
    own_weights: bool = False  # the layer computes its weights itself
    rotary_width: int = 0  # of a key: how much of it the scheme may rotate

    @classmethod
    def of(cls, spec: Attention, width: int) -> "Requirements":
        """Return the requirements of an attention layer in a model of this width."""
        k, k_v = spec.widths(width)
        if spec.global_projections:  # two keys and values for each token
            k, k_v = 2 * k, 2 * k_v
        latent = None
        if spec.latent:
            rank, rotary = spec.latent.rank, spec.latent.rotary_width
            latent = LatentCost(rank + rotary, rank, 2 * rank + rotary - k - k_v, rank * (k - rotary + k_v))
        own = latent, spec.own_weights, spec.rotary_width(width)
        return cls(k, k_v, spec.normalizer, spec.dropout > 0, spec.cap, spec.sinks, *own)

    def absorbs(self, queries: int) -> bool:
        """Return whether compressed vectors are cheaper than expanded keys and values for this many queries."""
        return self.latent is not None and queries * self.latent.extra < self.latent.expansion

    def absorbed(self) -> "Requirements":
        """Return the requirements on compressed vectors."""
        assert self.latent is not None
        return self._replace(key_width=self.latent.key_width, value_width=self.latent.value_width)


class Pair(NamedTuple):
    """The facts of queries and keys that decide on a kernel."""

    q: Facts
    k: Facts
    role: Role
    same: bool  # one layout is both
    grads: bool  # are enabled
    transformed: bool  # by torch.func
    triton: bool  # is available

    @property
    def longest(self) -> int:
        return max(self.q.length, self.k.length)


def decide(
    backend: str, pattern: Pattern, pair: Pair, scheme: Position, needs: Requirements, at: Runtime
) -> KernelChoice:
    """Return the requested kernel, or the next best one if it cannot run; for `auto` the fastest one that can."""
    maskless = None if scheme.biases() else without_mask(pattern, pair.q, pair.k, pair.role)
    choice = _decide(backend, pattern, pair, scheme, needs, at, maskless is not None)
    if maskless is None or choice.kernel not in ("sdpa", "eager"):
        return choice
    return choice._replace(maskless=maskless._replace(kernel=choice.kernel))


decide_once = lru_cache(maxsize=4096)(decide)
"""The same; facts that were there before take their decision from then."""


def _decide(
    backend: str, pattern: Pattern, pair: Pair, scheme: Position, needs: Requirements, at: Runtime, maskless: bool
) -> KernelChoice:
    content = f"{scheme.kind} positions add a bias of each text's own" if scheme.reads_content() else None
    obstacles = {
        "decode": content or _no_decode(pair, needs, at),
        "short": content or _no_short(pattern, pair, scheme, needs, at),
        "varlen": content or _no_varlen(pattern, pair, scheme, needs, at),
        "flex": content or _no_flex(pair, scheme, needs, at),
        "sdpa": _no_sdpa(needs),
    }
    match backend:
        case "eager":
            return KernelChoice("eager", "requested")
        case "sdpa" | "short" | "flex" | "varlen" | "decode":
            if (obstacle := obstacles[backend]) is None:
                return KernelChoice(backend, "requested")
            reason = f"not {backend}: {obstacle}"
        case "auto":
            if obstacles["decode"] is None:
                return KernelChoice("decode", "few queries read a cache")
            maskless = maskless and not content
            # outside of a compiled step the host needs longer to launch `short` than the GPU for most rows
            compiled = torch.compiler.is_compiling() and pair.grads
            if compiled and obstacles["short"] is None and (not maskless or pair.longest <= SHORT_MAX_MASKLESS_ROW):
                return KernelChoice("short", "short rows in compiled training")
            if maskless and not obstacles["sdpa"]:
                return KernelChoice("sdpa", "no mask is needed")
            if obstacles["varlen"] is None and pair.longest >= VARLEN_MIN_ROW:
                return KernelChoice("varlen", "the layout knows its documents")
            pays = at.device == "cuda" and pair.q.length * pair.k.length >= FLEX_MIN_PAIRS
            if obstacles["flex"] is None and pays:
                return KernelChoice("flex", "a mask between many tokens")
            reason = f"not flex: {obstacles['flex'] or 'it pays off on CUDA, between many tokens'}"
        case _:
            raise ValueError(
                f"backend = {backend!r}: must be 'auto', 'eager', 'sdpa', 'short', 'flex', 'varlen' or 'decode'"
            )
    obstacle = obstacles["sdpa"]
    return KernelChoice("sdpa", reason) if obstacle is None else KernelChoice("eager", f"{reason}; {obstacle}")


def without_mask(pattern: Pattern, q: Facts | Layout, k: Facts | Layout, role: Role) -> Dense | None:
    """Return the dense form without a stored mask, or None if layouts and pattern need one."""
    if q.marks is None and k.marks is None and not q.packed and not k.packed:
        if pattern.as_window == EVERYTHING and q.padding == k.padding == "none":
            return Dense()
        # the real tokens of a row never see the padding to their right
        if pattern.as_window == PAST and role == "self" and q.ordered and q.padding != "any":
            return Dense(causal=True)
    return None


# -- why a kernel cannot run: None if it can --------------------------------------------------------------------------


def _no_softmax(needs: Requirements) -> str | None:
    if needs.own_weights:
        return "the layer computes its weights itself"
    return "no kernel normalises by ReLU" if needs.normalizer != "softmax" else None


def _no_sdpa(needs: Requirements, name: str = "sdpa") -> str | None:
    if (obstacle := _no_softmax(needs)) is not None:
        return obstacle
    return f"{name} has no soft cap" if needs.cap is not None else f"{name} has no sinks" if needs.sinks else None


def _no_decode(pair: Pair, needs: Requirements, at: Runtime) -> str | None:
    if at.device != "cuda" or not pair.triton:
        return "it needs CUDA and Triton"
    if at.dtype not in HALF:
        return f"it needs half precision, not {at.dtype}"
    if pair.role in ("self", "part") or pair.q.length > MAX_QUERIES:
        return f"it takes up to {MAX_QUERIES} queries, of a cache or of an encoder's output"
    if pair.grads:
        return "it has no backward pass"
    if (obstacle := _no_sdpa(needs, "it")) is not None:
        return obstacle
    if max(needs.key_width, needs.value_width) > MAX_HEAD_WIDTH:
        return f"heads are {needs.key_width} and {needs.value_width} wide: it takes up to {MAX_HEAD_WIDTH}"
    return None


def _no_segments(pattern: Pattern, pair: Pair, scheme: Position) -> str | None:
    """Return why segments and a window do not say all that a kernel must know; None if they do."""
    if pair.role == "cross" and pattern.as_window != EVERYTHING:
        return "in cross-attention it takes the full pattern only"
    if pair.q.marks or pair.k.marks or scheme.biases() or pattern.as_window is None:
        return "it takes full, causal and window patterns only, without marks or biases"
    return None


def _no_short(pattern: Pattern, pair: Pair, scheme: Position, needs: Requirements, at: Runtime) -> str | None:
    if at.device != "cuda" or not pair.triton:
        return "it needs CUDA and Triton"
    if at.dtype is not torch.bfloat16:  # GPUs with fp16 alone have too little shared memory
        return f"it needs bf16, not {at.dtype}"
    if (obstacle := _no_sdpa(needs, "it")) is not None:
        return obstacle
    if pair.role in ("cached", "part") or pair.longest > short_rows.MAX_ROW:
        return f"it takes rows of up to {short_rows.MAX_ROW} tokens, without a cache"
    if (obstacle := _no_segments(pattern, pair, scheme)) is not None:
        return obstacle
    contiguous = all(side.is_arange or (side.ordered and side.has_documents) for side in (pair.q, pair.k))
    if not contiguous and pattern.as_window != EVERYTHING:  # the kernel takes indices for positions
        return "a document may not be contiguous"
    if needs.key_width != needs.value_width or needs.key_width > short_rows.MAX_HEAD_WIDTH:
        return (
            f"heads are {needs.key_width} and {needs.value_width} wide: "
            f"it takes equal widths up to {short_rows.MAX_HEAD_WIDTH}"
        )
    return "torch.func cannot transform it" if pair.transformed else None


def _no_flex(pair: Pair, scheme: Position, needs: Requirements, at: Runtime) -> str | None:
    if (obstacle := _no_softmax(needs)) is not None:
        return obstacle
    if needs.dropout and at.training:
        return "it has no dropout on weights"
    if pair.role == "cached":
        return "it does not read a cache"
    if type(scheme).bias is not Position.bias:
        return f"{scheme.kind} positions have no score function"
    if at.device == "cpu":
        return "it has no backward pass on the CPU" if pair.grads else None
    if at.device != "cuda":
        return f"it does not run on {at.device}"
    if at.dtype not in (*HALF, torch.float32):
        return f"it does not run in {at.dtype}"
    if not all(16 <= width <= 256 for width in (needs.key_width, needs.value_width)):
        return f"heads are {needs.key_width} and {needs.value_width} wide: it takes 16 to 256"
    return None


def _no_varlen(pattern: Pattern, pair: Pair, scheme: Position, needs: Requirements, at: Runtime) -> str | None:
    if at.device != "cuda" or not {"window_size", "scale"} <= varlen.OPTIONS:
        return "it needs CUDA and a torch version that has it"
    if at.dtype not in HALF:
        return f"it needs half precision, not {at.dtype}"
    if (obstacle := _no_sdpa(needs, "it")) is not None:
        return obstacle
    if needs.dropout and at.training:
        return "it has no dropout on weights"
    known = all(side.ordered and side.has_documents and side.segmented for side in (pair.q, pair.k))
    if not known or pair.role in ("cached", "part") or (pair.role == "self" and not pair.same):
        return "the layout does not know its documents"
    if (obstacle := _no_segments(pattern, pair, scheme)) is not None:
        return obstacle
    if needs.key_width != needs.value_width or needs.key_width % 8 or needs.key_width > 256:
        return f"heads are {needs.key_width} and {needs.value_width} wide: it takes equal multiples of 8 up to 256"
    return None

"""Attention: softmax(Q Kᵀ) V, self or cross. Imports no torch."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field

from anyformer.config.cost import Cost, Matrix, Sizes, linear_costs
from anyformer.config.disentangled import Disentangled as Disentangled  # all schemes are known where this is imported
from anyformer.config.families import Mixer, Side, must_divide
from anyformer.config.norm import RMSNorm, TokenNorm
from anyformer.config.pattern import Pattern, pairs, plain_pattern
from anyformer.config.position import Position
from anyformer.config.spec import BY_KIND, Count, Fault, Flag, Number, Positive, Probability, Size, Spec

if TYPE_CHECKING:
    from torch import nn

MAX_HEADS = 65_536
Heads = Annotated[int, Field(strict=True, ge=1, le=MAX_HEADS)]


class Unscaled(Spec):
    """A factor of 1."""

    kind: Literal["none"] = "none"


class Times(Spec):
    """A number."""

    kind: Literal["value"] = "value"
    value: Number  # the factor


class InvSqrtKey(Spec):
    """1/sqrt(k), the head width: keeps the variance of scores near 1."""

    kind: Literal["inv_sqrt_key"] = "inv_sqrt_key"


class InvSqrtWidth(Spec):
    """1/sqrt(d)."""

    kind: Literal["inv_sqrt_width"] = "inv_sqrt_width"


class SqrtWidth(Spec):
    """sqrt(d)."""

    kind: Literal["sqrt_width"] = "sqrt_width"


Scale = Annotated[Unscaled | Times | InvSqrtKey | InvSqrtWidth, *BY_KIND]


def factor(scale: Unscaled | Times | InvSqrtKey | InvSqrtWidth | SqrtWidth, width: int, key_width: float = 1) -> float:
    """Return the factor of the scores."""
    match scale:
        case Unscaled():
            return 1.0
        case Times(value=value):
            return value
        case InvSqrtKey():
            return key_width**-0.5
        case InvSqrtWidth():
            return width**-0.5
        case SqrtWidth():
            return width**0.5


class NoOutput(Spec):
    """The concatenated heads as they are (then h·k_v must be d)."""

    kind: Literal["none"] = "none"


class Projected(Spec):
    """A linear layer that mixes the heads."""

    kind: Literal["linear"] = "linear"
    bias: Flag = False  # a bias of the output projection


Output = Annotated[NoOutput | Projected, *BY_KIND]


class NoCompression(Spec):
    """Queries, keys and values straight from the embedding."""

    kind: Literal["none"] = "none"


class Latent(Spec):
    """Keys and values of all heads from one vector per token, and that is what a cache keeps (DeepSeek-V2, 2024).

    c = N(x W_c) of `rank` numbers; k_i = [c W_ki ; r], v_i = c W_vi. Rotary positions act on the last `rotary_width`
    numbers of a head, where all share one key: r = x W_r, turned, and kept beside c.
    """

    kind: Literal["latent"] = "latent"
    rank: Size  # size of the vector that the cache stores for each token
    rotary_width: Count  # part of key_width that carries positions; the rest is content
    query_rank: Size | None = None  # rank of a low-rank projection of queries; None: a full projection
    norm: TokenNorm = RMSNorm()  # of c, and of what queries go through


Compression = Annotated[NoCompression | Latent, *BY_KIND]


HeadNormOver = Literal["head", "each_head", "projection"]


class Attention(Mixer):
    """softmax(Q Kᵀ · scale + mask + bias) V in h heads, each a projection of the whole embedding."""

    own_weights: ClassVar[bool] = False  # its module overrides `weigh` and `attend`, and reads a dense mask: no kernel

    kind: Literal["attention"] = "attention"
    heads: Heads  # number of query heads
    kv_heads: Heads | None = None  # number of key/value heads; None: heads; fewer: grouped-query, 1: multi-query
    key_width: Size | None = None  # width of a head's queries and keys; None: d / heads
    value_width: Size | None = None  # width of a head's values; None: key_width
    # shared_qk: one projection for queries and keys; shared_qkv: and values
    projections: Literal["separate", "shared_qk", "shared_qkv"] = "separate"
    compress: Compression = NoCompression()  # latent: keys and values from one short vector per token (MLA)
    bias: Flag = False  # biases of the query, key and value projections
    # second query, key and value projections, by which global tokens read all others; in an encoder (Longformer)
    global_projections: Flag = False
    output: Output = Projected()  # the output projection W_O, or none
    # sigmoid gate of each head's output, from the token itself: one number per head, or one per element (Qwen3-Next)
    gate: Literal["none", "head", "element"] = "none"
    value_residual: Flag = False  # mixes in the values of the first layer that has it, with learned weights (ResFormer)
    qk_norm: TokenNorm = TokenNorm.none()  # norm of queries and keys, before positions
    # vectors of qk_norm: each head, with one γ for all heads (head) or one for each (each_head: StableLM 2, Cohere),
    # or all heads at once (projection: OLMo 2)
    qk_norm_over: HeadNormOver = "head"
    scale: Scale = InvSqrtKey()  # factor of the scores
    cap: Positive | None = None  # scores become cap · tanh(scores / cap), before positions add to them (Gemma 2)
    normalizer: Literal["softmax", "relu"] = "softmax"  # relu: relu(scores) / number of visible keys
    sinks: Flag = False  # softmax: a learned score for each head that takes weight and gives no value (gpt-oss)
    pattern: Pattern | None = None  # which keys a query sees; None: causal in a decoder, full in an encoder and across
    position: Position | None = None  # position scheme of this attention; None: the stack's
    dropout: Probability = 0.0  # on the attention weights
    part: ClassVar = "self-attention"

    @property
    def groups(self) -> int:
        """Key/value heads, given or derived."""
        return self.kv_heads or self.heads

    def widths(self, width: int) -> tuple[int, int]:
        """Head width of queries and keys, and of values, given or derived."""
        key = self.key_width or width // self.heads
        return key, self.value_width or key

    @property
    def latent(self) -> Latent | None:
        """How keys and values are compressed; None: they are not."""
        return self.compress if isinstance(self.compress, Latent) else None

    def scaled(self, value: float) -> Self:
        """Return the attention with a given factor of the scores."""
        return self.model_copy(update={"scale": Times(value=value)})

    @property
    def global_positions(self) -> int:
        """Number of first positions that see all others by the pattern."""
        return self.pattern.global_positions if self.pattern else 0

    def kernel_widths(self, width: int) -> tuple[int, int]:
        """Head widths that a kernel computes with: twice those of a head if the pattern has global tokens with
        separate projections."""
        times = 2 if self.global_projections and self.global_positions else 1
        key, value = self.widths(width)
        return times * key, times * value

    def rotary_width(self, width: int) -> int:
        """Return how much of each query and key a position scheme may rotate."""
        return self.latent.rotary_width if self.latent else self.widths(width)[0]

    def _setting_faults(self) -> Iterator[Fault]:
        """Yield settings that do not fit together, whatever the width of the model."""
        if self.sinks and self.normalizer != "softmax":
            what = f"a sink takes its share of a softmax, and the normalizer is '{self.normalizer}'"
            yield Fault("sinks", f"= True: {what}")
        if self.qk_norm_over != "head" and self.qk_norm.is_none:
            yield Fault("qk_norm_over", f"= '{self.qk_norm_over}': there is no norm; set qk_norm, or leave this out")
        if self.global_projections:
            fits = {"compress": isinstance(self.compress, NoCompression), "projections": self.projections == "separate"}
            fits["value_residual"] = not self.value_residual
            if wrong := [name for name, fit in fits.items() if not fit]:
                what = f"global tokens have no separate {' or '.join(wrong)}; leave one out"
                yield Fault("global_projections", f"= True: {what}")

    def build(self, width: int) -> "nn.Module":
        from anyformer.nn.attention import MultiHeadAttention
        from anyformer.nn.attention_variants.global_tokens import GlobalTokenAttention
        from anyformer.nn.attention_variants.latent import LatentAttention

        if self.position is not None and (special := self.position.attention()) is not None:
            return special(self, width)
        if isinstance(self.compress, Latent):
            return LatentAttention(self, width)
        return (GlobalTokenAttention if self.global_projections else MultiHeadAttention)(self, width)

    def stores(self, width: int) -> Sizes:
        if latent := self.latent:
            return Sizes(1, latent.rank, latent.rotary_width, self.reach, quantisable=True)
        return Sizes(self.groups, *self.widths(width), self.reach, quantisable=True)

    def matrices(self, width: int, across: bool = False) -> Iterator[Matrix]:
        yield from self.input_matrices(width, across)
        if self.global_projections:
            yield self._global_matrix(width)
        if gates := self.gate_size(width):
            yield Matrix("gate", width, gates)
        if isinstance(self.output, Projected):
            yield Matrix("out", self.heads * self.widths(width)[1], width, bias=self.output.bias)
        if self.position:
            yield from self.position.matrices(self, width)

    def input_matrices(self, d: int, across: bool = False) -> Iterator[Matrix]:
        """Yield the linear layers from the input to queries, keys and values."""
        h, g, (k, k_v) = self.heads, self.groups, self.widths(d)
        if across:
            yield Matrix("q", d, h * k, bias=self.bias)
            yield Matrix("kv", d, g * (k + k_v), across=True, bias=self.bias)
        elif latent := self.latent:
            rank, turning, query = latent.rank, latent.rotary_width, latent.query_rank
            yield Matrix("latent.down", d, (query or h * k) + rank + turning, bias=self.bias)
            if query:
                yield Matrix("latent.query_up", query, h * k)
            yield Matrix("latent.up", rank, h * (k - turning + k_v))
        else:
            both = g * k * (self.projections == "separate") + g * k_v * (self.projections != "shared_qkv")
            yield Matrix("qkv", d, h * k + both, bias=self.bias)

    def _global_matrix(self, d: int) -> Matrix:
        k, k_v = self.widths(d)
        return Matrix("global_qkv", d, self.heads * k + self.groups * (k + k_v), bias=self.bias)

    def cost(self, width: int, b: int, t: int, side: Side) -> Cost:
        return self.cost_between(pattern_of(self, side), width, b, t, t, side)

    def cost_between(self, pattern: Pattern, d: int, b: int, t: int, s: int, side: Side, across: bool = False) -> Cost:
        """Return the cost of b rows of t queries and s keys; `across`: the keys are of the encoder."""
        h, g, (k, k_v) = self.heads, self.groups, self.widths(d)
        matrices = [matrix for matrix in self.matrices(d, across) if matrix.name != "global_qkv"]
        cost = linear_costs(matrices, b * t, b * s) + self._norm_cost(d, b * t, b * s)
        cost += Cost(saved=b * (t * h * (k + k_v) + s * g * (k + k_v)))  # q and the heads' outputs; k and v
        cost += Cost(h * self.sinks)
        wide, wide_v = self.kernel_widths(d)
        if self.global_projections:
            own = linear_costs([self._global_matrix(d)], b * t)
            more = b * t * (h + g) * (wide - k + wide_v - k_v)
            cost += replace(own, flops=own.flops if wide > k else 0, saved=more)
        if gates := self.gate_size(d):
            cost += Cost(saved=b * t * (gates + h * k_v))  # and the gated heads
        if self.value_residual:
            cost += Cost(2, saved=b * t * g * k_v)  # values before they are mixed
        if self.position and not across:
            cost += self.position.cost(self, d, b, t)
        cached = self.stores(d).cached(b, s) * (side == "decoder")
        return cost + Cost(flops=2 * b * h * pairs(pattern, t, s) * (wide + wide_v), cached=cached)

    def _norm_cost(self, d: int, queries: int, keys: int) -> Cost:
        """Return the cost of the norms of queries and keys, or of what they are computed from."""
        h, g, (k, _) = self.heads, self.groups, self.widths(d)
        if latent := self.latent:
            norm, rank = latent.norm, latent.query_rank
            return norm.cost(latent.rank, queries) + (norm.cost(rank, queries) if rank else Cost())
        if self.qk_norm_over == "head":
            return self.qk_norm.cost(k, queries * h) + self.qk_norm.cost(k, keys * g)
        return self.qk_norm.cost(h * k, queries) + self.qk_norm.cost(g * k, keys)

    def describe(self, across: bool = False) -> str:
        attention = "cross-attention" if across else "self-attention"
        if self.latent:
            return f"latent {attention}, {self.heads} heads"
        if self.groups < self.heads:
            return f"{'multi' if self.groups == 1 else 'grouped'}-query {attention}, {self.heads} heads"
        return f"multi-head {attention}, {self.heads} heads"

    def with_position(self, position: Position) -> Self:
        return self if self.position else self.model_copy(update={"position": position})

    def faults(self, width: int, side: Side, has_encoder: bool) -> Iterator[Fault]:
        yield from self.size_faults(width)
        if self.position and self.position.embeds():
            yield Fault("position", f"{self.position.kind} positions act on the embeddings: set them on the stack")
        elif self.position and self.divides(width):
            yield from (fault.under("position") for fault in self.position_faults(self.position, width))

    def reads_back(self, side: Side) -> bool:
        return not pattern_of(self, side).looks_ahead

    def position_faults(self, scheme: Position, width: int) -> Iterator[Fault]:
        """Yield faults of a scheme at the width it rotates, under the name of that width."""
        name = "compress.rotary_width" if self.latent else "key_width"
        if scheme.reads_content() and self.latent:
            what = "projects its vectors like tokens, which latent attention compresses"
            yield Fault("", f"of kind '{scheme.kind}': {what}")
        for fault in scheme.faults(self.rotary_width(width)):
            yield Fault(fault.path, fault.message.replace("key_width", name))

    def divides(self, width: int) -> bool:
        """Return whether the head width is known."""
        return bool(self.key_width) or width % self.heads == 0

    def size_faults(self, width: int) -> Iterator[Fault]:
        """Yield sizes that do not fit together, or not into a model of this width."""
        h, g = self.heads, self.groups
        if h % g:
            divisors = ", ".join(str(n) for n in range(1, min(h, 1024) + 1) if h % n == 0)
            yield Fault("kv_heads", f"= {self.kv_heads}: must divide heads = {h} ({divisors})")
        if not self.divides(width):
            yield must_divide("heads", h, width, "key_width")
            return
        key, value = self.widths(width)
        if isinstance(self.output, NoOutput) and h * value != width:
            what = f"heads · value_width = {h * value} must be width = {width}"
            yield Fault("output", f"without a projection {what}")
        if self.projections != "separate" and g != h:
            yield Fault("projections", f"= '{self.projections}': needs kv_heads = heads = {h}, not {g}")
        if self.projections == "shared_qkv" and key != value:
            yield Fault("projections", f"= 'shared_qkv': needs value_width = key_width = {key}, not {value}")
        yield from self._setting_faults()
        if self.latent:
            yield from self._latent_faults(self.latent, key)

    def _latent_faults(self, compress: Latent, key: int) -> Iterator[Fault]:
        if compress.rotary_width >= key:
            yield Fault("compress.rotary_width", f"= {compress.rotary_width}: must be less than key_width = {key}")
        if self.groups != self.heads:
            what = "in latent attention every head has its own keys: leave kv_heads out"
            yield Fault("kv_heads", f"= {self.kv_heads}: {what}")
        if self.projections != "separate":
            what = "latent attention compresses keys and values, not queries"
            yield Fault("projections", f"= '{self.projections}': {what}")
        if not self.qk_norm.is_none:
            yield Fault("qk_norm", "latent attention norms what it compresses: set compress.norm instead")

    def gate_size(self, width: int) -> int:
        """Return the number of gates of a token: none, one for each head, or one for each element of the heads."""
        return {"none": 0, "head": self.heads, "element": self.heads * self.widths(width)[1]}[self.gate]

    @property
    def ends(self) -> list[tuple[int, str]]:
        limit = self.pattern.limit if self.pattern else None
        return [] if limit is None or not self.pattern else [(limit, f"positions of the '{self.pattern.kind}' pattern")]

    @property
    def reach(self) -> int | None:
        """Largest distance back in a decoder, or None if unbounded: the cache may drop older tokens."""
        return self.pattern.towards(False).reach if self.pattern else None


def pattern_of(attention: Attention, side: Side) -> Pattern:
    """Return the pattern of a self-attention, given or derived; a decoder is causal unless it is given otherwise."""
    ahead = side == "encoder"
    return attention.pattern.towards(ahead) if attention.pattern else plain_pattern(ahead)


def pattern_across(attention: Attention) -> Pattern:
    """Return the pattern of a cross-attention, given or derived; by default the whole source is visible."""
    return attention.pattern.towards(True) if attention.pattern else plain_pattern(ahead=True)

"""Mixers: what lets tokens read each other. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal

from anyformer.config.norm import NoNorm, RMSNorm, TokenNorm
from anyformer.config.pattern import BigBird, Pattern, Window
from anyformer.config.position import Position
from anyformer.config.spec import BY_KIND, Count, Fault, Flag, Number, Positive, Probability, Size, Spec, by_kind
from anyformer.config.state_mixer import GatedDelta, Heads, LinearAttention, Mamba2


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


class Attention(Spec):
    """softmax(Q Kᵀ · scale + mask + bias) V in h heads, each a projection of the whole embedding."""

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
    qk_norm: TokenNorm = NoNorm()  # norm of queries and keys, before positions
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

    @property
    def groups(self) -> int:
        """Key/value heads, given or derived."""
        return self.kv_heads or self.heads

    def widths(self, width: int) -> tuple[int, int]:
        """Head width of queries and keys, and of values, given or derived."""
        key = self.key_width or width // self.heads
        return key, self.value_width or key

    @property
    def global_positions(self) -> int:
        """Number of first positions that see all others by the pattern."""
        match self.pattern:
            case Window(globals=count):
                return count
            case BigBird(globals=count, block=size):
                return count * size
            case _:
                return 0

    def kernel_widths(self, width: int) -> tuple[int, int]:
        """Head widths that a kernel computes with: twice those of a head if the pattern has global tokens with
        separate projections."""
        times = 2 if self.global_projections and self.global_positions else 1
        key, value = self.widths(width)
        return times * key, times * value

    def rotary_width(self, width: int) -> int:
        """Return how much of each query and key a position scheme may rotate."""
        return self.compress.rotary_width if isinstance(self.compress, Latent) else self.widths(width)[0]

    def faults(self) -> Iterator[Fault]:
        """Yield settings that do not fit together, whatever the width of the model."""
        if self.sinks and self.normalizer != "softmax":
            what = f"a sink takes its share of a softmax, and the normalizer is '{self.normalizer}'"
            yield Fault("sinks", f"= True: {what}")
        if self.qk_norm_over != "head" and isinstance(self.qk_norm, NoNorm):
            yield Fault("qk_norm_over", f"= '{self.qk_norm_over}': there is no norm; set qk_norm, or leave this out")
        if self.global_projections:
            fits = {"compress": isinstance(self.compress, NoCompression), "projections": self.projections == "separate"}
            fits["value_residual"] = not self.value_residual
            if wrong := [name for name, fit in fits.items() if not fit]:
                what = f"global tokens have no separate {' or '.join(wrong)}; leave one out"
                yield Fault("global_projections", f"= True: {what}")

    def gate_size(self, width: int) -> int:
        """Return the number of gates of a token: none, one for each head, or one for each element of the heads."""
        return {"none": 0, "head": self.heads, "element": self.heads * self.widths(width)[1]}[self.gate]

    @property
    def reach(self) -> int | None:
        """Largest distance back in a decoder, or None if unbounded: the cache may drop older tokens."""
        return self.pattern.towards(False).reach if self.pattern else None


class Recurrent(Spec):
    """h_t = f(W x_t + U h_{t-1} + b): the state is reset at every segment; padding does not change it.

    rnn: f = tanh (Elman 1990) · lstm: Hochreiter & Schmidhuber 1997 · gru: Cho et al. 2014; with torch's two biases.
    """

    kind: Literal["recurrent"] = "recurrent"
    cell: Literal["rnn", "lstm", "gru"] = "gru"  # the recurrence: a plain RNN, an LSTM or a GRU
    width: Size | None = None  # width of the state h; None: d
    both_ways: Flag = False  # in an encoder: a second cell reads from the end
    begin: Literal["zero", "encoder"] = "zero"  # encoder: where the encoder's layer of the same number ended (forward)

    def hidden(self, width: int) -> int:
        """Return the width of h, given or derived."""
        return self.width or width

    def state(self, width: int) -> int:
        """Return the size of the state of a cell: h, and in an LSTM c."""
        return self.hidden(width) * (2 if self.cell == "lstm" else 1)


class Convolution(Spec):
    """y_t = Σ_j W_j x_{t + j·dilation - before}, j < width: a token reads its neighbours by distance.

    Causal: all before it, and itself; else centred. Beyond the ends of a segment there is zero.
    """

    kind: Literal["convolution"] = "convolution"
    width: Size = 3  # kernel width: number of tokens that it reads
    dilation: Size = 1  # distance between two tokens that it reads
    causal: Flag | None = None  # reads no later token; None: in a decoder
    bias: Flag = True  # a bias per channel

    def before(self, causal: bool) -> int:
        """Return the distance from a token to the first of its K tokens."""
        span = self.dilation * (self.width - 1)
        return span if causal else span // 2


class FullyConnected(Spec):
    """One dense layer over all numbers of a sequence: y_p = Σ_r W_pr x_r + b_p, each W_pr its own d×d matrix."""

    kind: Literal["dense"] = "dense"
    length: Size  # number of positions: longer inputs are an error
    causal: Flag | None = None  # reads no later token; None: in a decoder
    bias: Flag = True  # a bias per position and channel


class PositionMixing(Spec):
    """y_p = Σ_r w_pr x_r + b_p: one number for each pair of positions, the same for all channels (MLP-Mixer 2021)."""

    kind: Literal["positions"] = "positions"
    length: Size  # number of positions: longer inputs are an error
    causal: Flag | None = None  # reads no later token; None: in a decoder
    bias: Flag = True  # a bias per position


class NoMixer(Spec):
    """No token reads another: with it everywhere, a language model is a bigram model."""

    kind: Literal["none"] = "none"


Mixer = Annotated[
    Attention
    | LinearAttention
    | GatedDelta
    | Mamba2
    | Recurrent
    | Convolution
    | FullyConnected
    | PositionMixing
    | NoMixer,
    *by_kind("attention"),
]

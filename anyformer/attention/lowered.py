"""Lowered masks: the visible pairs, in the form that one kernel takes.

    Lowered = Dense | FewQueries | ShortRows | Blocks | Documents

Each variant holds exactly what its kernel reads. `lower` builds one per forward pass for all layers that share it, and
`attend` dispatches on its type. `densify` returns the dense form of any of them, for attention maps and taps.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from anyformer.attention.layout import Pages, WholeRows
from anyformer.config import Pattern, Position, Relative, Rotation
from anyformer.config.position import RotaryScheme
from anyformer.kernels.paged import rotate_heads
from anyformer.kernels.runtime import runs_fused

Kernel = Literal["eager", "sdpa", "short", "flex", "varlen", "decode"]
Index = Tensor  # a scalar tensor: flex calls its functions for one row, head, query and key at a time


class Dense(NamedTuple):
    """A mask or a bias over all pairs, or neither: for torch's `sdpa`, or for `eager`, the reference."""

    causal: bool = False  # query i sees the keys up to i; no mask is stored
    mask: Tensor | None = None  # bool [b or 1, 1, t, s]; None: every key, or as `causal` says
    bias: Tensor | None = None  # added to the scores [b or 1, h, t, s], -inf where masked
    has_key: Tensor | None = None  # bool [b, 1, t, 1]: queries with a visible key; None: all have one
    kernel: Literal["sdpa", "eager"] = "sdpa"


class FewQueries(NamedTuple):
    """A mask or a bias for the kernel that reads a KV cache once for few queries (`decode`); fields as in `Dense`.

    A query may be fully masked: the kernel returns zeros for it.
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    pages: Pages | None = None  # keys and values are pools [1, g, slots, k], read by these; None: they are [b, g, s, k]
    origins: Tensor | None = None  # int [b, s]: the row that holds each key (beams); None: each row has its own

    @property
    def reads_whole_rows(self) -> bool:
        """True if each row has one query, which sees all keys in its pages."""
        return self.pages is not None and self.mask is None and self.bias is None


class ShortRows(NamedTuple):
    """Segments of short rows (`short`); nothing of size t·s is stored."""

    q_segments: Tensor | None  # int32 [b or 1, t]; None: every token sees all, as far as the window goes
    k_segments: Tensor | None
    window: tuple[int, int]  # tokens back and ahead, -1: unlimited
    crosses: bool  # to tokens of another layout
    densify: Callable[[], Dense]


class Blocks(NamedTuple):
    """Blocks of keys for FlexAttention (`flex`); nothing of size t·s is stored."""

    mask: BlockMask
    bias: Callable[[Index, Index, Index, Index], Tensor] | None  # added to the score, by row, head, query and key
    kind: tuple[Pattern, Position | None]  # what its functions are made of: the same kind shares a compiled kernel
    size: int  # tokens in a block
    densify: Callable[[], Dense]


class Documents(NamedTuple):
    """Document boundaries for the variable-length kernels (`varlen`); nothing of size t·s is stored.

    All rows are concatenated. Each run of a segment or of padding is a document. Queries and keys have
    the same number of documents; some may be empty.
    """

    starts: Tensor  # int32 [n + 1], the last is the number of tokens; empty documents at the end
    longest: int
    key_starts: Tensor
    key_longest: int
    window: tuple[int, int]  # tokens back and ahead, -1: unlimited
    densify: Callable[[], Dense]


Lowered = Dense | FewQueries | ShortRows | Blocks | Documents


def densify(lowered: Lowered) -> Dense:
    """Return the dense form of a lowered mask."""
    match lowered:
        case Dense():
            return lowered
        case FewQueries(mask=mask, bias=bias):
            visible = mask if bias is None else (bias > -torch.inf).any(dim=1, keepdim=True)
            if visible is None:
                return Dense()
            has_key = visible.any(dim=-1, keepdim=True)
            if bias is not None:
                return Dense(bias=bias.masked_fill(~has_key, 0.0), has_key=has_key)
            return Dense(mask=visible | ~has_key, has_key=has_key)
        case ShortRows() | Blocks() | Documents():
            return lowered.densify()


def add_bias(lowered: Lowered, bias: Tensor) -> Dense:
    """Return the dense form of a lowered mask with a further bias [b, h, t, s] of the scores."""
    dense = densify(lowered)
    return dense._replace(causal=False, mask=None, bias=mask_scores(bias, dense))


def mask_scores(scores: Tensor, dense: Dense) -> Tensor:
    """Return scores [b, h, t, s] with the bias of a mask, -inf where it hides keys."""
    if dense.bias is not None:
        scores = scores + dense.bias
    if dense.mask is not None:
        scores = scores.masked_fill(~dense.mask, -torch.inf)
    if dense.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


class KernelChoice(NamedTuple):
    """The kernel that runs, and the reason."""

    kernel: Kernel
    reason: str
    maskless: Dense | None = None  # the form for `sdpa` or `eager` where no mask is needed


class RotaryKernel:
    """Rotation of whole heads by one kernel, in place of the formula of a rotary scheme."""

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotate_heads(x, *rotation)


def can_rotate(scheme: Position, rotation: Rotation, width: int) -> bool:
    """Return whether `RotaryKernel` supports vectors of this width."""
    return runs_fused(rotation.cos) and isinstance(scheme, RotaryScheme) and rotation.cos.shape[-1] == width


class FirstValues:
    """The values of the first layer with a value residual, for the tokens at hand [b, g, t, k_v].

    Not a list: FSDP copies those.
    """

    values: Tensor | None = None

    def of(self, values: Tensor) -> Tensor:
        """Return the first layer's values; those given, if this is the first layer."""
        if self.values is None:
            self.values = values
        return self.values


class Relation(NamedTuple):
    """State that attention layers of one kind share in a forward pass: the lowered mask and their positions."""

    lowered: Lowered = Dense()
    choice: KernelChoice = KernelChoice("sdpa", "built without a choice")
    scheme: "Position | RotaryKernel" = Position.none()  # rotates queries and keys
    rotation: Rotation | None = None  # of the new tokens: keys in a cache are rotated already
    relative: Relative | None = None  # vectors of distances, which each layer projects and compares with its content
    absorbs: bool = False  # latent attention reads the cached vectors themselves, as a single head
    whole: WholeRows | None = None  # the rows of the keys, of which a process computes a part; None: it computes all
    first_values: FirstValues | None = None
    reads_in_place: bool = False  # whether the kernel finds keys and values in the cache by a table

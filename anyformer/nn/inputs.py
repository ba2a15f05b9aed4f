"""What a model reads: inputs of a side, made once from the keywords of a call, and the layer from ids to vectors.

`model(ids, segments=..., types=...)` and `model(Inputs(ids, layout, types))` are the same call. Code that knows more
of a batch than segments say (all padding on the right, where a cache continues) passes `Inputs` with its `Layout`.

Every input layer is an `InputModule`: `measure` returns the batch size and length of an input or raises a clear error,
`check` validates its values, and `forward`, in which the function `embed` adds positions, returns vectors [b, t, d].
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.cache.paged import AnyCache
from anyformer.attention.cache.segment_memory import Past
from anyformer.attention.layout import Layout, check, check_values, make_layout
from anyformer.attention.media_batch import MediaBatch
from anyformer.config import ByteSpelling, ConfigError, FactorisedTable, Fault, Tokens, factor
from anyformer.config.spec import did_you_mean
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.media import MediaEmbedding, embedding
from anyformer.nn.norm import normed

EmbedIds = Callable[[Tensor], Tensor]
BYTES = 257  # values of a spelled byte: 0 is padding, byte b is b + 1


class Inputs(NamedTuple):
    """Everything that the encoder or the decoder reads."""

    ids: Tensor  # int [b, t]; or features [b, t, size], or images [b, c, h, w], where the config reads them
    layout: Layout | None = None  # None: one segment per row, from position 0 or where a cache or past ends
    types: Tensor | None = None  # int [b, t]: token types
    spelled: Tensor | None = None  # int [b, t, longest]: the bytes of each token's word, as byte + 1; 0 is padding
    media: MediaBatch | None = None  # images, sounds and feature vectors, and their places; ids are not read there


class StackOptions(TypedDict, total=False):
    """Keywords that describe the tokens of one stack."""

    segments: Tensor | None
    attention_mask: Tensor | None
    positions: Tensor | None
    marks: Tensor | None
    types: Tensor | None
    spelled: Tensor | None
    media: MediaBatch | None


class SideOptions(StackOptions, total=False):
    """Keywords that describe the tokens of all sides; those with a prefix are for encoder-decoders."""

    source_segments: Tensor | None
    source_attention_mask: Tensor | None
    source_types: Tensor | None
    source_positions: Tensor | None
    source_media: MediaBatch | None
    target_positions: Tensor | None
    target_segments: Tensor | None
    target_attention_mask: Tensor | None
    target_types: Tensor | None
    target_media: MediaBatch | None


OWN = tuple(StackOptions.__annotations__)
SIDED = tuple(name for name in SideOptions.__annotations__ if name not in OWN)


def check_options(options: Mapping[str, object], allowed: Collection[str], instead: str, shape: str) -> None:
    """Refuse keywords that a call does not have, and those that a model of this shape cannot use."""
    wrong = []
    for name, value in options.items():
        if name not in OWN and name not in SIDED:
            raise TypeError(f"unexpected keyword argument {name!r}: {did_you_mean(name, (*OWN, *SIDED))}")
        if name not in allowed and value is not None:
            wrong.append(name)
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: not for {shape} model, which takes {instead}")


def options_of(side: str, options: SideOptions) -> StackOptions:
    """Return the keywords of one side of an encoder-decoder, without their prefix."""
    named = {name.removeprefix(side): x for name, x in options.items() if name.startswith(side)}
    return cast(StackOptions, named)


class ByteWords(nn.Module):
    """Vector of each token's word from its bytes; byte b is stored as b + 1, and an all-padding word embeds to zero."""

    def __init__(self, spec: ByteSpelling, width: int):
        super().__init__()
        self.longest, self.margins = spec.longest, ((spec.kernel - 1) // 2, spec.kernel // 2)
        self.table = embedding(BYTES, spec.width)
        self.conv = nn.Conv1d(spec.width, spec.channels, spec.kernel)
        self.linear = nn.Linear(spec.channels, width, bias=False)

    def forward(self, spelled: Tensor) -> Tensor:
        """[b, t, longest] to [b, t, width]"""
        is_byte = spelled > 0
        x = self.table(F.pad(spelled, self.margins)).flatten(0, 1).transpose(1, 2)  # padding beyond both ends
        x = self.conv(x).unflatten(0, spelled.shape[:2])  # [b, t, channels, longest]
        x = x.masked_fill(~is_byte[:, :, None], torch.finfo(x.dtype).min).amax(dim=-1)
        return self.linear(torch.where(is_byte.any(dim=-1, keepdim=True), x, 0))


class InputModule(nn.Module):
    """Base of inputs. This one reads token ids below `vocab`; `vectors` are those of the ids, before positions."""

    table: nn.Embedding | None  # which the head, or the other side's input, may share
    media: MediaEmbedding | None  # what it reads besides tokens
    norm: nn.Module
    dropout: nn.Module

    def __init__(self, inner_width: int, vocab: int = 0):
        super().__init__()
        self.inner_width, self.vocab = inner_width, vocab
        self.table = self.media = None

    def measure(self, ids: Tensor) -> tuple[int, int]:
        """[b, t]"""
        if not isinstance(ids, Tensor):
            raise ValueError(f"ids must be a tensor [batch, length], got {type(ids).__name__}")
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"ids must be integers [batch, length], got {ids.dtype} {list(ids.shape)}")
        check_not_empty(ids, "ids")
        return ids.shape[0], ids.shape[1]

    def check(self, inputs: Inputs) -> None:
        """Check that ids are in range, and refuse what only some inputs read."""
        if inputs.types is not None:
            raise ValueError("this model has no token types: leave `types` out")
        if inputs.spelled is not None:
            raise ValueError("this model reads no words: leave `spelled` out")
        if inputs.media is not None:
            raise ValueError("`media` are for models that read tokens: leave it out")
        if self.vocab:
            _check_range(inputs.ids, self.vocab, "id", f"vocabulary of {self.vocab}")

    def vectors(self, x: Tensor) -> Tensor:
        """Return the vectors [b, t, d] of what the model reads, before positions."""
        raise NotImplementedError

    def forward(
        self, inputs: Inputs, table: Tensor | None, embed: EmbedIds, layout: Layout, aux: AuxOutputs | None = None
    ) -> Tensor:
        """Return the vectors [b, t, d] that the first block reads; `table` is the one that two inputs may share."""
        return embed(self.vectors(inputs.ids))

    def last_linear(self) -> nn.Linear | None:
        """Return the linear layer after positions and norm, if there is one."""
        return None


class TokenInput(InputModule):
    """Token embedding: lookup, scale, spelling, other modalities, positions, types, norm, dropout.

    The table may belong to another module (weight tying), so it is an argument of `forward`.
    """

    def __init__(self, spec: Tokens, width: int, own_table: bool):
        super().__init__(spec.inner_width(width), spec.rows)
        e, self.pad = spec.table_width(width), spec.pad
        self.table = embedding(spec.rows, e, spec.pad) if own_table else None
        self.types = embedding(spec.types, self.inner_width) if spec.types else None
        table = spec.table if isinstance(spec.table, FactorisedTable) else None
        self.project = nn.Linear(e, width, table.bias) if table else None
        self.early = table is not None and table.project == "before_position"
        self.spelling = spec.spelling.build(self.inner_width)
        self.media = None if spec.media is None else MediaEmbedding(spec.media, self.inner_width)
        self.norm = spec.norm.build(self.inner_width)
        self.dropout = nn.Dropout(spec.dropout)
        self.scale = factor(spec.scale, width)

    def check(self, inputs: Inputs) -> None:
        """Check that ids, types and bytes are in range, and that the model has all these inputs."""
        ids, types, spelled = inputs.ids, inputs.types, inputs.spelled
        if types is not None and self.types is None:
            raise ValueError("this model has no token types: leave `types` out")
        _check_range(ids, self.vocab, "id", f"vocabulary of {self.vocab}")
        if types is not None and self.types is not None:
            check(*ids.shape, types=types)
            _check_range(types, self.types.num_embeddings, "type", f"{self.types.num_embeddings} token types")
        if self.spelling is not None or spelled is not None:
            self._check_spelled(ids, spelled)
        if self.media is None and inputs.media is not None:
            raise ValueError("this model reads tokens only: leave `media` out")
        if spelled is not None:
            _check_range(spelled, BYTES, "spelled", f"{BYTES} values of a byte")

    def _check_spelled(self, ids: Tensor, spelled: Tensor | None) -> None:
        """Check that `spelled` is there if the model needs it, and only then."""
        if self.spelling is None:
            if spelled is not None:
                raise ValueError("this model reads no spelled words: leave `spelled` out")
            return
        shape = [*ids.shape, self.spelling.longest]
        if spelled is None:
            what = f"is required: the model also reads the bytes of each token's word, integers {shape}"
            raise ConfigError([Fault("spelled", what)])
        if list(spelled.shape) != shape or spelled.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"spelled must be integers {shape}, got {spelled.dtype} {list(spelled.shape)}")

    def forward(
        self, inputs: Inputs, table: Tensor | None, embed: EmbedIds, layout: Layout, aux: AuxOutputs | None = None
    ) -> Tensor:
        """[b, t] ids to [b, t, d]"""
        assert table is not None
        x = self.look_up(inputs.ids, table) * self.scale
        if self.project is not None and self.early:
            x = self.project(x)
        if self.spelling is not None:
            assert inputs.spelled is not None
            x = x + self.spelling(inputs.spelled)
        if self.media is not None:
            x = self.media(x, inputs.media)
        x = embed(x)
        if self.types is not None:
            # all of the first type: the gradient is then a sum, where a lookup would scatter row by row
            x = x + (self.types.weight[0] if inputs.types is None else self.types(inputs.types))
        x = self.dropout(normed(self.norm, x, layout, aux))
        return x if self.project is None or self.early else self.project(x)

    def last_linear(self) -> nn.Linear | None:
        return None if self.early else self.project

    def look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        """Return the rows of the table, [b, t, e]."""
        return F.embedding(ids, table, padding_idx=self.pad)


def check_not_empty(x: Tensor, name: str) -> None:
    if not x.numel():
        raise ValueError(f"{name} are empty, {list(x.shape)}: pass at least one row of at least one token")


def _check_range(ids: Tensor, size: int, name: str, whole: str) -> None:
    # on the CPU only: reading ids on a GPU would synchronise
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise ValueError(f"{name} {low if low < 0 else high} is outside the {whole}")


def read_inputs(
    module: InputModule,
    reads_coordinates: bool,
    given: Tensor | Inputs,
    options: StackOptions,
    before: AnyCache | Past | None = None,
) -> tuple[Inputs, Layout]:
    """Return the inputs of a side, and the layout of their tokens, which continue the cache or past `before`.

    The layout has coordinates only if a position scheme of the stack reads them.
    """
    inputs, layout = _read(module, given, options, before)
    if inputs.media is None or module.media is None:
        return inputs, layout
    module.media.check(inputs.media, tuple(inputs.ids.shape))
    if not reads_coordinates:
        return inputs, layout
    return inputs, layout._replace(coordinates=module.media.coordinates(inputs.media, layout.positions))


def _read(
    module: InputModule, given: Tensor | Inputs, options: StackOptions, before: AnyCache | Past | None
) -> tuple[Inputs, Layout]:
    if isinstance(given, Inputs):
        if given.layout is not None and given.layout.continues_cache and not options:  # made by `Cache.next`
            return given, given.layout
        if any(value is not None for value in options.values()):
            raise ValueError(f"{', '.join(options)}: `Inputs` hold these themselves; leave the keywords out")
        inputs = given
    else:
        inputs = Inputs(given, types=options.get("types"), spelled=options.get("spelled"), media=options.get("media"))
    batch, length = module.measure(inputs.ids)
    segments, mask = options.get("segments"), options.get("attention_mask")
    positions, marks, layout = options.get("positions"), options.get("marks"), inputs.layout
    if isinstance(segments, Layout):
        raise TypeError("segments must be a tensor [batch, length]; pass a Layout as `Inputs(ids, layout)`")
    check(batch, length, segments=segments, attention_mask=mask)
    check_values(segments, mask, whole=before is None)
    if before is None:
        if layout is not None:
            return inputs, layout.checked(batch, length)
        facts = {"segments": segments, "attention_mask": mask, "positions": positions, "marks": marks}
        return inputs, make_layout(batch, length, inputs.ids.device, **facts)
    if not isinstance(before, Past):
        if layout is None:
            return inputs, before.make_layout(batch, length, segments, positions, marks, mask)
        if layout.continues_cache:  # made by `Cache.next`
            return inputs, layout.checked(batch, length)
        return inputs, before.make_layout(batch, length, layout.segments, layout.positions, layout.marks)
    if marks is not None or (layout is not None and layout.marks is not None):
        raise ValueError("marks with a past are not supported: earlier tokens would have seen the marked ones")
    if layout is None:
        return inputs, before.make_layout(batch, length, segments, positions, attention_mask=mask)
    return inputs, before.make_layout(batch, length, layout.segments, layout.positions, layout.padding)

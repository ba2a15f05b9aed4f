"""The Transformer: one class, three shapes."""

from collections.abc import Iterable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from anyformer.config import ModelConfig, Side
from anyformer.nn.attend import Backend
from anyformer.nn.cache import Cache
from anyformer.nn.context import Tap
from anyformer.nn.heads import build_head
from anyformer.nn.init import initialise
from anyformer.nn.inputs import TokenInput
from anyformer.nn.mask import Layout, check, lay_out
from anyformer.nn.stack import BlockStack


class Transformer(nn.Module):
    """Encoder–decoder, encoder-only or decoder-only, by what the config holds.

    Built on the meta device and then filled, so that building anywhere gives the same weights from the same seed.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.backend: Backend = "auto"
        device = torch.get_default_device()
        with torch.device("meta"):
            self._build(config)
        if device.type != "meta":
            self.materialise(device)

    def _build(self, config: ModelConfig) -> None:
        tied_inputs, tied_output = config.tie in ("inputs", "all"), config.tie in ("output", "all")
        self.source = TokenInput(config.source, config.width, own_table=True) if config.source else None
        self.target = TokenInput(config.target, config.width, own_table=not tied_inputs) if config.target else None
        self.encoder = self._stack("encoder", self.source)
        self.decoder = self._stack("decoder", self.target)
        last = config.last_input
        embed_width = last.table_width(config.width)
        self.head = build_head(
            config.head, config.width, vocab=last.rows, embed_width=embed_width, tied=tied_output, pad=last.pad
        )

    def _stack(self, side: Side, read: TokenInput | None) -> BlockStack | None:
        spec = self.config.stacks.get(side)
        return BlockStack(spec, self.config.width, side, read.inner_width) if spec and read else None

    def materialise(self, device: torch.device | str = "cpu") -> Self:
        """Gives a model built on meta its memory, and fresh weights."""
        self.to_empty(device=device)
        initialise(self, self.config.init, self.config.width)
        return self

    def num_parameters(self) -> int:
        """Parameters, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    # -- running ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        ids: Tensor,
        target: Tensor | None = None,
        *,
        segments: Tensor | Layout | None = None,
        positions: Tensor | None = None,
        marks: Tensor | None = None,
        types: Tensor | None = None,
        source_segments: Tensor | Layout | None = None,
        source_positions: Tensor | None = None,
        source_types: Tensor | None = None,
        target_segments: Tensor | Layout | None = None,
        target_positions: Tensor | None = None,
        target_types: Tensor | None = None,
        cache: Cache | None = None,
        taps: Tap | None = None,
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        """What the head makes of ids [b, t], or of source [b, s] and target [b, t] in an encoder–decoder.

        Segments are int [b, t], -1 for padding; where nothing is given there is one segment and positions count from 0.
        What some parts add to the loss of training, such as the balance of experts, is put into the list `losses`.
        """
        own = {"segments": segments, "positions": positions, "marks": marks, "types": types}
        sided = {
            "target": target,
            "source_segments": source_segments,
            "source_positions": source_positions,
            "source_types": source_types,
            "target_segments": target_segments,
            "target_positions": target_positions,
            "target_types": target_types,
        }
        if self.config.shape == "encoder-decoder":
            _refuse(own, "an encoder-decoder", sided)
            if target is None:
                raise ValueError("this is an encoder-decoder: call it with (source, target)")
            source = self._lay_out(ids, source_segments, source_positions)
            memory = self.encode(ids, segments=source, types=source_types, taps=taps, losses=losses)
            layout = self._lay_out(target, target_segments, target_positions, cache=cache)
            x = self.decode(
                target,
                memory,
                source=source,
                segments=layout,
                types=target_types,
                cache=cache,
                taps=taps,
                losses=losses,
            )
        else:
            _refuse(sided, "an encoder-only" if self.encoder else "a decoder-only", own)
            layout = self._lay_out(ids, segments, positions, marks, cache=cache)
            if self.decoder is not None:
                x = self.decode(ids, segments=layout, types=types, cache=cache, taps=taps, losses=losses)
            else:
                if cache is not None:
                    raise ValueError("an encoder reads its input at once: leave `cache` out")
                x = self.encode(ids, segments=layout, types=types, taps=taps, losses=losses)
        out = self.apply_head(x, layout)
        return out if taps is None else taps("head", out)

    def encode(
        self,
        ids: Tensor,
        *,
        segments: Tensor | Layout | None = None,
        positions: Tensor | None = None,
        marks: Tensor | None = None,
        types: Tensor | None = None,
        taps: Tap | None = None,
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        """The encoder's hidden states [b, t, d] after the final norm."""
        if self.encoder is None or self.source is None:
            raise ValueError("this model has no encoder: use decode for its hidden states")
        layout = self._lay_out(ids, segments, positions, marks)
        taps = None if taps is None else taps.within("encoder")
        x = self._embed(self.source, self.encoder, ids, layout, types, taps)
        return self.encoder(x, layout, taps=taps, backend=self.backend, losses=losses)

    def decode(
        self,
        ids: Tensor,
        memory: Tensor | None = None,
        *,
        source: Tensor | Layout | None = None,
        segments: Tensor | Layout | None = None,
        positions: Tensor | None = None,
        marks: Tensor | None = None,
        types: Tensor | None = None,
        cache: Cache | None = None,
        taps: Tap | None = None,
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        """The decoder's hidden states [b, t, d] after the final norm.

        `memory` is the encoder's output and `source` its segments; once a cache holds them, they are left out. With a
        cache no gradient is kept.
        """
        if self.decoder is None or self.target is None:
            raise ValueError("this model has no decoder: use encode for its hidden states")
        layout = self._lay_out(ids, segments, positions, marks, cache=cache)
        seen = self._source(ids.shape[0], memory, source, cache)
        taps = None if taps is None else taps.within("decoder")
        # a cache outlives the step that wrote it, so nothing in it may hold on to that step's graph
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            x = self._embed(self.target, self.decoder, ids, layout, types, taps)
            return self.decoder(
                x,
                layout,
                memory=memory,
                source=seen,
                cache=cache,
                taps=taps,
                backend=self.backend,
                losses=losses,
            )

    def apply_head(self, hidden: Tensor, layout: Layout) -> Tensor:
        """What the head makes of hidden states [b, t, d] of tokens so laid out."""
        return self.head(hidden, layout, self._table("target" if self.decoder is not None else "source"))

    def new_cache(self, batch: int, slots: int) -> Cache:
        """An empty cache for up to `slots` tokens in each of `batch` rows."""
        if self.decoder is None:
            raise ValueError("only a decoder has a cache")
        weight = next(self.decoder.parameters())
        kind = weight.device.type
        # under autocast keys and values come in its precision, whatever the weights have
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        return Cache(batch, slots, self.decoder.sizes, weight.device, dtype)

    # -- small steps ------------------------------------------------------------------------------------------------

    def _lay_out(
        self,
        ids: Tensor,
        segments: Tensor | Layout | None = None,
        positions: Tensor | None = None,
        marks: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Layout:
        check_ids(ids)
        batch, length = ids.shape
        if cache is None:
            return lay_out(batch, length, ids.device, segments=segments, positions=positions, marks=marks)
        if marks is not None or (isinstance(segments, Layout) and segments.marks is not None):
            raise ValueError("marks with a cache are not supported: a marked token sees tokens that are not read yet")
        return cache.lay_out(batch, length, segments, positions)

    def _source(
        self, batch: int, memory: Tensor | None, source: Tensor | Layout | None, cache: Cache | None
    ) -> Layout | None:
        """Where the encoder's tokens stand: given now, or kept in the cache."""
        if memory is None and source is not None:
            raise ValueError("`source` says where the tokens of `memory` stand: give both, or neither")
        if self.encoder is None:
            if memory is not None:
                raise ValueError("this model has no encoder: leave `memory` out")
            return None
        if memory is None:
            if cache is None or cache.source is None:
                raise ValueError("the decoder needs the encoder's output: give `memory`, or a cache that has seen it")
            return cache.source
        if memory.dim() != 3 or memory.shape[::2] != (batch, self.config.width):
            expected = f"[{batch}, s, {self.config.width}]"
            raise ValueError(f"memory has shape {list(memory.shape)}, expected {expected} as `encode` gives it")
        layout = lay_out(memory.shape[0], memory.shape[1], memory.device, segments=source)
        if cache is not None:
            cache.keep_source(layout)
        return layout

    def _embed(
        self, read: TokenInput, stack: BlockStack, ids: Tensor, layout: Layout, types: Tensor | None, taps: Tap | None
    ) -> Tensor:
        _check_range(ids, read.vocab, "id", f"vocabulary of {read.vocab}")
        if types is not None and read.types is not None:
            check(*ids.shape, types=types)
            _check_range(types, read.types.num_embeddings, "type", f"{read.types.num_embeddings} token types")
        table = self._table("source" if read is self.source else "target")
        x = read(ids, table, lambda x: stack.embed(x, layout), types)
        return x if taps is None else taps("embed", x)

    def _table(self, name: str) -> Tensor:
        """The embedding table that an input reads, its own or the one it shares."""
        read = self.target if name == "target" and self.target and self.target.table is not None else self.source
        assert read is not None
        assert read.table is not None
        return read.table.weight


def check_ids(ids: Tensor) -> None:
    """A clear error where ids are not whole numbers [b, t]."""
    if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64) or not ids.numel():
        raise ValueError(f"ids must be whole numbers [batch, length], got {ids.dtype} {list(ids.shape)}")


def _check_range(ids: Tensor, size: int, name: str, whole: str) -> None:
    # looking at ids waits for the device: only where they are at hand anyway
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= size:
            raise ValueError(f"{name} {low if low < 0 else high} is outside the {whole}")


def _refuse(given: Mapping[str, object], shape: str, instead: Iterable[str]) -> None:
    """No argument is accepted and ignored."""
    if wrong := [name for name, value in given.items() if value is not None]:
        raise ValueError(f"{', '.join(wrong)}: not for {shape} model, which takes {', '.join(instead)}")

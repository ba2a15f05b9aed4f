"""The Transformer: one class, three shapes."""

from collections.abc import Iterable, Mapping
from typing import Self, TypedDict, Unpack, overload

import torch
from torch import Tensor, nn

from anyformer.attention.attend import Backend
from anyformer.attention.layout import Layout, check, make_layout
from anyformer.cache.kv_cache import Cache, CacheKind
from anyformer.cache.segment_memory import Past
from anyformer.config import ModelConfig, Side, Tokens, encoder_init_layers
from anyformer.config.adapter import adapted
from anyformer.kernels.runtime import Runtime
from anyformer.nn.aux_outputs import AuxOutputs, running
from anyformer.nn.context import Tap
from anyformer.nn.heads import LossTarget, VocabularyHead, build_head
from anyformer.nn.init import initialise
from anyformer.nn.inputs import BYTES, AnyInput, TokenInput, build_input
from anyformer.nn.lora import adapt
from anyformer.nn.recurrent import last_states
from anyformer.nn.stack import BlockStack


class Options(TypedDict, total=False):
    """What a model may be told beside its input."""

    segments: Tensor | Layout | None
    positions: Tensor | None
    marks: Tensor | None
    types: Tensor | None
    spelled: Tensor | None
    source_segments: Tensor | Layout | None
    source_positions: Tensor | None
    source_types: Tensor | None
    target_segments: Tensor | Layout | None
    target_positions: Tensor | None
    target_types: Tensor | None
    cache: Cache | None
    asked: LossTarget | None
    taps: Tap | None
    notes: AuxOutputs | None


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
        self.source = build_input(config.source, config.width) if config.source else None
        self.target = build_input(config.target, config.width, own_table=not tied_inputs) if config.target else None
        self.encoder = self._stack("encoder", self.source)
        self.decoder = self._stack("decoder", self.target)
        # how wide the states are with which layers of the decoder begin: they travel beside the encoder's output
        self.handed = {i: mixer.state(config.width) for i, mixer in encoder_init_layers(config).items()}
        tokens = config.last_input if isinstance(config.last_input, Tokens) else None
        self.head = build_head(config.head, config.width, tokens, tied=tied_output)
        if config.adapter:
            adapt(self, config.adapter, adapted(config.adapter, config.stacks, config.width))

    def _stack(self, side: Side, read: AnyInput | None) -> BlockStack | None:
        spec = self.config.stacks.get(side)
        return BlockStack(spec, self.config.width, side, read.inner_width) if spec and read else None

    def materialise(self, device: torch.device | str = "cpu") -> Self:
        """Gives a model built on meta its memory, and fresh weights."""
        self.to_empty(device=device)
        initialise(self, self.config.init, self.config.width)
        return self

    @torch.no_grad()
    def commit(self) -> None:
        """Update running statistics and router biases by the last pass and all collected ones: once per step."""
        for module in running(self):
            module.commit()

    def num_parameters(self) -> int:
        """Parameters, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    # -- running ----------------------------------------------------------------------------------------------------

    @overload
    def forward(
        self, ids: Tensor, target: Tensor | None = None, *, past: None = None, **options: Unpack[Options]
    ) -> Tensor: ...

    @overload
    def forward(self, ids: Tensor, *, past: Past, **options: Unpack[Options]) -> tuple[Tensor, Past]: ...

    def forward(
        self,
        ids: Tensor,
        target: Tensor | None = None,
        *,
        segments: Tensor | Layout | None = None,
        positions: Tensor | None = None,
        marks: Tensor | None = None,
        types: Tensor | None = None,
        spelled: Tensor | None = None,
        source_segments: Tensor | Layout | None = None,
        source_positions: Tensor | None = None,
        source_types: Tensor | None = None,
        target_segments: Tensor | Layout | None = None,
        target_positions: Tensor | None = None,
        target_types: Tensor | None = None,
        cache: Cache | None = None,
        past: Past | None = None,
        asked: LossTarget | None = None,
        taps: Tap | None = None,
        notes: AuxOutputs | None = None,
    ) -> Tensor | tuple[Tensor, Past]:
        """What the head makes of ids [b, t], or of source [b, s] and target [b, t] in an encoder–decoder.

        Where the config reads images or features, they stand in the place of ids: [b, c, h, w] or [b, t, size].
        Segments are int [b, t], -1 for padding; where nothing is given there is one segment and positions count from 0.
        `spelled` are the bytes of each token's word, [b, t, longest], where the config asks: byte + 1, 0 for nothing.
        What some parts add to the loss of training, such as the balance of experts, is put into `notes`.
        With a `past` (see `new_past`) the tokens go on from it, and the past of those that follow is returned, too.
        Where labels are `asked` for, their summed loss stands in the place of logits, which are never all there.
        """
        own: dict[str, object] = {"segments": segments, "positions": positions, "marks": marks}
        own |= {"types": types, "spelled": spelled, "past": past}
        kept: list[Tensor | None] = []
        sided: dict[str, object] = {"target": target, "source_segments": source_segments, "source_types": source_types}
        sided |= {"source_positions": source_positions, "target_positions": target_positions}
        sided |= {"target_segments": target_segments, "target_types": target_types}
        if self.config.shape == "encoder-decoder":
            _refuse(own, "an encoder-decoder", sided)
            if target is None:
                raise ValueError("this is an encoder-decoder: call it with (source, target)")
            source = self._make_layout(self.source, ids, source_segments, source_positions)
            memory = self.encode(ids, segments=source, types=source_types, taps=taps, notes=notes)
            layout = self._make_layout(self.target, target, target_segments, target_positions, before=cache)
            x = self.decode(
                target,
                memory,
                source=source,
                segments=layout,
                types=target_types,
                cache=cache,
                taps=taps,
                notes=notes,
            )
        else:
            _refuse(sided, "an encoder-only" if self.encoder else "a decoder-only", own)
            before = past if cache is None else cache
            layout = self._make_layout(self.target or self.source, ids, segments, positions, marks, before)
            if self.decoder is not None:
                x = self.decode(
                    ids,
                    segments=layout,
                    types=types,
                    spelled=spelled,
                    cache=cache,
                    past=past,
                    kept=kept,
                    taps=taps,
                    notes=notes,
                )
            else:
                if before is not None:
                    raise ValueError("an encoder reads its input at once: leave `cache` and `past` out")
                x = self.encode(ids, segments=layout, types=types, spelled=spelled, taps=taps, notes=notes)
        out = self.apply_head(x, layout, asked)
        out = out if taps is None else taps("head", out)
        return out if past is None else (out, past.after(layout, kept))

    def encode(
        self,
        ids: Tensor,
        *,
        segments: Tensor | Layout | None = None,
        positions: Tensor | None = None,
        marks: Tensor | None = None,
        types: Tensor | None = None,
        spelled: Tensor | None = None,
        taps: Tap | None = None,
        notes: AuxOutputs | None = None,
    ) -> Tensor:
        """The encoder's hidden states [b, t, d] after the final norm.

        Where recurrent layers of the decoder begin with the encoder's states, these follow: [b, t, d + states].
        """
        if self.encoder is None or self.source is None:
            raise ValueError("this model has no encoder: use decode for its hidden states")
        layout = self._make_layout(self.source, ids, segments, positions, marks)
        taps = None if taps is None else taps.within("encoder")
        own = AuxOutputs() if self.training else None
        x = self._embed(self.source, self.encoder, ids, layout, types, taps, own, spelled)
        states: dict[int, list[Tensor]] = {i: [] for i in self.handed}
        x = self.encoder(x, layout, taps=taps, backend=self.backend, notes=own, states=states)
        if own is not None:
            own.settle(notes)
        return torch.cat((x, *(layer[0] for layer in states.values())), dim=-1) if states else x

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
        spelled: Tensor | None = None,
        cache: Cache | None = None,
        past: Past | None = None,
        kept: list[Tensor | None] | None = None,
        taps: Tap | None = None,
        notes: AuxOutputs | None = None,
    ) -> Tensor:
        """The decoder's hidden states [b, t, d] after the final norm.

        `memory` is the encoder's output and `source` its segments; once a cache holds them, they are left out. With a
        cache no gradient is kept. With a `past`, what each layer keeps for the next one is put into the list `kept`.
        """
        if self.decoder is None or self.target is None:
            raise ValueError("this model has no decoder: use encode for its hidden states")
        if past is not None:
            self._check_past(past, cache)
        layout = self._make_layout(self.target, ids, segments, positions, marks, past if cache is None else cache)
        memory, states, seen = self._source(ids.shape[0], memory, source, cache)
        begin: dict[int, Tensor] = {}
        if states is not None and seen is not None:
            parts = last_states(states, layout, seen).split(list(self.handed.values()), dim=-1)
            begin = dict(zip(self.handed, parts, strict=True))
        taps = None if taps is None else taps.within("decoder")
        own = AuxOutputs() if self.training and cache is None else None
        # a cache outlives the step that wrote it, so nothing in it may hold on to that step's graph
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            x = self._embed(self.target, self.decoder, ids, layout, types, taps, own, spelled)
            x = self.decoder(
                x,
                layout,
                memory=memory,
                source=seen,
                cache=cache,
                taps=taps,
                backend=self.backend,
                notes=own,
                begin=begin,
                past=past,
                kept=kept,
            )
        if own is not None:
            own.settle(notes)
        return x

    def apply_head(self, hidden: Tensor, layout: Layout, asked: LossTarget | None = None) -> Tensor:
        """What the head makes of hidden states [b, t, d] of tokens so laid out, or the loss of what is asked."""
        table = self.table(self.target or self.source)
        if asked is None:
            return self.head(hidden, layout, table)
        if isinstance(self.head, VocabularyHead):
            return self.head.loss(hidden, table, asked)
        raise ValueError("`asked` is for models that say words: this one has another head")

    def new_cache(self, batch: int, slots: int, *, kind: CacheKind = "auto", slack: int = 0) -> Cache:
        """An empty cache for up to `slots` tokens in each of `batch` rows.

        auto: layers with a causal window keep no more than it shows, and `slack` tokens, so that as many can be taken
        back by `truncate`; static: every layer keeps every token; int8: auto, with keys and values of 8 bits.
        """
        if self.decoder is None:
            raise ValueError("only a decoder has a cache")
        return Cache(batch, slots, self.decoder.sizes, *self._kept_as(), kind, slack)

    def new_past(self, batch: int) -> Past:
        """An empty past of `batch` rows, for a decoder with `memory`: `out, past = model(ids, past=past)` reads on."""
        if self.decoder is None or not self.decoder.memory:
            raise ValueError("this model has no memory: set `decoder.memory` to the number of tokens it is to keep")
        widths = [self.config.width if size.groups else 0 for size in self.decoder.sizes]
        return Past.empty(batch, self.decoder.memory, widths, *self._kept_as())

    # -- small steps ------------------------------------------------------------------------------------------------

    def _kept_as(self) -> tuple[torch.device, torch.dtype]:
        """Where what is kept is, and as what: under autocast in its precision, whatever the weights have."""
        weight = next(self.parameters())
        return weight.device, Runtime.of(weight, self.training).dtype

    def _check_past(self, past: Past, cache: Cache | None) -> None:
        assert self.decoder is not None
        if cache is not None:
            raise ValueError("a cache holds all that came before: leave `past` out")
        slots, layers = past.positions.shape[1], len(past.layers)
        if (slots, layers) != (self.decoder.memory, len(self.decoder.sizes)):
            raise ValueError(f"a past of {layers} layers and {slots} tokens is not this model's: make it by `new_past`")

    def _make_layout(
        self,
        read: AnyInput | None,
        ids: Tensor,
        segments: Tensor | Layout | None = None,
        positions: Tensor | None = None,
        marks: Tensor | None = None,
        before: Cache | Past | None = None,
    ) -> Layout:
        assert read is not None
        batch, length = read.measure(ids)
        if before is None:
            return make_layout(batch, length, ids.device, segments=segments, positions=positions, marks=marks)
        if isinstance(before, Cache):
            return before.make_layout(batch, length, segments, positions, marks)
        if marks is not None or (isinstance(segments, Layout) and segments.marks is not None):
            raise ValueError("marks with a past are not supported: those before would have seen the marked tokens")
        return before.make_layout(batch, length, segments, positions)

    def _source(
        self, batch: int, memory: Tensor | None, source: Tensor | Layout | None, cache: Cache | None
    ) -> tuple[Tensor | None, Tensor | None, Layout | None]:
        """The encoder's output, the states that came with it, and where its tokens stand; or what the cache kept."""
        if memory is None and source is not None:
            raise ValueError("`source` says where the tokens of `memory` stand: give both, or neither")
        if self.encoder is None:
            if memory is not None:
                raise ValueError("this model has no encoder: leave `memory` out")
            return None, None, None
        if memory is None:
            if cache is None or cache.source is None:
                raise ValueError("the decoder needs the encoder's output: give `memory`, or a cache that has seen it")
            return None, cache.states, cache.source
        width = self.config.width + sum(self.handed.values())
        if memory.dim() != 3 or memory.shape[::2] != (batch, width):
            expected = f"[{batch}, s, {width}]"
            raise ValueError(f"memory has shape {list(memory.shape)}, expected {expected} as `encode` gives it")
        layout = make_layout(memory.shape[0], memory.shape[1], memory.device, segments=source)
        memory, rest = memory.tensor_split([self.config.width], dim=-1)
        states = rest if self.handed else None
        if cache is not None:
            cache.keep_source(layout, states)
        return memory, states, layout

    def _embed(
        self,
        read: AnyInput,
        stack: BlockStack,
        ids: Tensor,
        layout: Layout,
        types: Tensor | None,
        taps: Tap | None,
        notes: AuxOutputs | None,
        spelled: Tensor | None,
    ) -> Tensor:
        if types is not None and (not isinstance(read, TokenInput) or read.types is None):
            raise ValueError("this model has no token types: leave `types` out")
        if spelled is not None and not isinstance(read, TokenInput):
            raise ValueError("this model reads no words: leave `spelled` out")
        if isinstance(read, TokenInput):
            _check_range(ids, read.vocab, "id", f"vocabulary of {read.vocab}")
            if types is not None and read.types is not None:
                check(*ids.shape, types=types)
                _check_range(types, read.types.num_embeddings, "type", f"{read.types.num_embeddings} token types")
            read.check_spelled(ids, spelled)
            if spelled is not None:
                _check_range(spelled, BYTES, "spelled", f"{BYTES} of bytes")
            x = read(ids, self.table(read), lambda x: stack.embed(x, layout), layout, types, notes, spelled)
        else:
            x = read(ids, lambda x: stack.embed(x, layout), layout, notes)
        return x if taps is None else taps("embed", x)

    def table(self, read: AnyInput | None) -> Tensor | None:
        """The embedding table that an input reads, its own or the one it shares; None where it reads no tokens."""
        if not isinstance(read, TokenInput):
            return None
        shared = self.source if read.table is None else read
        assert isinstance(shared, TokenInput)
        assert shared.table is not None
        return shared.table.weight


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

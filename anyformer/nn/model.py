"""The Transformer: one class for encoder-decoders, encoders and decoders."""

from functools import partial
from typing import Self, Unpack, cast, overload

import torch
from torch import Tensor, nn

from anyformer.attention.attend import Backend
from anyformer.attention.cache.kv_cache import Cache, CacheKind
from anyformer.attention.cache.paged import AnyCache
from anyformer.attention.cache.segment_memory import MemoryUpdate, Past
from anyformer.attention.layout import Layout
from anyformer.attention.media_batch import MediaBatch
from anyformer.config import Input, ModelConfig, Side, encoder_init_layers, tower_config
from anyformer.config.adapter import adapted
from anyformer.config.cost import Sizes
from anyformer.kernels.cross_entropy import token_loss
from anyformer.kernels.runtime import Runtime
from anyformer.nn.aux_outputs import AuxOutputs, tracked_modules
from anyformer.nn.context import PassOptions, StateSink, Tap
from anyformer.nn.heads import LossTarget, PooledHead, VocabularyHead
from anyformer.nn.init import allocate, initialise
from anyformer.nn.inputs import (
    OWN,
    SIDED,
    InputModule,
    Inputs,
    SideOptions,
    StackOptions,
    check_options,
    options_of,
    read_inputs,
)
from anyformer.nn.linear import adapt
from anyformer.nn.stack import BlockStack, Encoded, check_encoder_out
from anyformer.nn.uncached import decode_again, initial_states, stored_sizes


class CallOptions(SideOptions, total=False):
    """Keywords of `Transformer.forward` besides `past`."""

    cache: AnyCache | None
    loss_target: LossTarget | None
    taps: Tap | None
    aux: AuxOutputs | None
    recompute: bool


class Transformer(nn.Module):
    """A model with an encoder, a decoder, or both, depending on the config.

    It is built on the meta device and then initialised, so the same seed gives the same weights on every device.

    Args:
        config: the model. Inside `with torch.device("meta")` its weights are not allocated: see `materialise`.

    Attributes:
        config: the same.
        backend: attention kernel to use; "auto" selects the fastest that can run.

    Example:
        >>> model = af.Transformer(af.presets.gpt2(depth=2, width=64, heads=4, vocab=97))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 97])
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
        self.source = self._input(config.source)
        self.target = self._input(config.target, own_table=not config.ties_inputs)
        self.encoder = self._stack("encoder", self.source)
        self.decoder = self._stack("decoder", self.target)
        # by decoder layer: the width of its initial state, which comes with the encoder's output
        self.encoder_init_widths = {i: mixer.state(config.width) for i, mixer in encoder_init_layers(config).items()}
        self.head = config.head.build(config.width, config.last_input, config.ties_output)
        tower = tower_config(config)
        self.image_tower = None if tower is None else Transformer(tower)
        if config.adapter:
            adapt(self, config.adapter, adapted(config.adapter, config.stacks, config.width))

    def _input(self, spec: Input | None, own_table: bool = True) -> InputModule | None:
        return None if spec is None else cast(InputModule, spec.build(self.config.width, own_table))

    def _stack(self, side: Side, read: InputModule | None) -> BlockStack | None:
        spec = self.config.stacks.get(side)
        return BlockStack(spec, self.config.width, side, read.inner_width) if spec and read else None

    def materialise(self, device: torch.device | str = "cpu") -> Self:
        """Allocate the weights of a model built on the meta device, and initialise them."""
        allocate(self, device)
        initialise(self, self.config.init, self.config.width)
        return self

    @torch.no_grad()
    def commit(self) -> None:
        """Update running statistics and router biases by the last pass and all collected ones: once per step."""
        for module in tracked_modules(self):
            module.commit()

    def num_parameters(self) -> int:
        """Return the number of parameters, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    # -- calls ------------------------------------------------------------------------------------------------------

    @overload
    def forward(
        self,
        ids: Tensor | Inputs,
        target: Tensor | Inputs | None = None,
        *,
        past: None = None,
        **options: Unpack[CallOptions],
    ) -> Tensor: ...

    @overload
    def forward(self, ids: Tensor | Inputs, *, past: Past, **options: Unpack[CallOptions]) -> tuple[Tensor, Past]: ...

    def forward(
        self,
        ids: Tensor | Inputs,
        target: Tensor | Inputs | None = None,
        *,
        cache: AnyCache | None = None,
        past: Past | None = None,
        loss_target: LossTarget | None = None,
        taps: Tap | None = None,
        aux: AuxOutputs | None = None,
        recompute: bool = False,
        **options: Unpack[SideOptions],
    ) -> Tensor | tuple[Tensor, Past]:
        """Return the head's output for ids [b, t], or for source [b, s] and target [b, t] in an encoder-decoder.

        A config that reads images or features takes [b, c, h, w] or [b, t, size] in place of ids.

        Args:
            segments, positions, marks, types, spelled: int [b, t] each; see `Inputs` and `Layout`. Padding has segment
                -1. By default every row is one segment whose positions start at 0. With an encoder and
                a decoder: `source_segments`, `target_segments`, and likewise masks, positions and types.
            attention_mask: bool or 0 and 1 [b, t], in place of segments: 1 at real tokens, 0 at padding on any side.
            media: images, sounds and feature vectors among the tokens, for models that read them.
            cache: KV cache that the tokens continue, and are added to (see `new_cache`).
            past: segment memory that the tokens continue (see `new_past`). The call then also returns the next one.
            loss_target: labels. The call then returns their summed loss in place of logits; the full [b, t, v] logits
                are never materialised.
            taps: reads or replaces activations by name.
            aux: receives auxiliary losses in training, such as the balance of experts.
            recompute: recompute the activations of each block in the backward pass, in place of storing them.
        """
        sides = self.read_sides(ids, target, before=past if cache is None else cache, **options)
        media = None
        if self.image_tower is not None:
            ((side, (inputs, layout)),) = sides.items()
            sides, media = {side: (inputs._replace(media=None), layout)}, inputs.media  # a tower reads the images
        pass_options = self._pass_options(taps, aux, recompute)
        memory, encoded = None if past is None else MemoryUpdate(past), None
        if self.encoder is not None:
            source, layout = sides["encoder"]
            x = self._encode(source, layout, pass_options)  # [b, s, d]
        if self.decoder is not None:
            inputs, decoder_layout = sides["decoder"]
            if self.encoder is not None:
                encoded = self._read_encoder(x, layout, inputs, decoder_layout, cache)
            layout = decoder_layout
            x = self._decode(inputs, layout, pass_options, encoded, cache, memory)  # [b, t, d]
        out = self.apply_head(x, layout, loss_target)  # [b, t, d] -> [b, t, v]
        if media is not None:
            out = self._with_images(out, media, pass_options)
        out = out if taps is None else taps("head", out)
        return out if memory is None else (out, memory.past.after(layout, memory.memory_out))

    def read_sides(
        self,
        ids: Tensor | Inputs,
        target: Tensor | Inputs | None = None,
        *,
        before: AnyCache | Past | None = None,
        **options: Unpack[SideOptions],
    ) -> dict[Side, tuple[Inputs, Layout]]:
        """Return what each stack reads in a call, with its layout; refuse arguments that this model cannot use."""
        if self.source is not None and self.target is not None:
            shape, allowed = "an encoder-decoder", ", ".join(("target", *SIDED))
            check_options(options, SIDED, allowed, shape)
            if isinstance(before, Past):
                raise ValueError(f"past: not for {shape} model, which takes {allowed}")
            if target is None:
                raise ValueError("this is an encoder-decoder: call it with (source, target)")
            return {
                "encoder": self._read("encoder", ids, options_of("source_", options)),
                "decoder": self._read("decoder", target, options_of("target_", options), before),
            }
        shape, allowed = "an encoder-only" if self.encoder else "a decoder-only", ", ".join((*OWN, "past"))
        check_options(options, OWN, allowed, shape)
        if target is not None:
            raise ValueError(f"target: not for {shape} model, which takes {allowed}")
        if self.target is not None:
            return {"decoder": self._read("decoder", ids, options, before)}
        if before is not None:
            raise ValueError("an encoder reads its whole input at once: leave `cache` and `past` out")
        return {"encoder": self._read("encoder", ids, options)}

    def _read(
        self, side: Side, ids: Tensor | Inputs, options: StackOptions, before: AnyCache | Past | None = None
    ) -> tuple[Inputs, Layout]:
        module, stack = (self.source, self.encoder) if side == "encoder" else (self.target, self.decoder)
        assert module is not None
        inputs, layout = read_inputs(module, stack is not None and stack.reads_coordinates, ids, options, before)
        module.check(inputs if self.image_tower is None else inputs._replace(media=None))
        return inputs, layout

    def encode(
        self,
        ids: Tensor | Inputs,
        *,
        taps: Tap | None = None,
        aux: AuxOutputs | None = None,
        **options: Unpack[StackOptions],
    ) -> Tensor:
        """Return the encoder's hidden states [b, t, d] after the final norm.

        If recurrent layers of the decoder start from the encoder's states, these follow: [b, t, d + states].
        """
        check_options(options, OWN, ", ".join(OWN), "an encoder")
        if self.encoder is None or self.source is None:
            raise ValueError("this model has no encoder: use decode for its hidden states")
        inputs, layout = self._read("encoder", ids, options)
        return self._encode(inputs, layout, self._pass_options(taps, aux))

    def decode(
        self,
        ids: Tensor | Inputs,
        encoder_out: Tensor | None = None,
        *,
        source: Tensor | Layout | None = None,
        cache: AnyCache | None = None,
        taps: Tap | None = None,
        aux: AuxOutputs | None = None,
        **options: Unpack[StackOptions],
    ) -> Tensor:
        """Return the decoder's hidden states [b, t, d] after the final norm.

        `encoder_out` is the output of `encode`, and `source` its segments or layout. Once a cache holds both, leave
        them out. No gradient is computed with a cache.
        """
        check_options(options, OWN, ", ".join(OWN), "a decoder")
        if self.decoder is None or self.target is None:
            raise ValueError("this model has no decoder: use encode for its hidden states")
        inputs, layout = self._read("decoder", ids, options, cache)
        encoded = self._read_encoder(encoder_out, source, inputs, layout, cache)
        return self._decode(inputs, layout, self._pass_options(taps, aux), encoded, cache)

    def extend(self, ids: Tensor, layout: Layout, cache: AnyCache) -> Tensor:
        """Return the decoder's hidden states [b, t, d] of ids that a model chose, in a layout of `cache.next`."""
        inputs = Inputs(ids)
        encoded = None if self.encoder is None else self._read_encoder(None, None, inputs, layout, cache)
        return self._decode(inputs, layout, PassOptions(self.backend), encoded, cache)

    def apply_head(self, hidden: Tensor, layout: Layout, loss_target: LossTarget | None = None) -> Tensor:
        """Return the head's output for hidden states [b, t, d] of this layout, or the summed loss of labels."""
        table = self.table(self.target or self.source)
        if loss_target is None:
            return self.head(hidden, layout, table)
        if isinstance(self.head, VocabularyHead):
            return self.head.training_loss(hidden, table, loss_target, layout)
        if self.config.head.predicts_tokens:
            logits = self.head(loss_target.rows_of(hidden), layout, table)
            return token_loss(logits, loss_target.labels, loss_target.smoothing)
        raise ValueError("`loss_target` needs a head over the vocabulary (`lm` or `masked_lm`): this model has another")

    def new_cache(self, batch: int, slots: int, *, kind: CacheKind = "auto", slack: int = 0) -> Cache:
        """Return an empty KV cache for up to `slots` tokens in each of `batch` rows.

        auto: a layer with a causal window stores only the tokens in it, and `slack` more, so that `truncate` can
        remove up to `slack` tokens; static: every layer stores every token; int8: auto, with 8-bit keys and values;
        none: the text is read again with each new token, as with any kind where a mixer stores nothing.
        """
        if self.decoder is None:
            raise ValueError("only a decoder has a cache")
        kind, sizes = stored_sizes(self, self.decoder, self.config.width, kind)
        return Cache(batch, slots, sizes, *self._state_format(), kind, slack)

    def new_past(self, batch: int) -> Past:
        """Return an empty segment memory of `batch` rows, for a decoder with `memory`.

        `out, past = model(ids, past=past)` reads a segment after the ones before.
        """
        if self.decoder is None or not self.decoder.segment_memory:
            raise ValueError("this model has no memory: set `decoder.memory` to the number of tokens to store")
        widths = [self.config.width if isinstance(size, Sizes) and size.groups else 0 for size in self.decoder.sizes]
        return Past.empty(batch, self.decoder.segment_memory, widths, *self._state_format())

    # -- parts of a call --------------------------------------------------------------------------------------------

    def _pass_options(self, taps: Tap | None, aux: AuxOutputs | None, recompute: bool = False) -> PassOptions:
        """Return the options of a pass; auxiliary outputs exist in training only, with or without a caller for them."""
        if not self.training:
            return PassOptions(self.backend, taps)
        return PassOptions(self.backend, taps, AuxOutputs() if aux is None else aux, recompute)

    def _encode(self, inputs: Inputs, layout: Layout, options: PassOptions) -> Tensor:
        assert self.encoder is not None
        options = options.scoped("encoder")
        x = self._embed(self.source, self.encoder, inputs, layout, options)
        sinks = {i: StateSink() for i in self.encoder_init_widths}
        x = self.encoder(x, layout, options, state_sinks=sinks)
        if options.aux is not None:
            options.aux.publish()
        states = [sink.states for sink in sinks.values() if sink.states is not None]
        return torch.cat((x, *states), dim=-1) if states else x

    def _decode(
        self,
        inputs: Inputs,
        layout: Layout,
        options: PassOptions,
        encoded: Encoded | None,
        cache: AnyCache | None,
        memory: MemoryUpdate | None = None,
    ) -> Tensor:
        assert self.decoder is not None
        if memory is not None:
            if cache is not None:
                raise ValueError("a cache holds all earlier tokens: leave `past` out")
            memory.past.check(self.decoder.segment_memory, len(self.decoder.sizes))
        options = options if options.taps is None else options.scoped("decoder")
        if cache is not None:
            options = options._replace(aux=None)
        # a cache outlives the step that wrote it, so none of its tensors may reference that step's graph
        with torch.set_grad_enabled(torch.is_grad_enabled() and cache is None):
            x = self._embed(self.target, self.decoder, inputs, layout, options)
            if cache is None or not cache.recomputes:
                x = self.decoder(x, layout, options, encoded=encoded, cache=cache, memory=memory)
            else:
                x = decode_again(self.decoder, x, layout, options, encoded, cache, self.encoder_init_widths)
        if options.aux is not None:
            options.aux.publish()
        return x

    def _with_images(self, out: Tensor, media: MediaBatch, options: PassOptions) -> Tensor:
        """Return vectors [b, d] in which the rows that are an image have the vector of the image tower."""
        assert self.image_tower is not None
        assert isinstance(self.head, PooledHead)
        if media.images is None or media.image_at is None:
            return out
        _, taps, aux, recompute = options.scoped("image_tower")
        self.image_tower.backend = self.backend
        vectors = self.head.last(self.image_tower(media.images, taps=taps, aux=aux, recompute=recompute))
        image = media.image_at.amax(dim=1)  # [b]
        return torch.where((image >= 0)[:, None], vectors[image.clamp(min=0)].to(out.dtype), out)

    def _state_format(self) -> tuple[torch.device, torch.dtype]:
        """Device and data type of caches and segment memory: autocast's data type where it is on."""
        weight = next(self.parameters())
        return weight.device, Runtime.of(weight, self.training).dtype

    def _read_encoder(
        self,
        encoder_out: Tensor | None,
        source: Tensor | Layout | None,
        inputs: Inputs,
        layout: Layout,
        cache: AnyCache | None,
    ) -> Encoded | None:
        """Return the encoder's output as the decoder reads it, given or from the cache, and store it in the cache."""
        if encoder_out is None and source is not None:
            raise ValueError("`source` is the layout of `encoder_out`: pass both, or neither")
        if self.encoder is None:
            if encoder_out is not None:
                raise ValueError("this model has no encoder: leave `encoder_out` out")
            return None
        states: Tensor | None = None
        if encoder_out is None:
            if cache is None or cache.source is None:
                raise ValueError("the decoder needs the encoder's output: pass `encoder_out`, or a cache that holds it")
            source_layout, states = cache.source, cache.states
        else:
            batch, width = inputs.ids.shape[0], self.config.width + sum(self.encoder_init_widths.values())
            source_layout = check_encoder_out(encoder_out, source, batch, width)
            encoder_out, rest = encoder_out.tensor_split([self.config.width], dim=-1)
            states = rest if self.encoder_init_widths else None
            if cache is not None:
                cache.keep_source(source_layout, states)
        return Encoded(
            encoder_out, source_layout, initial_states(states, layout, source_layout, self.encoder_init_widths)
        )

    def _embed(
        self, module: InputModule | None, stack: BlockStack, inputs: Inputs, layout: Layout, options: PassOptions
    ) -> Tensor:
        assert module is not None
        if inputs.media is not None and self.image_tower is not None:
            raise ValueError("only a whole call reads images by a tower: leave `media` out")
        x = module(inputs, self.table(module), partial(stack.embed, layout=layout), layout, options.aux)
        return x if options.taps is None else options.taps("embed", x)

    def table(self, module: InputModule | None) -> Tensor | None:
        """Return the embedding table of an input, its own or the one it shares; None where there is none."""
        shared = self.source if module is None or module.table is None else module
        return None if shared is None or shared.table is None else shared.table.weight

"""Stack of blocks: the encoder or the decoder, with its position schemes and final norm."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anyformer.attention.attend import lower
from anyformer.attention.cache.paged import AnyCache, PagedSlots
from anyformer.attention.cache.ring import SharedSlots, Step
from anyformer.attention.cache.segment_memory import LayerMemory, MemoryUpdate
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import Layout, Role, check_values, make_layout
from anyformer.attention.lowered import FirstValues, Relation
from anyformer.attention.position_module import Positions
from anyformer.config import (
    Pattern,
    Position,
    Side,
    Stack,
    pattern_across,
    pattern_of,
    position_of,
)
from anyformer.kernels.runtime import Runtime
from anyformer.nn.aux_outputs import AuxOutputs, TrackedModule
from anyformer.nn.block import Sublayer, build_block
from anyformer.nn.context import CacheWriter, Context, Crossing, PassOptions, RecurrentOptions, StateSink
from anyformer.nn.norm import normed
from anyformer.nn.pooling import Funnel

HERE = Runtime("cpu", torch.float32, training=False)
DEFAULT_OPTIONS = PassOptions()


class Plan(NamedTuple):
    """Everything that determines a layer's mask and positions; layers with equal plans share them."""

    pattern: Pattern
    scheme: int  # which of the stack's position schemes
    reach: int | None  # which of a cache's rings
    level: int  # how many times the tokens have been pooled
    needs: Requirements


class Encoded(NamedTuple):
    """The encoder's output as the decoder reads it."""

    hidden: Tensor | None  # [b, s, d]; None: a cache holds the keys and values made from it
    layout: Layout
    initial_states: Mapping[int, Tensor]  # of recurrent decoder layers that start from the encoder's: [b, t, h]


def check_encoder_out(encoder_out: Tensor, source: Tensor | Layout | None, batch: int, width: int) -> Layout:
    """Return the layout of an encoder's output [b, s, d]; raise a ValueError if it has another shape."""
    if encoder_out.dim() != 3 or encoder_out.shape[::2] != (batch, width):
        shapes = f"{list(encoder_out.shape)}, expected [{batch}, s, {width}]"
        raise ValueError(f"encoder_out has shape {shapes} as `encode` returns it")
    if isinstance(source, Layout):
        return source.checked(batch, encoder_out.shape[1])
    layout = make_layout(batch, encoder_out.shape[1], encoder_out.device, segments=source)
    check_values(source, None)
    return layout


class Skipped(NamedTuple):
    """Activations of a pass that later layers read."""

    first: Tensor  # the input of the first layer
    outputs: list[Tensor]  # of the layers so far


class SkipConnections(nn.Module):
    """Input of a layer: a x + b x₀ with learned a and b, after x + c y with the output y of an early layer.

    The last layer reads the output of the first, the last but one that of the second, and so on.
    """

    def __init__(self, spec: Stack):
        super().__init__()
        self.depth = spec.depth
        per_layer = spec.depth if spec.embedding_skip else 0
        self.own = nn.Parameter(torch.empty(per_layer)) if spec.embedding_skip else None
        self.embedding = nn.Parameter(torch.empty(per_layer)) if spec.embedding_skip else None
        self.unet = nn.Parameter(torch.empty(spec.depth // 2)) if spec.unet_skips else None

    def reset(self) -> None:
        """Begin with the input itself, and with whole outputs of early layers."""
        for weights, value in ((self.own, 1.0), (self.embedding, 0.0), (self.unet, 1.0)):
            if weights is not None:
                weights.fill_(value)

    def forward(self, layer: int, x: Tensor, skipped: Skipped) -> Tensor:
        early = self.depth - 1 - layer  # whose output [b, t, d] is added
        if self.unet is not None and early < len(self.unet):
            x = x + self.unet[early].to(x.dtype) * skipped.outputs[early]
        if self.own is not None and self.embedding is not None:
            x = self.own[layer].to(x.dtype) * x + self.embedding[layer].to(x.dtype) * skipped.first
        return x


class BlockStack(nn.Module):
    """Encoder or decoder. Layers are counted by application: with shared weights a module runs several times."""

    def __init__(self, spec: Stack, width: int, side: Side, embed_width: int):
        super().__init__()
        layers = tuple(block.on(side, spec.position) for block in spec.unrolled())
        self.runs = spec.runs  # the module of each layer
        self.blocks = nn.ModuleList(build_block(layers[i], width) for i in sorted(set(self.runs)))
        self.final_norm, self.dropout = spec.final_norm.build(width), nn.Dropout(spec.dropout)
        self.embeds = spec.position.embeds()
        self.embedder = Positions(spec.position if self.embeds else Position.none(), embed_width, 0)
        self.ends = spec.ends
        self.sizes = tuple(block.mixer.stores(width) for block in layers)
        self.reaches = tuple(size and size.reach for size in self.sizes)
        self.built = {
            f"{i}.{name}.inner": type(sublayer.inner)
            for i, block in enumerate(self.blocks)
            for name, sublayer in block.named_children()
            if isinstance(sublayer, Sublayer)
        }
        self.segment_memory, self.pooling, self.levels = spec.memory, spec.pooling, spec.levels
        self.skips = SkipConnections(spec) if spec.embedding_skip or spec.unet_skips else None

        schemes: dict[tuple[Position, int, int | None], int] = {}
        plans: dict[Plan, int] = {}
        plan_of_layer: list[int | None] = []  # None: its mixer is not attention
        for run, block, level in zip(self.runs, layers, self.levels, strict=True):
            mixer = block.attention
            if mixer is None:
                plan_of_layer.append(None)
                continue
            scheme: Position = position_of(mixer, spec)
            scheme = Position.none() if scheme.embeds() else scheme
            key = scheme, mixer.heads, run if scheme.per_layer else None
            which = schemes.setdefault(key, len(schemes))
            needs = Requirements.of(mixer, width)
            plan = Plan(pattern_of(mixer, side), which, mixer.reach, level, needs)
            plan_of_layer.append(plans.setdefault(plan, len(plans)))
        self.schemes = nn.ModuleList(Positions(scheme, width, heads) for scheme, heads, _ in schemes)
        self.reads_coordinates = any(scheme.reads_coordinates() for scheme, _, _ in schemes)
        self.plans, self.plan_of_layer = tuple(plans), tuple(plan_of_layer)
        crosses = (block.cross for block in layers)
        across = [cross and (pattern_across(cross), Requirements.of(cross, width)) for cross in crosses]
        self.cross_plans = tuple(dict.fromkeys(plan for plan in across if plan))
        self.cross_plan_of_layer = tuple(self.cross_plans.index(plan) if plan else None for plan in across)
        self.no_position = Positions(Position.none(), width, 0)  # no scheme acts between the positions of two texts

    def replaced(self) -> Iterator[tuple[str, str, str]]:
        """Yield the sublayers that were put in by hand: the name, the class that the config builds, and the one now."""
        for name, built in self.built.items():
            try:
                now = self.blocks.get_submodule(name)
            except AttributeError:
                yield name, built.__name__, "not there"
                continue
            if not isinstance(now, built):
                yield name, built.__name__, type(now).__name__

    def embed(self, x: Tensor, layout: Layout) -> Tensor:
        """Apply the part of the position scheme that acts on embeddings."""
        if self.ends and not torch.compiler.is_compiling():
            self._check(layout, *self.ends[0])
        return self.embedder.embed(x, layout.positions) if self.embeds else x

    def _check(self, layout: Layout, limit: int, positions: str) -> None:
        """Raise if a position has no weights."""
        if layout.position_bound is not None and layout.position_bound <= limit:
            return
        first, last = int(layout.positions.min()), int(layout.positions.max())
        if first < 0:
            raise ValueError(f"position {first} is before the first of {limit} {positions}")
        if last >= limit:
            raise ValueError(
                f"position {last} is past the end of {limit} {positions}: shorten the input, generate fewer tokens, "
                "configure more positions, or use parts without a limit"
            )

    def relations(
        self,
        layouts: Sequence[Layout],
        steps: dict[int | None, Step],
        cached: bool,
        runtime: Runtime = HERE,
        options: PassOptions = DEFAULT_OPTIONS,
    ) -> list[Relation]:
        """Return the lowered mask and the state of positions of each plan, once per forward pass.

        `layouts` are those of the tokens at hand, and of pooled ones. With taps, latent attention expands all keys and
        values.
        """
        made, tapped, first_values = [], options.taps is not None, FirstValues()
        for plan in self.plans:
            q, k = layouts[0], steps.get(plan.reach, steps[None]).keys
            if plan.level:
                q = k = layouts[plan.level]
            role: Role = "part" if q.whole is not None else "cached" if cached and k is not layouts[0] else "self"
            k = k._replace(pages=None, origins=None) if tapped else k  # taps read keys and values by row
            positions = cast(Positions, self.schemes[plan.scheme])
            can_absorb = cached and not tapped and plan.needs.latent is not None
            absorbs = can_absorb and plan.needs.absorbs(q.positions.shape[1])
            needs = plan.needs.absorbed() if absorbs else plan.needs
            relation = lower(plan.pattern, q, k, role, positions, needs, runtime, options.backend)
            made.append(relation._replace(absorbs=absorbs, whole=q.whole, first_values=first_values))
        return made

    def crossings(self, q: Layout, source: Layout, runtime: Runtime, options: PassOptions) -> list[Relation]:
        """Return the masks of cross-attention, once per forward pass."""
        made = []
        source = source if options.taps is None else source._replace(pages=None, origins=None)
        for pattern, needs in self.cross_plans:
            if pattern.limit is not None and not torch.compiler.is_compiling():
                self._check(source, pattern.limit, f"positions of the '{pattern.kind}' pattern")
            keys = source if source.whole is None else source.whole.layout
            relation = lower(pattern, q, keys, "cross", self.no_position, needs, runtime, options.backend)
            made.append(relation._replace(whole=source.whole))
        return made

    def contexts(
        self,
        x: Tensor,
        layouts: Sequence[Layout],
        options: PassOptions,
        *,
        encoded: Encoded | None,
        cache: AnyCache | None,
        memory: MemoryUpdate | None,
        state_sinks: Mapping[int, StateSink] | None,
    ) -> list[Context]:
        """Return what each layer reads besides its input; layers of one plan share masks and positions."""
        layout, runtime, made = layouts[0], Runtime.of(x, self.training), []
        keys = layout if memory is None else memory.past.keys(layout)
        keys = keys if layout.whole is None else layout.whole.layout
        steps: dict[int | None, Step] = {None: Step(keys)} if cache is None else cache.take(layout)
        relations = self.relations(layouts, steps, cache is not None, runtime, options)
        sinks = state_sinks or {}
        crossings: list[Crossing] = []
        initial: Mapping[int, Tensor] = {} if encoded is None else encoded.initial_states
        if encoded is not None:
            found = self.crossings(layout, encoded.layout, runtime, options)
            crossings = [Crossing(relation, encoded.hidden) for relation in found]
        for i, level in enumerate(self.levels):
            plan, across = self.plan_of_layer[i], self.cross_plan_of_layer[i]
            keys, writer = steps.get(self.reaches[i], steps[None])
            relation = None if plan is None else relations[plan]
            if relation is not None and relation.reads_in_place:
                assert isinstance(writer, PagedSlots | SharedSlots)
                writer = writer._replace(gathers=False)
            ctx = Context(
                layout=layouts[level],
                keys=layouts[level] if level else keys,
                relation=relation,
                cross=None if across is None or encoded is None else crossings[across],
                cache=None if cache is None or writer is None else CacheWriter(cache.layers[i], writer),
                memory=None if memory is None else LayerMemory(memory.past.layers[i]),
                recurrent=RecurrentOptions(initial.get(i), sinks.get(i), options.backend),
                taps=None if options.taps is None else options.taps.scoped(str(i)),
                aux=options.aux,
            )
            made.append(ctx)
        return made

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        options: PassOptions = DEFAULT_OPTIONS,
        *,
        encoded: Encoded | None = None,
        cache: AnyCache | None = None,
        memory: MemoryUpdate | None = None,
        state_sinks: Mapping[int, StateSink] | None = None,
    ) -> Tensor:
        """[b, t, d] to [b, t, d]; `state_sinks` receive the states of recurrent layers, by layer."""
        funnel = None if self.pooling is None else Funnel(self.pooling, layout, x.shape[0])
        layouts, skipped = [layout] if funnel is None else funnel.layouts, Skipped(x, [])
        contexts = self.contexts(
            x, layouts, options, encoded=encoded, cache=cache, memory=memory, state_sinks=state_sinks
        )
        for i, (run, ctx) in enumerate(zip(self.runs, contexts, strict=True)):
            if funnel is not None:
                x = funnel.to(self.levels[i], x)
            if self.skips is not None:
                x = self.skips(i, x, skipped)
            if options.recompute and options.aux is not None and options.taps is None:
                x, new = self._recomputed(self.blocks[run], x, ctx, options.aux)
            else:
                x = self.blocks[run](x, ctx)
                new = None if ctx.memory is None else ctx.memory.new
            if memory is not None:
                memory.memory_out.append(new)
            if ctx.taps is not None:
                x = ctx.taps("out", x)
            if self.skips is not None:
                skipped.outputs.append(x)
        x = x if funnel is None else funnel.to(0, x)
        x = self.dropout(normed(self.final_norm, x, layout, options.aux))
        return x if options.taps is None else options.taps("final", x)

    def _recomputed(self, block: nn.Module, x: Tensor, ctx: Context, aux: AuxOutputs) -> tuple[Tensor, Tensor | None]:
        """Return a block's output and its new segment memory; its activations are computed again when needed."""
        x, losses, statistics, new = checkpoint(run_apart, block, x, ctx, use_reentrant=False)
        aux.merge(losses, statistics)
        return x, new


def run_apart(
    block: nn.Module, x: Tensor, ctx: Context
) -> tuple[Tensor, list[Tensor], dict[TrackedModule, Tensor], Tensor | None]:
    """Return a block's output, its auxiliary outputs and its new segment memory; change nothing outside it.

    So activation checkpointing may run it twice.
    """
    assert ctx.aux is not None
    aux, memory = AuxOutputs(ctx.aux.reduce), None if ctx.memory is None else LayerMemory(ctx.memory.old)
    x = block(x, ctx._replace(aux=aux, memory=memory))
    return x, aux.losses, aux.statistics, None if memory is None else memory.new

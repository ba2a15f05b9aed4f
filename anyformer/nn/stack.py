"""A stack: blocks in depth, the position schemes they share, and a final norm."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anyformer.attention.layout import Layout, Relation, Role
from anyformer.attention.lower import Demand, lower
from anyformer.attention.position_tables import Positions
from anyformer.cache.kv_cache import Cache
from anyformer.cache.ring import Step
from anyformer.cache.segment_memory import Past, Recall
from anyformer.config import (
    Attention,
    Block,
    Convolution,
    FullyConnected,
    NoPosition,
    Pattern,
    PositionMixing,
    Scheme,
    Side,
    Stack,
    causal_of,
    pattern_across,
    pattern_of,
    position_of,
)
from anyformer.kernels.runtime import Runtime
from anyformer.nn.aux_outputs import AuxOutputs, TrackedModule
from anyformer.nn.block import build_block
from anyformer.nn.context import Context, Tap
from anyformer.nn.dropout import Dropout
from anyformer.nn.mixer import kept
from anyformer.nn.norm import build_norm, normed
from anyformer.nn.pooling import Funnel

HERE = Runtime("cpu", torch.float32, training=False)


class Plan(NamedTuple):
    """What decides a relation; layers with the same plan share it."""

    pattern: Pattern
    turning: int  # how much of a key the scheme may turn
    scheme: int  # which of the stack's position schemes
    reach: int | None  # which of a cache's rings
    level: int  # how many times the tokens have been pooled
    demand: Demand


class BlockStack(nn.Module):
    """An encoder or a decoder. Layers are counted by application: with shared weights a module runs several times."""

    def __init__(self, spec: Stack, width: int, side: Side, embed_width: int):
        super().__init__()
        layers = tuple(_settled(block, side) for block in spec.unrolled())
        self.runs = spec.runs  # the module of each layer
        self.blocks = nn.ModuleList(build_block(layers[i], width) for i in sorted(set(self.runs)))
        self.final_norm, self.dropout = build_norm(spec.final_norm, width), Dropout(spec.dropout)
        self.embedder = Positions(spec.position if spec.position.embeds() else NoPosition(), embed_width, 0)
        self.ends = spec.ends
        self.recompute = False  # activations in the backward pass, rather than keeping them; set from outside
        self.sizes = tuple(kept(block.mixer, width) for block in layers)
        self.memory, self.pooling, self.levels = spec.memory, spec.pooling, spec.levels

        schemes: dict[tuple[Scheme, int, int | None], int] = {}
        plans: dict[Plan, int] = {}
        follows: list[int | None] = []  # the plan of each layer; None: its mixer is no attention
        for run, block, level in zip(self.runs, layers, self.levels, strict=True):
            mixer = block.mixer
            if not isinstance(mixer, Attention):
                follows.append(None)
                continue
            scheme: Scheme = position_of(mixer, spec)
            scheme = NoPosition() if scheme.embeds() else scheme
            key = scheme, mixer.heads, run if scheme.per_layer else None
            which = schemes.setdefault(key, len(schemes))
            demand = Demand.of(mixer, width)
            plan = Plan(pattern_of(mixer, side), mixer.turning(width), which, mixer.reach, level, demand)
            follows.append(plans.setdefault(plan, len(plans)))
        self.schemes = nn.ModuleList(Positions(scheme, width, heads) for scheme, heads, _ in schemes)
        self.plans, self.follows = tuple(plans), tuple(follows)
        across = [block.cross and (pattern_across(block.cross), Demand.of(block.cross, width)) for block in layers]
        self.across = tuple(dict.fromkeys(plan for plan in across if plan))
        self.crosses = tuple(self.across.index(plan) if plan else None for plan in across)
        self.nowhere = Positions(NoPosition(), width, 0)  # no scheme acts between the positions of two texts

    def embed(self, x: Tensor, layout: Layout) -> Tensor:
        """The part of the position scheme that acts on embeddings."""
        if self.ends and not torch.compiler.is_compiling():
            self._check(layout, *self.ends[0])
        return self.embedder.embed(x, layout.positions)

    def _check(self, layout: Layout, limit: int, positions: str) -> None:
        """A clear error where a token stands where no weights are."""
        if layout.position_bound is not None and layout.position_bound <= limit:
            return
        first, last = int(layout.positions.min()), int(layout.positions.max())
        if first < 0:
            raise ValueError(f"position {first} is before the first of {limit} {positions}")
        if last >= limit:
            raise ValueError(
                f"position {last} is past the end of {limit} {positions}: shorten the input, ask for fewer new tokens, "
                "give more of them, or choose a part without an end, such as rotary positions and attention"
            )

    def relations(
        self,
        layout: Layout,
        steps: dict[int | None, Step],
        cached: bool,
        site: Runtime = HERE,
        backend: str = "auto",
        levels: Sequence[Layout] = (),
    ) -> list[Relation]:
        """Mask and positions for each plan, once per forward pass; `levels` are the layouts of pooled tokens."""
        made = []
        for plan in self.plans:
            q, k = layout, steps.get(plan.reach, steps[None]).keys
            if plan.level:
                q = k = levels[plan.level]
            positions = cast(Positions, self.schemes[plan.scheme])
            role: Role = "cached" if cached else "self"
            relation = lower(plan.pattern, q, k, role, positions, plan.demand, site, backend)
            rotation = positions.prepare((q if cached else k).positions, plan.turning)  # a cache holds turned keys
            made.append(relation._replace(rotation=rotation, scheme=positions.scheme))
        return made

    def crossings(self, q: Layout, source: Layout, site: Runtime, backend: str) -> list[Relation]:
        """The same towards the encoder's output."""
        made = []
        for pattern, demand in self.across:
            if pattern.limit is not None and not torch.compiler.is_compiling():
                self._check(source, pattern.limit, f"positions of the '{pattern.kind}' pattern")
            made.append(lower(pattern, q, source, "cross", self.nowhere, demand, site, backend))
        return made

    def forward(
        self,
        x: Tensor,
        layout: Layout,
        *,
        memory: Tensor | None = None,
        source: Layout | None = None,
        cache: Cache | None = None,
        taps: Tap | None = None,
        backend: str = "auto",
        notes: AuxOutputs | None = None,
        begin: Mapping[int, Tensor] | None = None,
        states: Mapping[int, list[Tensor]] | None = None,
        past: Past | None = None,
        kept: list[Tensor | None] | None = None,
    ) -> Tensor:
        """[b, t, d] to [b, t, d]; `memory` is the encoder's output and `source` its layout.

        By layer: `begin` is the state in which a recurrent one would begin at each token, `states` takes its states;
        `past` is of the segments before this one, `kept` takes what goes into the next.
        """
        keys = layout if past is None else past.keys(layout)
        steps: dict[int | None, Step] = {None: Step(keys)} if cache is None else cache.take(layout)
        site = Runtime.of(x, self.training)
        funnel = Funnel(self.pooling, layout, x.shape[0])
        relations = self.relations(layout, steps, cache is not None, site, backend, funnel.layouts)
        recompute = self.recompute and self.training and notes is not None and taps is None  # a block runs twice
        crossings = [] if source is None else self.crossings(layout, source, site, backend)
        for i, run in enumerate(self.runs):
            layer = None if cache is None else cache.layers[i]
            plan = self.follows[i]
            relation = None if plan is None else relations[plan]
            across = self.crosses[i]
            cross = None if across is None or source is None else crossings[across]
            keys, at = steps.get(self.sizes[i].reach, steps[None])
            here, x = funnel.layouts[self.levels[i]], funnel.to(self.levels[i], x)
            keys = here if self.levels[i] else keys
            ctx = Context(here, keys, relation, cross, memory, layer, at, taps=taps, backend=backend).within(str(i))
            recall = None if past is None else Recall(past.layers[i])
            ctx = ctx._replace(begin=(begin or {}).get(i), states=(states or {}).get(i), past=recall)
            block = self.blocks[run]
            if notes is None:
                x = block(x, ctx)
                new = None if recall is None else recall.new
            else:
                call = partial(checkpoint, noted, use_reentrant=False) if recompute else noted
                x, losses, seen, new = call(block, x, ctx)
                notes.take(losses, seen)
            if kept is not None:
                kept.append(new)
            x = ctx.tap("out", x)
        x = funnel.to(0, x)
        x = self.dropout(normed(self.final_norm, x, layout, notes))
        return x if taps is None else taps("final", x)


def noted(
    block: nn.Module, x: Tensor, ctx: Context
) -> tuple[Tensor, list[Tensor], dict[TrackedModule, Tensor], Tensor | None]:
    """A block's output, its notes, and what it keeps; nothing outside is changed, so that it may run twice."""
    notes, recall = AuxOutputs(), None if ctx.past is None else Recall(ctx.past.old)
    x = block(x, ctx._replace(notes=notes, past=recall))
    return x, notes.losses, notes.seen, None if recall is None else recall.new


def _settled(block: Block, side: Side) -> Block:
    """The block with what its mixer leaves to the side."""
    mixer = block.mixer
    if not isinstance(mixer, (Convolution, FullyConnected, PositionMixing)):
        return block
    return block.model_copy(update={"mixer": mixer.model_copy(update={"causal": causal_of(mixer, side)})})

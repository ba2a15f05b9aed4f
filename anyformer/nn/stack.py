"""A stack: blocks in depth, the position schemes they share, and a final norm."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anyformer.config import Attention, Full, NoPosition, Pattern, Scheme, Side, Stack, pattern_of, position_of
from anyformer.nn.block import build_block
from anyformer.nn.cache import Cache
from anyformer.nn.context import Context, Tap
from anyformer.nn.mask import Layout, Relation, relate
from anyformer.nn.mixer import kept
from anyformer.nn.norm import build_norm
from anyformer.nn.position import Positions

ACROSS = Full()  # made here: torch.compile cannot follow the making of a spec


class Plan(NamedTuple):
    """What decides a relation; layers with the same plan share it."""

    pattern: Pattern
    key_width: int
    scheme: int  # which of the stack's position schemes


class BlockStack(nn.Module):
    """An encoder or a decoder. Layers are counted by application: with shared weights a module runs several times."""

    def __init__(self, spec: Stack, width: int, side: Side, embed_width: int):
        super().__init__()
        layers = spec.unrolled()
        head, tile = len(spec.prefix), len(spec.blocks)
        # the module that each layer runs
        self.runs = tuple(i if i < head or not spec.share else head + (i - head) % tile for i in range(spec.depth))
        self.blocks = nn.ModuleList(build_block(layers[i], width) for i in sorted(set(self.runs)))
        self.final_norm, self.dropout = build_norm(spec.final_norm, width), nn.Dropout(spec.dropout)
        self.embedder = Positions(spec.position if spec.position.embeds() else NoPosition(), embed_width, 0)
        self.recompute = False  # activations in the backward pass, rather than keeping them; set from outside
        self.sizes = tuple(kept(block.mixer, width) for block in layers)

        schemes: dict[tuple[Scheme, int, int | None], int] = {}
        plans: dict[Plan, int] = {}
        follows: list[int | None] = []  # the plan of each layer; None: its mixer is no attention
        for run, block in zip(self.runs, layers, strict=True):
            mixer = block.mixer
            if not isinstance(mixer, Attention):
                follows.append(None)
                continue
            scheme: Scheme = position_of(mixer, spec)
            scheme = NoPosition() if scheme.embeds() else scheme
            key = scheme, mixer.heads, run if scheme.per_layer else None
            which = schemes.setdefault(key, len(schemes))
            plan = Plan(pattern_of(mixer, side), mixer.widths(width)[0], which)
            follows.append(plans.setdefault(plan, len(plans)))
        self.schemes = nn.ModuleList(Positions(scheme, width, heads) for scheme, heads, _ in schemes)
        self.plans, self.follows = tuple(plans), tuple(follows)

    def embed(self, x: Tensor, layout: Layout) -> Tensor:
        """The part of the position scheme that acts on embeddings."""
        limit = self.embedder.scheme.limit
        if limit is not None and not torch.compiler.is_compiling() and (layout.bound is None or layout.bound > limit):
            first, last = int(layout.positions.min()), int(layout.positions.max())
            if first < 0:
                raise ValueError(
                    f"position {first} is before the first of {limit} {self.embedder.scheme.kind} positions"
                )
            if last >= limit:
                raise ValueError(
                    f"position {last} is past the end of {limit} {self.embedder.scheme.kind} positions: "
                    "shorten the input, ask for fewer new tokens, or choose a scheme without an end, such as rotary"
                )
        return self.embedder.embed(x, layout.positions)

    def relations(self, q: Layout, k: Layout, cached: bool) -> list[Relation]:
        """Mask and positions for each plan, once per forward pass."""
        made = []
        for plan in self.plans:
            positions = cast(Positions, self.schemes[plan.scheme])
            bias = positions.bias(q.positions, k.positions, causal=not plan.pattern.looks_ahead)
            relation = relate(plan.pattern, q, k, "cached" if cached else "self", bias)
            rotation = positions.prepare(q.positions, plan.key_width)
            made.append(relation._replace(rotation=rotation, scheme=positions.scheme))
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
        losses: list[Tensor] | None = None,
    ) -> Tensor:
        """[b, t, d] to [b, t, d]; `memory` is the encoder's output and `source` its layout."""
        keys, at = (layout, None) if cache is None else cache.take(layout)
        relations = self.relations(layout, keys, cached=cache is not None)
        recompute = self.recompute and self.training and cache is None and taps is None  # a block runs twice
        cross = None if source is None else relate(ACROSS, layout, source, "cross")
        for i, run in enumerate(self.runs):
            layer = None if cache is None else cache.layers[i]
            plan = self.follows[i]
            relation = None if plan is None else relations[plan]
            ctx = Context(layout, keys, relation, cross, memory, layer, at, taps, backend, losses).within(str(i))
            block = self.blocks[run]
            x = ctx.tap("out", checkpoint(block, x, ctx, use_reentrant=False) if recompute else block(x, ctx))
        x = self.dropout(self.final_norm(x))
        return x if taps is None else taps("final", x)

"""One token on its path through the model: a stack, a layer and a head, and the attention of that head to all keys."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from anyformer.attention.attend import weigh
from anyformer.attention.lowered import Dense
from anyformer.attention.scores import Scoring
from anyformer.config import Block, ConfigError, Fault, Side
from anyformer.explore.requests import StageRequest
from anyformer.explore.trace import Trace
from anyformer.nn.block import ParallelBlock, SequentialBlock
from anyformer.nn.inspection.residual_stream import LayerStream, StreamStep, layer_stream
from anyformer.nn.inspection.sublayers import stacks_of


@dataclass(frozen=True)
class AttentionRow:
    """The attention of a query in one head to s keys, in float64."""

    q: Tensor  # [k]
    keys: Tensor  # [s, k]
    values: Tensor  # [s, k_v]
    scoring: Scoring  # of this head
    bias: Tensor | None  # [s]; 0 where masked
    visible: Tensor  # bool [s]
    weights: Tensor  # [s]

    @property
    def dots(self) -> Tensor:
        """q · k, [s]."""
        return self.keys @ self.q

    @property
    def unmasked(self) -> Tensor:
        """The scores of all keys, [s]."""
        scores = self.scoring.scores(self.q[None, None, None], self.keys[None, None])[0, 0, 0]
        return scores if self.bias is None else scores + self.bias

    @property
    def scores(self) -> Tensor:
        """The scores [s], -inf where masked."""
        return self.unmasked.masked_fill(~self.visible, -torch.inf)

    @property
    def sink(self) -> float | None:
        return None if self.scoring.sinks is None else float(self.scoring.sinks)

    @property
    def output(self) -> Tensor:
        """Σ weight · v, [k_v]."""
        return self.weights @ self.values


@torch.no_grad()
def attention_row(trace: Trace, name: str, head: int, query: int) -> AttentionRow:
    """Return the attention of one query in one head of an attention layer."""
    attention, seen = trace.attention(name), trace.activations
    q, keys, v = (
        seen[f"{name}.q"][0, head, query].double().cpu(),
        trace.keys(name)[head].double().cpu(),
        seen[f"{name}.v"][0],
    )
    values = v[head // (attention.heads // len(v))].double().cpu()
    if values.shape[1] > (width := seen[f"{name}.heads"].shape[-1]):  # a global query reads the second half
        values = values[:, :width] if bool(q[: len(q) // 2].any()) else values[:, width:]
    scoring, visible, bias = attention.scoring, trace.visible(name)[query], trace.bias(name)
    if scoring.sinks is not None:
        scoring = scoring._replace(sinks=scoring.sinks[head : head + 1].double().cpu())
    own = None if bias is None else bias[head, query].double().masked_fill(~visible, 0)
    dense = Dense(mask=visible[None, None, None], bias=own)
    weights = weigh(q[None, None, None], keys[None, None], dense, scoring)[0, 0, 0]
    # without a visible key the weights are undefined, and the model reads nothing
    return AttentionRow(q, keys, values, scoring, own, visible, weights.masked_fill(~visible, 0))


@dataclass(frozen=True)
class PathPlace:
    """One token on its path: a stack, a layer and a head, limited to those that there are."""

    trace: Trace
    kind: str  # encoder, decoder or cross
    at: int
    request: StageRequest

    @property
    def side(self) -> Side:
        return "encoder" if self.kind == "encoder" else "decoder"

    @cached_property
    def layer(self) -> int:
        return min(self.request.layer, len(stacks_of(self.trace.run.model)[self.side].runs) - 1)

    @property
    def spec(self) -> Block:
        return self.trace.run.config.stacks[self.side].unrolled()[self.layer]

    @property
    def block(self) -> SequentialBlock | ParallelBlock:
        stack = stacks_of(self.trace.run.model)[self.side]
        block = stack.blocks[stack.runs[self.layer]]
        assert isinstance(block, SequentialBlock | ParallelBlock)
        return block

    @property
    def row(self) -> int:
        """The position in the layer: that of a window if the layer reads pooled tokens."""
        stack = stacks_of(self.trace.run.model)[self.side]
        return self.at // (stack.pooling.factor ** stack.levels[self.layer] if stack.pooling else 1)

    @cached_property
    def stream(self) -> LayerStream:
        layout = self.trace.layout(self.side)
        return layer_stream(self.trace.run.model, self.side, self.trace.activations, self.layer, [self.row], layout)

    def step(self, part: str) -> StreamStep:
        return next(step for step in self.stream.steps if step.name.endswith(part))

    @property
    def mixer(self) -> StreamStep:
        return self.step(".cross" if self.kind == "cross" else ".mixer")

    @property
    def head(self) -> int:
        return min(self.request.head, self.trace.attention(self.mixer.name).heads - 1)

    @cached_property
    def attention(self) -> AttentionRow:
        return attention_row(self.trace, self.mixer.name, self.head, self.row)

    @property
    def is_off(self) -> bool:
        return self.head in self.trace.off.get(self.mixer.name, ())


def source_position(trace: Trace, key: int, at: int) -> int:
    """Return a token of the encoder; -1 is the one that the last cross-attention gives most weight, over all heads."""
    tokens = trace.reading.tokens["encoder"]
    if not -1 <= key < len(tokens):
        raise ConfigError([Fault("key", f"= {key}: there are {len(tokens)} tokens, from 0")])
    names = trace.attentions.get("cross", {})
    if key != -1 or not names:
        return max(key, 0)
    name = names[max(names)]
    rows = [attention_row(trace, name, head, at).weights for head in range(trace.attention(name).heads)]
    return int(torch.stack(rows).sum(dim=0).argmax())

"""Parts as a user writes them, one of each family."""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from anyformer.config import (
    Activation,
    Attention,
    Causal,
    FeedForward,
    Head,
    IdInput,
    Mixer,
    Norm,
    Pattern,
    Plain,
    Position,
    Size,
)
from anyformer.config.cost import Cost, Matrix, Sizes, linear, linear_costs
from anyformer.nn.inputs import InputModule, embedding

CAUSAL = Causal()  # a constant: torch.compile cannot trace the construction of a spec


class Logarithm(Position):
    """Scores minus r log(1 + |q - k|), with a learned r for each head."""

    kind: Literal["logarithm"] = "logarithm"

    def tables(self, width, heads):
        return {"slopes": (heads,)}

    def fill(self, name, table, std):
        table.fill_(1)

    def levels(self, heads, causal, tables, device):
        return tables["slopes"]

    def score(self, levels, head, q, k):
        return -levels[head] * torch.log1p((q - k).abs())


class Strided(Pattern):
    """The tokens whose distance is a multiple of `step`, and the last `step` ones."""

    kind: Literal["strided"] = "strided"
    step: Size = 2  # distance between two of the keys that are far away

    @property
    def looks_ahead(self):
        return False

    def sees(self, q, k, of_q=None, of_k=None):
        back = q - k
        return (back >= 0) & ((back < self.step) | (back % self.step == 0))


class ScaleNorm(Norm):
    """g · x / |x| with one learned g (Nguyen and Salazar 2019)."""

    kind: Literal["scale"] = "scale"

    def build(self, width):
        return ScaleNormModule(width)

    def cost(self, width, rows):
        return Cost(1, saved=rows * width)


class ScaleNormModule(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain, self.start = nn.Parameter(torch.empty(1)), width**0.5

    def forward(self, x):
        return self.gain * F.normalize(x, dim=-1, eps=1e-6)

    def reset(self):
        self.gain.fill_(self.start)


class Mish(Activation):
    """x · tanh(softplus(x)) (Misra 2019)."""

    kind: Literal["mish"] = "mish"

    def function(self):
        return F.mish


class Bottleneck(FeedForward):
    """A narrow hidden layer with a skip connection around it."""

    kind: Literal["bottleneck"] = "bottleneck"
    rank: Size = 4  # width of the hidden layer
    activation: Activation = Mish()  # function of the hidden layer

    def build(self, width):
        return BottleneckModule(self, width)

    def matrices(self, width):
        yield Matrix("down", width, self.rank)
        yield Matrix("up", self.rank, width)

    def cost(self, width, rows):
        return linear_costs(self.matrices(width), rows) + Cost(saved=2 * rows * self.rank)


class BottleneckModule(nn.Module):
    def __init__(self, spec, width):
        super().__init__()
        from anyformer.nn.linear import Linear

        self.down, self.up = Linear(width, spec.rank, bias=False), Linear(spec.rank, width, bias=False)
        self.act = spec.activation.function()

    def forward(self, x, ctx):
        return x + self.up(self.act(self.down(x)))


class Double(Attention):
    """Attention whose output is doubled: it stores keys and values as attention does."""

    kind: Literal["double"] = "double"

    def build(self, width):
        from anyformer.nn.attention import MultiHeadAttention

        class DoubleModule(MultiHeadAttention):
            def forward(self, x, ctx):
                return 2 * super().forward(x, ctx)

        return DoubleModule(self, width)


class Mean(Mixer):
    """A linear layer of the mean of all tokens up to one's own: it stores what it reads, one vector per token."""

    kind: Literal["mean"] = "mean"

    def build(self, width):
        return MeanModule(width)

    def stores(self, width):
        return Sizes(1, width, 0)

    def matrices(self, width):
        yield Matrix("out", width, width)

    def cost(self, width, b, t, side):
        cached = self.stores(width).cached(b, t) * (side == "decoder")
        return linear(width, width, b * t, bias=False) + Cost(flops=2 * b * t * t * width, cached=cached)


class MeanModule(nn.Module):
    def __init__(self, width):
        super().__init__()
        from anyformer.nn.linear import Linear

        self.out = Linear(width, width, bias=False)

    def forward(self, x, ctx):
        from anyformer.attention.layout import sees

        read = ctx.with_history(x)
        seen = sees(CAUSAL, ctx.layout, ctx.keys).to(x.dtype)
        return self.out(seen @ read / seen.sum(-1, keepdim=True).clamp(min=1))


class Average(Mixer):
    """The mean of all tokens up to one's own: it stores nothing, so generation reads the whole text for each token."""

    kind: Literal["average"] = "average"

    def build(self, width):
        return AverageModule()

    def cost(self, width, b, t, side):
        return Cost(flops=2 * b * t * t * width)


class AverageModule(nn.Module):
    def forward(self, x, ctx):
        from anyformer.attention.layout import sees

        seen = sees(CAUSAL, ctx.layout, ctx.layout).to(x.dtype)
        return seen @ x / seen.sum(-1, keepdim=True).clamp(min=1)


class Wide(Plain):
    """A plain network of eight times the width: a part may derive from one of ours."""

    kind: Literal["wide"] = "wide"

    def hidden(self, width):
        return self.width or 8 * width


class Digits(IdInput):
    """The sum of a vector from each of a few small tables, chosen by the digits of the id in base `size`."""

    kind: Literal["digits"] = "digits"
    tables: Size = 2  # number of tables
    size: Size = 8  # rows of a table

    def build(self, width, own_table=True):
        return DigitsModule(self, width)

    def cost(self, width, b, t, own_table=True):
        return Cost(self.tables * self.size * width)


class DigitsModule(InputModule):
    def __init__(self, spec, width):
        super().__init__(width, vocab=spec.rows)
        self.tables = nn.ModuleList(embedding(spec.size, width) for _ in range(spec.tables))

    def vectors(self, ids):
        size = self.tables[0].num_embeddings
        return sum(table(ids // size**i % size) for i, table in enumerate(self.tables))


class Softmaxes(Head):
    """The log of a mixture of softmaxes over the vocabulary (Yang et al. 2018)."""

    kind: Literal["softmaxes"] = "softmaxes"
    count: Size = 2  # number of softmaxes
    output = "lm"  # logits of the next token

    def build(self, width, read, tied):
        return SoftmaxesModule(self.count, width, read.rows)

    def cost(self, width, read, b, t, tied):
        rows, k, v = b * t, self.count, read.rows
        layers = (linear(width, k, rows, False), linear(width, k * width, rows, False))
        return sum(layers, linear(width, v, k * rows, False)) + Cost(saved=rows * k * (v + width))

    def values(self, width, vocab):
        return vocab


class SoftmaxesModule(nn.Module):
    def __init__(self, count, width, vocab):
        super().__init__()
        self.count = count
        self.weigh = nn.Linear(width, count, bias=False)
        self.split = nn.Linear(width, count * width, bias=False)
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, hidden, layout, table):
        each = self.out(self.split(hidden).tanh().unflatten(-1, (self.count, -1))).log_softmax(-1)  # [b, t, k, v]
        return (self.weigh(hidden).log_softmax(-1)[..., None] + each).logsumexp(-2)

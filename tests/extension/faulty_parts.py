"""Parts with one mistake each, which `LAW` names the law for: small changes of parts that are right."""

from typing import Literal

import torch
from torch import nn

from anyformer.attention.layout import sees
from anyformer.config import Activation, Causal, Full, Norm, Position
from anyformer.config.cost import Cost, Sizes
from anyformer.nn.linear import Linear
from anyformer.recipe.schedule import Schedule
from tests.extension.faulty_feedforwards import LAW as LAW, broken
from tests.extension.my_parts import Digits, DigitsModule, Mean, Softmaxes, Strided

CAUSAL, FULL = Causal(), Full()


# -- norms: x times a learned number ---------------------------------------------------------------------------------


class Gain(Norm):
    """x times one learned number."""

    def cost(self, width, rows):
        return Cost(1)

    def build(self, width):
        return GainModule(self.weight())

    def weight(self):
        return nn.Parameter(torch.empty(1))


class GainModule(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        return self.gain * x

    def reset(self):
        self.gain.fill_(1)


@broken("meta")
class OnCpu(Gain):
    kind: Literal["on_cpu"] = "on_cpu"

    def weight(self):
        return nn.Parameter(torch.ones(1, device="cpu"))


@broken("meta")
class Uninitialised(Gain):
    kind: Literal["uninitialised"] = "uninitialised"

    def build(self, width):
        return UninitialisedModule(self.weight())


class UninitialisedModule(GainModule):
    def reset(self):
        pass


@broken("weights")
class Unsaved(Gain):
    kind: Literal["unsaved"] = "unsaved"

    def build(self, width):
        return UnsavedModule(self.weight())


class UnsavedModule(GainModule):
    def __init__(self, gain):
        super().__init__(gain)
        self.register_buffer("shift", torch.empty(1), persistent=False)

    def forward(self, x):
        return self.gain * x + self.shift

    def reset(self):
        super().reset()
        self.shift.normal_()


@broken("causal")
class OverTokens(Gain):
    kind: Literal["over_tokens"] = "over_tokens"

    def build(self, width):
        return OverTokensModule(self.weight())


class OverTokensModule(GainModule):
    def forward(self, x):
        return self.gain * (x - x.mean(dim=-2, keepdim=True))


# -- others ----------------------------------------------------------------------------------------------------------


@broken("inputs")
class NotElementwise(Activation):
    kind: Literal["not_elementwise"] = "not_elementwise"

    def function(self):
        return lambda x: x.softmax(-1)


@broken("cache")
class Index(Position):
    """Adds a multiple of the number of the token in the call, not of its position."""

    kind: Literal["index"] = "index"

    def embed(self, x, positions, tables):
        return x + 0.1 * torch.arange(x.shape[1], dtype=x.dtype)[:, None]


@broken("cache")
class ShortReach(Strided):
    kind: Literal["short_reach"] = "short_reach"

    @property
    def reach(self):
        return 2


class MeanOf(Mean):
    """The mean of earlier tokens; `read` is what a part changes."""

    def build(self, width):
        return MeanOfModule(self.read, width)

    @staticmethod
    def read(x, ctx):
        return ctx.with_history(x), sees(CAUSAL, ctx.layout, ctx.keys).to(x.dtype)


class MeanOfModule(nn.Module):
    def __init__(self, read, width):
        super().__init__()
        self.out, self.read = Linear(width, width, bias=False), read

    def forward(self, x, ctx):
        read, seen = self.read(x, ctx)
        return self.out(seen @ read / seen.sum(-1, keepdim=True).clamp(min=1))


@broken("causal")
class ReadsAhead(MeanOf):
    kind: Literal["reads_ahead"] = "reads_ahead"

    @staticmethod
    def read(x, ctx):
        return ctx.with_history(x), sees(FULL, ctx.layout, ctx.keys).to(x.dtype)


@broken("packing")
class IgnoresSegments(MeanOf):
    kind: Literal["ignores_segments"] = "ignores_segments"

    @staticmethod
    def read(x, ctx):
        read = ctx.with_history(x)
        return read, x.new_ones(x.shape[1], read.shape[1]).tril(read.shape[1] - x.shape[1])


@broken("padding")
class ReadsPadding(MeanOf):
    kind: Literal["reads_padding"] = "reads_padding"

    @staticmethod
    def read(x, ctx):
        seen = sees(CAUSAL, ctx.layout, ctx.keys)
        return ctx.with_history(x), (seen | (ctx.keys.segments == -1)[:, None]).to(
            x.dtype
        ) if ctx.keys.segments is not None else seen.to(x.dtype)


@broken("cache")
class ForgetsHistory(MeanOf):
    kind: Literal["forgets_history"] = "forgets_history"

    @staticmethod
    def read(x, ctx):
        return x, sees(CAUSAL, ctx.layout, ctx.layout).to(x.dtype)


@broken("cache")
class WrongHeads(MeanOf):
    kind: Literal["wrong_heads"] = "wrong_heads"

    def stores(self, width):
        return Sizes(2, width // 2, 0)


@broken("segments")
class ForgetsSegments(MeanOf):
    kind: Literal["forgets_segments"] = "forgets_segments"

    @staticmethod
    def read(x, ctx):
        if ctx.memory is not None:
            return x, sees(CAUSAL, ctx.layout, ctx.layout).to(x.dtype)
        return MeanOf.read(x, ctx)


# -- inputs and heads -------------------------------------------------------------------------------------------------


@broken("output")
class MoreValues(Softmaxes):
    kind: Literal["more_values"] = "more_values"

    def values(self, width, vocab):
        return vocab + 1


@broken("causal")
class ReadsNextId(Digits):
    kind: Literal["reads_next_id"] = "reads_next_id"

    def build(self, width, own_table=True):
        return ReadsNextIdModule(self, width)


class ReadsNextIdModule(DigitsModule):
    def vectors(self, ids):
        return super().vectors(ids.roll(-1, dims=1))


@broken("meta")
class UninitialisedHead(Softmaxes):
    kind: Literal["uninitialised_head"] = "uninitialised_head"

    def build(self, width, read, tied):
        module = super().build(width, read, tied)
        module.scale = nn.Parameter(torch.empty(read.rows))
        return module


@broken("steps")
class BelowZero(Schedule):
    kind: Literal["below_zero"] = "below_zero"

    def factor(self, step, steps):
        return 1 - 2 * step / steps

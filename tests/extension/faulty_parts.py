"""Parts with one mistake each, which `LAW` names the law for: small changes of parts that are right."""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from anyformer.attention.layout import sees
from anyformer.config import Activation, Causal, FeedForward, Full, Norm, Position, Size
from anyformer.config.cost import Cost, Matrix, Sizes, linear
from anyformer.nn.linear import Linear
from anyformer.recipe.schedule import Schedule
from tests.extension.my_parts import Digits, DigitsModule, Mean, Softmaxes, Strided

CAUSAL, FULL = Causal(), Full()
LAW = {}


def broken(law):
    """Record the law that a part breaks."""

    def record(part):
        LAW[part] = law
        return part

    return record


# -- feed-forwards: a linear layer -----------------------------------------------------------------------------------


class Flat(FeedForward):
    """A linear layer; `apply` is what a part changes."""

    def matrices(self, width):
        yield Matrix("linear", width, width)

    def cost(self, width, rows):
        return linear(width, width, rows, bias=False)

    def build(self, width):
        return FlatModule(self.apply, width)

    @staticmethod
    def apply(module, x):
        return module.linear(x)


class FlatModule(nn.Module):
    def __init__(self, apply, width):
        super().__init__()
        self.linear, self.apply_to = Linear(width, width, bias=False), apply

    def forward(self, x, ctx):
        return self.apply_to(self, x)


@broken("cost")
class UncountedWeights(Flat):
    kind: Literal["uncounted_weights"] = "uncounted_weights"

    def cost(self, width, rows):
        return Cost(flops=2 * rows * width * width)


@broken("cost")
class UncountedFlops(Flat):
    kind: Literal["uncounted_flops"] = "uncounted_flops"

    def cost(self, width, rows):
        return Cost(width * width)


@broken("cost")
class MisnamedMatrix(Flat):
    kind: Literal["misnamed_matrix"] = "misnamed_matrix"

    def matrices(self, width):
        yield Matrix("layer", width, width)


@broken("inputs")
class InPlace(Flat):
    kind: Literal["in_place"] = "in_place"

    @staticmethod
    def apply(module, x):
        return module.linear(x.clone() if torch.is_grad_enabled() else x.mul_(2).div_(2).add_(1e-3))


@broken("inputs")
class AlwaysFloat(Flat):
    kind: Literal["always_float"] = "always_float"

    @staticmethod
    def apply(module, x):
        return module.linear(x).float() if x.dtype == torch.bfloat16 else module.linear(x)


@broken("inputs")
class Contiguous(Flat):
    kind: Literal["contiguous"] = "contiguous"

    @staticmethod
    def apply(module, x):
        return module.linear(x.as_strided(x.shape, (x.shape[1] * x.shape[2], x.shape[2], 1)))


@broken("rows")
class MixesRows(Flat):
    kind: Literal["mixes_rows"] = "mixes_rows"

    @staticmethod
    def apply(module, x):
        return module.linear(x - x.mean(dim=0, keepdim=True))


@broken("repeats")
class Remembers(Flat):
    kind: Literal["remembers"] = "remembers"

    @staticmethod
    def apply(module, x):
        last, module.last = getattr(module, "last", 0.0), x.detach().mean()
        return module.linear(x + last)


@broken("repeats")
class AlwaysRandom(Flat):
    kind: Literal["always_random"] = "always_random"

    @staticmethod
    def apply(module, x):
        return F.dropout(module.linear(x), 0.5)


@broken("training")
class NoisyTraining(Flat):
    kind: Literal["noisy_training"] = "noisy_training"

    @staticmethod
    def apply(module, x):
        return module.linear(x + torch.randn_like(x) if module.training else x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return grad  # not 2 · grad


@broken("gradients")
class WrongGradient(Flat):
    kind: Literal["wrong_gradient"] = "wrong_gradient"

    @staticmethod
    def apply(module, x):
        return module.linear(Doubled.apply(x))


@broken("gradients")
class Detached(Flat):
    kind: Literal["detached"] = "detached"

    @staticmethod
    def apply(module, x):
        return F.linear(x, module.linear.weight.detach())


@broken("compile")
class ReadsValues(Flat):
    kind: Literal["reads_values"] = "reads_values"

    @staticmethod
    def apply(module, x):
        return module.linear(x) if x.sum() > 0 else -module.linear(x)


@broken("config")
class LosesField(Flat):
    kind: Literal["loses_field"] = "loses_field"
    rank: Size = 4

    def model_post_init(self, context):
        object.__setattr__(self, "rank", 4)


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

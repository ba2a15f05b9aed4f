"""Feed-forwards with one mistake each, which `LAW` names the law for: small changes of a linear layer."""

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from anyformer.config import FeedForward, Size
from anyformer.config.cost import Cost, Matrix, linear
from anyformer.nn.linear import Linear

LAW = {}


def broken(law):
    """Record the law that a part breaks."""

    def record(part):
        LAW[part] = law
        return part

    return record


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

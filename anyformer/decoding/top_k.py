"""The k greatest of many numbers, and the weight of all, in one look: torch's own choice takes many."""

import math

from torch import Tensor
from torch.nn.functional import pad

from anyformer.kernels.runtime import at_least_fp32

PART = 256  # numbers of which only the greatest is looked at first


def top(x: Tensor, k: int, part: int = PART) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of x [n, v] the k greatest, their places, [n, k] each, and log sum exp [n, 1].

    The k greatest stand in the k parts with the greatest maxima. NaN is greater than all, and makes the sum NaN.
    """
    parts = _cut(x, part)
    most = parts.amax(dim=2)
    high = at_least_fp32(most.amax(dim=1, keepdim=True))
    weights = ((at_least_fp32(parts) - high[..., None]) * math.log2(math.e)).exp2()  # a CPU's exp takes longer
    total = weights.sum(dim=2).sum(dim=1, keepdim=True).log() + high
    if parts.shape[1] <= k:
        return *x.topk(k), total
    best = most.topk(k, sorted=False).indices
    among = parts.gather(1, best[..., None].expand(-1, -1, part)).flatten(1)
    found, at = among.topk(k)
    places = best.gather(1, at // part) * part + at % part
    return found, places.clamp(max=x.shape[1] - 1), total  # beyond the end is only -inf


def greatest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of x [n, v] the greatest and its place, [n] each; of equals the first. NaN is greater than all."""
    return by_parts(x) if x.is_cuda else (x.amax(dim=-1), x.argmax(dim=-1))


def by_parts(x: Tensor, part: int = PART) -> tuple[Tensor, Tensor]:
    """The same by the part in which it is: a GPU would look for the place by one program a row."""
    parts = _cut(x, part)
    best = parts.amax(dim=2).argmax(dim=1)
    among = parts.gather(1, best[:, None, None].expand(-1, 1, part))[:, 0]
    return among.amax(dim=1), best * part + among.argmax(dim=1)


def _cut(x: Tensor, part: int) -> Tensor:
    """[n, v] to [n, parts, part], the last one filled up with less than all."""
    return pad(x, (0, -x.shape[1] % part), value=-math.inf).unflatten(1, (-1, part))

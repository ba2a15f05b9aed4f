"""Top-k, log-sum-exp and argmax over a vocabulary in one pass, where torch's own top-k takes several."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyformer.kernels.beam_candidates import can_find_candidates, find_candidates
from anyformer.kernels.runtime import at_least_fp32

PART = 256  # elements whose maximum is compared first
MAX_RANKED = 32  # elements of a row that are compared with each other


def top_candidates(logits: Tensor, log_p: Tensor, failed: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best continuations of w beams by logits [n * w, v], best first, in each of n searches.

    log_p: the log-probabilities of the beams [n, w]. failed: bool [n], searches that have ended.

    Return the log-probabilities of `count` continuations or all [n, k], their indices, beam * v + token, and which
    searches have failed, bool [n]: those of a beam without a distribution have, too. Their log-probabilities are -inf.
    """
    width, vocab = log_p.shape[1], logits.shape[1]
    if can_find_candidates(logits, width, count) and log_p.dtype is torch.float32:
        return find_candidates(logits, log_p, failed, count)
    values, token, total = topk_logsumexp(logits, min(count, vocab))
    new = (at_least_fp32(values) - total).unflatten(0, log_p.shape)  # NaN if any logit is
    failed = failed | new.isnan().flatten(1).any(dim=1)
    scores = (log_p[..., None] + new.masked_fill(failed[:, None, None], -math.inf)).flatten(1)
    flat = (token.unflatten(0, log_p.shape) + torch.arange(width, device=token.device)[:, None] * vocab).flatten(1)
    scores, best = scores.topk(min(count, scores.shape[1]))
    return scores, flat.gather(1, best), failed


def topk_logsumexp(x: Tensor, k: int, part: int = PART) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest elements of each row of x [n, v], their indices, [n, k] each, and log-sum-exp [n, 1].

    The k largest are in the k parts with the largest maxima. NaN is larger than all, and makes the sum NaN.
    """
    parts = _cut(x, part)
    maxima = parts.amax(dim=2)
    high = at_least_fp32(maxima.amax(dim=1, keepdim=True))
    weights = ((at_least_fp32(parts) - high[..., None]) * math.log2(math.e)).exp2()  # faster than exp on a CPU
    total = weights.sum(dim=2).sum(dim=1, keepdim=True).log() + high
    if parts.shape[1] <= k:
        return *x.topk(k), total
    best = maxima.topk(k, sorted=False).indices
    among = parts.gather(1, best[..., None].expand(-1, -1, part)).flatten(1)
    values, at = among.topk(k)
    index = best.gather(1, at // part) * part + at % part
    return values, index.clamp(max=x.shape[1] - 1), total  # only -inf padding is past the end


def topk_short(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest elements of each short row of x [n, m], none of them NaN, and their indices, [n, k] each."""
    compiled = x.is_cuda and torch.compiler.is_compiling()
    return topk_by_rank(x, k) if compiled and x.shape[1] <= MAX_RANKED else x.topk(k)


def topk_by_rank(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do the same, of equal elements the first one first, by counting how many precede each.

    The compiler fuses this with neighbouring operations; torch's top-k takes two kernels.
    """
    index = torch.arange(x.shape[1], device=x.device)
    own, other = x[:, :, None], x[:, None]
    rank = ((other > own) | ((other == own) & (index < index[:, None]))).sum(dim=2)  # [n, m]
    best = ((rank[:, None] == index[:k, None]) * index).sum(dim=2)  # [n, k]
    return x.gather(1, best), best


def max_argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each row of x [n, v] and its first index, [n] each. NaN is larger than all."""
    return max_by_parts(x) if x.is_cuda else (x.amax(dim=-1), x.argmax(dim=-1))


def max_by_parts(x: Tensor, part: int = PART) -> tuple[Tensor, Tensor]:
    """Do the same part by part: torch's argmax on a GPU uses one program per row."""
    parts = _cut(x, part)
    best = parts.amax(dim=2).argmax(dim=1)
    among = parts.gather(1, best[:, None, None].expand(-1, 1, part))[:, 0]
    return among.amax(dim=1), best * part + among.argmax(dim=1)


def _cut(x: Tensor, part: int) -> Tensor:
    """Reshape [n, v] to [n, parts, part], padded with -inf."""
    return pad(x, (0, -x.shape[1] % part), value=-math.inf).unflatten(1, (-1, part))

"""The best continuations of beams, by two kernels that read the logits once; see `generation/top_k.py`."""

import torch
from torch import Tensor

from anyformer.kernels.conventions import next_power_of_two
from anyformer.kernels.runtime import HAS_TRITON, opaque, supports_dependent_launch

GROUP = 128  # logits whose maximum is compared first
GROUPS_PER_PROGRAM = 32
MAX_CANDIDATES = 32  # found one by one
MAX_GROUPS = 16384  # of all beams of a search, whose maxima one program holds
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_find_candidates(logits: Tensor, width: int, count: int) -> bool:
    """Return whether `find_candidates` supports these logits [n * width, v] and this number of candidates."""
    here = HAS_TRITON and logits.is_cuda and torch.version.hip is None and logits.dtype in DTYPES
    few = count <= min(MAX_CANDIDATES, logits.shape[1])
    return here and few and next_power_of_two(width) * next_power_of_two(_groups(logits)) <= MAX_GROUPS


def _groups(logits: Tensor) -> int:
    return -(-logits.shape[1] // GROUP)


def _like(logits: Tensor, log_p: Tensor, failed: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    scores = log_p.new_empty(len(log_p), count)
    return scores, torch.empty_like(scores, dtype=torch.long), torch.empty_like(failed)


@opaque("find_candidates", _like)
def find_candidates(logits: Tensor, log_p: Tensor, failed: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `top_candidates` of `generation/top_k.py` returns. `log_p` is fp32; the first of equal scores wins.

    The first kernel reduces groups of logits to their maxima and sums. The second one compares the groups of all beams
    of a search, and then the logits of the best.
    """
    from anyformer.kernels.triton_top_k import best_of_beams, max_of_groups

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab), width, log_p = logits.shape, log_p.shape[1], log_p.contiguous()
    groups, early = _groups(logits), supports_dependent_launch(logits.device)
    options = {"EARLY": early, **({"launch_pdl": True} if early else {})}
    highest, tall = log_p.new_empty(rows, groups), min(GROUPS_PER_PROGRAM, next_power_of_two(groups))
    sums, (scores, flat, fails) = torch.empty_like(highest), _like(logits, log_p, failed, count)
    max_of_groups[(rows, -(-groups // tall))](
        logits, highest, sums, logits.stride(0), vocab, groups, TALL=tall, SIZE=GROUP, **options
    )
    best_of_beams[(len(log_p),)](
        logits, highest, sums, log_p, failed.view(torch.uint8), scores, flat, fails.view(torch.uint8),
        logits.stride(0), vocab, width, groups, COUNT=count, K=next_power_of_two(count),
        BEAMS=next_power_of_two(width), GROUPS=next_power_of_two(groups), SIZE=GROUP, **options,
    )  # fmt: skip
    return scores, flat, fails

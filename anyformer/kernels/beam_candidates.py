"""The best continuations of beams, by two kernels that read the logits once; see `decoding/top_k.py`."""

import torch
from torch import Tensor

from anyformer.conventions import next_power_of_two
from anyformer.kernels.opaque import opaque
from anyformer.kernels.runtime import HAS_TRITON, supports_dependent_launch

PART = 4096  # logits that one program reads
MAX_CANDIDATES = 32  # found one by one
MAX_MERGED = 16384  # candidates of all parts of all beams of a search, which one program holds
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_find_candidates(logits: Tensor, width: int, count: int) -> bool:
    """Whether `find_candidates` supports these logits [n * width, v] and this number of candidates."""
    here = HAS_TRITON and logits.is_cuda and torch.version.hip is None and logits.dtype in DTYPES
    few = count <= min(MAX_CANDIDATES, logits.shape[1])
    return here and few and next_power_of_two(width) * _candidates_per_beam(logits, count) <= MAX_MERGED


def _candidates_per_beam(logits: Tensor, count: int) -> int:
    """Return the number of candidates of all parts of a row, as a power of two."""
    return next_power_of_two(-(-logits.shape[1] // PART) * count)


def _like(logits: Tensor, log_p: Tensor, failed: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    scores = log_p.new_empty(len(log_p), count)
    return scores, torch.empty_like(scores, dtype=torch.long), torch.empty_like(failed)


@opaque("find_candidates", _like)
def find_candidates(logits: Tensor, log_p: Tensor, failed: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `top_candidates` of `decoding/top_k.py` returns. `log_p` is fp32; of equal scores the first is first.

    The first kernel finds the top of each part of each row, the second one merges those of a search.
    """
    from anyformer.kernels.triton_top_k import merge_beams, top_of_parts

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (rows, vocab), width, log_p = logits.shape, log_p.shape[1], log_p.contiguous()
    parts, early = -(-vocab // PART), supports_dependent_launch(logits.device)
    options = {"EARLY": early, **({"launch_pdl": True} if early else {})}
    values = log_p.new_empty(rows, parts, count)
    tokens, highest = torch.empty_like(values, dtype=torch.int32), values.new_empty(rows, parts)
    sums, out = torch.empty_like(highest), _like(logits, log_p, failed, count)
    top_of_parts[(rows, parts)](
        logits, values, tokens, highest, sums, logits.stride(0), vocab, parts, K=count, SIZE=PART, **options
    )
    scores, flat, fails = out
    merge_beams[(len(log_p),)](
        values, tokens, highest, sums, log_p, failed.view(torch.uint8), scores, flat, fails.view(torch.uint8), vocab,
        width, parts, K=count, BEAMS=next_power_of_two(width), PARTS=next_power_of_two(parts),
        ALL=_candidates_per_beam(logits, count), **options,
    )  # fmt: skip
    return out

"""Options of torch.compile for training steps."""

from typing import Any

from anyformer.config import ModelConfig
from anyformer.kernels.private import choice_options, fused_cast_choices, long_row_choices, whole_pass_options

SHORT_NORM_ROWS = range(257, 513)  # widths at which two passes over a norm's gradients beat one
MAX_PREFETCHED_ROW = 1024  # width: three rows of each operand then take at most 31 KB of shared memory


def compile_options(config: ModelConfig, fp8: bool) -> dict[str, Any]:
    """Return the options for a model; `fp8`: its blocks multiply in fp8.

    A norm's gradients are reduced along rows and along columns. In one pass over both, torch gives short rows too few
    threads: 198 us on 32,768 rows of 512, where two passes take 111 us (H200, torch 2.11). Other rows are prefetched
    in that pass, as torch 2.13 does by default. With fp8, torch 2.11 loses a buffer in it. A cast to fp8 first finds
    the maximum of a row, so that rows of a feed-forward would be read, and their activation computed, twice.
    """
    always, apart = whole_pass_options(), {"triton.mix_order_reduction": False}
    if fp8:
        return always | apart | choice_options(long_row_choices)
    if config.width in SHORT_NORM_ROWS:
        return always | apart
    prefetched = {"triton.mix_order_reduction_allow_multi_stages": True} if config.width <= MAX_PREFETCHED_ROW else {}
    return always | prefetched | choice_options(fused_cast_choices)

"""Options of torch.compile for training steps."""

from typing import Any

from anyformer.config import ModelConfig

SHORT_NORM_ROWS = range(257, 513)  # widths at which two passes over a norm's gradients beat one


def compile_options(config: ModelConfig, fp8: bool) -> dict[str, Any] | None:
    """Return the options for a model; `fp8`: its blocks multiply in fp8.

    A norm's gradients are reduced along rows and along columns. In one pass over both, torch gives short rows too few
    threads: 198 us on 32,768 rows of 512, where two passes take 111 us (H200, torch 2.11). With fp8, torch 2.11 loses a
    buffer in that pass.
    """
    return {"triton.mix_order_reduction": False} if fp8 or config.width in SHORT_NORM_ROWS else None

"""How the kernels of a step are compiled."""

from typing import Any

from anyformer.config import ModelConfig

SHORT = range(257, 513)  # rows of a norm


def options(config: ModelConfig, eight: bool) -> dict[str, Any] | None:
    """For torch.compile; `eight`: products in fp8.

    A norm's gradients go along rows and along columns. In one pass over both, torch gives short rows too few threads:
    198 us on 32,768 rows of 512, where two passes take 111 (H200, torch 2.11). In fp8 torch 2.11 loses a buffer there.
    """
    return {"triton.mix_order_reduction": False} if eight or config.width in SHORT else None

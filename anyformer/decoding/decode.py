"""`decode`: a request under any strategy."""

from torch import Tensor

from anyformer.decoding.request import Request
from anyformer.decoding.strategy import Strategy
from anyformer.nn.model import Transformer


def decode(model: Transformer, request: Request, strategy: Strategy) -> Tensor:
    """Return prompts and answers [b, t + new], or [b, 1 + new] with an encoder; of beam search the best hypotheses."""
    return strategy.run(model, request)

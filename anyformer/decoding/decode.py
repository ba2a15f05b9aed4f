"""`decode`: a request under any strategy."""

from typing import assert_never

from torch import Tensor

from anyformer.decoding.beam_search import run_beam_search
from anyformer.decoding.contrastive import run_contrastive
from anyformer.decoding.generate import run_sampling
from anyformer.decoding.request import Request
from anyformer.decoding.speculative import run_speculation
from anyformer.decoding.strategy import Beam, Contrastive, Sampling, Speculation, Strategy
from anyformer.nn.model import Transformer


def decode(model: Transformer, request: Request, strategy: Strategy) -> Tensor:
    """Return prompts and answers [b, t + new], or [b, 1 + new] with an encoder; of beam search the best hypotheses."""
    match strategy:
        case Speculation():
            return run_speculation(model, request, strategy).ids
        case Sampling():
            return run_sampling(model, request, strategy)
        case Contrastive():
            return run_contrastive(model, request, strategy)
        case Beam():
            return run_beam_search(model, request, strategy).ids[:, 0]
        case _:
            assert_never(strategy)

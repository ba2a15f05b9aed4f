"""Beam search of one request in the engine: its rows share pages, and the search is that of `decoding`."""

import torch
from torch import Tensor

from anyformer.generation.beam_search import Hypotheses, Rules, Search, best_hypotheses
from anyformer.generation.engine.interface import BeamHypothesis
from anyformer.generation.logit_processors import History
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam
from anyformer.kernels.runtime import at_least_fp32


class Beams:
    """The search of one prompt, begun by its logits [1, v]; `prompt` is what the decoder reads."""

    def __init__(self, request: Request, prompt: tuple[int, ...], logits: Tensor):
        strategy = request.strategy
        assert isinstance(strategy, Beam)
        logits = at_least_fp32(logits).expand(strategy.beams, -1)
        self.prompt = torch.tensor([prompt], device=logits.device)
        self.longest, self.steps = request.longest, 0
        self.search = Search(strategy, 1, self.longest, request.stop_ids, logits)
        self.search.begin([self.longest])
        self.rules = Rules(request, logits.shape[-1], logits.device)
        self.rules.begin(self.search)
        self.choose(logits)

    def _history(self) -> History:
        answers = self.search.answers[:, : self.steps]
        ids = torch.cat((self.prompt.expand(len(answers), -1), answers), dim=1)
        new = (torch.arange(ids.shape[1], device=ids.device) >= self.prompt.shape[1]).expand_as(ids)
        return History(ids, torch.ones_like(new), new)

    def choose(self, logits: Tensor) -> None:
        """Choose the next token of each beam from logits [beams, v]."""
        self.rules.choose(self.search, self._history, logits)
        self.steps += 1

    @property
    def is_over(self) -> bool:
        return self.steps == self.longest or not bool(self.search.running.any())

    def advance(self) -> list[int]:
        """Return the row that each beam continues; `search.newest` are to be read next."""
        self.rules.advance(self.search)
        parents: list[int] = self.search.rows.tolist()
        return parents

    def found(self) -> list[BeamHypothesis] | None:
        """Return the hypotheses, best first; None if logits were not finite."""
        if bool(self.search.failed.any()):
            return None
        return hypotheses(best_hypotheses(self.search, self.prompt, self.search.strategy.beams, 0))


def hypotheses(found: Hypotheses) -> list[BeamHypothesis]:
    """Return the n-best list of a single prompt."""
    begin = found.ids.shape[2] - int(found.lengths.max())
    rows = zip(*(x[0].tolist() for x in found), strict=True)
    return [BeamHypothesis(tuple(ids[begin : begin + n]), score) for ids, score, n in rows if n]

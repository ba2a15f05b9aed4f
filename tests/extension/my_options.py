"""Options of decoding as a user writes them: a filter of sampling, one of all strategies, and a strategy."""

from dataclasses import replace
from typing import Literal

from anyformer.config.spec import Positive, Size
from anyformer.generation.filters import PlainFilter, SamplingFilter, ban
from anyformer.generation.generate import run_sampling
from anyformer.generation.strategy import Sampling, Strategy


class TopNSigma(SamplingFilter):
    """Samples from tokens whose logits are within n standard deviations of the largest one."""

    kind: Literal["top_n_sigma"] = "top_n_sigma"
    value: Positive

    def __call__(self, history, logits):
        finite = logits.masked_fill(logits.isinf(), float("nan"))
        mean = finite.nanmean(dim=-1, keepdim=True)
        deviation = (finite - mean).square().nanmean(dim=-1, keepdim=True).sqrt()
        return ban(logits, logits < logits.amax(dim=-1, keepdim=True) - self.value * deviation)


class Lowest(PlainFilter):
    """Subtracted from the logits of the ids below 60."""

    kind: Literal["lowest"] = "lowest"
    value: Positive
    http = "lowest_ids"

    def __call__(self, history, logits):
        logits = logits.clone()
        logits[:, :60] -= self.value
        return logits


class Nth(Strategy):
    """Choose the n-th most probable token."""

    title = "n-th search"
    selected_by = ("nth",)

    kind: Literal["nth"] = "nth"
    nth: Size  # the rank of the token that is chosen

    def run(self, model, request):
        def choose(history, logits):
            return ban(logits, logits > logits.topk(self.nth).values[:, -1:])

        return run_sampling(model, replace(request, processors=[choose], strategy=Sampling(filters=self.filters)))

"""Filters: options of decoding that change the logits before a token is chosen. Imports no torch.

A filter is one class. Its `kind` is the option's name in Python, on the command line and over HTTP, its `value` has the
type and range of the option, and the first sentence of its docstring is the help. Filters are applied in the order of
their definition: those of every strategy, the mask of a constraint, those that force tokens, then those of sampling.
None changes its inputs, reads a tensor on the host or branches on one (`logit_processors.py` says what else holds).
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from anyformer.config.part import Part
from anyformer.config.spec import Count, Fraction, Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anyformer.generation.logit_processors import History, Processor

Ids = Annotated[tuple[Count, ...], Field(min_length=1)]

# Within these bounds no finite logit becomes NaN or Inf in fp32, whatever the other options are.
Divisor = Annotated[float, Field(strict=True, ge=1e-3, le=1000)]
Addend = Annotated[float, Field(strict=True, ge=-1e30, le=1e30)]


def ban(logits: "Tensor", banned: "Tensor") -> "Tensor":
    """Set banned logits [b or 1, v] to -inf, except in rows that would have nothing left."""
    rest = logits.masked_fill(banned & ~logits.isnan(), -math.inf)
    return rest.where((rest > -math.inf).any(dim=-1, keepdim=True), logits)


def mark_ids(ids: "Tensor", where: "Tensor", vocab: int) -> "Tensor":
    """Return which ids occur in each row at `where`: [b, n] to bool [b, v]. Ids outside the vocabulary are ignored."""
    marked = where.new_zeros(len(ids), vocab + 1)  # the last column is dropped
    return marked.scatter(1, ids.where(where & (ids < vocab), vocab), True)[:, :vocab]


class Place(NamedTuple):
    """Where a filter is used."""

    vocab: int
    stop: tuple[int, ...]  # ids that end an answer
    device: "torch.device | str"


class Filter(Part):
    """One option of decoding, and what it does to the logits."""

    stage: ClassVar[Literal["change", "force", "sample"]] = "change"  # "sample": of sampling alone
    reads_tokens: ClassVar[bool] = True  # whether it depends on the tokens so far
    in_ids: ClassVar[bool] = False  # its value is in ids: texts have other options for this
    off: ClassVar[Any] = None  # a value that changes nothing
    http: ClassVar[str] = ""  # its field over HTTP, if it has another name there
    public: ClassVar[str] = ""  # its field in generation_config.json

    if TYPE_CHECKING:
        value: Any

    @abstractmethod
    def processor(self, place: Place) -> "Processor | None":
        """Return a function from the history and logits [b, v] to logits; None: nothing is to be done there."""

    def ids(self) -> Iterator[tuple[str, int]]:
        """Yield the ids in its value, each with the name by which a fault is reported."""
        yield from ()


class PlainFilter(Filter):
    """A filter that depends on nothing but its value: a function itself."""

    @abstractmethod
    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        """Return the changed logits [b, v]."""

    def processor(self, place: Place) -> "Processor":
        return self


# -- penalties and bans -----------------------------------------------------------------------------------------------


class RepetitionPenalty(PlainFilter):
    """Divides the logits of tokens in prompt and answer, and multiplies negative ones; above 1 they are less probable.

    CTRL, Keskar et al. 2019.
    """

    kind: Literal["repetition_penalty"] = "repetition_penalty"
    value: Divisor
    off = 1.0
    public = "repetition_penalty"

    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        seen = mark_ids(history.ids, history.present, logits.shape[-1])
        return (logits * self.value).where(logits < 0, logits / self.value).where(seen, logits)


class PresencePenalty(PlainFilter):
    """Subtracted from the logit of every generated token."""

    kind: Literal["presence_penalty"] = "presence_penalty"
    value: Addend
    off = 0.0

    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        seen = mark_ids(history.ids, history.present & history.new, logits.shape[-1])
        return (logits - self.value).where(seen, logits)


class FrequencyPenalty(PlainFilter):
    """Subtracted from the logit of a generated token once per occurrence."""

    kind: Literal["frequency_penalty"] = "frequency_penalty"
    value: Addend
    off = 0.0

    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        ids, vocab = history.ids, logits.shape[-1]
        counted = ids.where(history.present & history.new & (ids < vocab), vocab)
        counts = ids.new_zeros(len(ids), vocab + 1).scatter_add(1, counted, ids.new_ones(ids.shape))
        return logits - self.value * counts[:, :vocab].to(logits.dtype)


class Bias(Filter):
    """Pairs of an id and a value that is added to its logit."""

    kind: Literal["bias"] = "bias"
    value: tuple[tuple[Count, Addend], ...]
    off = ()
    reads_tokens = False
    in_ids = True

    def processor(self, place: Place) -> "Processor":
        import torch

        ids, values = (torch.tensor(column, device=place.device) for column in zip(*self.value, strict=True))

        def add(history: "History", logits: "Tensor") -> "Tensor":
            return logits.index_add(1, ids, values.to(logits.dtype).expand(len(logits), -1))

        return add

    def ids(self) -> Iterator[tuple[str, int]]:
        yield from (("bias", id) for id, _ in self.value)


class NoRepeatNgram(PlainFilter):
    """Length of n-grams of prompt and answer that may not occur twice."""

    kind: Literal["no_repeat_ngram"] = "no_repeat_ngram"
    value: Size
    public = "no_repeat_ngram_size"

    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        size, length = self.value, history.ids.shape[1]
        if length < size:
            return logits
        ids, present = history.right_aligned()
        grams = ids.unfold(1, size, 1)  # [b, length + 1 - size, size]
        latest = ids[:, None, length + 1 - size :]
        complete = present[:, : length + 1 - size]  # right-aligned: no gap follows the first token
        repeated = complete & (grams[..., :-1] == latest).all(dim=-1)
        return ban(logits, mark_ids(grams[..., -1], repeated, logits.shape[-1]))


class Banned(Filter):
    """Sequences of ids that never occur."""

    kind: Literal["banned"] = "banned"
    value: tuple[Ids, ...]
    off = ()
    in_ids = True

    def processor(self, place: Place) -> "Processor":
        import torch
        from torch.nn.functional import pad

        longest = max(map(len, self.value)) - 1
        words = [[-1] * (longest + 1 - len(word)) + list(word[:-1]) for word in self.value]  # -1: any
        before = torch.tensor(words, device=place.device).long()
        last = torch.tensor([word[-1] for word in self.value], device=place.device)

        def drop(history: "History", logits: "Tensor") -> "Tensor":
            # the last tokens, [b, 1, longest]
            ids, present = (pad(x, (longest, 0))[:, None, x.shape[1] :] for x in history.right_aligned())
            matches = ((before == -1) | present & (before == ids)).all(dim=-1)  # [b, words]
            return ban(logits, mark_ids(last.expand_as(matches), matches, logits.shape[-1]))

        return drop

    def ids(self) -> Iterator[tuple[str, int]]:
        yield from ((f"banned.{i}", id) for i, word in enumerate(self.value) for id in word)


class MinNewTokens(Filter):
    """Minimum number of new tokens before a stop id."""

    kind: Literal["min_new_tokens"] = "min_new_tokens"
    value: Count
    off = 0
    http = "min_tokens"
    public = "min_new_tokens"

    def processor(self, place: Place) -> "Processor | None":
        import torch

        if not place.stop:
            return None
        stop, least = torch.tensor(place.stop, device=place.device), self.value

        def drop(history: "History", logits: "Tensor") -> "Tensor":
            ends = torch.isin(torch.arange(logits.shape[-1], device=logits.device), stop)
            return ban(logits, ends & (history.answered() < least)[:, None])

        return drop


class Prefix(Filter):
    """Ids that every answer begins with."""

    kind: Literal["prefix"] = "prefix"
    value: tuple[Count, ...]
    stage = "force"
    off = ()
    in_ids = True

    def processor(self, place: Place) -> "Processor":
        import torch

        ids = torch.tensor(self.value, device=place.device)

        def force(history: "History", logits: "Tensor") -> "Tensor":
            answered = history.answered()[:, None]  # [b, 1]
            forced = ids[answered.clamp(max=len(ids) - 1)]
            only = torch.where(torch.arange(logits.shape[-1], device=logits.device) == forced, 0.0, -math.inf)
            return torch.where((answered < len(ids)) & ~logits.isnan(), only.to(logits.dtype), logits)

        return force

    def ids(self) -> Iterator[tuple[str, int]]:
        yield from (("prefix", id) for id in self.value)


# -- sampling ---------------------------------------------------------------------------------------------------------


class SamplingFilter(PlainFilter):
    """A choice of the tokens among which is sampled, after the division by the temperature."""

    stage = "sample"
    reads_tokens = False


class TopK(SamplingFilter):
    """Samples from the k most probable tokens."""

    kind: Literal["top_k"] = "top_k"
    value: Size

    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        return ban(logits, logits < logits.topk(min(self.value, logits.shape[-1])).values[:, -1:])


class TopP(SamplingFilter):
    """Nucleus sampling: samples from the most probable tokens whose probabilities sum to p."""

    kind: Literal["top_p"] = "top_p"
    value: Fraction
    off = 1.0
    public = "top_p"

    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        rising = logits.sort(dim=-1).values
        dropped = (rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.value).sum(dim=-1, keepdim=True)
        return ban(logits, logits < rising.gather(1, dropped.clamp(max=logits.shape[-1] - 1)))


class MinP(SamplingFilter):
    """Samples from tokens at least p times as probable as the most probable one."""

    kind: Literal["min_p"] = "min_p"
    value: Fraction
    off = 0.0
    public = "min_p"

    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        probability = logits.softmax(dim=-1)
        return ban(logits, probability < self.value * probability.amax(dim=-1, keepdim=True))


class TypicalP(SamplingFilter):
    """Locally typical sampling: tokens with surprisal nearest to the entropy, of total probability p.

    Meister et al. 2023; the surprisal of a token is -log its probability.
    """

    kind: Literal["typical_p"] = "typical_p"
    value: Fraction
    off = 1.0
    public = "typical_p"

    def __call__(self, history: "History", logits: "Tensor") -> "Tensor":
        surprisal = -logits.log_softmax(dim=-1)
        entropy = (surprisal * (-surprisal).exp()).nansum(dim=-1, keepdim=True)  # inf · 0 where banned
        nearest, order = (surprisal - entropy).abs().sort(dim=-1)
        kept = (logits.gather(1, order).softmax(dim=-1).cumsum(dim=-1) < self.value).sum(dim=-1, keepdim=True)
        return ban(logits, (surprisal - entropy).abs() > nearest.gather(1, kept.clamp(max=logits.shape[-1] - 1)))

"""What is done to logits before a token is chosen: a list of pure functions (history, logits [b, v]) -> logits [b, v].

None changes its inputs, reads a tensor on the host or branches on one: a decode step with them compiles to one graph.
They do what the processors of the same purpose in `transformers` do, with five differences:

- pads are not history: a row is treated as if it were alone and unpadded;
- ties stay together: what is as likely as the last token kept is kept (there, also by top-k and typical, not by top-p);
- a row is never emptied: a ban that would leave it no token does not apply to it. `Allowed` and `Prefix` are commands
  and hold against earlier bans (as there); only a mask that allows nothing at all is passed over;
- a banned word may be one `stop` id alone (there it is passed over);
- NaN stays NaN whatever is banned, so that `sample.py` can tell.

What counts as history: prompt and answer for the repetition penalty, n-grams and banned words, as in `transformers`;
the answer alone for presence and frequency penalties, as OpenAI defines them ("how often that token was sampled"), and
for what goes by its length, the prefix and the minimum. A decoder's start id is prompt.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import pad

from anyformer.config.spec import ConfigError, Count, Fault, Fraction, Number, Positive, Size, Spec
from anyformer.kernels.runtime import at_least_fp32


class History(NamedTuple):
    """What each row holds so far, in order; `there` may have gaps (pads, slots not yet filled, what follows an end)."""

    ids: Tensor  # int [b, n], anything where no token is
    there: Tensor  # bool [b, n]: a real token
    new: Tensor  # bool [b, n]: where there is one, it belongs to the answer

    def answered(self) -> Tensor:
        """How many tokens of the answer there are, [b]."""
        return (self.there & self.new).sum(dim=1)

    def right_aligned(self) -> tuple[Tensor, Tensor]:
        """The ids and `there` with all gaps moved to the left."""
        order = self.there.byte().argsort(dim=1, stable=True)
        return self.ids.gather(1, order), self.there.gather(1, order)


Processor = Callable[[History, Tensor], Tensor]
Mask = Callable[[History], Tensor]
"""Which ids may follow: bool [b, v]. Of a constraint, `retrace.py` makes one."""


def process(processors: Iterable[Processor], history: History, logits: Tensor) -> Tensor:
    """The logits after all processors, in at least fp32."""
    logits = at_least_fp32(logits)
    for processor in processors:
        logits = processor(history, logits)
    return logits


# -- the pieces of processors ---------------------------------------------------------------------------------------


def ban(logits: Tensor, banned: Tensor) -> Tensor:
    """-inf where banned [b or 1, v], except in rows that would have nothing left."""
    rest = torch.where(banned & ~logits.isnan(), -math.inf, logits)
    return torch.where((rest > -math.inf).any(dim=-1, keepdim=True), rest, logits)


def mark(ids: Tensor, where: Tensor, vocab: int) -> Tensor:
    """Which ids occur in each row where `where` says so: [b, n] to bool [b, v]. Ids that no logit stands for do not."""
    marked = torch.zeros(ids.shape[0], vocab + 1, dtype=torch.bool, device=ids.device)  # the last is for the others
    return marked.scatter(1, torch.where(where & (ids < vocab), ids, vocab), True)[:, :vocab]


# -- penalties and bans ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repetition:
    """Logits of tokens in the prompt and the answer, divided by the penalty, or times it if negative (CTRL)."""

    penalty: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        seen = mark(history.ids, history.there, logits.shape[-1])
        return torch.where(seen, torch.where(logits < 0, logits * self.penalty, logits / self.penalty), logits)


@dataclass(frozen=True)
class Presence:
    """Less the penalty for every token in the answer."""

    penalty: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        seen = mark(history.ids, history.there & history.new, logits.shape[-1])
        return torch.where(seen, logits - self.penalty, logits)


@dataclass(frozen=True)
class Frequency:
    """Less the penalty times how often the token occurs in the answer."""

    penalty: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        ids, vocab = history.ids, logits.shape[-1]
        counted = torch.where(history.there & history.new & (ids < vocab), ids, vocab)
        counts = torch.zeros(len(ids), vocab + 1, dtype=ids.dtype, device=ids.device)
        counts = counts.scatter_add(1, counted, torch.ones_like(ids))[:, :vocab]
        return logits - self.penalty * counts.to(logits.dtype)


@dataclass(frozen=True)
class NoRepeat:
    """Bans what would complete an n-gram of the prompt and the answer a second time."""

    size: int

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        length = history.ids.shape[1]
        if length < self.size:
            return logits
        ids, there = history.right_aligned()
        grams = ids.unfold(1, self.size, 1)  # [b, length + 1 - size, size]
        latest = ids[:, None, length + 1 - self.size :]
        whole = there[:, : length + 1 - self.size]  # all of a gram is there if its first is
        again = whole & (grams[..., :-1] == latest).all(dim=-1)
        return ban(logits, mark(grams[..., -1], again, logits.shape[-1]))


@dataclass(frozen=True, eq=False)
class Banned:
    """Bans the last id of each word where the ids before it have just been read, in the prompt or the answer."""

    before: Tensor  # int [words, longest], -1 on the left of shorter words
    last: Tensor  # int [words]

    @classmethod
    def words(cls, words: Iterable[tuple[int, ...]], device: torch.device | str = "cpu") -> Self:
        words = list(words)
        longest = max(len(word) for word in words)
        before = [[-1] * (longest - len(word)) + list(word[:-1]) for word in words]
        return cls(
            torch.tensor(before, device=device).long(), torch.tensor([word[-1] for word in words], device=device)
        )

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        longest = self.before.shape[1]
        ids, there = (pad(x, (longest, 0))[:, None, x.shape[1] :] for x in history.right_aligned())  # [b, 1, longest]
        read = ((self.before == -1) | there & (self.before == ids)).all(dim=-1)  # [b, words]
        return ban(logits, mark(self.last.expand_as(read), read, logits.shape[-1]))


@dataclass(frozen=True, eq=False)
class MinNew:
    """Bans the ids that end a row until its answer has so many tokens."""

    count: int
    stop: Tensor  # int [stops]

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        ends = torch.isin(torch.arange(logits.shape[-1], device=logits.device), self.stop)
        return ban(logits, ends & (history.answered() < self.count)[:, None])


@dataclass(frozen=True)
class Allowed:
    """Bans what a mask does not allow. Where all it allows has been banned already, it holds nevertheless, all of it
    equally likely; where it allows nothing, nothing is banned."""

    mask: Mask

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        allowed = self.mask(history)
        overruled = (logits.isneginf() | ~allowed).all(dim=-1, keepdim=True) & allowed
        return ban(torch.where(overruled, 0.0, logits), ~allowed)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Makes the answer begin with these ids."""

    ids: Tensor  # int [p]

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        answered = history.answered()[:, None]  # [b, 1]
        wanted = self.ids[answered.clamp(max=len(self.ids) - 1)]
        only = torch.where(torch.arange(logits.shape[-1], device=logits.device) == wanted, 0.0, -math.inf)
        return torch.where((answered < len(self.ids)) & ~logits.isnan(), only.to(logits.dtype), logits)


# -- for sampling ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Temperature:
    """Logits divided by the temperature. Near 0 the largest is subtracted first, so that no quotient overflows."""

    value: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        if self.value > 1e-3:
            return logits / self.value
        return (logits - logits.amax(dim=-1, keepdim=True)) / max(self.value, 1e-30)  # fp32 has no numbers far below


@dataclass(frozen=True)
class TopK:
    """Only the k likeliest."""

    k: int

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        return ban(logits, logits < logits.topk(min(self.k, logits.shape[-1])).values[:, -1:])


@dataclass(frozen=True)
class TopP:
    """Only the likeliest that have a probability of p together."""

    p: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        rising = logits.sort(dim=-1).values
        dropped = (rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.p).sum(dim=-1, keepdim=True)
        return ban(logits, logits < rising.gather(1, dropped.clamp(max=logits.shape[-1] - 1)))


@dataclass(frozen=True)
class MinP:
    """Only what is at least p times as likely as the likeliest."""

    p: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        probability = logits.softmax(dim=-1)
        return ban(logits, probability < self.p * probability.amax(dim=-1, keepdim=True))


@dataclass(frozen=True)
class Typical:
    """Only those whose surprise, -log p, is nearest to the entropy, with a probability of `mass` together
    (Meister et al. 2023)."""

    mass: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        surprise = -logits.log_softmax(dim=-1)
        entropy = (surprise * (-surprise).exp()).nansum(dim=-1, keepdim=True)  # inf · 0 where banned
        nearest, order = (surprise - entropy).abs().sort(dim=-1)
        kept = (logits.gather(1, order).softmax(dim=-1).cumsum(dim=-1) < self.mass).sum(dim=-1, keepdim=True)
        return ban(logits, (surprise - entropy).abs() > nearest.gather(1, kept.clamp(max=logits.shape[-1] - 1)))


# -- all of them by name --------------------------------------------------------------------------------------------

Ids = Annotated[tuple[Count, ...], Field(min_length=1)]


class Processing(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """What is done to logits however tokens are chosen. None, penalties of 0 and one of 1 on repetition do nothing."""

    repetition_penalty: Positive = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    no_repeat_ngram: Size | None = None
    banned: tuple[Ids, ...] = ()  # words, each a sequence of ids
    min_new_tokens: Count = 0  # no `stop` id before
    prefix: tuple[Count, ...] = ()  # how every answer begins


class Sampling(Processing):
    """The likeliest token, or one that is drawn."""

    temperature: Annotated[float, Field(strict=True, ge=0)] = 0.0  # 0: the likeliest token
    top_k: Size | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    typical_p: Fraction | None = None

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> Self:
        drawn = ("top_k", "top_p", "min_p", "typical_p")
        idle = [name for name in drawn if self.temperature == 0 and getattr(self, name) is not None]
        if idle:
            reason = "needs a temperature above 0: at 0 the likeliest token is chosen"
            raise ConfigError(Fault(name, f"= {getattr(self, name)}: {reason}") for name in idle)
        return self


def build(
    how: Processing,
    *,
    vocab: int,
    stop: Iterable[int] = (),
    allowed: Mask | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Processor, ...]:
    """Those processors that change something, in the order of `transformers`: penalties (repetition, presence,
    frequency), bans (n-grams, words, minimum), commands (mask, prefix), then temperature, top-k, top-p, min-p,
    typical. Without `stop` ids no row ends early, and a minimum needs nothing."""
    stop = tuple(stop)
    named = [(f"banned.{i}", word) for i, word in enumerate(how.banned)] + [("prefix", how.prefix), ("stop", stop)]
    wrong = [(path, id) for path, ids in named for id in ids if not 0 <= id < vocab]
    if wrong:
        raise ConfigError(Fault(path, f"= {id}: no such id; the vocabulary has {vocab}") for path, id in wrong)
    made: list[Processor] = []
    if how.repetition_penalty != 1:
        made.append(Repetition(how.repetition_penalty))
    if how.presence_penalty:
        made.append(Presence(how.presence_penalty))
    if how.frequency_penalty:
        made.append(Frequency(how.frequency_penalty))
    if how.no_repeat_ngram is not None:
        made.append(NoRepeat(how.no_repeat_ngram))
    if how.banned:
        made.append(Banned.words(how.banned, device))
    if how.min_new_tokens and stop:
        made.append(MinNew(how.min_new_tokens, torch.tensor(stop, device=device)))
    if allowed is not None:
        made.append(Allowed(allowed))
    if how.prefix:
        made.append(Prefix(torch.tensor(how.prefix, device=device)))
    return (*made, *(_drawn(how) if isinstance(how, Sampling) else ()))


def _drawn(how: Sampling) -> Iterable[Processor]:
    made: list[Processor] = []
    if how.temperature not in (0, 1):
        made.append(Temperature(how.temperature))
    if how.top_k is not None:
        made.append(TopK(how.top_k))
    if how.top_p is not None and how.top_p < 1:
        made.append(TopP(how.top_p))
    if how.min_p is not None:
        made.append(MinP(how.min_p))
    if how.typical_p is not None and how.typical_p < 1:
        made.append(Typical(how.typical_p))
    return made

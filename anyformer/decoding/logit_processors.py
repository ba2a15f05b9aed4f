"""Logit processors: pure functions (history, logits [b, v]) -> logits [b, v], applied before a token is chosen.

None changes its inputs, reads a tensor on the host or branches on one: a decode step with them compiles to one graph.
They do what the processors of the same purpose in `transformers` do, with five differences:

- padding is not history: a row is treated as if it were alone and unpadded;
- ties are kept: a token as likely as the last one kept is kept (there, also by top-k and typical, not by top-p);
- a row is never emptied: a ban that would leave it no token does not apply to it. `Allowed` and `Prefix` are forced
  and override earlier bans (as there); only a mask that allows nothing at all is ignored;
- a banned word may be a single `stop` id (there it is ignored);
- NaN stays NaN whatever is banned, so that `sampling.py` can detect it.

The history is prompt and answer for the repetition penalty, n-grams and banned words, as in `transformers`. It is the
answer alone for presence and frequency penalties, as OpenAI defines them ("how often that token was sampled"), and for
the prefix and the minimum length. A decoder's start id belongs to the prompt.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyformer.config.spec import ConfigError, Fault
from anyformer.decoding.strategy import Processing, Sampling
from anyformer.kernels.runtime import at_least_fp32


class History(NamedTuple):
    """The tokens of each row so far, in order; with gaps at padding, at slots not yet filled and after a row's end."""

    ids: Tensor  # int [b, n], arbitrary at gaps
    present: Tensor  # bool [b, n]: False at gaps
    new: Tensor  # bool [b, n]: True in the slots of the answer

    def answered(self) -> Tensor:
        """Return the number of tokens of each answer, [b]."""
        return (self.present & self.new).sum(dim=1)

    def right_aligned(self) -> tuple[Tensor, Tensor]:
        """Return the ids and `present` with all gaps moved to the left."""
        order = self.present.byte().argsort(dim=1, stable=True)
        return self.ids.gather(1, order), self.present.gather(1, order)


Processor = Callable[[History, Tensor], Tensor]
Mask = Callable[[History], Tensor]
"""The ids that may follow, bool [b, v]; `constraints/rollback.py` makes one from a constraint."""


def process(processors: Iterable[Processor], history: History, logits: Tensor) -> Tensor:
    """Apply processors in order, in at least fp32."""
    logits = at_least_fp32(logits)
    for processor in processors:
        logits = processor(history, logits)
    return logits


# -- helpers ----------------------------------------------------------------------------------------------------------


def ban(logits: Tensor, banned: Tensor) -> Tensor:
    """Set banned logits [b or 1, v] to -inf, except in rows that would have nothing left."""
    rest = torch.where(banned & ~logits.isnan(), -math.inf, logits)
    return torch.where((rest > -math.inf).any(dim=-1, keepdim=True), rest, logits)


def mark_ids(ids: Tensor, where: Tensor, vocab: int) -> Tensor:
    """Return which ids occur in each row at `where`: [b, n] to bool [b, v]. Ids outside the vocabulary are ignored."""
    marked = torch.zeros(ids.shape[0], vocab + 1, dtype=torch.bool, device=ids.device)  # the last column is dropped
    return marked.scatter(1, torch.where(where & (ids < vocab), ids, vocab), True)[:, :vocab]


# -- penalties and bans ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repetition:
    """Divide the logits of tokens in prompt and answer by the penalty; multiply negative ones (CTRL, Keskar 2019)."""

    penalty: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        seen = mark_ids(history.ids, history.present, logits.shape[-1])
        return torch.where(seen, torch.where(logits < 0, logits * self.penalty, logits / self.penalty), logits)


@dataclass(frozen=True)
class Presence:
    """Subtract the penalty from the logit of every token in the answer."""

    penalty: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        seen = mark_ids(history.ids, history.present & history.new, logits.shape[-1])
        return torch.where(seen, logits - self.penalty, logits)


@dataclass(frozen=True)
class Frequency:
    """Subtract the penalty once for each occurrence of the token in the answer."""

    penalty: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        ids, vocab = history.ids, logits.shape[-1]
        counted = torch.where(history.present & history.new & (ids < vocab), ids, vocab)
        counts = torch.zeros(len(ids), vocab + 1, dtype=ids.dtype, device=ids.device)
        counts = counts.scatter_add(1, counted, torch.ones_like(ids))[:, :vocab]
        return logits - self.penalty * counts.to(logits.dtype)


@dataclass(frozen=True, eq=False)
class Bias:
    """Add a value to the logits of some ids."""

    ids: Tensor  # int [n]
    values: Tensor  # [n]

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        return logits.index_add(1, self.ids, self.values.to(logits.dtype).expand(len(logits), -1))


@dataclass(frozen=True)
class NoRepeat:
    """Ban tokens that would repeat an n-gram of the prompt and the answer."""

    size: int

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        length = history.ids.shape[1]
        if length < self.size:
            return logits
        ids, present = history.right_aligned()
        grams = ids.unfold(1, self.size, 1)  # [b, length + 1 - size, size]
        latest = ids[:, None, length + 1 - self.size :]
        complete = present[:, : length + 1 - self.size]  # right-aligned: no gap follows the first token
        repeated = complete & (grams[..., :-1] == latest).all(dim=-1)
        return ban(logits, mark_ids(grams[..., -1], repeated, logits.shape[-1]))


@dataclass(frozen=True, eq=False)
class Banned:
    """Ban the last id of each word where the history ends with the ids before it."""

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
        ids, present = (pad(x, (longest, 0))[:, None, x.shape[1] :] for x in history.right_aligned())  # [b, 1, longest]
        matches = ((self.before == -1) | present & (self.before == ids)).all(dim=-1)  # [b, words]
        return ban(logits, mark_ids(self.last.expand_as(matches), matches, logits.shape[-1]))


@dataclass(frozen=True, eq=False)
class MinNew:
    """Ban the stop ids until the answer has `count` tokens."""

    count: int
    stop: Tensor  # int [stops]

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        ends = torch.isin(torch.arange(logits.shape[-1], device=logits.device), self.stop)
        return ban(logits, ends & (history.answered() < self.count)[:, None])


@dataclass(frozen=True)
class Allowed:
    """Ban what a mask does not allow; a row in which it allows nothing is not changed.

    Where earlier bans exclude everything it allows, the mask wins, and all it allows is equally likely.
    """

    mask: Mask

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        allowed = self.mask(history)
        overruled = (logits.isneginf() | ~allowed).all(dim=-1, keepdim=True) & allowed
        return ban(torch.where(overruled, 0.0, logits), ~allowed)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Force the answer to begin with these ids."""

    ids: Tensor  # int [p]

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        answered = history.answered()[:, None]  # [b, 1]
        forced = self.ids[answered.clamp(max=len(self.ids) - 1)]
        only = torch.where(torch.arange(logits.shape[-1], device=logits.device) == forced, 0.0, -math.inf)
        return torch.where((answered < len(self.ids)) & ~logits.isnan(), only.to(logits.dtype), logits)


# -- sampling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Temperature:
    """Divide logits by the temperature. Near 0 the maximum is subtracted first, so that no quotient overflows."""

    value: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        if self.value > 1e-3:
            return logits / self.value
        return (logits - logits.amax(dim=-1, keepdim=True)) / max(self.value, 1e-30)  # fp32 underflows below


@dataclass(frozen=True)
class TopK:
    """Keep the k most probable tokens."""

    k: int

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        return ban(logits, logits < logits.topk(min(self.k, logits.shape[-1])).values[:, -1:])


@dataclass(frozen=True)
class TopP:
    """Keep the most probable tokens whose probabilities sum to p (nucleus sampling)."""

    p: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        rising = logits.sort(dim=-1).values
        dropped = (rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.p).sum(dim=-1, keepdim=True)
        return ban(logits, logits < rising.gather(1, dropped.clamp(max=logits.shape[-1] - 1)))


@dataclass(frozen=True)
class MinP:
    """Keep tokens that are at least p times as probable as the most probable one."""

    p: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        probability = logits.softmax(dim=-1)
        return ban(logits, probability < self.p * probability.amax(dim=-1, keepdim=True))


@dataclass(frozen=True)
class Typical:
    """Keep the tokens whose surprisal, -log p, is nearest to the entropy, with a total probability of `mass`
    (Meister et al. 2023)."""

    mass: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        surprisal = -logits.log_softmax(dim=-1)
        entropy = (surprisal * (-surprisal).exp()).nansum(dim=-1, keepdim=True)  # inf · 0 where banned
        nearest, order = (surprisal - entropy).abs().sort(dim=-1)
        kept = (logits.gather(1, order).softmax(dim=-1).cumsum(dim=-1) < self.mass).sum(dim=-1, keepdim=True)
        return ban(logits, (surprisal - entropy).abs() > nearest.gather(1, kept.clamp(max=logits.shape[-1] - 1)))


# -- from a spec ----------------------------------------------------------------------------------------------------


def build(
    spec: Processing,
    *,
    vocab: int,
    stop: Iterable[int] = (),
    allowed: Mask | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Processor, ...]:
    """Return the processors of a spec that change something, in the order of `transformers`.

    That is: penalties (repetition, presence, frequency), bias, bans (n-grams, words, minimum length), forced tokens
    (mask, prefix), then temperature, top-k, top-p, min-p, typical. Without `stop` ids a minimum length needs no
    processor.
    """
    stop = tuple(stop)
    named = [(f"banned.{i}", word) for i, word in enumerate(spec.banned)] + [
        ("bias", tuple(id for id, _ in spec.bias)),
        ("prefix", spec.prefix),
        ("stop", stop),
    ]
    wrong = [(path, id) for path, ids in named for id in ids if not 0 <= id < vocab]
    if wrong:
        raise ConfigError(Fault(path, f"= {id}: no such id; the vocabulary has {vocab}") for path, id in wrong)
    made: list[Processor] = []
    if spec.repetition_penalty != 1:
        made.append(Repetition(spec.repetition_penalty))
    if spec.presence_penalty:
        made.append(Presence(spec.presence_penalty))
    if spec.frequency_penalty:
        made.append(Frequency(spec.frequency_penalty))
    if spec.bias:
        ids, values = zip(*spec.bias, strict=True)
        made.append(Bias(torch.tensor(ids, device=device), torch.tensor(values, device=device)))
    if spec.no_repeat_ngram is not None:
        made.append(NoRepeat(spec.no_repeat_ngram))
    if spec.banned:
        made.append(Banned.words(spec.banned, device))
    if spec.min_new_tokens and stop:
        made.append(MinNew(spec.min_new_tokens, torch.tensor(stop, device=device)))
    if allowed is not None:
        made.append(Allowed(allowed))
    if spec.prefix:
        made.append(Prefix(torch.tensor(spec.prefix, device=device)))
    return (*made, *(_filters(spec) if isinstance(spec, Sampling) else ()))


def _filters(spec: Sampling) -> Iterable[Processor]:
    made: list[Processor] = []
    if spec.temperature not in (0, 1):
        made.append(Temperature(spec.temperature))
    if spec.top_k is not None:
        made.append(TopK(spec.top_k))
    if spec.top_p is not None and spec.top_p < 1:
        made.append(TopP(spec.top_p))
    if spec.min_p is not None:
        made.append(MinP(spec.min_p))
    if spec.typical_p is not None and spec.typical_p < 1:
        made.append(Typical(spec.typical_p))
    return made

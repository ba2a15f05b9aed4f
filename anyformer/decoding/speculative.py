"""Speculative decoding: some tokens are guessed ahead, and the model reads all of them in one call.

What it would have said itself stays, up to its first objection, and there its own token takes the guess's place: each
call says one token to `ahead` + 1, and the answer is as good as if it had been asked for token by token.

- The likeliest tokens, or guesses without a distribution: a guess stays if it is the token that `generate` chooses.
- Tokens drawn by a draft model: guess x stays with probability min(1, p(x) / q(x)), where p is what the model makes of
  the next token and q what the draft did; else a token is drawn from max(p - q, 0), rescaled (Leviathan et al. 2023,
  Chen et al. 2023). Whatever q is, tokens come out with probabilities p.

Rows agree with different numbers of guesses. The others are taken back: their slots in the cache are empty again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, assert_never

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyformer.attention.layout import real
from anyformer.cache.kv_cache import CacheKind
from anyformer.config import LM, ModelConfig, Tokens
from anyformer.config.spec import ConfigError, Fault, Size, Spec
from anyformer.decoding.check import check_call
from anyformer.decoding.constraints.constraint import Constraint, check_fit
from anyformer.decoding.constraints.rollback import Retracing
from anyformer.decoding.generate import Spoilt, seeds_of
from anyformer.decoding.logit_processors import History, Processor, Sampling, build, process
from anyformer.decoding.sampling import Choice, bits, greedy, sample, widest
from anyformer.decoding.session import Session, evaluating
from anyformer.nn.model import Transformer

DRAWN, TESTED = 1 << 30, 2 << 30  # added to the number of a step: noise of their own for guesses and their tests
CALLS = 4  # so many calls fit between two closings of gaps in the cache


class Draft(NamedTuple):
    """Guesses by a smaller model of the same shape and vocabulary."""

    model: Transformer


class Lookup(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """Guesses by what followed the newest tokens, `ngram` of them or as many as occur, where they stood last: in the
    prompt and the answer, and in a source of the same vocabulary. It pays where an answer repeats what was read."""

    ngram: Size = 3


class Speculated(NamedTuple):
    """Answers, and whether it paid: token by token there would have been as many calls as the longest has tokens."""

    ids: Tensor  # as of `generate`
    calls: int  # of the model, that of the prompt included
    drafted: Tensor  # int [b], tokens guessed
    accepted: Tensor  # int [b], those of them that stayed


def speculate(
    model: Transformer,
    ids: Tensor,
    *,
    draft: Draft | Lookup,
    ahead: int = 4,
    max_new_tokens: int | Sequence[int] = 20,
    stop: Sequence[int] = (),
    segments: Tensor | None = None,
    marks: Tensor | None = None,
    seed: int | Tensor | None = None,
    constraint: Constraint | None = None,
    cache: CacheKind = "auto",
    chunk: int | None = None,
    **how: Any,
) -> Speculated:
    """What `generate` says of the same arguments, with up to `ahead` tokens guessed before each call of the model.

    The likeliest tokens are the same, one by one, as far as rounding goes. So are tokens drawn with a `Lookup`; with a
    `Draft` others are drawn by the same seed, with the same probabilities.
    """
    sampling = Sampling(**how)
    rooms, stop = check_call(
        model,
        ids,
        max_new_tokens,
        stop,
        ahead=ahead,
        segments=segments,
        marks=marks,
        seed=seed,
        temperature=sampling.temperature,
        constraint=constraint,
        cache=cache,
        chunk=chunk,
    )
    _check(model, draft)
    if isinstance(draft, Draft):
        _check_positions(draft.model, ids, segments)
    most = max(rooms, default=0)
    other = draft.model if isinstance(draft, Draft) else model
    with evaluating(model), evaluating(other):

        def begin(reader: Transformer) -> Session:
            room, slack = most + CALLS * (ahead + 1), ahead + 1
            return Session(reader, ids, room, segments=segments, marks=marks, cache=cache, slack=slack, chunk=chunk)

        session = begin(model)
        vocab, device = session.logits.shape[-1], session.ids.device
        allowed = None
        if constraint is not None:
            check_fit(constraint, vocab, stop)
            allowed = Retracing(constraint, rooms, device)
        processors = build(sampling, vocab=vocab, stop=stop, allowed=allowed, device=device)
        seeds = None if sampling.temperature == 0 else seeds_of(seed, len(session.ids), device)
        drafter: Drafter
        match draft:
            case Draft():
                drafter = Drafting(begin(draft.model), processors, seeds)
            case Lookup():
                drafter = LookingUp(draft.ngram, *_source(model, ids, segments))
            case _:
                assert_never(draft)
        answers = Answers(rooms, stop, session.filler(stop), processors, seeds, device)
        if most:
            answers.judge(session.history, session.logits[:, None], _none(session.ids))
        calls = 1
        while bool(answers.going.any()):
            going, newest, before = answers.going, answers.newest(), answers.count
            limit = torch.where(going, answers.room - before - 1, 0).clamp(max=ahead)
            guess = drafter.propose(_longer(session.history, newest, going), limit)
            session.make_room(1 + guess.ids.shape[1])
            new = torch.cat((newest[:, None], guess.ids), dim=1)
            logits = session.read(new, torch.cat((going[:, None], guess.there), dim=1))
            calls += 1
            answers.judge(session.history, logits, guess)
            kept = (answers.count - before - 1).clamp(min=0)  # the last token said is yet to be read
            session.forget(guess.there.sum(dim=1) - kept)
            drafter.keep(kept)
        whole = torch.cat((session.given, answers.ids[:, : int(answers.count.max())]), dim=1)
        session.close()
        if isinstance(drafter, Drafting):
            drafter.session.close()
    if bool(answers.spoilt.any()):
        raise Spoilt(answers.spoilt.nonzero()[:, 0].tolist(), whole)
    return Speculated(whole, calls, answers.drafted, answers.accepted)


# -- guesses --------------------------------------------------------------------------------------------------------


class Guess(NamedTuple):
    """The next tokens of each row, as many of them as are `there`."""

    ids: Tensor  # int [b, k]
    there: Tensor  # bool [b, k], the first ones of each row
    p: Tensor | None = None  # the probabilities [b, k, v] that they were drawn by; None: by none


class Drafter(Protocol):
    def propose(self, history: History, limit: Tensor) -> Guess:
        """What comes next, up to `limit` [b] tokens."""

    def keep(self, kept: Tensor) -> None:
        """So many of them [b] are read as guessed; another token follows, the newest of the next history."""


class Drafting:
    """By a model that chooses as the large one does."""

    def __init__(self, session: Session, processors: Sequence[Processor], seeds: Tensor | None):
        self.session, self.processors, self.seeds = session, processors, seeds
        self.guess, self.read = _none(session.ids), session.ids.new_zeros(len(session.ids))  # how many of them it read
        self.late, self.behind = session.ids[:, :1], torch.zeros_like(session.ids[:, :1], dtype=torch.bool)
        self.full = torch.zeros_like(self.read, dtype=torch.bool)  # rows that have come to the draft's last position

    def propose(self, history: History, limit: Tensor) -> Guess:
        limit = self._within(limit)
        wanted = int(limit.max())
        self.session.make_room(wanted + 1)
        new, there = history.ids[:, -1:], (limit > 0)[:, None]
        if bool(self.behind.any()):
            new, there = torch.cat((self.late, new), dim=1), torch.cat((self.behind & there, there), dim=1)
        self.read = torch.zeros_like(limit)
        going, ids, found, p = limit > 0, [], [], []
        for n in range(wanted):
            logits = process(self.processors, history, self.session.read(new, there)[:, -1])
            choice = _choose(logits, self.seeds, history.answered() + DRAWN)
            going = going & (limit > n) & choice.ok
            ids.append(choice.ids)
            found.append(going)
            if self.seeds is not None:
                p.append(logits.to(widest(logits.device)).softmax(dim=-1))
            history = _longer(history, choice.ids, going)
            new, there = choice.ids[:, None], (going & (limit > n + 1))[:, None]
            self.read = self.read + there[:, 0]
        self.guess = _none(history.ids)
        if wanted:
            self.guess = Guess(torch.stack(ids, dim=1), torch.stack(found, dim=1), torch.stack(p, dim=1) if p else None)
        return self.guess

    def _within(self, limit: Tensor) -> Tensor:
        """Return how many tokens may be guessed where the draft has fewer positions than the model."""
        if self.session.limit is None:
            return limit
        left = self.session.limit - self.session.cache.following - self.behind[:, 0].long()
        self.full = self.full | (left < 1)
        return torch.minimum(limit, left).masked_fill(self.full, 0)

    def keep(self, kept: Tensor) -> None:
        self.session.forget((self.read - kept).clamp(min=0))
        self.behind = (kept > self.read)[:, None]  # it does not read its own last guess
        if self.guess.ids.shape[1]:
            self.late = self.guess.ids.gather(1, (kept - 1).clamp(min=0)[:, None])


class LookingUp:
    """By what was read before: text of the same vocabulary [b, s], where there is some, and the history."""

    def __init__(self, ngram: int, ids: Tensor, there: Tensor):
        self.ngram, self.ids, self.there = ngram, ids, there

    def propose(self, history: History, limit: Tensor) -> Guess:
        ids, there = torch.cat((self.ids, history.ids), dim=1), torch.cat((self.there, history.there), dim=1)
        ids, there = History(ids, there, there).right_aligned()
        last = ids.shape[1] - 1
        wanted = int(limit.max())
        if not last or not wanted:
            return _none(ids)
        alike, length = there[:, :last], torch.zeros_like(ids[:, :last])  # tokens before each place as the newest are
        for n in range(min(self.ngram, last)):
            earlier, known = (pad(x[:, : last - n], (n, 0)) for x in (ids, there))
            alike = alike & known & (earlier == ids[:, last - n, None])
            length = length + alike
        best = torch.where(length > 0, length * last + torch.arange(last, device=ids.device), -1).max(dim=1)
        # where the text behind that place ends with the newest token, it goes on from there as from the place itself
        step = torch.arange(wanted, device=ids.device) % (last - best.indices)[:, None]
        found = (best.values >= 0)[:, None] & (torch.arange(wanted, device=ids.device) < limit[:, None])
        some = int(found.sum(dim=1).amax())
        return Guess(ids.gather(1, best.indices[:, None] + 1 + step)[:, :some], found[:, :some])

    def keep(self, kept: Tensor) -> None:
        """The history tells."""


def _source(model: Transformer, ids: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """The text before the decoder's own that may be looked at, and where it is."""
    source, target = model.config.source, model.config.target
    if not isinstance(source, Tokens) or not isinstance(target, Tokens) or source.vocab != target.vocab:
        ids, segments = ids.new_zeros(len(ids), 0, dtype=torch.long), None
    return ids, torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments).expand_as(ids)


def _none(ids: Tensor) -> Guess:
    return Guess(ids[:, :0], torch.zeros_like(ids[:, :0], dtype=torch.bool))


def _longer(history: History, ids: Tensor, there: Tensor) -> History:
    """With one token more in each row [b], where it is `there`."""
    new = torch.ones_like(there)
    return History(*(torch.cat((x, y[:, None]), dim=1) for x, y in zip(history, (ids, there, new), strict=True)))


# -- judgement ------------------------------------------------------------------------------------------------------


class Answers:
    """What each row has said so far."""

    def __init__(
        self,
        rooms: Sequence[int],
        stop: Sequence[int],
        filler: int,
        processors: Sequence[Processor],
        seeds: Tensor | None,
        device: torch.device,
    ):
        self.processors, self.seeds, self.filler = processors, seeds, filler
        self.room, self.ending = (torch.tensor(list(x), dtype=torch.long, device=device) for x in (rooms, stop))
        self.ids = torch.full((len(rooms), max(rooms, default=0)), filler, device=device)
        self.count, self.drafted, self.accepted = (torch.zeros_like(self.room) for _ in range(3))
        self.going, self.spoilt = self.room > 0, torch.zeros_like(self.room, dtype=torch.bool)

    def newest(self) -> Tensor:
        """The token that each row said last, [b]."""
        return self.ids.gather(1, (self.count - 1).clamp(min=0)[:, None])[:, 0]

    def judge(self, history: History, logits: Tensor, guess: Guess) -> None:
        """Says the guesses that stay and one token more. The history ends with the guesses, k of them, and the logits
        [b, k + 1, v] are of what comes before each of them and after the last."""
        asked, width = self.going, guess.ids.shape[1]
        for n in range(width + 1):
            known = torch.arange(history.ids.shape[1], device=logits.device) < history.ids.shape[1] - width + n
            here = process(self.processors, history._replace(there=history.there & known), logits[:, n])
            if n < width:
                token, there = guess.ids[:, n], guess.there[:, n]
                choice, stays = self._test(here, token, there, None if guess.p is None else guess.p[:, n])
            else:
                choice, stays = _choose(here, self.seeds, self.count), torch.zeros_like(asked)
            said = torch.where(choice.ok, choice.ids, self.filler)
            at = self.count.clamp(max=self.ids.shape[1] - 1)[:, None]
            self.ids.scatter_(1, at, torch.where(asked, said, self.ids.gather(1, at)[:, 0])[:, None])
            self.count = self.count + asked
            self.accepted = self.accepted + (asked & stays)
            self.spoilt = self.spoilt | (asked & ~choice.ok)
            over = ~choice.ok | torch.isin(said, self.ending) | (self.count >= self.room)
            self.going = self.going & ~(asked & over)
            asked = asked & stays & self.going
        self.drafted = self.drafted + guess.there.sum(dim=1)

    def _test(self, logits: Tensor, token: Tensor, there: Tensor, q: Tensor | None) -> tuple[Choice, Tensor]:
        """The next token of each row, and whether it is the one that was guessed."""
        if q is None or self.seeds is None:
            choice = _choose(logits, self.seeds, self.count)
            return choice, there & (choice.ids == token)
        logits = logits.to(widest(logits.device))
        p = logits.softmax(dim=-1)
        u = (bits(self.seeds, self.count + TESTED, 1)[:, 0].to(p.dtype) + 0.5) * 2.0**-52
        p_token, q_token = (x.gather(1, token[:, None])[:, 0] for x in (p, q))
        stays = there & (u * q_token < p_token)
        rest = (p - q).clamp(min=0)
        instead = there & ~stays & (rest.sum(dim=-1) > 0)  # it is 0 only by rounding, and never without one
        choice = _choose(torch.where(instead[:, None], rest.log(), logits), self.seeds, self.count)
        return Choice(torch.where(stays, token, choice.ids), choice.ok), stays


def _choose(logits: Tensor, seeds: Tensor | None, steps: Tensor) -> Choice:
    return greedy(logits) if seeds is None else sample(logits, seeds, steps)


def _check(model: Transformer, draft: object) -> None:
    if not isinstance(draft, Draft | Lookup):
        what = f"must be Draft(model) or Lookup(ngram=n), got {type(draft).__name__}"
        raise ConfigError([Fault("draft", what)])
    if isinstance(draft, Draft) and (wrong := _misfit(model.config, draft.model.config)):
        raise ConfigError([Fault("draft", wrong)])


def _check_positions(draft: Transformer, ids: Tensor, segments: Tensor | None) -> None:
    """Refuse a draft model that cannot read the prompts, or the sources; at the end of its positions it only stops."""
    stack, read = draft.encoder or draft.decoder, draft.source or draft.target
    if stack is None or read is None or not stack.ends:
        return
    (limit, what), length = stack.ends[0], read.measure(ids)[1]
    if segments is not None:
        length = int(real(segments).sum(dim=1).amax())
    if length > limit:
        fix = "give shorter ones, or another draft"
        raise ConfigError([Fault("draft", f"has {limit} {what}, and what it reads first is of {length} tokens: {fix}")])


def _misfit(ours: ModelConfig, its: ModelConfig) -> str | None:
    """What keeps one model from guessing what another says."""
    if not isinstance(its.head, LM) or its.decoder is None:
        return "guesses no tokens: must be a model with a decoder and an `lm` head"
    shapes = ["decoder-only" if config.encoder is None else "encoder-decoder" for config in (its, ours)]
    if shapes[0] != shapes[1]:
        return f"is {shapes[0]}: must be {shapes[1]} like the model"
    for name in ("source", "target"):
        a, b = getattr(its, name), getattr(ours, name)
        if type(a) is not type(b):
            return f"has a {name} of kind '{a.kind}': must be '{b.kind}' like the model's"
        if isinstance(a, Tokens) and a.vocab != b.vocab:
            return f"has a {name} vocabulary of {a.vocab}: must be {b.vocab} like the model's"
    return None

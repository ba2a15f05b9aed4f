"""Beam search: the `beams` likeliest beginnings of an answer go on side by side, and the best ends are kept.

A hypothesis of n tokens, its stop id included, scores the sum of its log-probabilities / n^length_penalty. All
hypotheses and scores are those of `transformers`, with these differences: a beam that does not exist yet, or is banned
altogether, is dead rather than very unlikely, so that no hypothesis comes twice and a beam may be wider than the
vocabulary; and a prompt is searched as if it were alone, whatever the rest of the batch does.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn.functional import one_hot

from anyformer.cache.kv_cache import CacheKind
from anyformer.config.spec import ConfigError, Fault, Number, Size
from anyformer.decoding.check import check_call
from anyformer.decoding.constraints.constraint import Constraint, check_fit
from anyformer.decoding.constraints.phrases import Phrase, Phrases, shortest
from anyformer.decoding.generate import Spoilt, patience_of
from anyformer.decoding.logit_processors import Processing, Processor, process
from anyformer.decoding.session import Read, Session, evaluating
from anyformer.decoding.step import compiled
from anyformer.decoding.top_k import top
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.model import Transformer

EarlyStopping = Literal["first", "heuristic", "never"]
"""When a search ends that has `beams` hypotheses (in `transformers`: True, False, "never").

first: at once. heuristic: when the likeliest beam, were it to end at its present length, scores no better than the
worst of them. never: when it cannot score better whatever its length.
"""


class Beam(Processing):
    """The likeliest answers as a whole."""

    beams: Size
    n_best: Size = 1
    length_penalty: Number = 1.0
    early_stopping: EarlyStopping = "heuristic"
    groups: Size = 1
    diversity_penalty: Number = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        faults = []
        if self.n_best > self.beams:
            faults.append(Fault("n_best", f"= {self.n_best}: must be from 1 to the number of beams, {self.beams}"))
        if self.groups > 1 and self.beams % self.groups:
            faults.append(Fault("groups", f"= {self.groups}: must divide beams = {self.beams}"))
        penalty = self.diversity_penalty
        if self.groups > 1 and penalty <= 0:
            faults.append(Fault("diversity_penalty", f"= {penalty}: must be above 0, or all groups are equal"))
        if self.groups == 1 and penalty != 0:
            faults.append(Fault("diversity_penalty", f"= {penalty}: needs groups, and there is 1"))
        if faults:
            raise ConfigError(faults)
        return self


class Hypotheses(NamedTuple):
    """The best answers to each prompt, the best first. Where there are fewer than asked for, a length of 0 and a score
    of -inf."""

    ids: Tensor  # int [b, n_best, length]: the prompt, or the start id, then the answer, then padding
    scores: Tensor  # [b, n_best]
    lengths: Tensor  # int [b, n_best]: of the answers, their stop ids included


def beam_search(
    model: Transformer,
    ids: Tensor,
    *,
    beams: int = 4,
    max_new_tokens: int | Sequence[int] = 20,
    n_best: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = "heuristic",
    stop: Sequence[int] = (),
    groups: int = 1,
    diversity_penalty: float = 0.0,
    phrases: Sequence[Phrase] = (),
    constraint: Constraint | None = None,
    processors: Sequence[Processor] = (),
    segments: Tensor | None = None,
    marks: Tensor | None = None,
    cache: CacheKind = "auto",
    compile: bool = False,
) -> Hypotheses:
    """The best continuations of prompts [b, t], or answers to sources [b, s]; ids, segments, marks, cache and `compile`
    as in `generate`.

    A length penalty above 0 favours long answers, below 0 short ones. Processors change log-probabilities, and so
    scores. A `constraint` holds for every hypothesis: one that is cut off before it is met counts for nothing.

    groups: diverse beam search (Vijayakumar et al. 2018). Groups of beams / groups are searched one after the other at
    each step; what a token is worth to one falls by the penalty for every beam of earlier groups that just chose it.
    Scores are without it.

    phrases: sequences of ids that must stand in the answer, by dynamic beam allocation (Post & Vilar 2018).
    """
    how = Beam(
        beams=beams,
        n_best=n_best,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        groups=groups,
        diversity_penalty=diversity_penalty,
    )
    given = {"constraint": constraint, "segments": segments, "marks": marks, "cache": cache, "compile": compile}
    rooms, stop = check_call(model, ids, max_new_tokens, stop, phrases=phrases, processors=processors, **given)
    _check_room(min(rooms, default=1), groups, phrases)
    with evaluating(model):
        longest = max(rooms, default=1)
        session = Session(
            model, ids, longest, segments=segments, marks=marks, cache=cache, copies=beams, compile=compile
        )
        device, vocab = session.ids.device, session.logits.shape[-1]
        needed = Phrases(phrases, vocab=vocab, stop=stop) if phrases else None
        if constraint is not None:
            check_fit(constraint, vocab, stop)
        automata = [automaton for automaton in (constraint, needed) if automaton is not None]
        limits = Limits(processors, automata, needed, rooms)
        # what others do with log-probabilities may ask the host
        key = ("search", how, tuple(stop), longest) if not processors and not automata else None

        def make() -> Search:
            return Search(how, len(ids), longest, stop, at_least_fp32(session.logits))

        search = make() if key is None else session.place.keep(key, make)
        search.begin(rooms)
        limits.begin(search)

        def choose(logits: Tensor) -> None:
            if key is None or groups > 1:
                limits.choose(search, session, logits)
            else:
                run = compiled(likeliest, id(model), len(logits)) if compile else likeliest
                run(search, logits)

        def move(read: Read) -> None:
            limits.advance(search)
            session.reorder(search.rows)
            choose(read(search.newest, search.there))  # what is over may have no position

        patience = patience_of(device, ends=bool(stop) or constraint is not None)
        session.first(choose, key)
        for new in range(1, longest):
            if new % patience == 0 and not bool(search.going.any()):
                break
            session.go(move, key)
        best = _best(search, session.ids[::beams, : session.prompt], n_best, session.filler(stop))
        spoilt = search.spoilt.nonzero()[:, 0].tolist()
        session.close()
    if spoilt:
        raise SpoiltSearch(spoilt, best)
    return best


class SpoiltSearch(Spoilt):
    """Rows that have no hypothesis, since their logits were no distribution; `found` has those of the others."""

    def __init__(self, rows: list[int], found: Hypotheses):
        super().__init__(rows, found.ids)
        self.found = found


class Search:
    """How far the searches are, one for each prompt and group [n], of w beams each: tensors that stay where they are,
    so that a step can be captured."""

    def __init__(self, how: Beam, batch: int, longest: int, stop: Sequence[int], logits: Tensor):
        def whole(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=logits.device)

        n, width = batch * how.groups, how.beams // how.groups
        self.how, self.batch, self.width, self.vocab = how, batch, width, logits.shape[-1]
        self.pool = max(2, 1 + len(stop)) * width  # so that beams are left when all others end
        self.ending = torch.tensor(list(stop), dtype=torch.long, device=logits.device)
        self.step, self.room = whole(1), whole(n)
        lengths = torch.arange(longest + 1, dtype=torch.float64)
        self.divisors = (lengths**how.length_penalty).to(logits)  # of the scores of so many tokens
        # beams: their log-probabilities, and answers so far
        self.running, self.answers = logits.new_zeros(n, width), whole(n * width, longest)
        # the best hypotheses so far, best first; of length 0: none
        self.scores, self.lengths, self.ids = logits.new_zeros(n, width), whole(n, width), whole(n, width, longest)
        self.going, self.spoilt = whole(n).bool(), whole(batch).bool()
        # how beams go on: from which row each, and with which token
        self.rows, self.newest, self.there = whole(n * width), whole(n * width, 1), whole(n * width, 1).bool()

    def begin(self, rooms: Sequence[int]) -> None:
        self.room.copy_(torch.tensor(rooms).repeat_interleave(self.how.groups))
        for x in (self.step, self.lengths, self.answers, self.ids, self.spoilt):
            x.zero_()
        self.scores.fill_(-math.inf)
        self.running.fill_(-math.inf)
        self.running[:, 0] = 0.0  # all are the same prompt yet
        self.going.fill_(True)

    def spoil(self, rows: Tensor) -> Tensor:
        """Ends the prompts of those rows [b * beams] that have no distribution; the rows of all that ended so."""
        self.spoilt |= rows.view(self.batch, -1).any(dim=1)
        return self.spoilt.repeat_interleave(self.how.beams)[:, None]

    def settle(self, found: "Candidates", met: Tensor | None = None) -> None:
        """Goes on with the best of what was found; `met`: which of the first w may end at the last step [n, w]."""
        how, width, step, new = self.how, self.width, self.step.clone(), self.step + 1
        first = torch.arange(len(found.flat), device=step.device)[:, None] * width  # the row of each first beam
        parents, tokens = first + found.flat // self.vocab, found.flat % self.vocab
        last, divisor = self.room == new, self.divisors[new]

        # only the best `width` may become hypotheses: the others are there to go on
        stops, scores = found.stops[:, :width], found.scores[:, :width]
        ends = (stops | last[:, None]) & (scores > -math.inf) & self.going[:, None]
        if met is not None:
            ends = ends & (stops | met)
        ended = self.answers[parents[:, :width]].index_copy(2, step, tokens[:, :width, None])
        scores = torch.cat((self.scores, (scores / divisor).where(ends, -math.inf)), dim=1)
        scores, best = scores.topk(width)
        self.scores.copy_(scores)
        self.lengths.copy_(torch.cat((self.lengths, ends * new), dim=1).gather(1, best))
        places = best[..., None].expand(-1, -1, ended.shape[2])
        self.ids.copy_(torch.cat((self.ids, ended), dim=1).gather(1, places))

        running = found.scores.masked_fill(found.stops, -math.inf).gather(1, found.on)
        if how.early_stopping == "never" and how.length_penalty > 0:
            divisor = self.divisors[self.room]
        full = (self.lengths > 0).all(dim=1)
        going = self.going & (running.amax(dim=1) / divisor > scores.amin(dim=1).where(full, -math.inf)) & ~last
        self.going.copy_(going & ~full if how.early_stopping == "first" else going)
        rows, newest = parents.gather(1, found.on).flatten(), tokens.gather(1, found.on).flatten()[:, None]
        self.answers.copy_(self.answers[rows].index_copy(1, step, newest))
        self.running.copy_(running)
        self.rows.copy_(rows)
        self.newest.copy_(newest)
        self.there.copy_(self.going.repeat_interleave(width)[:, None])
        self.step += 1


def likeliest(search: Search, logits: Tensor) -> None:
    """A step where nothing changes log-probabilities [b * w, v]: of each beam only the best are looked at."""
    width, vocab, pool = search.width, search.vocab, search.pool
    found, token, total = top(logits, min(pool, vocab))
    log_p = at_least_fp32(found) - total  # of NaN anywhere, NaN
    log_p = log_p.masked_fill(search.spoil(log_p.isnan().any(dim=1)), -math.inf)
    scores = (search.running.view(-1, 1) + log_p).view(search.batch, -1)
    flat = (token.view(search.batch, width, -1) + torch.arange(width, device=token.device)[:, None] * vocab).flatten(1)
    scores, best = scores.topk(min(pool, scores.shape[1]))
    search.settle(_candidates(flat.gather(1, best), scores, width, vocab, search.ending))


class Limits:
    """What changes log-probabilities: processors, automata, the diversity of groups."""

    def __init__(
        self,
        processors: Sequence[Processor],
        automata: Sequence[Constraint],
        phrases: Phrases | None,
        rooms: Sequence[int],
    ):
        self.processors, self.automata, self.phrases, self.rooms = processors, automata, phrases, rooms
        self.new, self.states = 1, list[Tensor]()

    def begin(self, search: Search) -> None:
        self.states = [torch.full_like(search.rows, automaton.start()) for automaton in self.automata]

    def advance(self, search: Search) -> None:
        """Goes on as the beams do."""
        rows, added = search.rows, search.newest[:, 0]
        self.new += 1
        self.states = [a.advance(state[rows], added) for a, state in zip(self.automata, self.states, strict=True)]

    def choose(self, search: Search, session: Session, logits: Tensor) -> None:
        """A step of the search."""
        width, groups, left = search.width, search.how.groups, search.room - search.step - 1
        log_p = at_least_fp32(logits).log_softmax(dim=-1)
        spoilt = search.spoil(log_p.isnan().any(dim=1))
        log_p = process(self.processors, session.history, log_p)
        for automaton, state in zip(self.automata, self.states, strict=True):
            log_p = log_p.masked_fill(~automaton.in_time(state, left.repeat_interleave(width) + 1), -math.inf)
        log_p = log_p.masked_fill(spoilt, -math.inf)
        scores = search.running[..., None] + log_p.view(-1, width, search.vocab)
        if self.phrases is None:
            penalty = search.how.diversity_penalty
            found = _diverse(scores.view(search.batch, groups, -1), width, search.pool, penalty, search.ending)
        else:
            states = self.states[-1].view(search.batch, width)
            found = _allocated(scores, search.pool, self.phrases, states, left, search.ending)
        search.settle(found, self._met(search, found))

    def _met(self, search: Search, found: "Candidates") -> Tensor | None:
        """Which of the first w candidates meet all automata, bool [n, w]."""
        if not self.automata or self.new not in self.rooms:  # only there is an answer cut off
            return None
        first = torch.arange(len(found.flat), device=found.flat.device)[:, None] * search.width
        rows, added = first + found.flat // search.vocab, found.flat % search.vocab
        rows, added = rows[:, : search.width], added[:, : search.width]
        met = torch.ones_like(rows, dtype=torch.bool)
        for automaton, state in zip(self.automata, self.states, strict=True):
            met &= automaton.accepting(automaton.advance(state[rows.flatten()], added.flatten())).view_as(met)
        return met


class Candidates(NamedTuple):
    """Ways on for each search, the preferred first, and those that go on."""

    flat: Tensor  # int [n, k], beam * vocab + token
    scores: Tensor  # [n, k]; -inf where there is none
    stops: Tensor  # bool [n, k]: with a stop id
    on: Tensor  # int [n, w], of k


def _candidates(index: Tensor, scores: Tensor, width: int, vocab: int, ending: Tensor) -> Candidates:
    stops = torch.isin(index % vocab, ending)
    over = stops | scores.isneginf()
    return Candidates(index, scores, stops, over.byte().argsort(dim=1, stable=True)[:, :width])


def _diverse(scores: Tensor, width: int, pool: int, penalty: float, ending: Tensor) -> Candidates:
    """The likeliest of [b, groups, width * vocab], each group less what earlier ones chose: [b * groups, pool]."""
    vocab = scores.shape[2] // width
    chosen = scores.new_zeros(len(scores), vocab)  # how often
    parts = []
    for group in scores.unbind(dim=1):
        index = (group - penalty * chosen.repeat(1, width)).topk(min(pool, group.shape[1])).indices
        part = _candidates(index, group.gather(1, index), width, vocab, ending)
        there = ~part.scores.gather(1, part.on).isneginf()
        chosen = chosen.scatter_add(1, (index % vocab).gather(1, part.on), there.to(chosen.dtype))
        parts.append(part)
    return Candidates(*(torch.stack(part, dim=1).flatten(0, 1) for part in zip(*parts, strict=True)))


def _allocated(scores: Tensor, pool: int, phrases: Phrases, states: Tensor, left: Tensor, ending: Tensor) -> Candidates:
    """Of scores [b, w, vocab], the best with every number of phrase tokens still missing, in turn: the best of each
    bank, then the second best of each, and so on, the one that misses least first.

    Besides the likeliest, every beam's likeliest token and all those that bring one of its phrases on are considered;
    and none that misses more tokens than there are `left` [b], so that no beam runs out of time.
    """
    (batch, width, vocab), flat = scores.shape, scores.flatten(1)
    likeliest = scores.argmax(dim=-1, keepdim=True)
    wanted = phrases.wanted(states.flatten()).view(batch, width, -1)
    each = torch.cat((likeliest, wanted.where(wanted >= 0, likeliest)), dim=-1)
    each = (each + torch.arange(width, device=scores.device)[:, None] * vocab).flatten(1)
    considered = torch.cat((flat.topk(min(pool, flat.shape[1])).indices, each), dim=1)
    seen = torch.zeros_like(flat, dtype=torch.bool).scatter(1, considered, True)  # each of them once
    values, index = flat.where(seen, -math.inf).topk(min(considered.shape[1], flat.shape[1]))

    before = states.gather(1, index // vocab).flatten()
    missing = phrases.total - phrases.progress(phrases.advance(before, (index % vocab).flatten())).view_as(index)
    values = values.masked_fill(missing > left[:, None], -math.inf)
    bank = missing.masked_fill(values.isneginf(), phrases.total + 1)  # those that are none have their own
    turn = one_hot(bank, phrases.total + 2).cumsum(dim=1).gather(2, bank[..., None])[..., 0]
    turn = turn.masked_fill(values.isneginf(), index.shape[1] + 1)
    order = (turn * (phrases.total + 2) + bank).argsort(dim=1, stable=True)[:, :pool]
    return _candidates(index.gather(1, order), values.gather(1, order), width, vocab, ending)


def _best(finished: Search, prompts: Tensor, n_best: int, filler: int) -> Hypotheses:
    """The best of all groups, none of them twice."""
    batch, longest = len(prompts), finished.ids.shape[2]
    scores, lengths = finished.scores.view(batch, -1), finished.lengths.view(batch, -1)
    place = torch.arange(longest, device=prompts.device)
    ids = finished.ids.view(batch, -1, longest).where(place < lengths[..., None], -1)
    if len(finished.ids) > batch:  # groups may have come to the same
        twins = (ids[:, :, None] == ids[:, None]).all(dim=-1)
        scores = scores.masked_fill(twins.tril(-1).any(dim=2), -math.inf)
    scores, best = scores.topk(n_best)
    lengths = lengths.gather(1, best).where(scores > -math.inf, 0)
    ids = ids.gather(1, best[..., None].expand(-1, -1, longest))
    ids = ids.where(place < lengths[..., None], filler)[..., : int(lengths.max())]
    prompts = prompts[:, None].expand(-1, n_best, -1)
    return Hypotheses(torch.cat((prompts, ids.to(prompts.dtype)), dim=-1), scores, lengths)


def _check_room(room: int, groups: int, phrases: Sequence[Phrase]) -> None:
    faults = []
    if room < 1:
        faults.append(Fault("max_new_tokens", f"= {room}: must be at least 1"))
    if groups > 1 and phrases:
        faults.append(Fault("phrases", "share one beam out among them: leave groups at 1"))
    if (tokens := sum(map(shortest, phrases))) > room:
        faults.append(Fault("phrases", f"have {tokens} tokens: max_new_tokens = {room} has no room for them"))
    if faults:
        raise ConfigError(faults)

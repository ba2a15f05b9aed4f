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
from torch.nn.functional import one_hot, pad

from anyformer.config.spec import ConfigError, Fault, Number, Size
from anyformer.decoding.constrain import Constraint, check_fit
from anyformer.decoding.decode import Spoilt, rooms_of
from anyformer.decoding.phrases import Phrase, Phrases, shortest
from anyformer.decoding.process import Processing, Processor, process
from anyformer.decoding.session import Session, evaluating
from anyformer.nn.cache import CacheKind
from anyformer.nn.model import Transformer
from anyformer.nn.norm import at_least_fp32

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
) -> Hypotheses:
    """The best continuations of prompts [b, t], or answers to sources [b, s]; ids, segments, marks and cache as in
    `generate`.

    A length penalty above 0 favours long answers, below 0 short ones. Processors change log-probabilities, and so
    scores. A `constraint` holds for every hypothesis: one that is cut off before it is met counts for nothing.

    groups: diverse beam search (Vijayakumar et al. 2018). Groups of beams / groups are searched one after the other at
    each step; what a token is worth to one falls by the penalty for every beam of earlier groups that just chose it.
    Scores are without it.

    phrases: sequences of ids that must stand in the answer, by dynamic beam allocation (Post & Vilar 2018).
    """
    Beam(
        beams=beams,
        n_best=n_best,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        groups=groups,
        diversity_penalty=diversity_penalty,
    )
    rooms = rooms_of(max_new_tokens, len(ids))
    _check_room(min(rooms), groups, phrases)
    with evaluating(model):
        longest = max(rooms)
        session = Session(model, ids, longest, segments=segments, marks=marks, cache=cache, copies=beams)
        vocab, device, width = session.logits.shape[-1], session.ids.device, beams // groups
        batch, searches = len(session.ids) // beams, len(session.ids) // width
        ending = torch.tensor(list(stop), dtype=torch.long, device=device)
        needed = Phrases(phrases, vocab=vocab, stop=stop) if phrases else None
        if constraint is not None:
            check_fit(constraint, vocab, stop)
        automata = [automaton for automaton in (constraint, needed) if automaton is not None]
        states = [torch.full((len(session.ids),), automaton.start(), device=device) for automaton in automata]

        first = torch.arange(searches, device=device)[:, None] * width  # the row of each search's first beam
        running = at_least_fp32(session.logits).new_full((searches, width), -math.inf)  # log-probabilities of the beams
        running[:, 0] = 0.0  # all are the same prompt yet
        finished = Finished(searches, width, longest, running)
        room = torch.tensor(rooms, device=device).repeat_interleave(groups)  # of each search
        going = torch.ones(searches, dtype=torch.bool, device=device)
        spoilt = torch.zeros(batch, dtype=torch.bool, device=device)
        for new in range(1, longest + 1):
            left = room - new
            last = left == 0
            log_p = at_least_fp32(session.logits).log_softmax(dim=-1)
            spoilt |= log_p.isnan().view(batch, -1).any(dim=1)
            log_p = process(processors, session.history, log_p)
            for automaton, state in zip(automata, states, strict=True):
                log_p = log_p.masked_fill(~automaton.in_time(state, left.repeat_interleave(width) + 1), -math.inf)
            log_p = log_p.masked_fill(spoilt.repeat_interleave(beams)[:, None], -math.inf)
            scores = running[..., None] + log_p.view(searches, width, vocab)

            pool = max(2, 1 + len(stop)) * width  # so that beams are left when all others end
            if needed is None:
                found = _diverse(scores.view(batch, groups, -1), width, pool, diversity_penalty, ending)
            else:
                found = _allocated(scores, pool, needed, states[-1].view(batch, width), left, ending)
            parents, tokens = first + found.flat // vocab, found.flat % vocab

            # only the best `width` may become hypotheses: the others are there to go on
            rows, added = parents[:, :width], tokens[:, :width]
            stops = found.stops[:, :width]
            ends = (stops | last[:, None]) & (found.scores[:, :width] > -math.inf) & going[:, None]
            for automaton, state in zip(automata, states, strict=True) if new in rooms else ():
                after = automaton.advance(state[rows.flatten()], added.flatten())
                ends &= stops | automaton.accepting(after).view_as(ends)
            answers = torch.cat((session.answers[rows], added[..., None]), dim=-1)
            finished.add(answers, found.scores[:, :width] / new**length_penalty, ends)

            running = found.scores.masked_fill(found.stops, -math.inf).gather(1, found.on)
            length = room.to(running.dtype) if early_stopping == "never" and length_penalty > 0 else new
            full = (finished.lengths > 0).all(dim=1)
            going &= running.amax(dim=1) / length**length_penalty > finished.scores.amin(dim=1).where(full, -math.inf)
            going &= ~last
            if early_stopping == "first":
                going &= ~full
            if not bool(going.any()):
                break
            rows, added = parents.gather(1, found.on).flatten(), tokens.gather(1, found.on).flatten()
            states = [a.advance(state[rows], added) for a, state in zip(automata, states, strict=True)]
            session.reorder(rows)
            session.read(added[:, None], going.repeat_interleave(width)[:, None])  # what is over may have no position
        best = _best(finished, session.ids[::beams, : session.prompt], n_best, session.filler(stop))
    if bool(spoilt.any()):
        raise SpoiltSearch(spoilt.nonzero()[:, 0].tolist(), best)
    return best


class SpoiltSearch(Spoilt):
    """Rows that have no hypothesis, since their logits were no distribution; `found` has those of the others."""

    def __init__(self, rows: list[int], found: Hypotheses):
        super().__init__(rows, found.ids)
        self.found = found


class Finished:
    """The best hypotheses of each search so far, best first: as many as it has beams."""

    def __init__(self, searches: int, width: int, longest: int, like: Tensor):
        self.scores = torch.full((searches, width), -math.inf, dtype=like.dtype, device=like.device)
        self.lengths = torch.zeros(searches, width, dtype=torch.long, device=like.device)  # 0: there is none
        self.ids = torch.zeros(searches, width, longest, dtype=torch.long, device=like.device)

    def add(self, ids: Tensor, scores: Tensor, ends: Tensor) -> None:
        """Takes those of ids [n, w, t] that `end` and are good enough."""
        length, longest = ids.shape[2], self.ids.shape[2]
        scores = torch.cat((self.scores, scores.where(ends, -math.inf)), dim=1)
        lengths = torch.cat((self.lengths, ends * length), dim=1)
        ids = torch.cat((self.ids, pad(ids, (0, longest - length))), dim=1)
        self.scores, best = scores.topk(self.scores.shape[1])
        self.lengths = lengths.gather(1, best)
        self.ids = ids.gather(1, best[..., None].expand(-1, -1, longest))


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


def _best(finished: Finished, prompts: Tensor, n_best: int, filler: int) -> Hypotheses:
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

"""Beam search: extend the `beams` most probable beginnings of an answer together, and keep the best finished ones.

A hypothesis of n tokens, its stop id included, scores the sum of its log-probabilities / n^length_penalty. Hypotheses
and scores are those of `transformers`, with two differences. A beam that does not exist yet, or is banned altogether,
is dead rather than improbable: no hypothesis occurs twice, and there may be more beams than tokens in the vocabulary. A
prompt is searched as if it were alone, whatever the rest of the batch does.
"""

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from anyformer.generation.constraints.constraint import Constraint, check_fit
from anyformer.generation.constraints.phrases import Phrases
from anyformer.generation.generate import NonFiniteLogits, steps_between_checks
from anyformer.generation.logit_processors import History, Processor, build, process
from anyformer.generation.request import Request, check_request
from anyformer.generation.session import Session
from anyformer.generation.step import compiled
from anyformer.generation.strategy import Beam
from anyformer.generation.top_k import top_candidates, topk_short
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.eval_mode import run_steps
from anyformer.nn.model import Transformer


class Hypotheses(NamedTuple):
    """The n-best list of each prompt, best first. Missing hypotheses have length 0 and score -inf."""

    ids: Tensor  # int [b, n_best, length]: the prompt or the start id, then the answer, then padding
    scores: Tensor  # [b, n_best]
    lengths: Tensor  # int [b, n_best]: of the answers, their stop ids included


class NonFiniteSearch(NonFiniteLogits):
    """Prompts without a hypothesis, since their logits were not finite; `found` has the hypotheses of the others."""

    def __init__(self, rows: list[int], found: Hypotheses):
        super().__init__(rows, found.ids)
        self.found = found


def beam_search(model: Transformer, ids: Tensor, *, beams: int = 4, **options: Any) -> Hypotheses:
    """Return the best continuations of prompts [b, t], or answers to sources [b, s].

    `options` are those of `Request` and of `Beam`, and its filters.

    groups: diverse beam search (Vijayakumar et al. 2018). Groups of beams / groups are searched one after the other at
    each step; a token's score falls by the penalty for every beam of earlier groups that just chose it. The hypotheses'
    scores are without it.

    constraint, phrases: they hold for every hypothesis; one that is cut off before it meets them is dropped. Phrases
    are brought in by dynamic beam allocation (Post & Vilar 2018).

    processors: they change log-probabilities, and so scores.
    """
    return run_beam_search(model, Request.of(Beam, ids, {"beams": beams, **options}))


def run_beam_search(model: Transformer, request: Request) -> Hypotheses:
    """Search for the best hypotheses of a request; raise `NonFiniteSearch` if rows failed."""
    return run_steps(model, search_steps(model, request))


def search_steps(model: Transformer, request: Request) -> Generator[None, None, Hypotheses]:
    """Do the same step by step, within `evaluating(model)`."""
    check_request(model, request)
    strategy = request.strategy
    assert isinstance(strategy, Beam)
    session, stop = Session(model, request, copies=strategy.beams), request.stop_ids
    # with an empty batch the loop still needs one step
    longest = max(request.budgets, default=1)
    rules = Rules(request, session.logits.shape[-1], session.ids.device)
    key = None if rules.may_synchronise else ("search", strategy, stop, longest)

    search = session.buffers.keep(
        key, lambda: Search(strategy, len(request.ids), longest, stop, at_least_fp32(session.logits))
    )
    search.begin(request.budgets)
    rules.begin(search)

    def choose(logits: Tensor) -> None:
        plain = compiled(choose_top, id(model), len(logits)) if request.compile else choose_top
        rules.choose(search, lambda: session.history, logits, plain)

    def move() -> None:
        rules.advance(search)
        session.reorder(search.rows)
        choose(session.read(search.newest, search.present)[:, -1])  # a finished row may have no position left

    can_end = bool(stop) or request.constraint is not None
    interval = steps_between_checks(session.ids.device, can_end)
    session.run_first(choose, key)
    for new in range(1, longest):
        if new % interval == 0 and not bool(search.running.any()):
            break
        session.run_step(move, key)
        yield
    best = best_hypotheses(search, session.prompt_ids.to(session.ids.dtype), strategy.n_best, session.fill_id(stop))
    failed = search.failed.nonzero()[:, 0].tolist()
    session.close()
    if failed:
        raise NonFiniteSearch(failed, best)
    return best


class Search:
    """The state of all searches, one for each prompt and group [n], of w beams each: tensors with fixed addresses, so
    that steps are captured."""

    def __init__(self, strategy: Beam, batch: int, longest: int, stop: Sequence[int], logits: Tensor):
        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.long, device=logits.device)

        n, width = batch * strategy.groups, strategy.beams // strategy.groups
        self.strategy, self.batch, self.width, self.vocab = strategy, batch, width, logits.shape[-1]
        self.pool = max(2, 1 + len(stop)) * width  # candidates: enough beams remain when all others end
        self.stop = torch.tensor(list(stop), dtype=torch.long, device=logits.device)
        self.step, self.budgets = integers(1), integers(n)
        lengths = torch.arange(longest + 1, dtype=torch.float64)
        self.divisors = (lengths**strategy.length_penalty).to(logits)  # of the scores, by length
        # beams: their log-probabilities, and answers so far
        self.log_p, self.answers = logits.new_zeros(n, width), integers(n * width, longest)
        # the best hypotheses so far, best first; length 0: none
        self.scores, self.lengths, self.ids = (
            logits.new_zeros(n, width),
            integers(n, width),
            integers(n, width, longest),
        )
        self.running, self.failed = integers(n).bool(), integers(batch).bool()
        # the next step of each beam: the row it continues, its token, and whether it is read
        self.rows, self.newest, self.present = (
            integers(n * width),
            integers(n * width, 1),
            integers(n * width, 1).bool(),
        )

    def begin(self, budgets: Sequence[int]) -> None:
        self.budgets.copy_(torch.tensor(budgets).repeat_interleave(self.strategy.groups))
        for x in (self.step, self.lengths, self.answers, self.ids, self.failed):
            x.zero_()
        self.scores.fill_(-math.inf)
        self.log_p.fill_(-math.inf)
        self.log_p[:, 0] = 0.0  # the beams are copies of one prompt: only the first is alive
        self.running.fill_(True)

    def mark_nonfinite(self, rows: Tensor) -> Tensor:
        """End the prompts of rows [b * beams] without a distribution; return the rows of all prompts ended so."""
        self.failed |= rows.view(self.batch, -1).any(dim=1)
        return self.failed.repeat_interleave(self.strategy.beams)[:, None]

    def update(self, found: "Candidates", complete: Tensor | None = None) -> None:
        """Continue with the best candidates; `complete` [n, w]: which of the first w may end at the last step."""
        strategy, width, step, new = self.strategy, self.width, self.step.clone(), self.step + 1
        first = torch.arange(len(found.flat), device=step.device)[:, None] * width  # the row of each first beam
        parents, tokens = first + found.flat // self.vocab, found.flat % self.vocab
        last, divisor = self.budgets == new, self.divisors[new]

        # only the best `width` may become hypotheses: the others replace beams that end
        stops, scores = found.stops[:, :width], found.scores[:, :width]
        ends = (stops | last[:, None]) & (scores > -math.inf) & self.running[:, None]
        if complete is not None:
            ends = ends & (stops | complete)
        ended = self.answers[parents[:, :width]].index_copy(2, step, tokens[:, :width, None])
        scores = torch.cat((self.scores, (scores / divisor).where(ends, -math.inf)), dim=1)
        scores, best = topk_short(scores, width)
        self.scores.copy_(scores)
        self.lengths.copy_(torch.cat((self.lengths, ends * new), dim=1).gather(1, best))
        index = best[..., None].expand(-1, -1, ended.shape[2])
        self.ids.copy_(torch.cat((self.ids, ended), dim=1).gather(1, index))

        log_p = found.scores.masked_fill(found.stops, -math.inf).gather(1, found.kept)
        if strategy.early_stopping == "never" and strategy.length_penalty > 0:
            divisor = self.divisors[self.budgets]
        full = (self.lengths > 0).all(dim=1)
        running = self.running & (log_p.amax(dim=1) / divisor > scores.amin(dim=1).where(full, -math.inf)) & ~last
        self.running.copy_(running & ~full if strategy.early_stopping == "first" else running)
        rows, newest = parents.gather(1, found.kept).flatten(), tokens.gather(1, found.kept).flatten()[:, None]
        self.answers.copy_(self.answers[rows].index_copy(1, step, newest))
        self.log_p.copy_(log_p)
        self.rows.copy_(rows)
        self.newest.copy_(newest)
        self.present.copy_(self.running.repeat_interleave(width)[:, None])
        self.step += 1


def choose_top(search: Search, logits: Tensor) -> None:
    """Choose where nothing changes log-probabilities [b * w, v]: only the top tokens of each beam are looked at."""
    scores, flat, failed = top_candidates(logits, search.log_p, search.failed, search.pool)
    search.failed.copy_(failed)
    search.update(_candidates(flat, scores, search))


class Rules:
    """Everything that changes log-probabilities: processors, automata, the diversity of groups."""

    def __init__(self, request: Request, vocab: int, device: torch.device):
        stop, constraint = request.stop_ids, request.constraint
        self.budgets = request.budgets
        own = build(request.strategy, vocab=vocab, stop=stop, device=device)
        self.processors: tuple[Processor, ...] = (*request.processors, *own)
        self.phrases = Phrases(request.phrases, vocab=vocab, stop=stop) if request.phrases else None
        if constraint is not None:
            check_fit(constraint, vocab, stop)
        self.automata: list[Constraint] = [a for a in (constraint, self.phrases) if a is not None]
        self.new, self.states = 1, list[Tensor]()

    @property
    def may_synchronise(self) -> bool:
        """True if a step may need the host."""
        return bool(self.processors or self.automata)

    def begin(self, search: Search) -> None:
        self.states = [torch.full_like(search.rows, automaton.start()) for automaton in self.automata]

    def advance(self, search: Search) -> None:
        """Advance the automata by the tokens of the beams."""
        rows, added = search.rows, search.newest[:, 0]
        self.new += 1
        self.states = [a.advance(state[rows], added) for a, state in zip(self.automata, self.states, strict=True)]

    def choose(
        self,
        search: Search,
        history: Callable[[], History],
        logits: Tensor,
        plain: Callable[[Search, Tensor], None] = choose_top,
    ) -> None:
        """Choose the next token of each beam from logits [b * w, v]; `plain` does where there are no rules."""
        if not self.may_synchronise and search.strategy.groups == 1:
            plain(search, logits)
            return
        width, groups, left = search.width, search.strategy.groups, search.budgets - search.step - 1
        log_p = at_least_fp32(logits).log_softmax(dim=-1)
        failed = search.mark_nonfinite(log_p.isnan().any(dim=1))
        log_p = process(self.processors, history(), log_p)
        for automaton, state in zip(self.automata, self.states, strict=True):
            allowed = automaton.allowed_within(state, left.repeat_interleave(width) + 1)
            log_p = log_p.masked_fill(~allowed, -math.inf)
        log_p = log_p.masked_fill(failed, -math.inf)
        scores = search.log_p[..., None] + log_p.view(-1, width, search.vocab)
        if self.phrases is None:
            found = _diverse(scores.view(search.batch, groups, -1), search)
        else:
            found = _allocated(scores, search, self.phrases, self.states[-1].view(search.batch, width), left)
        search.update(found, self._complete(search, found))

    def _complete(self, search: Search, found: "Candidates") -> Tensor | None:
        """Return which of the first w candidates all automata accept, bool [n, w]; None if no budget ends here."""
        if not self.automata or self.new not in self.budgets:
            return None
        first = torch.arange(len(found.flat), device=found.flat.device)[:, None] * search.width
        rows, added = first + found.flat // search.vocab, found.flat % search.vocab
        rows, added = rows[:, : search.width], added[:, : search.width]
        complete = torch.ones_like(rows, dtype=torch.bool)
        for automaton, state in zip(self.automata, self.states, strict=True):
            after = automaton.advance(state[rows.flatten()], added.flatten())
            complete &= automaton.accepting(after).view_as(complete)
        return complete


class Candidates(NamedTuple):
    """Continuations of each search, the preferred first, and those that become beams."""

    flat: Tensor  # int [n, k], beam * vocab + token
    scores: Tensor  # [n, k]; -inf where there is none
    stops: Tensor  # bool [n, k]: with a stop id
    kept: Tensor  # int [n, w], indices into k


def _candidates(index: Tensor, scores: Tensor, search: Search) -> Candidates:
    stops = torch.isin(index % search.vocab, search.stop)
    over = stops | scores.isneginf()
    return Candidates(index, scores, stops, over.byte().argsort(dim=1, stable=True)[:, : search.width])


def _diverse(scores: Tensor, search: Search) -> Candidates:
    """Return the top candidates of [b, groups, width * vocab], each group penalised by the tokens of earlier ones:
    [b * groups, pool]."""
    width, vocab, penalty = search.width, search.vocab, search.strategy.diversity_penalty
    chosen = scores.new_zeros(len(scores), vocab)  # how often
    parts = []
    for group in scores.unbind(dim=1):
        index = (group - penalty * chosen.repeat(1, width)).topk(min(search.pool, group.shape[1])).indices
        part = _candidates(index, group.gather(1, index), search)
        alive = ~part.scores.gather(1, part.kept).isneginf()
        chosen = chosen.scatter_add(1, (index % vocab).gather(1, part.kept), alive.to(chosen.dtype))
        parts.append(part)
    return Candidates(*(torch.stack(part, dim=1).flatten(0, 1) for part in zip(*parts, strict=True)))


def _allocated(scores: Tensor, search: Search, phrases: Phrases, states: Tensor, left: Tensor) -> Candidates:
    """Return the best of scores [b, w, vocab] from each bank in turn, the bank that misses fewest tokens first.

    A bank holds the candidates that miss the same number of phrase tokens. Candidates are the top scores, the top-1
    token of every beam, and all tokens that advance one of its phrases. None may miss more tokens than are `left` [b].
    """
    (batch, width, vocab), flat, pool = scores.shape, scores.flatten(1), search.pool
    top = scores.argmax(dim=-1, keepdim=True)
    wanted = phrases.wanted(states.flatten()).view(batch, width, -1)
    each = torch.cat((top, wanted.where(wanted >= 0, top)), dim=-1)
    each = (each + torch.arange(width, device=scores.device)[:, None] * vocab).flatten(1)
    considered = torch.cat((flat.topk(min(pool, flat.shape[1])).indices, each), dim=1)
    unique = torch.zeros_like(flat, dtype=torch.bool).scatter(1, considered, True)
    values, index = flat.where(unique, -math.inf).topk(min(considered.shape[1], flat.shape[1]))

    before = states.gather(1, index // vocab).flatten()
    missing = phrases.total - phrases.progress(phrases.advance(before, (index % vocab).flatten())).view_as(index)
    values = values.masked_fill(missing > left[:, None], -math.inf)
    bank = missing.masked_fill(values.isneginf(), phrases.total + 1)  # dead candidates have their own bank
    turn = one_hot(bank, phrases.total + 2).cumsum(dim=1).gather(2, bank[..., None])[..., 0]
    turn = turn.masked_fill(values.isneginf(), index.shape[1] + 1)
    order = (turn * (phrases.total + 2) + bank).argsort(dim=1, stable=True)[:, :pool]
    return _candidates(index.gather(1, order), values.gather(1, order), search)


def best_hypotheses(finished: Search, prompts: Tensor, n_best: int, fill: int) -> Hypotheses:
    """Return the best hypotheses of all groups, without duplicates."""
    batch, longest = len(prompts), finished.ids.shape[2]
    scores, lengths = finished.scores.view(batch, -1), finished.lengths.view(batch, -1)
    index = torch.arange(longest, device=prompts.device)
    ids = finished.ids.view(batch, -1, longest).where(index < lengths[..., None], -1)
    if len(finished.ids) > batch:  # groups may have found the same
        equal = (ids[:, :, None] == ids[:, None]).all(dim=-1)
        scores = scores.masked_fill(equal.tril(-1).any(dim=2), -math.inf)
    scores, best = scores.topk(n_best)
    lengths = lengths.gather(1, best).where(scores > -math.inf, 0)
    ids = ids.gather(1, best[..., None].expand(-1, -1, longest))
    ids = ids.where(index < lengths[..., None], fill)[..., : int(lengths.max())]
    prompts = prompts[:, None].expand(-1, n_best, -1)
    return Hypotheses(torch.cat((prompts, ids.to(prompts.dtype)), dim=-1), scores, lengths)

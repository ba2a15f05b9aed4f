"""Generation from texts to texts: answers, n-best lists and streams, under any decoding strategy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from anyformer.attention.padding import pad_rows
from anyformer.config import ConfigError, Fault
from anyformer.generation.beam_search import Hypotheses, NonFiniteSearch, run_beam_search
from anyformer.generation.check import parse_ids
from anyformer.generation.generate import decode
from anyformer.generation.request import Request
from anyformer.generation.sampling import row_seeds
from anyformer.generation.strategy import Beam, Strategy, strategy as make_strategy
from anyformer.kernels.conventions import SEEN
from anyformer.nn.model import Transformer
from anyformer.tasks.answer_budgets import answer_budget, budget_faults, check_context, stop_faults
from anyformer.tasks.base import MAX_INFERENCE_TOKENS, Progress, Writer, check_media, ending_ids, read_media
from anyformer.tasks.output_constraints import OutputConstraints, TokenConstraints, tokenise
from anyformer.tasks.text_stream import NONFINITE, AnswerText, IncrementalDecoder, StopStrings

SETTINGS = ("cache", "chunk", "compile", "reuse")  # fields of `Request` for the cache and the device

T = TypeVar("T")


class SamplingBackend(Protocol):
    """Another loop than that of `decoding` for sampled and greedy answers, such as that of the serving engine."""

    def decode(self, request: "GenerationRequest") -> "Iterator[list[FinishedAnswer]]":
        """Yield what `request.decoded()` does, in any order."""


class DraftRun(Protocol):
    """A run whose smaller model drafts tokens."""

    @property
    def model(self) -> Transformer: ...
    @property
    def task(self) -> Any: ...


class FinishedAnswer(NamedTuple):
    """The number of a text, from 0, and its answer."""

    number: int
    text: AnswerText


class Hypothesis(NamedTuple):
    """An answer, and the sum of its log-probabilities / its number of tokens ^ length_penalty."""

    text: str
    score: float


class NotFinite(FloatingPointError):
    """The model's logits were not finite for some `texts`; `answers` has the answers to the others."""

    def __init__(self, texts: Sequence[int], answers: Sequence[Any]):
        where = f"text{'s' if len(texts) > 1 else ''} {', '.join(map(str, texts))}"
        super().__init__(f"{where}: the model's logits are not finite")
        self.texts, self.answers = list(texts), list(answers)  # None to those texts

    def map_answers(self, change: Callable[[int, Any], str]) -> "NotFinite":
        """Return the same error with each answer changed by a function of its index and itself."""
        changed = [None if answer is None else change(i, answer) for i, answer in enumerate(self.answers)]
        return NotFinite(self.texts, changed)


def generate(
    task: Writer, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
) -> list[str]:
    """Continue or answer each text, up to <eos>, a `stop` string, its budget or the last position.

    max_new_tokens: the budget. context: most tokens of prompt and answer, or of the answer of an encoder-decoder, in
    place of the length that the model was trained for. at_limit: called with the budget of each answer that it cuts
    off. stop: strings that end an answer and are not part of it. stop_ids: ids that replace <eos>. seed: one from which
    each text's seed is derived, one per text, or a tensor of derived ones. cache, chunk, compile, reuse: see
    `decoding.request.Request`. backend: a `SamplingBackend`. The strategy and its options: see `decoding.strategy`.
    Constraints on answers: see `OutputConstraints`; an answer meets them, or it is an error. A text's answer does not
    depend on the other texts.
    """
    request = GenerationRequest.of(task, model, texts, options)
    with torch.autocast(next(model.parameters()).device.type, enabled=False):  # on in evaluations of training
        return _generate(request, progress)


def _generate(request: "GenerationRequest", progress: Progress | None) -> list[str]:
    if isinstance(request.strategy, Beam):
        if (n_best := request.strategy.n_best) > 1:
            raise ConfigError([Fault("n_best", f"= {n_best}: `generate` gives the best; see `hypotheses`")])
        try:
            return [_best(n_best_list) for n_best_list in request.hypotheses(progress)]
        except NotFinite as error:
            raise error.map_answers(lambda _, n_best_list: _best(n_best_list)) from None
    return request.answers(progress)


def hypotheses(
    task: Writer, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
) -> list[list[Hypothesis]]:
    """Return the n-best list of each text, best first, by beam search; an empty one for a blank text."""
    request = GenerationRequest.of(task, model, texts, options)
    if not isinstance(request.strategy, Beam):
        raise ConfigError([Fault("beams", "is missing: hypotheses are those of beam search")])
    return request.hypotheses(progress)


def stream(task: Writer, model: Transformer, text: str, **options: Any) -> Iterator[str]:
    """Yield what `generate` returns for one text piece by piece, in whole characters.

    A piece that may belong to a stop string is held back. Wrong options raise at the call, not with the first piece.
    """
    request = GenerationRequest.of(task, model, [text], options)
    if not request.strategy.streams:
        name = request.strategy.kind
        raise ConfigError([Fault("stream", f"is for sampling and greedy decoding, not for {name}")])
    return request.pieces() if request.prompts[0] else iter(())


@dataclass(frozen=True)
class GenerationRequest:
    """Texts to answer and all options, parsed and checked."""

    task: Writer
    model: Transformer
    prompts: list[list[int]]
    budgets: list[int]  # max_new_tokens of each
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    seeds: Tensor | None  # None: random
    strategy: Strategy
    constraints: OutputConstraints
    token_constraints: dict[bool, TokenConstraints]  # the same in ids, for separate answers and for others
    settings: dict[str, Any]  # those of SETTINGS
    at_limit: Callable[[int], None] | None  # called with the budget of an answer that it cut off, not by beam search
    backend: SamplingBackend | None = None

    @classmethod
    def of(cls, task: Writer, model: Transformer, texts: Sequence[str], options: dict[str, Any]) -> "GenerationRequest":
        if isinstance(texts, str):
            raise ConfigError([Fault("texts", "must be a list of texts, not one")])
        check_media(task, texts)
        constraints, rest = OutputConstraints.split(options)
        names = ("max_new_tokens", "context", "stop", "stop_ids", "at_limit", "backend")
        most, context, stop, stop_ids, at_limit, backend = (rest.pop(name, None) for name in names)
        settings = {name: rest.pop(name) for name in SETTINGS if rest.get(name) is not None}
        seed = rest.get("seed")
        if rest.get("draft") is not None:
            rest["draft"] = _draft_model(task, rest["draft"])
        strategy = make_strategy(**rest, phrases=constraints.phrases or None)
        stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if stop_ids is None:
            stop_ids = ending_ids(task.tokenizer, model.config)
        stop_ids, faults = parse_ids("stop_ids", stop_ids, model.config.vocab)
        faults += budget_faults(most, context, strategy) + stop_faults(stop, strategy, constraints)
        if seed is not None and not isinstance(seed, int) and len(seed) != len(texts):
            what = f"there are {len(seed)}, and {len(texts)} texts: give one for all, or one for each"
            faults.append(Fault("seed", what))
        if faults:
            raise ConfigError(faults)
        prompts = task.prompts(texts, model.config)
        check_context(list(map(len, prompts)), model, context)
        budgets = [answer_budget(task, model, len(ids), most, strategy, context) for ids in prompts]
        alone = {stands_alone(task, ids) for ids in prompts if ids}
        in_ids = {kind: tokenise(constraints, task.tokenizer, model.config.vocab, stop_ids, kind) for kind in alone}
        for i, (ids, budget) in enumerate(zip(prompts, budgets, strict=True), 1):
            if ids and len(prefix := in_ids[stands_alone(task, ids)].prefix) > budget:
                what = f"has {budget} tokens at most, and the prefix {constraints.prefix!r} has {len(prefix)}"
                raise ConfigError([Fault(f"text {i}", f"its answer {what}")])
        seeds = _seeds(seed, len(texts))
        limits = (budgets, stop, stop_ids)
        return cls(task, model, prompts, *limits, seeds, strategy, constraints, in_ids, settings, at_limit, backend)

    def batches(self) -> Iterator[list[int]]:
        """Yield indices of texts to decode together: of similar length, and with the same token constraints."""
        order = sorted((i for i, ids in enumerate(self.prompts) if ids), key=lambda i: -len(self.prompts[i]))
        for alone in (False, True):
            left = [i for i in order if stands_alone(self.task, self.prompts[i]) == alone]
            while left:
                size = len(self.prompts[left[0]]) + max(self.budgets[i] for i in left)
                batch = left[: max(1, MAX_INFERENCE_TOKENS // (size * self.strategy.copies))]
                left = left[len(batch) :]
                yield batch

    def constraints_of(self, i: int) -> TokenConstraints:
        """Return the constraints on the answer to a text."""
        return self.token_constraints[stands_alone(self.task, self.prompts[i])]

    # -- texts --------------------------------------------------------------------------------------------------------

    def answers(self, progress: Progress | None) -> list[str]:
        out: list[str | None] = ["" for _ in self.prompts]
        for finished in self.decoded() if self.backend is None else self.backend.decode(self):
            for i, text in finished:
                constraint = self.constraints_of(i).constraint
                out[i] = None if text.nonfinite else text.whole()
                self._note_limit(i, text)
                if constraint is not None and not text.nonfinite and not constraint.accepts(text.ids):
                    raise self._unmet(i)
            if progress:
                progress(len(finished))
        return _finite(out)

    def decoded(self) -> Iterator[list[FinishedAnswer]]:
        """Yield the answers to all texts that have a prompt, batch by batch."""
        for rows in self.batches():
            texts = [self.answer_text(i) for i in rows]
            pending: list[list[int]] = [[] for _ in rows]
            for new in self.tokens(rows, patience=1 if self.stop else None):
                for i, id in enumerate(new):
                    pending[i].append(id)
                if self.stop:  # otherwise text is only needed at the end
                    for i, text in enumerate(texts):
                        text.push(pending[i])
                        pending[i] = []
                    if all(text.ended for text in texts):
                        break
            for text, ids in zip(texts, pending, strict=True):
                text.push(ids)
            yield list(map(FinishedAnswer, rows, texts))

    def hypotheses(self, progress: Progress | None) -> list[list[Hypothesis]]:
        out: list[list[Hypothesis] | None] = [[] for _ in self.prompts]
        for rows in self.batches():
            found, failed = self._search(rows)
            prompt = found.ids.shape[2] - int(found.lengths.max())
            for n, i in enumerate(rows):
                n_best = []
                for ids, score, length in zip(*(x[n].tolist() for x in found), strict=True):
                    if length:
                        text = self.answer_text(i)
                        text.push(ids[prompt : prompt + length])
                        n_best.append(Hypothesis(text.whole(), score))
                if not n_best and n not in failed:
                    raise self._unmet(i)
                out[i] = None if n in failed else n_best
            if progress:
                progress(len(rows))
        return _finite(out)

    def pieces(self) -> Iterator[str]:
        text, constraint = self.answer_text(0), self.constraints_of(0).constraint
        for new in self.tokens([0]):
            piece = text.push(new)
            if text.nonfinite:
                raise NotFinite([1], [None])
            if piece:
                yield piece
            if text.ended:
                break
        if constraint is not None and not constraint.accepts(text.ids):
            raise self._unmet(0)
        if piece := text.rest():
            yield piece
        self._note_limit(0, text)

    def _note_limit(self, i: int, text: AnswerText) -> None:
        if self.at_limit is not None and text.limited:
            self.at_limit(self.budgets[i])

    def answer_text(self, i: int) -> AnswerText:
        before = self.prompts[i] if self.task.continues else []
        decoder = IncrementalDecoder(self.task.tokenizer, before)
        return AnswerText(self.budgets[i], self.stop_ids, decoder, StopStrings(self.stop))

    def _unmet(self, i: int) -> ConfigError:
        names = [name for name in (*self.constraints.formats, "banned", "phrases") if getattr(self.constraints, name)]
        what = f"no answer of at most {self.budgets[i]} tokens was found that {' and '.join(names)} would allow"
        return ConfigError([Fault(f"text {i + 1}", f"{what}: allow more tokens, or more answers")])

    # -- ids ----------------------------------------------------------------------------------------------------------

    def tokens(self, rows: Sequence[int], patience: int | None = 1) -> Iterator[list[int]]:
        """Yield the next token of each of some texts, until all have ended by an id."""
        for new, ok in decode(self.model, self.request(rows), patience):
            yield torch.where(ok, new, NONFINITE).tolist()

    def _search(self, rows: Sequence[int]) -> tuple[Hypotheses, list[int]]:
        try:
            return run_beam_search(self.model, self.request(rows)), []
        except NonFiniteSearch as error:
            return error.found, error.rows

    def request(self, rows: Sequence[int], device: torch.device | None = None) -> Request:
        """Return the request of some texts in ids, by default on the model's device."""
        constraints = self.constraints_of(rows[0])
        ids, segments = pad_rows([self.prompts[i] for i in rows], device or next(self.model.parameters()).device)
        ids, media, marks = read_media(self.task, ids, torch.full_like(ids, SEEN) if self.task.marked else None)
        return Request(
            ids,
            [self.budgets[i] for i in rows],
            self.strategy.model_copy(update={"prefix": constraints.prefix}),
            self.stop_ids,
            segments,
            marks=marks,
            media=media,
            seed=None if self.seeds is None else self.seeds[list(rows)],
            constraint=constraints.constraint,
            phrases=constraints.phrases,
            **self.settings,
        )


# -- helpers ----------------------------------------------------------------------------------------------------------


def _best(n_best: list[Hypothesis]) -> str:
    return n_best[0].text if n_best else ""


def _finite(answers: Sequence[T | None]) -> list[T]:
    if failed := [i for i, answer in enumerate(answers, 1) if answer is None]:
        raise NotFinite(failed, answers)
    return [answer for answer in answers if answer is not None]


def stands_alone(task: Writer, prompt: Sequence[int]) -> bool:
    """Return whether an answer is decoded as its own text, without the space that some tokenizers begin with."""
    return not task.continues or not task.tokenizer.decode(prompt)


def _draft_model(task: Writer, draft: DraftRun) -> Transformer:
    pairs = (draft.task.tokenizer, task.tokenizer), (draft.task.source_tokenizer, task.source_tokenizer)
    if any((a is None) != (b is None) or (a and b and a.to_json() != b.to_json()) for a, b in pairs):
        raise ConfigError([Fault("draft", "has another tokenizer: its tokens are not those of this run")])
    return draft.model


def _seeds(seed: int | Sequence[int] | Tensor | None, texts: int) -> Tensor | None:
    if isinstance(seed, Tensor):
        return seed
    if seed is None or isinstance(seed, int):
        return None if seed is None else row_seeds(seed, texts)
    return torch.cat([row_seeds(one, 1) for one in seed]) if seed else row_seeds(0, 0)

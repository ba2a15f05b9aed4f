"""From texts to texts: what a model says to them, whole or piece by piece, in any way that tokens are chosen."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, assert_never

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig, Tokens
from anyformer.conventions import SEEN
from anyformer.data.batch import Example
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.beam_search import Beam, Hypotheses, SpoiltSearch, beam_search
from anyformer.decoding.check import ids_of, whole
from anyformer.decoding.contrastive import Contrastive, contrastive_search
from anyformer.decoding.generate import Spoilt, stream as tokens
from anyformer.decoding.logit_processors import Processing, Processor, Sampling, build
from anyformer.decoding.sampling import row_seeds
from anyformer.decoding.session import padded
from anyformer.decoding.speculative import speculate
from anyformer.decoding.strategy import Speculation, Strategy, strategy
from anyformer.nn.model import Transformer
from anyformer.tasks.base import MAX_INFERENCE_TOKENS, Progress
from anyformer.tasks.output_constraints import Held, Limits, hold
from anyformer.tasks.text_stream import SPOILT, Stops, Unfolding, Writing

SETTINGS = ("cache", "chunk", "compile", "reuse")  # that change no answer, or hardly

T = TypeVar("T")


class Writer(Protocol):
    """A task whose model answers in text."""

    tokenizer: TextTokenizer
    source_tokenizer: TextTokenizer | None
    continues: bool  # an answer goes on from the text, rather than being one of its own
    marked: bool  # all of a prompt is seen from everywhere in it

    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        """What is read of each text before its answer; nothing of one that is answered by nothing."""

    def room(self, read: int, config: ModelConfig) -> int:
        """How many tokens the answer to a prompt of so many may have, if nobody says."""

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """The texts, or answers to them, as they were in training."""


class Drafting(Protocol):
    """A run whose smaller model guesses."""

    @property
    def model(self) -> Transformer: ...
    @property
    def task(self) -> Any: ...


class Hypothesis(NamedTuple):
    """An answer, and the sum of its log-probabilities / its number of tokens ^ length_penalty."""

    text: str
    score: float


class NotFinite(FloatingPointError):
    """The model's logits were no distribution for some texts; the answers to the others are there."""

    def __init__(self, texts: Sequence[int], answers: Sequence[Any]):
        where = f"text{'s' if len(texts) > 1 else ''} {', '.join(map(str, texts))}"
        super().__init__(f"{where}: the model's logits are not finite")
        self.texts, self.answers = list(texts), list(answers)  # None to those texts

    def but(self, change: Callable[[int, Any], str]) -> "NotFinite":
        """The same with each answer, and its number, changed."""
        changed = [None if answer is None else change(i, answer) for i, answer in enumerate(self.answers)]
        return NotFinite(self.texts, changed)


def generate(
    task: Writer, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
) -> list[str]:
    """How each text goes on, or its answer: up to <eos>, a `stop` string, so many tokens or the last position.

    max_new_tokens; stop: strings that end an answer and are no part of it; stop_ids: instead of <eos>; seed: text i
    draws by the i-th of the seeds that are made from it, or has one of its own; cache, chunk, compile, reuse: as in
    `decoding.decode.generate`. How tokens are chosen: as in `decoding.strategy`. What answers must be: as in `Limits`,
    and they are, or it is an error. A text's answer depends on no other.
    """
    asked = GenerationRequest.of(task, model, texts, options)
    if isinstance(asked.way, Beam):
        if asked.way.n_best > 1:
            raise ConfigError([Fault("n_best", f"= {asked.way.n_best}: `generate` gives the best; see `hypotheses`")])
        try:
            return [_best(found) for found in asked.hypotheses(progress)]
        except NotFinite as error:
            raise error.but(lambda _, found: _best(found)) from None
    return asked.answers(progress)


def hypotheses(
    task: Writer, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
) -> list[list[Hypothesis]]:
    """The `n_best` answers to each text that beam search finds, or as many as there are, the best first; to a text that
    is answered by nothing, none."""
    asked = GenerationRequest.of(task, model, texts, options)
    if not isinstance(asked.way, Beam):
        raise ConfigError([Fault("beams", "is missing: hypotheses are those of beam search")])
    return asked.hypotheses(progress)


def stream(task: Writer, model: Transformer, text: str, **options: Any) -> Iterator[str]:
    """What `generate` says to one text, in pieces as they come: whole characters, and nothing that may belong to a stop
    string. What is wrong is told at the call, not with the first piece."""
    asked = GenerationRequest.of(task, model, [text], options)
    if not isinstance(asked.way, Sampling) or isinstance(asked.way, Speculation):
        name = type(asked.way).__name__.lower()
        raise ConfigError([Fault("stream", f"gives tokens as they are chosen: there are none with {name}")])
    return asked.pieces() if asked.prompts[0] else iter(())


@dataclass(frozen=True)
class GenerationRequest:
    """Texts that are to be answered, and how."""

    task: Writer
    model: Transformer
    prompts: list[list[int]]
    rooms: list[int]  # tokens that each answer may have
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    seeds: Tensor | None  # None: any
    way: Strategy
    limits: Limits
    held: dict[bool, Held]  # the same in ids, of answers that are fresh and of others
    settings: dict[str, Any]  # of the cache and the machine

    @classmethod
    def of(cls, task: Writer, model: Transformer, texts: Sequence[str], options: dict[str, Any]) -> "GenerationRequest":
        if isinstance(texts, str):
            raise ConfigError([Fault("texts", "must be a list of texts, not one")])
        limits, rest = Limits.split(options)
        most, stop, stop_ids = (rest.pop(name, None) for name in ("max_new_tokens", "stop", "stop_ids"))
        settings = {name: rest.pop(name) for name in SETTINGS if rest.get(name) is not None}
        seed = rest.get("seed")
        if rest.get("draft") is not None:
            rest["draft"] = _drafted(task, rest["draft"])
        way = strategy(**rest, phrases=limits.phrases or None)
        stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if stop_ids is None:
            ends = (task.tokenizer.eos, model.config.special.eos, *model.config.special.stops)
            stop_ids = list(dict.fromkeys(id for id in ends if id is not None))
        stop_ids, faults = ids_of("stop_ids", stop_ids, _vocab(model))
        _check(faults, most, stop, seed, len(texts), way, limits, settings)
        prompts = task.prompts(texts, model.config)
        rooms = [_room(task, model, len(ids), most, way) for ids in prompts]
        kinds = {_fresh(task, ids) for ids in prompts if ids}
        held = {fresh: hold(limits, task.tokenizer, _vocab(model), stop_ids, fresh) for fresh in kinds}
        for i, (ids, room) in enumerate(zip(prompts, rooms, strict=True), 1):
            if ids and len(prefix := held[_fresh(task, ids)].prefix) > room:
                what = f"has room for {room} tokens, and the prefix {limits.prefix!r} has {len(prefix)}"
                raise ConfigError([Fault(f"text {i}", f"its answer {what}")])
        seeds = _seeds(seed, len(texts))
        return cls(task, model, prompts, rooms, stop, stop_ids, seeds, way, limits, held, settings)

    def batches(self) -> Iterator[list[int]]:
        """Texts that are answered together: of similar length, and alike in what their answers follow."""
        order = sorted((i for i, ids in enumerate(self.prompts) if ids), key=lambda i: -len(self.prompts[i]))
        match self.way:
            case Beam(beams=copies) | Contrastive(candidates=copies):
                pass
            case _:
                copies = 1
        for fresh in (False, True):
            left = [i for i in order if _fresh(self.task, self.prompts[i]) == fresh]
            while left:
                size = len(self.prompts[left[0]]) + max(self.rooms[i] for i in left)
                now = left[: max(1, MAX_INFERENCE_TOKENS // (size * copies))]
                left = left[len(now) :]
                yield now

    def held_by(self, i: int) -> Held:
        """The limits on the answer to a text."""
        return self.held[_fresh(self.task, self.prompts[i])]

    # -- answers ------------------------------------------------------------------------------------------------------

    def answers(self, progress: Progress | None) -> list[str]:
        out: list[str | None] = ["" for _ in self.prompts]
        for rows in self.batches():
            held = self.held_by(rows[0])
            writing = [self.writing(i) for i in rows]
            said: list[list[int]] = [[] for _ in rows]
            for new in self.tokens(rows, held, patience=1 if self.stop else None):
                for i, id in enumerate(new):
                    said[i].append(id)
                if self.stop:  # else there is no need to look before the end
                    for i, one in enumerate(writing):
                        one.push(said[i])
                        said[i] = []
                    if all(one.ended for one in writing):
                        break
            for i, one, ids in zip(rows, writing, said, strict=True):
                one.push(ids)
                out[i] = None if one.spoilt else one.whole()
                if held.constraint is not None and not one.spoilt and not held.constraint.accepts(one.ids):
                    raise self._unmet(i)
            if progress:
                progress(len(rows))
        return _finite(out)

    def hypotheses(self, progress: Progress | None) -> list[list[Hypothesis]]:
        out: list[list[Hypothesis] | None] = [[] for _ in self.prompts]
        for rows in self.batches():
            found, spoilt = self._search(rows, self.held_by(rows[0]))
            prompt = found.ids.shape[2] - int(found.lengths.max())
            for n, i in enumerate(rows):
                best = []
                for ids, score, length in zip(*(x[n].tolist() for x in found), strict=True):
                    if length:
                        writing = self.writing(i)
                        writing.push(ids[prompt : prompt + length])
                        best.append(Hypothesis(writing.whole(), score))
                if not best and n not in spoilt:
                    raise self._unmet(i)
                out[i] = None if n in spoilt else best
            if progress:
                progress(len(rows))
        return _finite(out)

    def pieces(self) -> Iterator[str]:
        writing, held = self.writing(0), self.held_by(0)
        for new in self.tokens([0], held):
            piece = writing.push(new)
            if writing.spoilt:
                raise NotFinite([1], [None])
            if piece:
                yield piece
            if writing.ended:
                break
        if held.constraint is not None and not held.constraint.accepts(writing.ids):
            raise self._unmet(0)
        if piece := writing.rest():
            yield piece

    def writing(self, i: int) -> Writing:
        before = self.prompts[i] if self.task.continues else []
        return Writing(self.rooms[i], self.stop_ids, Unfolding(self.task.tokenizer, before), Stops(self.stop))

    def _unmet(self, i: int) -> ConfigError:
        names = [name for name in (*self.limits.whole, "banned", "phrases") if getattr(self.limits, name)]
        what = f"no answer of at most {self.rooms[i]} tokens was found that {' and '.join(names)} would allow"
        return ConfigError([Fault(f"text {i + 1}", f"{what}: allow more tokens, or more answers")])

    # -- ids ----------------------------------------------------------------------------------------------------------

    def tokens(self, rows: Sequence[int], held: Held, patience: int | None = 1) -> Iterator[list[int]]:
        """The next token of each of some texts, until all have ended by an id."""
        common = self._common(rows) | {"constraint": held.constraint}
        seed = None if self.seeds is None else self.seeds[list(rows)]
        match self.way:
            case Speculation():
                how = _given(self.way, held)
                draft, ahead = how.pop("draft"), how.pop("ahead", self.way.ahead)
                yield from self._columns(
                    lambda: speculate(draft=draft, ahead=ahead, seed=seed, **common, **how).ids, rows
                )
            case Sampling():
                for new, ok in tokens(seed=seed, patience=patience, **common, **_given(self.way, held)):
                    yield torch.where(ok, new, SPOILT).tolist()
            case Contrastive():
                own: dict[str, Any] = {
                    "candidates": self.way.candidates,
                    "alpha": self.way.alpha,
                    "processors": self._processors(held),
                }
                yield from self._columns(lambda: contrastive_search(**common, **own), rows)
            case Beam():
                raise AssertionError("beam search has no next token")
            case _:
                assert_never(self.way)

    def _search(self, rows: Sequence[int], held: Held) -> tuple[Hypotheses, list[int]]:
        assert isinstance(self.way, Beam)
        own = {name: getattr(self.way, name) for name in Beam.model_fields.keys() - Processing.model_fields.keys()}
        common = self._common(rows) | {"constraint": held.constraint, "phrases": held.phrases}
        try:
            return beam_search(processors=self._processors(held), **common, **own), []
        except SpoiltSearch as error:
            return error.found, error.rows

    def _columns(self, decode: Callable[[], Tensor], rows: Sequence[int]) -> Iterator[list[int]]:
        """The tokens of whole answers, as if they came one by one."""
        spoilt: list[int] = []
        try:
            ids = decode()
        except Spoilt as error:
            ids, spoilt = error.ids, error.rows
        begin = 1 if self.model.encoder is not None else max(len(self.prompts[i]) for i in rows)
        answers = ids[:, begin:].tolist()
        for n in spoilt:
            answers[n][:1] = [SPOILT]
        yield from map(list, zip(*answers, strict=True))

    def _common(self, rows: Sequence[int]) -> dict[str, Any]:
        device = next(self.model.parameters()).device
        ids, segments = padded([self.prompts[i] for i in rows], device)
        here = {"model": self.model, "ids": ids, "segments": segments, "stop": self.stop_ids}
        if self.task.marked:
            here["marks"] = torch.full_like(ids, SEEN)
        return here | {"max_new_tokens": [self.rooms[i] for i in rows], **self.settings}

    def _processors(self, held: Held) -> tuple[Processor, ...]:
        how = self.way.model_copy(update={"prefix": held.prefix})
        device = next(self.model.parameters()).device
        return build(how, vocab=_vocab(self.model), stop=self.stop_ids, device=device)


# -- small steps ------------------------------------------------------------------------------------------------------


def _best(found: list[Hypothesis]) -> str:
    return found[0].text if found else ""


def _finite(answers: Sequence[T | None]) -> list[T]:
    if spoilt := [i for i, answer in enumerate(answers, 1) if answer is None]:
        raise NotFinite(spoilt, answers)
    return [answer for answer in answers if answer is not None]


def _given(way: Sampling, held: Held) -> dict[str, Any]:
    return {name: getattr(way, name) for name in way.model_fields_set} | {"prefix": held.prefix}


def _fresh(task: Writer, prompt: Sequence[int]) -> bool:
    """Whether an answer is decoded as a text of its own, without the space that some tokenizers begin with."""
    return not task.continues or not task.tokenizer.decode(prompt)


def _drafted(task: Writer, draft: Drafting) -> Transformer:
    pairs = (draft.task.tokenizer, task.tokenizer), (draft.task.source_tokenizer, task.source_tokenizer)
    if any((a is None) != (b is None) or (a and b and a.to_json() != b.to_json()) for a, b in pairs):
        raise ConfigError([Fault("draft", "has another tokenizer: its tokens are not those of this run")])
    return draft.model


def _check(
    faults: list[Fault],
    most: int | None,
    stop: Sequence[str],
    seed: int | Sequence[int] | None,
    texts: int,
    way: Strategy,
    limits: Limits,
    settings: dict[str, Any],
) -> None:
    faults += (wrong := [] if most is None else whole("max_new_tokens", most, 0))
    if not wrong and most is not None and way.min_new_tokens > most >= 0:
        faults.append(Fault("min_new_tokens", f"= {way.min_new_tokens}: is more than max_new_tokens = {most}"))
    if "" in stop:
        faults.append(Fault("stop", "an empty string stands everywhere: leave it out"))
    if stop and isinstance(way, Beam):
        faults.append(Fault("stop", "is for answers that are said token by token: beam search ends them by ids alone"))
    if stop and limits.whole:
        faults.append(Fault("stop", f"would cut off what {limits.whole[0]} asks for: leave it out"))
    if seed is not None and not isinstance(seed, int) and len(seed) != texts:
        faults.append(Fault("seed", f"there are {len(seed)}, and {texts} texts: give one for all, or one for each"))
    own = {Sampling: SETTINGS, Speculation: SETTINGS[:2], Beam: ("cache", "compile")}.get(type(way), ("cache",))
    faults += [
        Fault(name, f"is not for {type(way).__name__.lower()}: leave it out") for name in settings if name not in own
    ]
    if faults:
        raise ConfigError(faults)


def _room(task: Writer, model: Transformer, read: int, most: int | None, way: Strategy) -> int:
    """How many tokens an answer may have."""
    config = model.config
    assert config.decoder is not None
    before = 0 if model.encoder is not None else read - 1  # an answer's last token is not read again
    room = task.room(read, config) if most is None else most
    if most is None and config.context is not None and config.context > before:
        room = min(room, config.context - before)
    limit = config.decoder.limit
    return room if limit is None else min(room, limit - before - isinstance(way, Contrastive))  # but there it is


def _vocab(model: Transformer) -> int:
    target = model.config.target
    assert isinstance(target, Tokens)
    return target.rows


def _seeds(seed: int | Sequence[int] | None, texts: int) -> Tensor | None:
    if seed is None or isinstance(seed, int):
        return None if seed is None else row_seeds(seed, texts)
    return torch.cat([row_seeds(one, 1) for one in seed]) if seed else row_seeds(0, 0)

"""From texts to texts: what a model says to them, whole or piece by piece, and how likely it finds them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import IGNORE, Piece
from anyformer.data.tokenizer import TextTokenizer
from anyformer.decoding.decode import stream as tokens
from anyformer.decoding.process import Sampling
from anyformer.decoding.sample import row_seeds
from anyformer.decoding.score import score as log_probabilities, sliding
from anyformer.decoding.session import padded
from anyformer.nn.model import Transformer
from anyformer.tasks.base import refuse_long
from anyformer.tasks.text import Stops, Unfolding

SLOTS = 8192  # of a batch, prompts and answers
SPOILT = -1  # in the place of a token whose logits were no distribution


class Writer(Protocol):
    """A task whose model answers in text."""

    tokenizer: TextTokenizer
    continues: bool  # an answer goes on from the text, rather than being one of its own

    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        """What is read of each text before its answer; nothing of one that is answered by nothing."""

    def room(self, read: int, config: ModelConfig) -> int:
        """How many tokens the answer to a prompt of so many may have, if nobody says."""

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Piece]:
        """The texts, or answers to them, as they were in training."""


def generate(
    task: Writer,
    model: Transformer,
    texts: Sequence[str],
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    seed: int | Sequence[int] | None = None,
    **how: Any,
) -> list[str]:
    """How each text goes on, or its answer: up to <eos>, a `stop` string, so many tokens or the last position.

    A stop string is no part of the answer. `stop_ids` end it instead of <eos>. `how` is what `decoding.decode.generate`
    takes: temperature, top_p, ... A text's answer depends on no other: text i draws by the i-th of the seeds that are
    made from `seed`, or has a `seed` of its own.
    """
    asked = Asked.of(task, model, texts, max_new_tokens, stop, stop_ids, seed, how)
    out = [""] * len(texts)
    order = sorted((i for i, ids in enumerate(asked.prompts) if ids), key=lambda i: -len(asked.prompts[i]))
    while order:
        size = len(asked.prompts[order[0]]) + max(asked.rooms[i] for i in order)
        now = order[: max(1, SLOTS // size)]
        order = order[len(now) :]
        writing = [asked.writing(i) for i in now]
        said: list[list[int]] = [[] for _ in now]
        for new in asked.tokens(now, patience=1 if asked.stop else None):
            for i, id in enumerate(new):
                said[i].append(id)
            if asked.stop:  # else there is no need to look before the end
                for i, one in enumerate(writing):
                    out[now[i]] += one.push(said[i])
                    said[i] = []
                if all(one.ended for one in writing):
                    break
        for i, one in enumerate(writing):
            out[now[i]] += one.push(said[i]) + one.rest()
    return out


def stream(
    task: Writer,
    model: Transformer,
    text: str,
    *,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    seed: int | None = None,
    **how: Any,
) -> Iterator[str]:
    """The same for one text, in pieces as they come: whole characters, and nothing that may belong to a stop string.

    What is wrong is told at the call, not with the first piece.
    """
    asked = Asked.of(task, model, [text], max_new_tokens, stop, stop_ids, seed, how)
    return asked.pieces() if asked.prompts[0] else iter(())


@dataclass(frozen=True)
class Asked:
    """Texts that are to be answered, and how."""

    task: Writer
    model: Transformer
    prompts: list[list[int]]
    rooms: list[int]  # tokens that each answer may have
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    seeds: Tensor | None  # None: any
    how: dict[str, Any]

    @classmethod
    def of(
        cls,
        task: Writer,
        model: Transformer,
        texts: Sequence[str],
        most: int | None,
        stop: str | Sequence[str],
        stop_ids: Sequence[int] | None,
        seed: int | Sequence[int] | None,
        how: dict[str, Any],
    ) -> "Asked":
        if isinstance(texts, str):
            raise ConfigError([Fault("texts", "must be a list of texts, not one")])
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if stop_ids is None:
            stop_ids = [] if task.tokenizer.eos is None else [task.tokenizer.eos]
        _check(most, stop, seed, len(texts))
        Sampling(**{name: value for name, value in how.items() if name not in ("constraint", "cache", "chunk")})
        prompts, limit = task.prompts(texts, model.config), _limit(model.config)
        rooms = []
        for ids in prompts:
            room = task.room(len(ids), model.config) if most is None else most
            if limit is not None:  # the last token is not read again
                room = min(room, limit if model.encoder is not None else limit - len(ids) + 1)
            rooms.append(room)
        return cls(task, model, prompts, rooms, stop, tuple(stop_ids), _seeds(seed, len(texts)), how)

    def tokens(self, rows: Sequence[int], patience: int | None = 1) -> Iterator[list[int]]:
        """The next token of each of some texts, until all have ended by an id."""
        device = next(self.model.parameters()).device
        ids, segments = padded([self.prompts[i] for i in rows], device)
        for new, ok in tokens(
            self.model,
            ids,
            max_new_tokens=[self.rooms[i] for i in rows],
            segments=segments,
            stop=self.stop_ids,
            seed=None if self.seeds is None else self.seeds[list(rows)],
            patience=patience,
            **self.how,
        ):
            yield torch.where(ok, new, SPOILT).tolist()

    def writing(self, i: int) -> "Writing":
        before = self.prompts[i] if self.task.continues else []
        return Writing(i + 1, self.rooms[i], self.stop_ids, Unfolding(self.task.tokenizer, before), Stops(self.stop))

    def pieces(self) -> Iterator[str]:
        writing = self.writing(0)
        for new in self.tokens([0]):
            if piece := writing.push(new):
                yield piece
            if writing.ended:
                break
        if piece := writing.rest():
            yield piece


class Writing:
    """An answer that is being said."""

    def __init__(self, number: int, room: int, stop_ids: Sequence[int], text: Unfolding, stops: Stops):
        self.number, self.room, self.stop_ids, self.text, self.stops = number, room, stop_ids, text, stops
        self.ended = room == 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that some more tokens add; of those behind the end, none."""
        said: list[int] = []
        for id in ids:
            if self.ended:
                break
            if id == SPOILT:
                raise FloatingPointError(f"text {self.number}: the model's logits are not finite")
            self.room -= 1
            self.ended = id in self.stop_ids or self.room == 0
            said += [] if id in self.stop_ids else [id]
        piece = self.stops.push(self.text.push(said)) if said else ""
        self.ended |= self.stops.found
        return piece

    def rest(self) -> str:
        """What was held back."""
        return "" if self.stops.found else self.stops.push(self.text.rest()) + self.stops.rest()


# -- scoring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """How likely a model finds a text."""

    ids: tuple[int, ...]  # that were asked for
    logprobs: tuple[float, ...]  # of each, natural logarithms

    @property
    def total(self) -> float:
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp of the mean surprise per token."""
        return math.exp(min(-self.total / len(self.ids), 700.0))


def score(
    task: Writer,
    model: Transformer,
    texts: Sequence[str],
    answers: Sequence[str] | None = None,
    *,
    window: int | None = None,
    stride: int | None = None,
) -> list[Score]:
    """The log-probability of each text's tokens after its first, or of an answer to each text.

    A decoder reads a text that is longer than its positions by windows of so many tokens, `stride` apart.
    """
    if isinstance(texts, str) or isinstance(answers, str):
        raise ConfigError([Fault("texts", "must be a list of texts, not one")])
    if answers is not None and len(answers) != len(texts):
        raise ConfigError([Fault("answers", f"there are {len(answers)}, and {len(texts)} texts: each needs one")])
    if stride is not None and window is None:
        raise ConfigError([Fault("stride", f"= {stride}: needs a window")])
    if window is not None and model.encoder is not None:
        raise ConfigError([Fault("window", f"= {window}: only a decoder without an encoder reads by windows")])
    pieces = task.scored(texts, answers, model.config)
    rows = [[*piece.ids, piece.labels[-1]] for piece in pieces]
    if window is not None:
        found = [sliding(model, row, window, stride) for row in rows]
    else:
        refuse_long([len(piece.ids) for piece in pieces], model.config, "decoder")
        sources = None if model.encoder is None else [piece.source or () for piece in pieces]
        refuse_long([] if sources is None else list(map(len, sources)), model.config, "encoder")
        found = log_probabilities(model, rows, sources)
    scores = []
    for piece, each in zip(pieces, found, strict=True):
        asked = [(id, value) for id, value in zip(piece.labels, each.tolist(), strict=True) if id != IGNORE]
        scores.append(Score(tuple(id for id, _ in asked), tuple(value for _, value in asked)))
    return scores


# -- small steps ----------------------------------------------------------------------------------------------------


def _check(most: int | None, stop: Sequence[str], seed: int | Sequence[int] | None, texts: int) -> None:
    faults = []
    if most is not None and most < 0:
        faults.append(Fault("max_new_tokens", f"= {most}: must not be negative"))
    if "" in stop:
        faults.append(Fault("stop", "an empty string stands everywhere: leave it out"))
    if seed is not None and not isinstance(seed, int) and len(seed) != texts:
        faults.append(Fault("seed", f"there are {len(seed)}, and {texts} texts: give one for all, or one for each"))
    if faults:
        raise ConfigError(faults)


def _limit(config: ModelConfig) -> int | None:
    assert config.decoder is not None
    return config.decoder.limit


def _seeds(seed: int | Sequence[int] | None, texts: int) -> Tensor | None:
    if seed is None or isinstance(seed, int):
        return None if seed is None else row_seeds(seed, texts)
    return torch.cat([row_seeds(one, 1) for one in seed]) if seed else row_seeds(0, 0)

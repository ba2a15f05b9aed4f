"""The task actions: the next action of an episode (behaviour cloning, decision transformer, vision-language-action).

A row has an instruction and, for each step, the return to go (if `returns` are set), the observation and the action:

    go to the red ball <observation> <left> <observation> <forward> ...

Observations are images or vectors, one or more places each, or numbers in bins. The loss is on the actions only. All
actions of an episode are learnt in one pass, up to `history` steps. A longer episode has several rows. Each begins with
the instruction and the last half of the steps of the row before, without a loss on these: so an action sees at least
half of `history`. Rollouts read the same rows (`window_start`), hence what a model sees is what it was trained on.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import did_you_mean
from anyformer.data.batch import ExampleTable, Ragged
from anyformer.data.loader import ExampleLoader, Loader, longest_first
from anyformer.data.media import REFERENCE, MediaStore
from anyformer.data.media_files import BadFile, read_numbers
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import Actions, Batches, ExampleBatches
from anyformer.tasks.base import (
    MAX_INFERENCE_TOKENS,
    Metrics,
    Progress,
    TokenTask,
    bad_row_notes,
    call,
    check_lengths,
    length_fault,
    token_loss,
)

Action = int | list[float]
"""The number of an action, or the numbers of a continuous one."""


class EncodedEpisode(NamedTuple):
    """The ids of an episode: the instruction, and all steps in one array."""

    mission: np.ndarray  # int32 [m]
    ids: np.ndarray  # int32 [n]: the inputs of each step, then its action
    bounds: list[int]  # where each step begins in `ids`, and n
    action_size: int  # tokens of an action

    @classmethod
    def of(cls, mission: Sequence[int], steps: Iterable[Sequence[int]], action_size: int) -> "EncodedEpisode":
        """Return an episode whose steps end with their action."""
        ids, bounds = list[int](), [0]
        for step in steps:
            ids += step
            bounds.append(len(ids))
        return cls(np.array(mission, dtype=np.int32), np.array(ids, dtype=np.int32), bounds, action_size)


class EpisodeWindow(NamedTuple):
    """A row of training: some steps of an episode after its instruction."""

    ids: np.ndarray
    labels: np.ndarray


def window_start(step: int, history: int) -> int:
    """Return the first step of the row in which the action of a step is predicted."""
    if step < history:
        return 0
    stride = history - history // 2
    return ((step - history) // stride + 1) * stride


def window_spans(steps: int, history: int) -> Iterator[tuple[int, int, int]]:
    """Yield the steps of each row of an episode: the first, the first whose action has a label, and the end."""
    labelled = 0
    for start in range(0, window_start(steps - 1, history) + 1, history - history // 2):
        stop = min(start + history, steps)
        yield start, labelled, stop
        labelled = stop


class ActionPrediction(TokenTask):
    """Prediction of actions."""

    spec: Actions

    def __init__(self, spec: Actions, tokenizer: TextTokenizer):
        self.spec, self.tokenizer = spec, tokenizer
        self._special = {name: self._id(name) for name in spec.special_tokens}
        self.action_ids = [self._special[name] for name in spec.action_tokens]
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))))

    def _id(self, name: str) -> int:
        found = self.tokenizer.special_id(name)
        if found is None:
            raise ConfigError([Fault("tokenizer", f"has no {name}, a token of the task actions")])
        return found

    # -- episodes to ids ----------------------------------------------------------------------------------------------

    def encode(self, rows: Rows) -> Iterator[EncodedEpisode | str]:
        """Yield the ids of each episode, or why it cannot be read."""
        missions = self._encode_missions(rows.columns["text"])
        columns = (rows.columns[name] for name in ("observations", "actions", "rewards"))
        for mission, *cells in zip(missions, *columns, strict=True):
            observations, actions, rewards = (cell.split("\n") for cell in cells)
            try:
                numbers = np.array(rewards, dtype=np.float64)
                returns = numbers[::-1].cumsum()[::-1].tolist()
                steps = (
                    [*self.encode_return(to_go), *self._encode_observation(seen), *self.encode_action(action)]
                    for to_go, seen, action in zip(returns, observations, actions, strict=True)
                )
                yield EncodedEpisode.of(mission, steps, self.spec.action_size)
            except (BadFile, ValueError) as error:
                yield str(error)

    def _encode_missions(self, texts: Sequence[str]) -> list[list[int]]:
        known = list(dict.fromkeys(texts))
        ids = dict(zip(known, self.tokenizer.encode_batch(known), strict=True))
        return [ids[text] if text.strip() else [] for text in texts]

    def encode_mission(self, text: str) -> list[int]:
        """Return the ids of an instruction."""
        return self._encode_missions([text])[0]

    def encode_return(self, to_go: float) -> list[int]:
        """Return the token of a return to go; none if rows have no returns."""
        bins = self.spec.returns
        return [] if bins is None else [self._special[f"<return-{bins.index(to_go)}>"]]

    def _encode_observation(self, text: str) -> list[int]:
        found = REFERENCE.fullmatch(text)
        if found is None:
            raise ValueError(f"the observation {text[:40]!r} is no reference such as <image:frame.png>")
        if self.spec.state_bins is not None:
            return self.encode_state(read_numbers(found[2]))
        store = self.tokenizer.media
        if store is None:
            raise ValueError("the model reads no images or features: set model.target.media, or task.state_bins")
        number = store.number(found[1], found[2])  # type: ignore[arg-type]
        return [-number - 1] * store.places(number)

    def encode_state(self, values: np.ndarray, store: MediaStore | None = None) -> list[int]:
        """Return the ids of an observation: numbers in bins, or a segment that is added to the store."""
        if (bins := self.spec.state_bins) is not None:
            return [self._special[f"<state-{bins.index(value)}>"] for value in values.ravel().tolist()]
        assert store is not None
        number = store.add(values, "the observation")
        return [-number - 1] * store.places(number)

    def encode_action(self, action: str) -> list[int]:
        """Return the tokens of an action: its number or name, or the numbers of a continuous one."""
        names = self.spec.actions
        if (bins := self.spec.action_bins) is not None:
            numbers = [float(word) for word in action.split()]
            if len(numbers) != self.spec.action_size:
                raise ValueError(f"the action {action!r} has {len(numbers)} numbers, not {self.spec.action_size}")
            return [self.action_ids[bins.index(number)] for number in numbers]
        number = int(action) if action.isdecimal() else names.index(action) if action in names else len(names)
        if number >= len(names):
            known = did_you_mean(action, names) if not action.isdecimal() else f"they are {', '.join(names)}"
            raise ValueError(f"the action {action!r} is not one of the {len(names)} of task.actions; {known}")
        return [self.action_ids[number]]

    def decode_action(self, ids: Sequence[int]) -> Action:
        """Return the action of its tokens; a bin becomes its centre."""
        indices = [self.action_ids.index(id) for id in ids]
        if (bins := self.spec.action_bins) is not None:
            return [bins.centre(i) for i in indices]
        return indices[0]

    def windows(self, episode: EncodedEpisode) -> Iterator[EpisodeWindow]:
        """Yield the rows of an episode; each action has a label in one of them."""
        mission, ids, bounds, action_size = episode
        unlabelled = np.full(len(mission), IGNORE, dtype=np.int32)
        actions = np.full(len(ids), IGNORE, dtype=np.int32)
        for i in range(1, action_size + 1):
            at = np.array(bounds[1:]) - i
            actions[at] = ids[at]
        for start, labelled, stop in window_spans(len(bounds) - 1, self.spec.history):
            labels = actions[bounds[start] : bounds[stop]].copy()
            labels[: bounds[labelled] - bounds[start]] = IGNORE
            row = np.concatenate((mission, ids[bounds[start] : bounds[stop]]))
            yield EpisodeWindow(row[:-1], np.concatenate((unlabelled, labels))[1:])

    # -- the protocol of tasks ----------------------------------------------------------------------------------------

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        encoded = list(self.encode(rows))
        bad = {i: why for i, one in enumerate(encoded) if (why := self._fault(one, config, batches))}
        return replace(rows, ids={"text": encoded}).without(bad)

    def _fault(self, episode: EncodedEpisode | str, config: ModelConfig, batches: Batches | None) -> str:
        if isinstance(episode, str):
            return episode
        mission, _, bounds, _ = episode
        spans = window_spans(len(bounds) - 1, self.spec.history)
        length = len(mission) + max(bounds[stop] - bounds[start] for start, _, stop in spans) - 1
        if why := length_fault(length, config, "decoder"):
            return why
        limit = batches and batches.row_limit
        return f"{self.spec.history} steps have {length} tokens, more than {limit}" if limit and length > limit else ""

    def _examples(self, rows: Rows) -> ExampleTable:
        windows = [window for episode in rows.ids["text"] for window in self.windows(episode)]
        return ExampleTable(Ragged.of([window.ids for window in windows]), Ragged.of([one.labels for one in windows]))

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, ExampleBatches)
        pad = self.tokenizer.pad or 0
        return ExampleLoader(self._examples(rows), batches, seed, pad, pad, media=self.tokenizer.media)

    @torch.no_grad()
    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure the loss, and how often the most probable action is the recorded one, after recorded steps."""
        pad, device = self.tokenizer.pad or 0, next(model.parameters()).device
        known = torch.tensor(self.action_ids, device=device)
        total, right, count = 0.0, 0, 0
        for batch in longest_first(self._examples(rows), MAX_INFERENCE_TOKENS, pad, pad, self.tokenizer.media):
            moved = batch.to(device)
            logits = call(model, moved, packed=False)
            total += float(token_loss(logits, moved.labels))
            right += int((known[logits[:, :, known].argmax(-1)] == moved.labels).sum())
            count += batch.target_count
        values = {"loss": total / count, "accuracy": right / count}
        return Metrics("actions", count, values, bad_row_notes(rows))

    @torch.no_grad()
    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the next action of each text, a row up to an observation: `go left <image:a.png>`."""
        if options:
            raise ConfigError([Fault(next(iter(options)), "is an option of models that write, not of actions")])
        rows = [self._encode_row(text) for text in texts]
        check_lengths([len(row) for row in rows], model.config, "decoder")
        if empty := [i for i, row in enumerate(rows, 1) if not row]:
            raise ConfigError([Fault(f"text {empty[0]}", "is empty: it must end with an observation")])
        found = []
        for row in rows:
            for _ in range(self.spec.action_size):
                row.append(self._next(model, row))
            found.append(self._named(self.decode_action(row[-self.spec.action_size :])))
            if progress is not None:
                progress(1)
        return found

    def _next(self, model: Transformer, row: list[int]) -> int:
        """Return the most probable action token after a row."""
        ids = torch.tensor([row], device=next(model.parameters()).device)
        media, marks = None, None
        if self.tokenizer.media is not None:
            ids, media, marks = self.tokenizer.media.read(ids)
        logits = model(ids, media=media, marks=None if marks is None else marks.to(ids.device))[0, -1]
        return self.action_ids[int(logits[self.action_ids].argmax())]

    def _named(self, action: Action) -> str:
        return self.spec.actions[action] if isinstance(action, int) else " ".join(f"{x:g}" for x in action)

    def _encode_row(self, text: str) -> list[int]:
        """Return the ids of a row that is written as a text, in which names such as <left> are tokens."""
        ids, at = list[int](), 0
        for found in [*self._pattern.finditer(text), None]:
            part = text[at : None if found is None else found.start()].strip()
            ids += self.tokenizer.encode_batch([part])[0] if part else []
            if found is not None:
                ids.append(self._special[found[0]])
                at = found.end()
        return ids

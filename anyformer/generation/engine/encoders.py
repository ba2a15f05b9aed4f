"""Texts to vectors, labels, tags, numbers, scores and fillings of masks: batches across requests."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.data.batch import Example
from anyformer.generation.engine.interface import EncodeKind, Failed, Unsupported
from anyformer.generation.engine.stats import Stats
from anyformer.runs.run import Run
from anyformer.tasks.sequence_level import read_rows

MAX_LOGITS = 2**26  # of a batch that fills masks
TOP = 5  # tokens for a mask, by default

Item = Callable[[Tensor], Any]
"""From the head's output for a text, without padding, to the item that the caller gets."""


class TextJob:
    """Texts of one request: examples that the model reads, and what becomes of its outputs."""

    def __init__(self, examples: Sequence[Example], items: Sequence[Item], future: "asyncio.Future[list[Any]]"):
        self.examples, self.items, self.future = examples, items, future
        self.results: list[Any] = [None] * len(examples)
        self.read = self.done = 0  # texts that are in a batch, and that have a result


class ScoreJob(NamedTuple):
    """Texts whose log-probabilities are computed at once."""

    compute: Callable[[], list[Any]]
    future: "asyncio.Future[list[Any]]"


class EncodeServer:
    """Reads the texts of all requests for one run, in batches of at most `tokens`."""

    def __init__(self, run: Run, tokens: int, stats: Stats):
        self.run, self.stats = run, stats
        vocab = run.config.vocab if run.config.head.output == "masked_lm" else 0
        self.tokens = min(tokens, max(1, MAX_LOGITS // vocab)) if vocab else tokens
        self._jobs: deque[TextJob] = deque()
        self._scoring: deque[ScoreJob] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._scoring)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._jobs) + len(self._scoring)

    def add(self, job: TextJob | ScoreJob) -> None:
        if isinstance(job, ScoreJob):
            self._scoring.append(job)
        else:
            self._jobs.append(job)

    def step(self) -> None:
        """Read one batch, the oldest texts first."""
        if self._scoring:
            self._score(self._scoring.popleft())
        while self._jobs and self._jobs[0].future.cancelled():
            self._jobs.popleft()
        batch: list[tuple[TextJob, int]] = []
        longest = 0
        while self._jobs:
            job = self._jobs[0]
            longest = max(longest, job.examples[job.read].length)
            if batch and longest * (len(batch) + 1) > self.tokens:
                break
            batch.append((job, job.read))
            job.read += 1
            if job.read == len(job.examples):
                self._jobs.popleft()
        if batch:
            self._read(batch)

    def _score(self, job: ScoreJob) -> None:
        if job.future.cancelled():
            return
        try:
            _set(job.future, job.compute())
        except Exception as error:
            _set(job.future, error)

    def _read(self, batch: list[tuple[TextJob, int]]) -> None:
        examples = [job.examples[i] for job, i in batch]
        try:
            for n, output in read_rows(self.run.model, examples, self.run.tokenizer):
                self._take(*batch[n], output)
        except Exception as error:
            for job, _ in batch:
                _set(job.future, error)
        self.stats.encoded_texts += len(batch)

    def _take(self, job: TextJob, i: int, output: Tensor) -> None:
        length = len(job.examples[i].ids)
        whole = self.run.config.head.per_row or output.shape[0] < length
        output = output if whole else output[:length]
        if not np.isfinite(output.numpy()).all():  # of one row: torch takes ten times as long
            _set(job.future, Failed(f"text {i + 1}: the model's output is not finite"))
            return
        job.results[i] = job.items[i](output)
        job.done += 1
        if job.done == len(job.examples):
            _set(job.future, job.results)

    def fail(self, message: str) -> None:
        """End all requests."""
        for future in [*(job.future for job in self._jobs), *(job.future for job in self._scoring)]:
            _set(future, Failed(message))
        self._jobs.clear()
        self._scoring.clear()

    # -- texts to examples, in the thread of the caller ---------------------------------------------------------------

    def prepare(
        self, kind: EncodeKind, texts: Sequence[str], k: int = TOP, prompt_name: str | None = None
    ) -> tuple[list[Example], list[Item]]:
        """Return the examples of texts, and what becomes of their outputs."""
        task: Any = self.run.task
        if prompt_name is not None and not hasattr(task.spec, "prompts"):
            raise Unsupported(f"prompt_name = '{prompt_name}': the model has no prompts")
        named = {} if prompt_name is None else {"prompt_name": prompt_name}
        examples: dict[int, Example] = task.examples(texts, self.run.config, **named)
        if len(examples) < len(texts):
            blank = next(i for i in range(len(texts)) if i not in examples)
            raise Unsupported(f"text {blank + 1} is blank")
        return list(examples.values()), [self._item(kind, text, examples[i], k) for i, text in enumerate(texts)]

    def _item(self, kind: EncodeKind, text: str, example: Example, k: int) -> Item:
        task: Any = self.run.task
        match kind:
            case "embed":
                pools = self.run.config.head.output == "none"
                return lambda output: (output.mean(dim=0) if pools else output).numpy()
            case "classify":
                return self._labels
            case "number":
                return lambda output: float(task.format_prediction(output))
            case "tag":
                return self._tags(text, example)
            case "fill_mask":
                return self._fillings(example, k)
            case _:
                raise Unsupported(f"{kind}: is not an output of this model")

    def _labels(self, logits: Tensor) -> list[tuple[str, float]]:
        """Return each label with its probability; of several labels, each has its own."""
        spec: Any = self.run.spec
        p = logits.sigmoid() if spec.several_labels else logits.softmax(dim=-1)
        return list(zip(spec.label_names, p.tolist(), strict=True))

    def _tags(self, text: str, example: Example) -> Item:
        """Return each word with its tag, and the probability of the tag; None with a CRF."""
        task: Any = self.run.task
        at, words = task.words(text, example)

        def best(logits: Tensor) -> list[tuple[str, str, float | None]]:
            if logits.dim() > 2:
                (tags,) = task.best(logits[None], torch.tensor([list(example.labels)]))
                return list(zip(words, tags, [None] * len(at), strict=True))
            tags = [task.spec.label_names[i] for i in logits[at].argmax(dim=-1).tolist()]
            return list(zip(words, tags, logits[at].softmax(dim=-1).amax(dim=-1).tolist(), strict=True))

        return best

    def _fillings(self, example: Example, k: int) -> Item:
        """Return the k most probable tokens for each mask, with their names and probabilities."""
        tokenizer = self.run.tokenizer
        at = [i for i, id in enumerate(example.ids) if id == tokenizer.mask]

        def best(logits: Tensor) -> list[list[tuple[int, str, float]]]:
            top = logits[at].softmax(dim=-1).topk(min(k, logits.shape[-1]))
            rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            return [[(id, tokenizer.token(id), p) for id, p in zip(*row, strict=True)] for row in rows]

        return best


def _set(future: "asyncio.Future[list[Any]]", result: list[Any] | Exception) -> None:
    """Give a future of another thread its result, unless it has one or was cancelled."""

    def deliver() -> None:
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(deliver)

"""The task mixture: several sequence-to-sequence tasks in one model; the first token of a source selects one."""

from collections.abc import Sequence
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import did_you_mean
from anyformer.data.batch import Example
from anyformer.data.loader import ExampleLoader, Loader
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, ExampleBatches, Mixture
from anyformer.tasks.base import Metrics, Progress, TokenTask, bad_row_notes
from anyformer.tasks.seq2seq import SequenceToSequence


class MixedTasks(TokenTask):
    """A mixture of tasks. Batches hold rows of all parts; a row is read `weight` times per epoch."""

    spec: Mixture

    def __init__(self, spec: Mixture, tokenizer: TextTokenizer, source_tokenizer: TextTokenizer | None = None):
        self.spec, self.tokenizer, self.source_tokenizer = spec, tokenizer, source_tokenizer
        self.reader = source_tokenizer or tokenizer
        self.parts: dict[str, SequenceToSequence] = {}
        for part in spec.parts:
            if (begin := self.reader.special_id(part.token)) is None:
                raise ConfigError([Fault("tokenizer", f"has no {part.token}, which the task mixture needs")])
            self.parts[part.name] = SequenceToSequence(part, tokenizer, source_tokenizer, [begin])

    def part(self, name: str | None) -> SequenceToSequence:
        if name is None:
            raise ConfigError([Fault("task", f"is missing: choose one of the mixture: {', '.join(self.parts)}")])
        if name not in self.parts:
            what = f"= '{name}': the mixture has no such task; {did_you_mean(name, self.parts)}"
            raise ConfigError([Fault("task", what)])
        return self.parts[name]

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        if batches is not None:
            rows = next(iter(self.parts.values())).with_ids(rows)
        bad: dict[int, str] = {}
        for name, numbers in _by_part(rows).items():
            whys = self.part(name).row_faults(rows.take(numbers), config, batches)
            bad |= {i: why for i, why in zip(numbers, whys, strict=True) if why}
        return rows.without(dict(sorted(bad.items())))

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, ExampleBatches)
        examples, weights = list[Example](), list[float]()
        for name, numbers in _by_part(rows).items():
            part = self.part(name)
            examples += part.encode(rows.take(numbers), both_sides=model.encoder is not None)
            weights += [next(p.weight for p in self.spec.parts if p is part.spec)] * len(numbers)
        pads = self.tokenizer.pad or 0, self.reader.pad or 0
        return ExampleLoader(examples, batches, seed, *pads, weights=weights)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure each part, as `name.metric`, and the mean of each metric over the parts that have it."""
        metrics = {n: self.part(n).evaluate(model, rows.take(some), batches) for n, some in _by_part(rows).items()}
        names = dict.fromkeys(metric for part in metrics.values() for metric in part.values)
        each = {f"{name}.{metric}": value for name, part in metrics.items() for metric, value in part.values.items()}
        values = {metric: _mean([p.values[metric] for p in metrics.values() if metric in p.values]) for metric in names}
        notes = {name: part.notes for name, part in metrics.items() if part.notes}
        return Metrics("mixture", len(rows), values | each, {**notes, **bad_row_notes(rows)})

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        return self.part(None).read(text, config, target)  # raises, with the names of the tasks

    def predict(
        self,
        model: Transformer,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
        task: str | None = None,
        **options: Any,
    ) -> list[str]:
        """Return the predictions of the part `task`."""
        return self.part(task).predict(model, texts, progress=progress, **options)


def _by_part(rows: Rows) -> dict[str, list[int]]:
    """Return the numbers of the rows of each part."""
    numbers: dict[str, list[int]] = {}
    for i, name in enumerate(rows.columns["task"]):
        numbers.setdefault(name, []).append(i)
    return numbers


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

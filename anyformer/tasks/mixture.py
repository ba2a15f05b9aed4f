"""A mixture: several sequence-to-sequence tasks by one model, told apart by the token that each source begins with."""

from collections.abc import Sequence
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import did_you_mean
from anyformer.data.loader import ExampleLoader, Loader
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Mixture, Packed, Padded
from anyformer.tasks.base import Metrics, Progress, left_out, token_loss
from anyformer.tasks.seq2seq import SequenceToSequence


def task_token(name: str) -> str:
    """What the token of a part is called."""
    return f"<task:{name}>"


class MixedTasks:
    """Rows of all parts stand side by side in a batch, each as often in an epoch as its part's weight says."""

    loss = staticmethod(token_loss)

    def __init__(self, spec: Mixture, tokenizer: TextTokenizer, source_tokenizer: TextTokenizer | None = None):
        self.spec, self.tokenizer, self.source_tokenizer = spec, tokenizer, source_tokenizer
        self.reader = source_tokenizer or tokenizer
        self.parts: dict[str, SequenceToSequence] = {}
        for part in spec.parts:
            if (begin := self.reader.special_id(task_token(part.name))) is None:
                raise ConfigError([Fault("tokenizer", f"has no {task_token(part.name)}, which the task mixture needs")])
            self.parts[part.name] = SequenceToSequence(part, tokenizer, source_tokenizer, [begin])

    def part(self, name: str | None) -> SequenceToSequence:
        """One of the tasks, by its name."""
        if name is None:
            raise ConfigError([Fault("task", f"which one of the mixture? There are {', '.join(self.parts)}")])
        if name not in self.parts:
            what = f"= '{name}': the mixture has no such task; {did_you_mean(name, self.parts)}"
            raise ConfigError([Fault("task", what)])
        return self.parts[name]

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        if batches is not None:  # all at once, so that they stay with all rows
            rows.encoded("source", self.reader.encode_batch, keep=True)
            rows.encoded("target", self.tokenizer.encode_batch, keep=True)
        bad: dict[int, str] = {}
        for name, numbers in _by_part(rows).items():
            whys = self.part(name).misfits(rows.take(numbers), config, batches)
            bad |= {i: why for i, why in zip(numbers, whys, strict=True) if why}
        return rows.without(dict(sorted(bad.items())))

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, Padded | Packed)
        taken = [(self.part(name), rows.take(numbers)) for name, numbers in _by_part(rows).items()]
        rows.kept.clear()  # each part has its own
        pieces, weights = [], list[float]()
        for part, own in taken:
            pieces += part.encode(own, both_sides=model.encoder is not None)
            weights += [next(p.weight for p in self.spec.parts if p is part.spec)] * len(own)
        pads = self.tokenizer.pad or 0, self.reader.pad or 0
        return ExampleLoader(pieces, batches, seed, *pads, weights=weights)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Each part by itself, as `name.metric`; and the mean over the parts that have a metric."""
        found = {n: self.part(n).evaluate(model, rows.take(some), batches) for n, some in _by_part(rows).items()}
        names = dict.fromkeys(metric for part in found.values() for metric in part.values)
        each = {f"{name}.{metric}": value for name, part in found.items() for metric, value in part.values.items()}
        values = {metric: _mean([p.values[metric] for p in found.values() if metric in p.values]) for metric in names}
        notes = {name: part.notes for name, part in found.items() if part.notes}
        return Metrics("mixture", len(rows), values | each, {**notes, **left_out(rows)})

    def predict(
        self,
        model: Transformer,
        texts: Sequence[str],
        *,
        progress: Progress | None = None,
        task: str | None = None,
        **options: Any,
    ) -> list[str]:
        """The answers of one of the tasks."""
        return self.part(task).predict(model, texts, progress=progress, **options)


def _by_part(rows: Rows) -> dict[str, list[int]]:
    """The numbers of the rows of each part."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(rows.columns["task"]):
        found.setdefault(name, []).append(i)
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

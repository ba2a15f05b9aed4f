"""Compare runs: their settings, learning curves, cost, and metrics on the same rows.

Metrics are computed on the rows of the first run's test split that all runs can read. Each further run is compared
with the first by a paired bootstrap over these rows.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Fault, io
from anyformer.data.readers import Rows, read
from anyformer.lab.comparison import measures
from anyformer.lab.comparison.bootstrap import MetricDifference, paired, resample
from anyformer.lab.comparison.measures import Measure
from anyformer.nn.inspection.count import count
from anyformer.recipe import Recipe, Task
from anyformer.runs.run import RECIPE, Run, load
from anyformer.tasks.base import media_of, readable
from anyformer.tasks.classify import split as split_labels
from anyformer.tasks.tag import split as split_words
from anyformer.training.log import read_metrics
from anyformer.training.train import recipe_path, split_sources

MIN_ROWS = 10  # fewer say nothing about other rows
MAX_EXAMPLES = 10
BLOCKS, BLOCK_CHARACTERS = 50, 2000  # number of blocks of a long text, and the largest size of one
WINDOW = 1024  # tokens that a language model reads at once
KINDS = ("classify", "regress", "tag", "seq2seq", "lm")

Log = Sequence[Mapping[str, Any]]  # lines of a run's metrics.jsonl; none if it was imported


@dataclass(frozen=True)
class DifferingRow:
    """A row on which runs differ."""

    text: str
    target: str
    predictions: tuple[str, ...]  # of each run


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; the first is the baseline."""

    names: tuple[str, ...]
    settings: Mapping[str, tuple[str, ...]]  # settings that differ, with the value of each run
    curves: Mapping[str, Sequence[tuple[int, float]]]  # validation loss by step, of runs that were trained here
    cost: Mapping[str, tuple[str, ...]]
    rows: int = 0  # rows of the split that all runs can read
    left_out: int = 0
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    differences: Mapping[str, tuple[MetricDifference, ...]] = field(
        default_factory=dict
    )  # of each further run to the first
    examples: tuple[DifferingRow, ...] = ()


def compare(folders: Sequence[str | Path], split: str = "test", overrides: Sequence[str] = ()) -> Comparison:
    """Return the comparison of two or more runs. `overrides` change the first run's recipe: `data.root=DIR`."""
    paths = [Path(folder) for folder in folders]
    if len(paths) < 2:
        raise ConfigError([Fault("runs", "name at least two runs")])
    if len(set(paths)) < len(paths):
        raise ConfigError([Fault("runs", "each run must be named once")])
    runs = [load(path) for path in paths]
    kinds = [run.spec.kind for run in runs]
    if len(set(kinds)) > 1:
        raise ConfigError([Fault("runs", f"have different tasks: {', '.join(kinds)}")])
    if kinds[0] not in KINDS and not _has_row_measures(runs[0]):
        what = f"compare knows {', '.join(KINDS)}, and tasks with `row_measures`"
        raise ConfigError([Fault("runs", f"of the task '{kinds[0]}': {what}")])
    rows, left_out = _shared_rows(runs, paths[0], split, overrides)
    found, examples = _measure(runs, rows)
    names = tuple(_names(paths))
    logs = [read_metrics(path) for path in paths]
    return Comparison(
        names,
        _settings(runs, paths),
        {name: curve for name, log in zip(names, logs, strict=True) if (curve := _curve(log))},
        _cost(runs, logs),
        len(rows),
        left_out,
        {name: tuple(one.total for one in each) for name, each in found.items()},
        {name: each[0].higher_is_better for name, each in found.items()},
        _differences(found),
        examples,
    )


def _differences(found: Mapping[str, Sequence[Measure]]) -> dict[str, tuple[MetricDifference, ...]]:
    """Return the differences of each further run to the first, for each metric."""
    values = iter(resample([one for each in found.values() for one in each]))
    differences = {}
    for name, (first, *others) in found.items():
        base = next(values)
        differences[name] = tuple(paired(first, one, (base, next(values))) for one in others)
    return differences


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of paths, as many as make them distinct."""
    for n in range(1, 1 + max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-n:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return list(map(str, paths))


# -- settings, curves, cost -------------------------------------------------------------------------------------------


def _settings(runs: Sequence[Run], paths: Sequence[Path]) -> dict[str, tuple[str, ...]]:
    """Return the settings that differ: of the recipes, or of the models if a run has no recipe."""
    have = all(
        (run.folder / RECIPE).exists() or (path / RECIPE).exists() for run, path in zip(runs, paths, strict=True)
    )
    if have:
        recipes = [io.load(Recipe, recipe_path(run, path, "")) for run, path in zip(runs, paths, strict=True)]
        tables = [dict(_flat(json.loads(io.dumps(recipe, "json")))) for recipe in recipes]
    else:
        tables = [dict(_flat({"model": json.loads(io.dumps(run.config, "json"))})) for run in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(tables))
    values = {name: tuple(str(table.get(name, "–")) for table in tables) for name in names}
    return {name: each for name, each in values.items() if len(set(each)) > 1}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of a nested table with its dotted name."""
    items: Any = None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value):
        items = enumerate(value)
    if items is None:
        yield name, value
        return
    for key, each in items:
        yield from _flat(each, f"{name}.{key}" if name else str(key))


def _curve(log: Log) -> list[tuple[int, float]]:
    """Return the validation loss by step, or the training loss if there was no validation."""
    key = "valid_loss" if any("valid_loss" in line for line in log) else "loss"
    return [(line["step"], float(line[key])) for line in log if key in line]


def _cost(runs: Sequence[Run], logs: Sequence[Log]) -> dict[str, tuple[str, ...]]:
    """Return parameters, FLOPs, steps and speed of training."""
    tables = [count(run.config) for run in runs]
    cost = {
        "parameters": tuple(f"{table.parameters:,}" for table in tables),
        "forward FLOPs per token": tuple(f"{table.flops / table.length:.3g}" for table in tables),
    }
    if any(logs):
        cost["steps"] = tuple(f"{log[-1]['step']:,}" if log else "–" for log in logs)
        speeds = [sorted(line["tokens_per_second"] for line in log if "tokens_per_second" in line) for log in logs]
        cost["tokens per second in training (median)"] = tuple(
            f"{speed[len(speed) // 2]:,}" if speed else "–" for speed in speeds
        )
    return cost


# -- metrics on the same rows -----------------------------------------------------------------------------------------


def _shared_rows(runs: Sequence[Run], path: Path, split: str, overrides: Sequence[str]) -> tuple[Rows, int]:
    """Return the rows of the first run's split that all runs can read, and how many were left out."""
    file = recipe_path(runs[0], path, "name a run that was trained here first: its data are used")
    recipe = io.override(io.load(Recipe, file), overrides)
    sources = split_sources(recipe, split, file)
    if len(sources) > 1:
        names = ", ".join(one.name for one in sources)
        raise ConfigError([Fault("--split", f"= '{split}': the recipe has several test sets; choose one: {names}")])
    rows = read(sources[0].source, recipe.data, sources[0].split, recipe.seed, sources[0].key)
    if rows.stream is not None:
        raise ConfigError([Fault(sources[0].key, "is tokenised text of shards: compare needs the texts")])
    before = len(rows) + len(rows.bad)
    for run in runs:
        rows = run.task.filter_rows(readable(rows, media_of(run.task)), run.config)
    if runs[0].spec.kind == "lm":
        texts = list(_blocks(rows.columns["text"]))
        rows, left_out = Rows({"text": texts}, rows.file, range(1, len(texts) + 1)), 0
    else:
        left_out = before - len(rows)
    if len(rows) < MIN_ROWS:
        raise ConfigError(
            [Fault(sources[0].key, f"has {len(rows)} rows that all runs can read: at least {MIN_ROWS} are compared")]
        )
    return rows, left_out


def _blocks(texts: Sequence[str]) -> Iterator[str]:
    """Yield texts in blocks that end with a line, or within a line that is longer than a block."""
    limit = min(BLOCK_CHARACTERS, max(1, sum(map(len, texts)) // BLOCKS))
    for text in texts:
        block = ""
        for line in text.splitlines(keepends=True):
            for at in range(0, len(line), BLOCK_CHARACTERS):
                block += line[at : at + BLOCK_CHARACTERS]
                if len(block) >= limit:
                    yield block
                    block = ""
        if block.strip():
            yield block


def _measure(runs: Sequence[Run], rows: Rows) -> tuple[dict[str, tuple[Measure, ...]], tuple[DifferingRow, ...]]:
    """Return each metric for each run, and rows with different predictions, most different ones first."""
    columns, spec = rows.columns, runs[0].spec
    if spec.kind == "lm":
        windows = [min(WINDOW, run.config.stacks["decoder"].limit or WINDOW) for run in runs]
        each = zip(runs, windows, strict=True)
        return {"bits_per_byte": tuple(measures.bits_per_byte(run, columns["text"], n) for run, n in each)}, ()
    assert isinstance(spec, Task)
    *inputs, targets = (columns[name] for name in spec.columns)
    texts = ["\t".join(row) for row in zip(*inputs, strict=True)]
    if spec.reads_words:
        texts = [words.replace("\n", "\t") for words in texts]
    predictions = [run.predict(texts) for run in runs]
    found: dict[str, list[Measure]] = {}
    for run, predicted in zip(runs, predictions, strict=True):
        for one in _measures(run, texts, targets, predicted):
            found.setdefault(one.name, []).append(one)
    shared = {name: tuple(each) for name, each in found.items() if len(each) == len(runs)}
    return shared, _examples(texts, targets, predictions)


def _has_row_measures(run: Run) -> bool:
    return isinstance(run.spec, Task) and type(run.spec).row_measures is not Task.row_measures


def _measures(run: Run, texts: Sequence[str], targets: Sequence[str], predicted: Sequence[str]) -> Iterator[Measure]:
    """Yield the metrics of a run's predictions."""
    spec: Any = run.spec
    match spec.kind:
        case "classify":
            labels = [[set(split_labels(one, spec.separator)) for one in some] for some in (predicted, targets)]
            yield measures.mean("accuracy", [float(a == b) for a, b in zip(*labels, strict=True)])
        case "regress":
            pairs = [(float(a), float(b)) for a, b in zip(predicted, targets, strict=True)]
            yield measures.mean("squared_error", [(a - b) ** 2 for a, b in pairs], higher_is_better=False)
        case "tag":
            guessed, true = [split_words(one) for one in predicted], [tags.split("\n") for tags in targets]
            right = [float(sum(x == y for x, y in zip(a, b, strict=True))) for a, b in zip(guessed, true, strict=True)]
            yield measures.ratio("accuracy", right, [float(len(tags)) for tags in true])
            if spec.spans:
                yield measures.span_f1(guessed, true)
        case "seq2seq":
            yield measures.loss(run, texts, targets)
            yield measures.mean("exact_match", [float(a == b) for a, b in zip(predicted, targets, strict=True)])
            if "bleu" in spec.metrics:
                yield measures.bleu(predicted, targets, spec.bleu_tokenize)
            if "word_error_rate" in spec.metrics:
                yield measures.word_error_rate(predicted, targets)
        case _:
            rows = [spec.row_measures(*row) for row in zip(predicted, targets, strict=True)]
            for name in rows[0]:
                yield measures.mean(name, [row[name] for row in rows], name not in spec.lower_is_better)


def _examples(
    texts: Sequence[str], targets: Sequence[str], predictions: Sequence[Sequence[str]]
) -> tuple[DifferingRow, ...]:
    """Return rows with different predictions: first those that only some runs predict right."""
    rows = list(zip(texts, targets, zip(*predictions, strict=True), strict=True))
    differing = [DifferingRow(*row) for row in rows if len(set(row[2])) > 1]
    differing.sort(key=lambda one: not any(_same(p, one.target) for p in one.predictions))  # stable
    return tuple(differing[:MAX_EXAMPLES])


def _same(prediction: str, target: str) -> bool:
    return prediction.split() == target.split()

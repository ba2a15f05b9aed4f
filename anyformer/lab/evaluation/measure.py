"""Metrics of a task file: accuracy by log-likelihood, and perplexity. The definitions are lm-evaluation-harness's.

multiple_choice          acc: the answer with the largest log-likelihood is right; acc_norm: the same, divided by its
                         number of characters
loglikelihood            perplexity: exp(-mean log-likelihood); acc: greedy decoding gives the target
loglikelihood_rolling    word_perplexity, byte_perplexity, bits_per_byte: of all texts together
"""

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.lab.evaluation.likelihood import Likelihood, Progress, continuations, texts
from anyformer.lab.evaluation.task_file import Item, TaskFile, read_items, read_task
from anyformer.runs.run import Run
from anyformer.tasks.base import Metrics


def evaluate_file(run: Run, path: str | Path, *, limit: int | None = None, progress: Progress | None = None) -> Metrics:
    """Evaluate a language model on a task file, or on its first `limit` rows.

    `progress` is called with the number of log-likelihoods computed since its last call.
    """
    task = read_task(path)
    items = read_items(task, Path(path).parent, limit)
    match task.output_type:
        case "multiple_choice":
            found = _multiple_choice(task, items, run, progress)
        case "loglikelihood":
            pairs = [(item.context, task.target_delimiter + str(item.target)) for item in items]
            scores = continuations(run, pairs, progress)
            found = {"perplexity": _exp(-statistics.fmean(score.total for score in scores))}
            found |= _mean("acc", [score.greedy for score in scores])
        case "loglikelihood_rolling":
            documents = [str(item.target) for item in items]
            if not any(documents):
                raise ConfigError([Fault(f"{visible(str(path))}: doc_to_target", "every text is empty")])
            found = _perplexities(documents, texts(run, documents, progress))
    kept = {name: value for name, value in found.items() if name.removesuffix("_stderr") in task.metrics}
    notes = {"output_type": task.output_type, **({"metadata": task.metadata} if task.metadata else {})}
    return Metrics(task.task, len(items), kept, notes)


def _multiple_choice(task: TaskFile, items: Sequence[Item], run: Run, progress: Progress | None) -> dict[str, float]:
    pairs = [(item.context, task.target_delimiter + choice) for item in items for choice in item.choices]
    scores = iter(continuations(run, pairs, progress))
    right, right_by_length = [], []
    for item in items:
        totals = [next(scores).total for _ in item.choices]
        by_length = [total / len(choice) for total, choice in zip(totals, item.choices, strict=True)]
        right.append(totals.index(max(totals)) == item.target)
        right_by_length.append(by_length.index(max(by_length)) == item.target)
    return _mean("acc", right) | _mean("acc_norm", right_by_length)


def _mean(name: str, values: Sequence[bool]) -> dict[str, float]:
    """Return the mean of a metric and its standard error, for two or more rows."""
    found = {name: statistics.fmean(values)}
    if len(values) > 1:
        found[f"{name}_stderr"] = statistics.stdev(map(float, values)) / math.sqrt(len(values))
    return found


def _perplexities(documents: Sequence[str], scores: Sequence[Likelihood]) -> dict[str, float]:
    total = math.fsum(score.total for score in scores)
    words = sum(len(re.split(r"\s+", document)) for document in documents)
    size = sum(len(document.encode("utf-8")) for document in documents)
    return {
        "word_perplexity": _exp(-total / words),
        "byte_perplexity": _exp(-total / size),
        "bits_per_byte": -total / size / math.log(2),
    }


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))

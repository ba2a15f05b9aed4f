"""Log-likelihoods of continuations and of whole texts, as lm-evaluation-harness defines them.

A context and its continuation are encoded as one text. The continuation's tokens are those after as many as the context
alone has. Spaces at the end of a context are moved to the continuation, where most tokenizers expect them. Inputs begin
with the special tokens that the run's task puts before a text.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from anyformer.config import ConfigError, Fault
from anyformer.generation.score import token_scores
from anyformer.runs.run import Run
from anyformer.tasks.lm import LanguageModelling

DEFAULT_LENGTH = 2048  # tokens that a model without a limit reads at once
CHUNK = 256  # rows between two reports of progress

Progress = Callable[[int], object]


class Likelihood(NamedTuple):
    """The log-likelihood of a continuation."""

    total: float  # summed over its tokens, natural logarithm
    greedy: bool  # True if each of its tokens is the most probable one
    tokens: int  # that were scored


class ScoredRow(NamedTuple):
    """Ids that a model reads, and how many of the last ones are scored."""

    ids: list[int]
    scored: int


def continuations(run: Run, pairs: Sequence[tuple[str, str]], progress: Progress | None = None) -> list[Likelihood]:
    """Return the log-likelihood of each continuation after its context; contexts that are too long lose their start."""
    task, limit = language_model(run), max_length(run)
    rows = []
    for number, (context, continuation) in enumerate(pairs, 1):
        before, after = _encode_pair(task, context, continuation)
        if not 0 < len(after) <= limit:
            what = f"has {len(after):,} tokens: must have from 1 to {limit:,}"
            raise ConfigError([Fault(f"continuation {number}", what)])
        rows.append(ScoredRow([*before, *after][-(limit + 1) :], len(after)))
    return _score(run, rows, progress)


def texts(run: Run, documents: Sequence[str], progress: Progress | None = None) -> list[Likelihood]:
    """Return the log-likelihood of each text, after <bos> or else <eos>.

    Longer texts are read in windows that begin with the last token of the window before. The last one ends with the
    text and is full. Each token is scored once.
    """
    task, limit = language_model(run), max_length(run)
    rows, counts = [], []
    for number, document in enumerate(documents, 1):
        ids = [*task.begin, *task.tokenizer.encode(document)]
        if not ids:
            raise ConfigError([Fault(f"text {number}", "is empty")])
        whole, done, windows = [_first_id(task), *ids], 0, 0
        while done < len(ids):
            end = min(done + limit, len(ids))
            rows.append(ScoredRow(whole[max(0, end - limit) : end + 1], end - done))
            done, windows = end, windows + 1
        counts.append(windows)
    scored = iter(_score(run, rows, progress))
    found = []
    for windows in counts:
        parts = [next(scored) for _ in range(windows)]
        total, tokens = sum(part.total for part in parts), sum(part.tokens for part in parts)
        found.append(Likelihood(total, all(part.greedy for part in parts), tokens))
    return found


def language_model(run: Run) -> LanguageModelling:
    """Return the task of a run that continues texts, without an encoder and without visible prefixes."""
    task = run.writer()
    if not isinstance(task, LanguageModelling) or task.marked or run.model.encoder is not None:
        what = f"= '{run.spec.kind}': log-likelihoods are of language models (lm)"
        raise ConfigError([Fault("task.kind", what)])
    return task


def max_length(run: Run) -> int:
    """Return the number of tokens that a model reads at once."""
    limits = [stack.limit for stack in run.config.stacks.values() if stack.limit is not None]
    return min([*limits, *([run.config.context] if run.config.context else [])], default=DEFAULT_LENGTH)


def _first_id(task: LanguageModelling) -> int:
    text = task.tokenizer
    first = text.bos if text.bos is not None else text.eos
    if first is None:
        raise ConfigError([Fault("tokenizer", "has no <bos> and no <eos>: an empty context needs one of them")])
    return first


def _encode_pair(task: LanguageModelling, context: str, continuation: str) -> tuple[list[int], list[int]]:
    encode = task.tokenizer.encode
    if not context:
        first, after = _first_id(task), encode(continuation)
        return ([first], after) if after[:1] != [first] else (after[:1], after[1:])
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    before, whole = [*task.begin, *encode(context)], [*task.begin, *encode(context + continuation)]
    if not before:  # blanks only
        return [_first_id(task)], whole
    return before, whole[len(before) :]


def _score(run: Run, rows: Sequence[ScoredRow], progress: Progress | None) -> list[Likelihood]:
    """Score rows of similar length together; a row's result does not depend on the others."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    found: dict[int, Likelihood] = {}
    for at in range(0, len(order), CHUNK):
        chunk = order[at : at + CHUNK]
        scores = token_scores(run.model, [rows[i].ids for i in chunk])
        for i, each in zip(chunk, scores, strict=True):
            n = rows[i].scored
            total, greedy = each.logprobs[-n:].double().sum().item(), bool(each.top[-n:].all())
            found[i] = Likelihood(total, greedy, n)
        if progress is not None:
            progress(len(chunk))
    return [found[i] for i in range(len(rows))]

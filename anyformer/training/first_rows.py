"""The first rows of a batch as text, as the model sees them: special tokens and other modalities by name."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from anyformer.attention.media_batch import MediaBatch
from anyformer.config.media import MEDIA_KINDS
from anyformer.data.batch import Batch
from anyformer.data.tokenizer import TextTokenizer
from anyformer.kernels.conventions import IGNORE, PADDING
from anyformer.training.job import Job

MAX_EXAMPLES = 3  # rows


@dataclass(frozen=True)
class ExampleSummary:
    """A row of a batch as text."""

    source: str | None  # input of the encoder, if there is a decoder, too
    inputs: str
    labels: str


def first_rows(job: Job, batch: Batch) -> Iterator[ExampleSummary]:
    """Yield the first rows of a batch as text."""
    task, target = job.task, job.task.tokenizer
    source = task.source_tokenizer or target
    texts = len(batch.ids) // len(batch.labels)  # of an example: two, if the texts of a pair are encoded apart
    for i in range(min(MAX_EXAMPLES, len(batch.labels))):
        segments = None if batch.segments is None else batch.segments[i]
        if segments is not None and bool((segments == PADDING).all()):
            return  # rows that fill up the batch
        encoder_input = None
        if batch.source is not None:
            source_segments = None if batch.source_segments is None else batch.source_segments[i]
            encoder_input = spell(source, batch.source[i], source_segments, batch.media and _kinds(batch.media, i))
        rows = slice(texts * i, texts * (i + 1))
        row_segments = [None] * texts if batch.segments is None else batch.segments[rows]
        labels = task.format_label(batch.labels[i])
        if labels is None:  # of pairs that are compared, both
            each = zip(batch.labels[i].view(texts, -1), row_segments, strict=True)
            labels = " | ".join(spell(target, *row) for row in each)
        kinds = None if batch.media is None or batch.source is not None else _kinds(batch.media, i)
        inputs = (spell(target, *row, kinds) for row in zip(batch.ids[rows], row_segments, strict=True))
        yield ExampleSummary(encoder_input, " | ".join(inputs), labels)


def _kinds(media: MediaBatch, row: int) -> list[str]:
    """Return the kind of segment at each place of a row; empty for tokens."""
    places = {kind: at[row].tolist() for kind in MEDIA_KINDS if (at := media.at(kind)) is not None}
    each = zip(*places.values(), strict=True)
    return [next((kind for kind, at in zip(places, place, strict=True) if at >= 0), "") for place in each]


def spell(tokenizer: TextTokenizer, ids: Tensor, segments: Tensor | None, kinds: Sequence[str] | None = None) -> str:
    """Return a row as text, without padding: special tokens by name, ¦ between packed texts, … for missing labels.

    A segment of one of the `kinds` is one name, such as <image>.
    """
    names = tokenizer.special
    words: list[str] = []

    def name(i: int, kind: str) -> str:
        """Return the name of a place that is no plain token."""
        return f"<{kind}>" if kind else "…" if i == IGNORE else tokenizer.token(i) if i in names else ""

    pieces = ids.tolist(), [0] * len(ids) if segments is None else segments.tolist(), kinds or [""] * len(ids)
    for segment, members in itertools.groupby(zip(*pieces, strict=True), key=lambda place: place[1]):
        if segment == PADDING:
            continue
        words += ["¦"] if words else []
        for named, run in itertools.groupby(((i, name(i, kind)) for i, _, kind in members), key=lambda pair: pair[1]):
            words.append(named or tokenizer.decode([i for i, _ in run]).replace("\n", "⏎").strip(" "))
    return " ".join(filter(None, words))

"""Batches: examples in token ids, and the tensors that rows of examples become."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.attention.media_batch import MediaBatch
from anyformer.data.batch_plan import Row
from anyformer.kernels.conventions import IGNORE, PADDING, next_power_of_two

Ids = Sequence[int]


class Example(NamedTuple):
    """One example in ids: the inputs of the model, and a label for each token or for the whole row."""

    ids: Ids
    labels: Sequence[Any]  # one per id, IGNORE where there is none; or the labels of the row
    source: Ids | None = None  # input of the encoder of an encoder–decoder
    types: Ids | None = None  # one per id, in models with token types that read two texts
    pair: Ids | None = None  # a second text that is read separately, in the next row
    pair_labels: Ids | None = None  # one per id of the pair, where both texts have labels of their tokens
    marks: Ids | None = None  # one per id, where the whole text sees some tokens (see `attention/layout.py`)
    spelled: np.ndarray | None = None  # [ids, longest]: bytes + 1 of the words, in models that read their spelling

    @property
    def length(self) -> int:
        """Tokens that a row must hold: the longest of ids, source and pair."""
        return max(len(self.ids), len(self.source or ()), len(self.pair or ()))


class SampledAnswers(NamedTuple):
    """Rewards and advantages of rows that the model has sampled itself (the task grpo)."""

    rewards: Tensor  # [b]
    advantages: Tensor  # [b]
    log_p: Tensor | None = None  # [b, t], of each label when it was sampled; None: as in the first forward pass

    def to(self, device: torch.device) -> "SampledAnswers":
        log_p = None if self.log_p is None else to_device(self.log_p, device)
        return SampledAnswers(to_device(self.rewards, device), to_device(self.advantages, device), log_p)


class Batch(NamedTuple):
    """The input and labels of one forward pass."""

    ids: Tensor  # [b, t]; [2b, t] for pairs that are read separately, the two texts in consecutive rows
    labels: Tensor  # [b, t], IGNORE where there is none; [b, n] of whole rows; or [b, 2, t] of pairs that are compared
    segments: Tensor | None  # [b, t], PADDING where there is no token; None: full rows
    source: Tensor | None = None  # [b, s]
    source_segments: Tensor | None = None
    examples: tuple[int, ...] = ()  # their numbers, which identify the batch
    follows_previous: bool = False  # each row continues where it ended in the previous batch
    types: Tensor | None = None  # [b, t]
    marks: Tensor | None = None  # [b, t]
    spelled: Tensor | None = None  # [b, t, longest]
    media: MediaBatch | None = None  # images, sounds and feature vectors in `ids`, or in `source` if there is one
    documents: int = 0  # upper bound of the number of documents in all rows, if packed
    sampled: SampledAnswers | None = None  # of rows that the model has sampled; `labels` are then its own tokens

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device."""
        moved: dict[str, Any] = {
            name: to_device(x, device) for name, x in self._asdict().items() if isinstance(x, Tensor)
        }
        if self.media is not None:
            moved["media"] = MediaBatch(*(None if x is None else to_device(x, device) for x in self.media))
        if self.sampled is not None:
            moved["sampled"] = self.sampled.to(device)
        return self._replace(**moved)

    @property
    def target_count(self) -> int:
        """Number of labels that are not IGNORE; of pairs that are compared, or of sampled answers, their number."""
        if self.sampled is not None:
            return len(self.labels)
        if self.labels.dim() == 3:
            return int((self.labels != IGNORE).flatten(1).any(dim=1).sum())
        return _count_unequal(self.labels, IGNORE)

    @property
    def tokens(self) -> int:
        """Number of tokens on both sides, without padding."""
        return self.tokens_in_ids + (0 if self.source is None else _count_tokens(self.source, self.source_segments))

    @property
    def tokens_in_ids(self) -> int:
        """Number of tokens in `ids`, without padding."""
        return _count_tokens(self.ids, self.segments)

    @property
    def slots(self) -> int:
        """Number of tokens on both sides, padding included."""
        return self.ids.numel() + (0 if self.source is None else self.source.numel())


def _count_tokens(ids: Tensor, segments: Tensor | None) -> int:
    return ids.numel() if segments is None else _count_unequal(segments, PADDING)


def _count_unequal(x: Tensor, value: int) -> int:
    """Return how many elements differ from a value; on the CPU by numpy, which has less overhead per call."""
    return int(np.count_nonzero(x.numpy() != value) if x.device.type == "cpu" else (x != value).sum())


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; to a GPU it is copied asynchronously from pinned memory."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of different lengths: their concatenated values, and the length of each."""

    values: np.ndarray  # [total], or [total, n]
    sizes: np.ndarray

    @classmethod
    def of(cls, sequences: Sequence[Any]) -> "Ragged":
        """Concatenate sequences: lists of integers become int32, lists of floats fp32; arrays keep their type."""
        sizes = np.array([len(x) for x in sequences], dtype=np.int64)
        if sequences and isinstance(sequences[0], np.ndarray):
            return cls(np.concatenate(sequences), sizes)
        is_float = sequences and sequences[0] and isinstance(sequences[0][0], float)
        values = np.fromiter(chain.from_iterable(sequences), np.float32 if is_float else np.int32, int(sizes.sum()))
        return cls(values, sizes)

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of the first value of each sequence, and the total length."""
        return np.concatenate(([0], self.sizes.cumsum()))

    def sequence(self, i: int) -> np.ndarray:
        """Return the i-th sequence."""
        return self.values[self.starts[i] : self.starts[i + 1]]

    def take(self, numbers: np.ndarray) -> "Ragged":
        """Return the sequences with these numbers, in this order."""
        sizes = self.sizes[numbers]
        shift = self.starts[numbers] - (sizes.cumsum() - sizes)
        return Ragged(self.values.take(np.arange(sizes.sum()) + np.repeat(shift, sizes), axis=0), sizes)

    def framed(self, before: Ids, after: Ids) -> "Ragged":
        """Return each sequence with the same ids before and after it."""
        sizes = self.sizes + len(before) + len(after)
        ends = sizes.cumsum()
        at = [*(ends - sizes + i for i in range(len(before))), *(ends - i for i in range(len(after), 0, -1))]
        return Ragged(insert_at(self.values, np.array(at, dtype=np.int64).T, np.array([*before, *after])), sizes)


def insert_at(values: np.ndarray, at: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Insert new values, which have the indices `at` in the result."""
    out, is_old = np.empty(len(values) + at.size, dtype=values.dtype), np.ones(len(values) + at.size, dtype=np.bool_)
    out[at], is_old[at] = new, False
    out[is_old] = values
    return out


class ExampleTable(Sequence[Example]):
    """Examples by column: each field of all examples is one ragged array.

    A batch is cut out with a few numpy operations. Python loops over tokens would take longer than a GPU's step.
    """

    def __init__(self, ids: Ragged, labels: Ragged, **others: Ragged):
        self.columns = {"ids": ids, "labels": labels, **others}  # by the fields of `Example`

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "ExampleTable":
        """Return the table of examples; all have the fields that the first one has."""
        if isinstance(examples, ExampleTable):
            return examples
        first = examples[0] if examples else Example((), ())
        names = [name for name in Example._fields if getattr(first, name) is not None]
        return cls(**{name: Ragged.of([getattr(example, name) for example in examples]) for name in names})

    def __len__(self) -> int:
        return len(self.columns["ids"].sizes)

    def __getitem__(self, i: Any) -> Any:
        arrays = {name: column.sequence(range(len(self))[i]) for name, column in self.columns.items()}
        fields: dict[str, Any] = {name: x.tolist() if x.ndim == 1 else x for name, x in arrays.items()}
        return Example(**fields)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Tokens of each side of an example, [n, 2]: its ids, and its source or pair (0 if there is none)."""
        sides = [self.columns[name].sizes for name in ("ids", "source", "pair") if name in self.columns]
        return np.stack([sides[0], sides[1] if len(sides) > 1 else np.zeros_like(sides[0])], axis=1)

    def take(self, numbers: np.ndarray) -> "ExampleTable":
        """Return the examples with these numbers, in this order."""
        return ExampleTable(**{name: column.take(numbers) for name, column in self.columns.items()})


def collate(
    rows: Sequence[Row], examples: Sequence[Example], pad: int, source_pad: int, length: int | None = None
) -> Batch:
    """Return the batch of some rows, which are numbers of examples."""
    table = ExampleTable.of(examples).take(np.array(list(chain.from_iterable(rows))))
    return collate_rows(rows, table, pad, source_pad, length)


def collate_rows(
    rows: Sequence[Row],
    table: ExampleTable,
    pad: int,
    source_pad: int,
    length: int | None = None,
    documents: int = 0,
    row_labels: bool = False,
) -> Batch:
    """Return the batch of rows whose examples are in the table, in the same order.

    The width is `length`, or else that of the longest row. All rows but the first may be empty. `Batch.documents` is
    `documents` unless the batch has more of them. `row_labels`: labels are of whole rows, and not of their tokens.
    """
    columns, examples = table.columns, tuple(chain.from_iterable(rows))
    counts = np.array([len(row) for row in rows], dtype=np.int64)

    def fill(name: str, filler: int) -> Tensor:
        return _fill(columns[name], counts, filler, length)

    labels = _fill(columns["labels"], counts, IGNORE, None if row_labels else length)
    documents = max(documents, next_power_of_two(len(examples)))
    if "pair" in columns:
        both = _interleave(columns["ids"], columns["pair"])
        ones = np.ones(2 * len(examples), dtype=np.int64)
        ids, segments = _fill(both, ones, pad, length), _segments(both.sizes, ones, length)
        if "pair_labels" in columns:
            compared = _interleave(columns["labels"], columns["pair_labels"])
            labels = _fill(compared, ones, IGNORE, length).unflatten(0, (-1, 2))
        return Batch(ids, labels, segments, examples=examples)
    ids, segments = fill("ids", pad), _segments(columns["ids"].sizes, counts, length)
    if "source" not in columns:
        more: dict[str, Any] = {name: fill(name, 0) for name in ("types", "marks", "spelled") if name in columns}
        return Batch(ids, labels, segments, examples=examples, documents=documents, **more)
    source, source_segments = fill("source", source_pad), _segments(columns["source"].sizes, counts, length)
    if segments is None or source_segments is None:  # cross-attention needs the segments of both sides or of none
        segments = torch.zeros_like(ids) if segments is None else segments
        source_segments = torch.zeros_like(source) if source_segments is None else source_segments
    return Batch(ids, labels, segments, source, source_segments, examples, documents=documents)


def with_empty_rows(batch: Batch, rows: int) -> Batch:
    """Return a padded batch with this many rows: the new ones hold one token of the first row, and have no label.

    They are no bare padding, of which a mean over a row's tokens would be NaN.
    """
    batch, new = batch._replace(documents=rows), rows - len(batch.ids)
    if new <= 0:
        return batch

    def filled(name: str, x: Tensor) -> Tensor:
        row = x[:1].clone()
        if name == "labels":
            row.fill_(IGNORE)
        elif name in ("ids", "source"):
            row[:] = row[:, :1]
        elif name in ("segments", "source_segments"):
            row[:, 1:] = PADDING
        return torch.cat((x, row.expand(new, *row.shape[1:])))

    more: dict[str, Any] = {name: filled(name, x) for name, x in batch._asdict().items() if isinstance(x, Tensor)}
    return batch._replace(**more)


def _interleave(a: Ragged, b: Ragged) -> Ragged:
    """Return a0, b0, a1, b1, ..."""
    both = Ragged(np.concatenate((a.values, b.values)), np.concatenate((a.sizes, b.sizes)))
    return both.take(np.arange(len(both.sizes)).reshape(2, -1).T.ravel())


def _fill(column: Ragged, counts: np.ndarray, filler: int, length: int | None) -> Tensor:
    """Return sequences as [b, t]; `counts` [b] is the number of sequences in each row."""
    values, dtype = column.values, np.float32 if column.values.dtype.kind == "f" else np.int64
    if _is_full(column.sizes, counts, length):
        return torch.from_numpy(values.reshape(len(counts), column.sizes[0], *values.shape[1:]).astype(dtype))
    is_token = _token_mask(column.sizes, counts, length)
    out = np.full((*is_token.shape, *values.shape[1:]), filler, dtype=dtype)
    out[is_token] = values
    return torch.from_numpy(out)


def _segments(sizes: np.ndarray, counts: np.ndarray, length: int | None) -> Tensor | None:
    """Return the number of each token's sequence within its row [b, t]; None if every row is one full sequence."""
    if _is_full(sizes, counts, length):
        return None
    is_token = _token_mask(sizes, counts, length)
    segments = np.full(is_token.shape, PADDING, dtype=np.int64)
    segments[is_token] = np.repeat(np.arange(len(sizes)) - np.repeat(counts.cumsum() - counts, counts), sizes)
    return torch.from_numpy(segments)


def _is_full(sizes: np.ndarray, counts: np.ndarray, length: int | None) -> bool:
    """Return whether each row is one sequence, all of one length, and no width is fixed."""
    return length is None and bool((counts == 1).all() and (sizes == sizes[0]).all())


def _token_mask(sizes: np.ndarray, counts: np.ndarray, length: int | None) -> np.ndarray:
    """Return which slots hold a token [b, t]: rows are filled from the left, sequence after sequence."""
    totals = sizes.cumsum()[counts.cumsum() - 1]
    totals[1:] -= totals[:-1].copy()
    return np.arange(length or totals.max(), dtype=np.int32) < totals.astype(np.int32)[:, None]

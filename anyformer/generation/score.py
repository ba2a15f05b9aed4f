"""Scores of given tokens: their log-probabilities, and the top tokens at a position or a mask.

A row is what the model reads, in ids; in an encoder–decoder it begins with the start id and belongs to a source. Rows
may have unequal lengths, and a row's result does not depend on the others. The first `seen` tokens of a row, if given,
are seen by all of it. Everything is computed in at least fp32.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer.attention.layout import Layout, make_layout
from anyformer.attention.media_batch import MediaBatch
from anyformer.attention.padding import pad_rows
from anyformer.config import ConfigError, Fault, Input
from anyformer.generation.check import integer_faults, parse_ids
from anyformer.kernels.conventions import PLAIN, SEEN
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer

MAX_LOGITS = 2**26  # in memory at once, about

Ids = Sequence[int]


class TopTokens(NamedTuple):
    """The k most probable tokens at each of n positions, best first."""

    ids: Tensor  # int [n, k]
    probabilities: Tensor  # [n, k]


ReadMedia = Callable[[Tensor, Tensor | None], tuple[Tensor, MediaBatch | None, Tensor | None]]
"""Takes ids, negative ones for places of images or sounds, and marks; returns ids, segments and marks."""


class TokenScores(NamedTuple):
    """The tokens of a row but the first."""

    logprobs: Tensor  # [t - 1]
    top: Tensor  # bool [t - 1]: it is the most probable token; of equals, the one with the lowest id


def score(
    model: Transformer,
    rows: Sequence[Ids],
    sources: Sequence[Ids] | None = None,
    seen: Sequence[int] | None = None,
    read: ReadMedia | None = None,
) -> list[Tensor]:
    """Return for each row the log-probability of every token but the first, given those before it: [len(row) - 1].

    With `read`, rows or sources may have negative ids; as tokens to predict, their values mean nothing.
    """
    return [each.logprobs for each in token_scores(model, rows, sources, seen, read)]


def token_scores(
    model: Transformer,
    rows: Sequence[Ids],
    sources: Sequence[Ids] | None = None,
    seen: Sequence[int] | None = None,
    read: ReadMedia | None = None,
) -> list[TokenScores]:
    """Return what `score` does, and for each token whether greedy decoding would choose it."""
    _check(model, rows, sources, seen, read)
    scores = [TokenScores(torch.empty(0), torch.empty(0, dtype=torch.bool))] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    with evaluating(model):
        while order:
            longest = len(rows[order[0]])
            batch = order[: max(1, MAX_LOGITS // (longest * _vocab(model)))]
            order = order[len(batch) :]
            if longest == 1:
                break  # rows are sorted: no other has a token to score
            inputs = [rows[i][:-1] or rows[i] for i in batch]
            batch_sources = None if sources is None else [sources[i] for i in batch]
            logits = _logits(model, inputs, batch_sources, None if seen is None else [seen[i] for i in batch], read)
            targets, _ = _padded([rows[i][1:] for i in batch], logits.device)
            top = logits.argmax(dim=-1) == targets
            log_p = logits.log_softmax(dim=-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
            for i, values, best in zip(batch, log_p.cpu(), top.cpu(), strict=True):
                n = len(rows[i]) - 1
                scores[i] = TokenScores(values[:n].clone(), best[:n].clone())
    return scores


def sliding(model: Transformer, ids: Ids, window: int, stride: int | None = None) -> Tensor:
    """Score one row of any length, of which a decoder reads `window` tokens at a time: [len(ids) - 1].

    Windows begin `stride` tokens apart (half a window if not given). Each token is scored once, in the first window
    that contains it, with at least window - stride tokens of context.
    """
    if model.config.encoder is not None:
        raise ValueError("only a decoder without an encoder reads by windows")
    if faults := integer_faults("window", window, 1) + ([] if stride is None else integer_faults("stride", stride, 1)):
        raise ConfigError(faults)
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride <= window:
        raise ConfigError([Fault("stride", f"= {stride}: must be from 1 to the window, {window}")])
    ends = model.config.stacks["decoder"].ends
    if ends and window > ends[0][0]:
        raise ConfigError([Fault("window", f"= {window}: the decoder has {ends[0][0]} {ends[0][1]}")])
    begins = range(0, max(1, len(ids) - 1 - (window - stride)), stride)
    scores = score(model, [ids[at : at + window + 1] for at in begins])
    return torch.cat([scores[0], *(each[window - stride :] for each in scores[1:])])


def top_tokens(
    model: Transformer,
    rows: Sequence[Ids],
    k: int = 10,
    sources: Sequence[Ids] | None = None,
    seen: Sequence[int] | None = None,
    read: ReadMedia | None = None,
) -> TopTokens:
    """Return the k most probable next tokens of each row."""
    _check(model, rows, sources, seen, read)
    if not len(rows):
        raise ConfigError([Fault("rows", "are empty: give at least one")])
    _check_k(k, _vocab(model))
    with evaluating(model):
        logits = _logits(model, rows, sources, seen, read)
        last = torch.tensor([len(row) - 1 for row in rows], device=logits.device)
        return _top_tokens(logits[torch.arange(len(rows), device=logits.device), last], k)


def fill_mask(model: Transformer, rows: Sequence[Ids], mask: int, k: int = 5) -> list[TopTokens]:
    """Return for each row the k most probable tokens at each of its ids `mask`, from left to right."""
    if model.config.head.output != "masked_lm" or len(model.config.stacks) > 1:
        raise ValueError("filling masks needs an encoder with a `masked_lm` head")
    tokens = model.config.source or model.config.target
    _check_rows("row", rows, tokens)
    _check_k(k, model.config.vocab)
    if without := [i for i, row in enumerate(rows) if mask not in row]:
        raise ValueError(f"row {without[0]} has no mask: no id in it is {mask}")
    with evaluating(model):
        logits = _logits(model, rows, None)
        masks = [torch.tensor([at for at, id in enumerate(row) if id == mask]) for row in rows]
        return [_top_tokens(logits[i, at.to(logits.device)], k) for i, at in enumerate(masks)]


def _check_k(k: object, vocab: int) -> None:
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= vocab:
        raise ConfigError([Fault("k", f"= {k!r}: must be from 1 to the size of the vocabulary, {vocab}")])


def _top_tokens(logits: Tensor, k: int) -> TopTokens:
    top = logits.softmax(dim=-1).topk(k)
    return TopTokens(top.indices, top.values)


def _logits(
    model: Transformer,
    rows: Sequence[Ids],
    sources: Sequence[Ids] | None,
    seen: Sequence[int] | None = None,
    read: ReadMedia | None = None,
) -> Tensor:
    device = next(model.parameters()).device
    ids, layout = _padded(rows, device)
    marks: Tensor | None = None
    media: MediaBatch | None = None
    if seen is not None:
        counts = torch.tensor(seen, device=device)[:, None]
        marks = torch.where(torch.arange(ids.shape[1], device=device) < counts, SEEN, PLAIN)
    if read is not None and sources is None:
        ids, media, marks = read(ids, marks)
    if marks is not None:
        plain = make_layout(len(ids), ids.shape[1], device) if layout is None else layout
        layout = plain._replace(marks=marks.to(device))
    if sources is None:
        return at_least_fp32(model(Inputs(ids, layout, media=media)))
    source, source_layout = _padded(sources, device)
    if read is not None:
        source, media, _ = read(source, None)
    return at_least_fp32(model(Inputs(source, source_layout, media=media), Inputs(ids, layout)))


def _padded(rows: Sequence[Ids], device: torch.device) -> tuple[Tensor, Layout | None]:
    """Return rows padded on the right [b, t], and their layout."""
    ids, segments = pad_rows(rows, device)
    return ids, None if segments is None else Layout.right_padded(segments)


def _vocab(model: Transformer) -> int:
    return model.config.vocab


def _check(
    model: Transformer,
    rows: Sequence[Ids],
    sources: Sequence[Ids] | None,
    seen: Sequence[int] | None,
    read: ReadMedia | None,
) -> None:
    if not model.config.generates:
        raise ValueError("scoring needs a decoder with an `lm` head")
    if (model.encoder is None) != (sources is None):
        raise ValueError(f"give `sources` to an encoder-decoder, and to no other; this is {model.config.shape}")
    if sources is not None and len(sources) != len(rows):
        raise ValueError(f"there are {len(sources)} sources and {len(rows)} rows: each row needs one")
    if read is not None:  # the reader of segments has made these ids itself
        rows, sources = ([[id for id in row if id >= 0] or [0] for row in x or []] for x in (rows, sources))
    _check_rows("row", rows, model.config.target)
    if sources:
        _check_rows("source", sources, model.config.source)
    if seen is not None:
        if len(seen) != len(rows):
            raise ConfigError([Fault("seen", f"has {len(seen)} numbers, expected one for each of {len(rows)} rows")])
        if faults := [fault for i, n in enumerate(seen) for fault in integer_faults(f"seen.{i}", n, 0)]:
            raise ConfigError(faults)


def _check_rows(name: str, rows: Any, tokens: Input | None) -> None:
    if isinstance(rows, str) or any(not isinstance(row, Sequence | Tensor) or isinstance(row, str) for row in rows):
        raise ConfigError([Fault(f"{name}s", "must be a list of rows, each a list of ids")])
    for i, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"{name} {i} is empty: give it at least one token")
        if tokens and tokens.rows and (faults := parse_ids(f"{name} {i}", row, tokens.rows)[1]):
            raise ConfigError(faults)

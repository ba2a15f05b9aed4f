"""Prompts and sources are read: what stands before the first step, captured where shapes come again."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anyformer.attention.layout import Layout, make_layout, real
from anyformer.cache.kv_cache import Cache
from anyformer.decoding.buffers import DecodeBuffers, parts_of
from anyformer.decoding.prefix_cache import Begun
from anyformer.decoding.step import logits
from anyformer.nn.experts import Mixture
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer

MOST = 8192  # tokens that are read from a graph: of more, kernels take longer than their start, and memory stays taken


def begin(
    model: Transformer,
    place: DecodeBuffers,
    copies: int,
    ids: Tensor,
    segments: Tensor | None,
    *,
    marks: Tensor | None = None,
    begun: Sequence[Begun] = (),
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Reads sources, or prompts, into an empty place, each for so many rows: the hidden states of what the decoder read
    [rows, n, d], and the logits of what follows [rows, v]."""
    encoder_out, source = None, None
    if model.source is not None and model.encoder is not None:
        source = make_layout(*model.source.measure(ids), ids.device, segments=segments)
        encoder_out, segments = model.encode(Inputs(ids, source)), None
        ids = starts(model, len(encoder_out), ids.device)
    there = torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments)
    known = max((one.length for one in begun), default=0)
    for row, one in enumerate(begun):
        one.put(place.prompts, row)
    if known:
        place.prompts.skip(known)
    hidden, found = _read(model, place.prompts, ids, there, encoder_out, source, segments, marks, known, chunk)
    if copies > 1:  # prompts are read once
        place.cache.fill(place.prompts, copies)
    place.ids[:, : ids.shape[1]], place.there[:, : ids.shape[1]] = _repeated(ids, copies), _repeated(there, copies)
    return _repeated(hidden, copies), _repeated(found, copies)


def begin_again(
    model: Transformer, place: DecodeBuffers, copies: int, ids: Tensor, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same from tensors that stay where they are, in a place that may have been used before."""
    key = "begin", ids.dtype, segments is None
    mine = place.keep(key, lambda: (ids.clone(), None if segments is None else segments.clone()))
    mine[0].copy_(ids)
    if mine[1] is not None and segments is not None:
        mine[1].copy_(segments)

    def run() -> tuple[Tensor, Tensor]:
        place.reset()
        return begin(model, place, copies, *mine)

    return place.run(key, run)


def repeats(model: Transformer, place: DecodeBuffers, tokens: int, source: int, prompt: int, segmented: bool) -> bool:
    """Whether prompts so long can be read from a graph: where nothing asks the host."""
    if tokens > MOST or not place.keep("repeats", lambda: not _asks(model)):
        return False
    if segmented and place.prompts.rings:  # whether tokens come in order
        return False
    # whether positions end before the tokens do
    ends = [limit for limit, _ in (model.encoder.ends if model.encoder else ())]
    ends += [] if model.decoder is None else [p.limit for p, _ in model.decoder.cross_plans if p.limit is not None]
    return all(source <= limit for limit in ends) and all(
        prompt <= limit for limit, _ in (model.decoder.ends if model.decoder else ())
    )


def _asks(model: Transformer) -> bool:
    """Whether a part looks at how many tokens go where."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return any(stack.pooling is not None for stack in stacks) or any(
        isinstance(part, (Mixture, nn.RNNBase)) for part in parts_of(model)
    )


def starts(model: Transformer, batch: int, device: torch.device) -> Tensor:
    """What the decoder reads first where there is an encoder [b, 1]."""
    start = model.config.special.start
    if start is None:
        raise ValueError("decoding needs `special.start`, the id that the decoder reads first")
    return torch.full((batch, 1), start, device=device)


def _read(
    model: Transformer,
    cache: Cache,
    ids: Tensor,
    there: Tensor,
    encoder_out: Tensor | None,
    source: Layout | None,
    segments: Tensor | None,
    marks: Tensor | None,
    begin: int,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """Reads prompts: the hidden states of what was read [b, n, d], and the logits of what follows each [b, v]."""
    length, size = ids.shape[1], chunk or ids.shape[1]
    if segments is None and marks is None and begin == 0 and size >= length:  # all rows end together
        new = cache.next(length, position_bound=length)
        hidden = model.decode(Inputs(ids, new), encoder_out, source=source, cache=cache)
        return hidden, logits(model, cache, hidden[:, -1:])[:, -1]
    last = torch.where(there, torch.arange(length, device=ids.device), -1).amax(dim=1)
    kept: Tensor | None = None
    parts = []
    for at in range(begin, length, size):
        part = slice(at, at + size)
        some = None if segments is None else segments[:, part]
        hidden = model.decode(ids[:, part], encoder_out, source=source, segments=some, marks=marks, cache=cache)
        encoder_out = source = None  # the cache has them now
        parts.append(hidden)
        here = (last >= at) & (last < at + hidden.shape[1])
        mine = hidden.gather(1, (last - at).clamp(0, hidden.shape[1] - 1)[:, None, None].expand(-1, 1, hidden.shape[2]))
        kept = mine if kept is None else torch.where(here[:, None, None], mine, kept)
    assert kept is not None
    return torch.cat(parts, dim=1), logits(model, cache, kept)[:, -1]


def _repeated(x: Tensor, copies: int) -> Tensor:
    return x if copies == 1 else x.repeat_interleave(copies, dim=0)

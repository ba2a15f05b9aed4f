"""Prefill: read prompts, or sources and start ids, before the first step. Captured where shapes repeat."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anyformer.attention.cache.kv_cache import Cache
from anyformer.attention.layout import Layout, make_layout, real
from anyformer.attention.media_batch import MediaBatch
from anyformer.generation.buffers import DecodeBuffers
from anyformer.generation.prefix_cache import CachedPrefix
from anyformer.generation.step import logits
from anyformer.kernels.conventions import PADDING
from anyformer.nn.eval_mode import submodules
from anyformer.nn.experts import ExpertMixture
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer

MAX_CAPTURED_TOKENS = 8192  # prompts of a graph: larger ones are not launch-bound, and its memory is never freed


class Prompts(NamedTuple):
    """The model's first input: prompts, or with an encoder sources."""

    inputs: Tensor  # int [b, t], or what else an encoder reads
    segments: Tensor | None = None  # [b, t]
    marks: Tensor | None = None  # [b, t]
    chunk: int | None = None  # tokens read at a time
    prefixes: Sequence[CachedPrefix] = ()  # of each prompt, read by earlier calls
    media: MediaBatch | None = None  # images, sounds and feature vectors of the prompts or sources
    right_padded: bool = False  # each row is one text, with all padding on the right

    def aligned(self) -> "Prompts":
        """Return prompts of one text each with all padding on the right, where causal layers need no mask.

        Others, and those with marks or media, are returned as they are. The host reads once which they are.
        """
        ids, segments = self.inputs, self.segments
        if segments is None or self.marks is not None or self.media is not None:
            return self
        is_real = real(segments)
        if bool((is_real & (segments != segments.amax(dim=1, keepdim=True))).any()):  # several texts in a row
            return self
        order = (~is_real).int().argsort(dim=1, stable=True)
        segments = torch.where(is_real, 0, PADDING).gather(1, order)
        return self._replace(inputs=ids.gather(1, order), segments=segments, right_padded=True)


class _Source(NamedTuple):
    encoder_out: Tensor
    layout: Layout


def prefill(model: Transformer, buffers: DecodeBuffers, copies: int, prompts: Prompts) -> tuple[Tensor, Tensor]:
    """Read prompts into empty buffers, for `copies` rows each.

    Return the hidden states of what the decoder read [rows, n, d], and the logits of the next token [rows, v].
    """
    ids, segments, source = prompts.inputs, prompts.segments, None
    if model.source is not None and model.encoder is not None:
        layout = make_layout(*model.source.measure(ids), ids.device, segments=segments)
        source, segments = _Source(model.encode(Inputs(ids, layout, media=prompts.media)), layout), None
        ids = start_ids(model, len(source.encoder_out), ids.device)
    present = torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments)
    known = max((prefix.length for prefix in prompts.prefixes), default=0)
    for row, prefix in enumerate(prompts.prefixes):
        prefix.copy_into(buffers.prompts, row)
    if known:
        buffers.prompts.skip(known)
    at_once = known == 0 and (prompts.chunk or ids.shape[1]) >= ids.shape[1]
    own_media = None if source is not None else prompts.media
    plain = (segments is None or prompts.right_padded) and prompts.marks is None and own_media is None
    rest = prompts._replace(inputs=ids, segments=segments, media=own_media)
    hidden, last = _read(model, buffers.prompts, rest, source, known, plain and at_once)
    found = logits(model, last)[:, -1]
    if copies > 1:  # prompts are read once
        buffers.cache.fill(buffers.prompts, copies)
    length = ids.shape[1]
    buffers.ids[:, :length], buffers.present[:, :length] = _repeated(ids, copies), _repeated(present, copies)
    return _repeated(hidden, copies), _repeated(found, copies)


def prefill_captured(
    model: Transformer, buffers: DecodeBuffers, copies: int, prompts: Prompts
) -> tuple[Tensor, Tensor]:
    """Do the same from tensors with fixed addresses, in buffers that may have been used before."""
    ids, segments = prompts.inputs, prompts.segments
    key = "begin", ids.dtype, segments is None, prompts.right_padded
    fixed = buffers.keep(key, lambda: (ids.clone(), None if segments is None else segments.clone()))
    fixed[0].copy_(ids)
    if fixed[1] is not None and segments is not None:
        fixed[1].copy_(segments)

    def run() -> tuple[Tensor, Tensor]:
        buffers.reset()
        return prefill(model, buffers, copies, Prompts(*fixed, right_padded=prompts.right_padded))

    return buffers.run(key, run)


def can_capture(
    model: Transformer, buffers: DecodeBuffers, sizes: tuple[int, int], prompt: int, segmented: bool
) -> bool:
    """Return whether inputs of `sizes` (rows, length) can be read by a graph: without host synchronisation.

    `prompt` is the length of what the decoder reads of them, `segmented` whether that has segments in any order.
    """
    rows, length = sizes
    if rows * length > MAX_CAPTURED_TOKENS or not buffers.keep("repeats", lambda: not synchronises(model)):
        return False
    if segmented and buffers.prompts.rings:  # rings check on the host that tokens are in order
        return False
    # positions past their limit are an error that the host raises
    ends = [limit for limit, _ in (model.encoder.ends if model.encoder else ())]
    ends += [] if model.decoder is None else [p.limit for p, _ in model.decoder.cross_plans if p.limit is not None]
    return all(length <= limit for limit in ends) and all(
        prompt <= limit for limit, _ in (model.decoder.ends if model.decoder else ())
    )


def synchronises(model: Transformer) -> bool:
    """Return whether a module reads sizes from the device."""
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    return any(stack.pooling is not None for stack in stacks) or any(
        isinstance(module, (ExpertMixture, nn.RNNBase)) for module in submodules(model)
    )


def start_ids(model: Transformer, batch: int, device: torch.device) -> Tensor:
    """Return what the decoder reads first where there is an encoder [b, 1]."""
    start = model.config.special.start
    if start is None:
        raise ValueError("decoding needs `special.start`, the id that the decoder reads first")
    return torch.full((batch, 1), start, device=device)


def _read(
    model: Transformer, cache: Cache, prompts: Prompts, source: _Source | None, begin: int, at_once: bool
) -> tuple[Tensor, Tensor]:
    """Read rows from `begin`, chunk by chunk: hidden states [b, n, d], and those of each row's last token [b, 1, d].

    `at_once`: each row is one text, padded on the right or not, and the cache is empty.
    """
    ids, segments, marks, chunk, _, media, _ = prompts
    length, size = ids.shape[1], chunk or ids.shape[1]
    encoder_out, layout = (None, None) if source is None else source
    if at_once:
        if segments is None:
            whole = cache.next(length, position_bound=length)
        else:
            whole = Layout.right_padded(segments)._replace(continues_cache=True)
        hidden = model.decode(Inputs(ids, whole), encoder_out, source=layout, cache=cache)
        if segments is None:
            return hidden, hidden[:, -1:]
        end = real(segments).sum(dim=1) - 1
        return hidden, hidden.gather(1, end[:, None, None].expand(-1, 1, hidden.shape[2]))
    present = torch.ones_like(ids, dtype=torch.bool) if segments is None else real(segments)
    newest = torch.where(present, torch.arange(length, device=ids.device), -1).amax(dim=1)
    last: Tensor | None = None
    parts = []
    for at in range(begin, length, size):
        part = slice(at, at + size)
        own = None if segments is None else segments[:, part]
        hidden = model.decode(
            ids[:, part], encoder_out, source=layout, segments=own, marks=marks, media=media, cache=cache
        )
        encoder_out = layout = None  # the cache holds them now
        parts.append(hidden)
        inside = (newest >= at) & (newest < at + hidden.shape[1])
        index = (newest - at).clamp(0, hidden.shape[1] - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
        at_newest = hidden.gather(1, index)
        last = at_newest if last is None else torch.where(inside[:, None, None], at_newest, last)
    assert last is not None
    return torch.cat(parts, dim=1), last


def _repeated(x: Tensor, copies: int) -> Tensor:
    return x if copies == 1 else x.repeat_interleave(copies, dim=0)

"""Autoregressive decoding with a cache, for decoder-only and encoder–decoder models alike."""

from collections.abc import Sequence

import torch
from torch import Tensor

from anyformer.config import LM
from anyformer.nn.cache import CacheKind
from anyformer.nn.mask import Layout, lay_out, real
from anyformer.nn.model import Transformer


@torch.no_grad()  # not inference_mode: a model may be trained on what it generated
def generate(
    model: Transformer,
    ids: Tensor,
    *,
    max_new_tokens: int = 20,
    temperature: float = 0.0,
    stop: Sequence[int] = (),
    segments: Tensor | None = None,
    generator: torch.Generator | None = None,
    cache: CacheKind = "auto",
) -> Tensor:
    """Continues prompts [b, t] to [b, t + new], or answers sources [b, s] with [b, 1 + new], the start id first.

    A source may also be images or features, where the encoder reads those.
    Prompts of unequal length are padded on either side, with `segments` -1 there. Temperature 0 is greedy. A row ends
    at its first `stop` id and is padded from there; decoding ends when all rows have. The cache is one of
    `model.new_cache`: with "int8" it is a half to a quarter of the size, and answers may differ a little.
    """
    if not isinstance(model.config.head, LM) or model.decoder is None:
        raise ValueError("generate needs a decoder with an `lm` head")
    if max_new_tokens < 0 or temperature < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens}, temperature = {temperature}: must not be negative")
    read = model.source or model.target
    assert read is not None
    batch, length = read.measure(ids)
    special, training = model.config.special, model.training
    model.eval()
    try:
        memory, source = None, None
        if model.encoder is not None:
            if special.start is None:
                raise ValueError("generate needs `special.start`, the id that the decoder reads first")
            source = lay_out(batch, length, ids.device, segments=segments)
            memory, segments = model.encode(ids, segments=source), None
            ids = torch.full((batch, 1), special.start, device=ids.device)
        if not max_new_tokens:
            return ids
        kept = model.new_cache(ids.shape[0], ids.shape[1] + max_new_tokens, kind=cache)
        hidden = model.decode(ids, memory, source=source, segments=segments, cache=kept)
        hidden = hidden[torch.arange(ids.shape[0], device=ids.device), _last_real(ids, segments)][:, None]
        ending = torch.tensor(list(stop), device=ids.device, dtype=ids.dtype)
        filler = special.pad if special.pad is not None else (stop[0] if stop else 0)
        ended = torch.zeros(ids.shape[0], 1, dtype=torch.bool, device=ids.device)
        for step in range(max_new_tokens):
            logits = model.apply_head(hidden, Layout(kept.following[:, None]))[:, -1]
            new = _pick(logits, temperature, generator).masked_fill(ended, filler)
            ids = torch.cat((ids, new), dim=1)
            if stop:
                ended = ended | torch.isin(new, ending)
                if bool(ended.all()):
                    break
            if step + 1 < max_new_tokens:
                hidden = model.decode(new, cache=kept)
        return ids
    finally:
        model.train(training)


def _last_real(ids: Tensor, segments: Tensor | None) -> Tensor:
    """The index of each row's last token that is not padding, [b]."""
    index = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return (index if segments is None else torch.where(real(segments), index, 0)).max(dim=1).values


def _pick(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """The next token of each row, [b, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(dim=-1), 1, generator=generator)

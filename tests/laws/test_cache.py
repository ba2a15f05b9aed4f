"""Cached equals uncached, over all combinations of parts, for static caches and for rings."""

from itertools import pairwise

import torch
from hypothesis import given, strategies as st

from anyformer.config import ModelConfig
from tests.strategies import build, close, models, seeds, tokens

decoders = models(shapes=("decoder", "encoder-decoder"))
kinds = st.sampled_from(["auto", "auto", "static", "none"])


def start(model, seed: int, batch: int, slots: int, kind: str = "auto", slack: int = 0):
    """A cache, the memory for the first call, and a function for the uncached run."""
    cache = model.new_cache(batch, slots, kind=kind, slack=slack)
    if model.encoder is None:
        return cache, {}, lambda ids, **o: model.decode(ids, **o)
    source = tokens(seed + 9, batch, 5)
    segments = torch.zeros(batch, 5, dtype=torch.long)
    segments[0, 3:] = -1
    seen = {"encoder_out": model.encode(source, segments=segments), "source": segments}
    return cache, seen, lambda ids, **o: model.decode(ids, **seen, **o)


@st.composite
def cuts(draw: st.DrawFn, length: int) -> list[int]:
    """Borders of chunks: prefill in chunks of any size, then one by one."""
    prefill = draw(st.integers(1, length))
    inner = draw(st.lists(st.integers(1, prefill), max_size=3))
    return sorted({0, *inner, prefill, *range(prefill, length + 1)})


def in_chunks(model, ids: torch.Tensor, borders: list[int], cache, seen: dict) -> torch.Tensor:
    outs = []
    for a, b in pairwise(borders):
        outs.append(model.decode(ids[:, a:b], **seen, cache=cache))
        seen = {}
    return torch.cat(outs, dim=1)


@given(decoders, seeds, st.integers(1, 12), st.integers(0, 3), kinds, st.integers(0, 2), st.data())
def test_chunks_equal_the_whole(
    config: ModelConfig, seed: int, length: int, spare: int, kind: str, slack: int, data: st.DataObject
):
    model, ids = build(config, seed), tokens(seed, 2, length)
    cache, seen, whole = start(model, seed, 2, length + spare, kind, slack)
    close(in_chunks(model, ids, data.draw(cuts(length)), cache, seen), whole(ids))


@given(decoders, seeds, st.integers(1, 12), st.data())
def test_int8_does_not_depend_on_the_chunks(config: ModelConfig, seed: int, length: int, data: st.DataObject):
    """A token reads what the cache keeps of itself, too, so how a text was cut leaves no trace."""
    model, ids = build(config, seed), tokens(seed, 2, length)
    cache, seen, _ = start(model, seed, 2, length, "int8")
    other, again, _ = start(model, seed, 2, length, "int8")
    close(in_chunks(model, ids, data.draw(cuts(length)), cache, seen), model.decode(ids, **again, cache=other))


@given(decoders, seeds, st.sampled_from(["left", "right"]), st.integers(1, 8))
def test_ragged_prompts(config: ModelConfig, seed: int, side: str, steps: int):
    """Prompts padded on either side, then decoded: each row as if it were alone and unpadded."""
    model, long, short = build(config, seed), tokens(seed, 1, 5), tokens(seed + 1, 1, 3)
    new = tokens(seed + 2, 2, steps)
    pads, real = torch.full((1, 2), -1), torch.zeros(1, 3, dtype=torch.long)
    order = (pads.clamp(min=0), short) if side == "left" else (short, pads.clamp(min=0))
    prompt = torch.cat((long, torch.cat(order, dim=1)))
    segments = torch.cat(
        (torch.zeros(1, 5, dtype=torch.long), torch.cat((pads, real) if side == "left" else (real, pads), dim=1))
    )
    cache, seen, whole = start(model, seed, 2, 5 + steps)
    model.decode(prompt, **seen, segments=segments, cache=cache)
    outs = torch.cat([model.decode(new[:, i : i + 1], cache=cache) for i in range(steps)], dim=1)
    # the uncached run of the padded rows and the new tokens together, positions counted in real tokens
    places = torch.where(segments >= 0, segments.eq(0).cumsum(dim=1) - 1, 0)
    after = segments.eq(0).sum(dim=1, keepdim=True) + torch.arange(steps)
    expected = whole(
        torch.cat((prompt, new), dim=1),
        segments=torch.cat((segments, torch.zeros(2, steps, dtype=torch.long)), dim=1),
        positions=torch.cat((places, after), dim=1),
    )
    close(outs, expected[:, 5:])


@given(models(shapes=("decoder",)), seeds, st.integers(0, 3), st.integers(1, 5), st.integers(1, 4))
def test_a_prefix_that_sees_itself(config: ModelConfig, seed: int, pads: int, prompt: int, steps: int):
    """A marked prompt is read at once; what follows sees it as an uncached run with the same marks does."""
    model, new = build(config, seed), tokens(seed + 1, 2, steps)
    ids, segments = tokens(seed, 2, prompt + pads), torch.zeros(2, prompt + pads, dtype=torch.long)
    segments[0, prompt:] = -1
    marks = torch.ones_like(segments)
    cache = model.new_cache(2, prompt + pads + steps, kind="static")
    outs = [model.decode(ids, segments=segments, marks=marks, cache=cache)]
    outs += [model.decode(new[:, i : i + 1], cache=cache) for i in range(steps)]
    whole = model.decode(
        torch.cat((ids, new), dim=1),
        segments=torch.cat((segments, torch.zeros_like(new)), dim=1),
        marks=torch.cat((marks, torch.zeros_like(new)), dim=1),
    )
    close(torch.cat(outs, dim=1)[segments_and(segments, steps)], whole[segments_and(segments, steps)])


def segments_and(segments: torch.Tensor, steps: int) -> torch.Tensor:
    """Which tokens are real, those that follow included: the output of padding is not compared."""
    return torch.cat((segments, torch.zeros(len(segments), steps, dtype=torch.long)), dim=1) >= 0


@given(decoders, seeds, st.permutations(range(3)), st.integers(1, 5), st.booleans())
def test_reorder(config: ModelConfig, seed: int, rows: list[int], length: int, double: bool):
    """After reordering, the cache is as if the rows had been read in the new order (a row may be taken twice)."""
    model, ids, new = build(config, seed), tokens(seed, 3, length), tokens(seed + 1, 3, 1)
    order = torch.tensor([rows[0], rows[0], rows[2]] if double else rows)
    cache, seen, _ = start(model, seed, 3, length + 1)
    model.decode(ids, **seen, cache=cache)
    cache.reorder(order)
    other, again, _ = start(model, seed, 3, length + 1)
    model.decode(ids[order], **{name: x[order] for name, x in again.items()}, cache=other)
    close(model.decode(new, cache=cache), model.decode(new, cache=other))


@given(decoders, seeds, st.integers(1, 5), st.integers(1, 3), kinds)
def test_fill(config: ModelConfig, seed: int, length: int, copies: int, kind: str):
    """Rows that are read once and then copied are as if each had been read; also into a cache that was used."""
    model, ids, new = build(config, seed), tokens(seed, 2, length), tokens(seed + 1, 2 * copies, 1)
    cache, seen, _ = start(model, seed, 2, length + 1, kind)
    model.decode(ids, **seen, cache=cache)
    rows = torch.arange(2).repeat_interleave(copies)
    repeated = {name: x[rows] for name, x in seen.items()}
    whole, other = (start(model, seed, 2 * copies, length + 1, kind)[0] for _ in range(2))
    model.decode(ids[rows], **repeated, cache=other)
    expected = model.decode(new, cache=other)
    for _ in range(2):
        whole.fill(cache, copies)
        close(model.decode(new, cache=whole), expected)
        whole.reset()


@given(decoders, seeds, st.integers(1, 5), kinds)
def test_reset(config: ModelConfig, seed: int, length: int, kind: str):
    """A reset forgets earlier tokens, NaN included, and keeps all addresses."""
    model, ids = build(config, seed), tokens(seed, 2, length)
    used, seen, _ = start(model, seed, 2, length + 1, kind)
    model.decode(tokens(seed + 1, 2, length + 1), **start(model, seed + 1, 2, length + 1, kind)[1], cache=used)
    homes = [x.data_ptr() for layer in used.layers for x in layer.tensors()]
    for layer in used.layers:
        for x in layer.own():
            if x.is_floating_point():
                x.fill_(torch.nan)
    used.reset()
    fresh = start(model, seed, 2, length + 1, kind)[0]
    for at in range(length):
        part = seen if at == 0 else {}
        close(*(model.decode(ids[:, at : at + 1], **part, cache=cache) for cache in (used, fresh)))
    assert [x.data_ptr() for layer in used.layers for x in layer.tensors()] == homes


@given(decoders, seeds, st.integers(1, 8), st.integers(0, 4), st.integers(1, 4), kinds, st.data())
def test_truncate(config: ModelConfig, seed: int, keep: int, dropped: int, length: int, kind: str, data: st.DataObject):
    """Forgetting the last tokens and reading others is as if the first had never been read; and again."""
    model, ids = build(config, seed), tokens(seed, 2, keep + dropped)
    rest, last = tokens(seed + 1, 2, length), tokens(seed + 2, 2, 2)
    cache, seen, whole = start(model, seed, 2, keep + dropped + length + 6, kind, slack=max(dropped, length))
    in_chunks(model, ids, data.draw(cuts(keep + dropped)), cache, seen)
    cache.truncate(keep)
    read = torch.cat((ids[:, :keep], rest), dim=1)
    close(model.decode(rest, cache=cache), whole(read)[:, keep:])
    cache.truncate(keep + 1)
    close(model.decode(last, cache=cache), whole(torch.cat((read[:, : keep + 1], last), dim=1))[:, keep + 1 :])


@given(decoders, seeds, st.integers(1, 7), st.integers(1, 7))
def test_packed_documents_in_a_cache(config: ModelConfig, seed: int, first: int, second: int):
    """A new segment in the same cache starts from position 0 and sees nothing of the old one."""
    model, a, b = build(config, seed), tokens(seed, 2, first), tokens(seed + 1, 2, second)
    if config.encoder:  # both segments read the same source: packing of pairs is tested elsewhere
        return
    cache, _, whole = start(model, seed, 2, first + second, slack=1)
    model.decode(a, cache=cache)
    close(model.decode(b[:, :1], segments=torch.ones(2, 1, dtype=torch.long), cache=cache), whole(b[:, :1]))
    cache.truncate(first)
    close(model.decode(b, segments=torch.ones(2, second, dtype=torch.long), cache=cache), whole(b))

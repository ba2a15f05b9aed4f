"""Laws about other tokens: what may and what may not influence an output. Over all combinations of parts."""

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.config import (
    Classifier,
    Embedder,
    Full,
    Head,
    MaskedLM,
    ModelConfig,
    NoPosition,
    SpanBounds,
    TokenLabels,
    Transform,
)
from tests.strategies import (
    BACKWARD,
    BOTH_WAYS,
    FIXED,
    MIXERS,
    ORDERED,
    RELATIVE,
    VOCAB,
    build,
    close,
    models,
    seeds,
    speaks,
    tokens,
)

lengths = st.integers(1, 9)


def run(model, ids, **options):
    """The output for ids; an encoder–decoder reads the same ids on both sides."""
    if model.config.shape != "encoder-decoder":
        return model(ids, **options)
    sided = {f"{side}_{name}": value for name, value in options.items() for side in ("source", "target")}
    return model(ids, ids, **sided)


@given(models(shapes=("decoder", "encoder-decoder")), seeds, st.integers(2, 9), st.data())
def test_causality(config: ModelConfig, seed: int, length: int, data: st.DataObject):
    """Changing a token never changes an output before it."""
    model, ids = build(config, seed), tokens(seed, 2, length)
    at = data.draw(st.integers(1, length - 1))
    other = ids.clone()
    other[:, at:] = (other[:, at:] + 1 + tokens(seed + 1, 2, length - at) % (VOCAB - 1)) % VOCAB
    source = (tokens(seed + 2, 2, 5),) if config.encoder else ()
    before, after = model(*source, ids), model(*source, other)
    close(before[:, :at], after[:, :at])
    assert not speaks(config) or not torch.equal(before, after)


@given(models(), seeds, lengths, st.integers(1, 4), st.sampled_from(["left", "right"]))
def test_padding_changes_nothing(config: ModelConfig, seed: int, length: int, pads: int, side: str):
    """Padding on either side, whatever its ids, never changes a real token's output."""
    model, ids, junk = build(config, seed), tokens(seed, 2, length), tokens(seed + 1, 2, pads)
    real, fill = torch.zeros(2, length, dtype=torch.long), torch.full((2, pads), -1)
    left = side == "left"
    padded = torch.cat((junk, ids) if left else (ids, junk), dim=1)
    segments = torch.cat((fill, real) if left else (real, fill), dim=1)
    out = run(model, padded, segments=segments)
    close(out[:, pads:] if left else out[:, :length], run(model, ids))
    assert out.isfinite().all()


HEADS = (
    TokenLabels(labels=3),
    TokenLabels(labels=3, crf=True),
    SpanBounds(transform=Transform()),
    Classifier(labels=3, pool="first", transform=Transform()),
    Classifier(labels=3, pool="mean"),
    Embedder(pool="last", normalize=True),
    MaskedLM(),
)


@given(models(), st.sampled_from(HEADS), seeds, lengths, st.integers(1, 4), st.integers(0, 4))
def test_padding_changes_no_head(config: ModelConfig, head: Head, seed: int, length: int, left: int, right: int):
    """Heads over one vector per row, too, read real tokens only."""
    tie = "inputs" if config.tie in ("inputs", "all") else "none"
    model, ids = build(config.model_copy(update={"head": head, "tie": tie}), seed), tokens(seed, 2, length)
    padded = torch.cat((tokens(seed + 1, 2, left), ids, tokens(seed + 2, 2, right)), dim=1)
    segments = torch.tensor([[-1] * left + [0] * length + [-1] * right] * 2)
    out = run(model, padded, segments=segments)
    close(out if isinstance(head, (Classifier, Embedder)) else out[:, left : left + length], run(model, ids))


@given(models(), seeds, lengths, lengths, st.integers(0, 2))
def test_packing_equals_separate_runs(config: ModelConfig, seed: int, first: int, second: int, pads: int):
    """Two documents in a row, as two segments, give what each gives alone; pads may follow."""
    model, a, b = build(config, seed), tokens(seed, 1, first), tokens(seed + 1, 1, second)
    packed = torch.cat((a, b, tokens(seed + 2, 1, pads)), dim=1)
    segments = torch.tensor([[0] * first + [1] * second + [-1] * pads])
    out = run(model, packed, segments=segments)
    close(out[:, :first], run(model, a))
    close(out[:, first : first + second], run(model, b))


@given(models(shapes=("encoder-decoder",)), seeds, lengths, lengths, lengths, lengths)
def test_packed_pairs_equal_separate_pairs(config: ModelConfig, seed: int, s1: int, t1: int, s2: int, t2: int):
    """Sentence pairs packed on both sides: each target reads its own source only."""
    model = build(config, seed)
    sources = [tokens(seed, 1, s1), tokens(seed + 1, 1, s2)]
    targets = [tokens(seed + 2, 1, t1), tokens(seed + 3, 1, t2)]
    out = model(
        torch.cat(sources, dim=1),
        torch.cat(targets, dim=1),
        source_segments=torch.tensor([[4] * s1 + [7] * s2]),
        target_segments=torch.tensor([[4] * t1 + [7] * t2]),
    )
    close(out[:, :t1], model(sources[0], targets[0]))
    close(out[:, t1:], model(sources[1], targets[1]))


@given(
    models(
        shapes=("encoder",),
        positions=(NoPosition(),),
        encoder_patterns=(Full(),),
        mixers=tuple(kind for kind in MIXERS if kind not in ORDERED),
        pools=False,  # neighbours are in one window
    ),
    seeds,
    lengths,
)
def test_permutation_equivariance(config: ModelConfig, seed: int, length: int):
    """An encoder without positions does not know the order of its tokens."""
    model, ids = build(config, seed), tokens(seed, 2, length)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
    close(model(ids[:, order]), model(ids)[:, order])


@given(
    models(
        positions=RELATIVE,
        encoder_patterns=BOTH_WAYS,
        decoder_patterns=BACKWARD,
        mixers=tuple(kind for kind in MIXERS if kind not in FIXED),
        pools=False,  # windows are counted from the first position
    ),
    seeds,
    lengths,
    st.integers(1, 50),
)
def test_shift_invariance(config: ModelConfig, seed: int, length: int, shift: int):
    """With relative positions and patterns made of distances, only differences of positions matter."""
    model, ids = build(config, seed), tokens(seed, 2, length)
    positions = torch.arange(length)[None] + shift
    close(run(model, ids, positions=positions), run(model, ids), 1e-4)  # fp32 angles


@given(models(shapes=("decoder",), positions=RELATIVE), seeds, st.integers(2, 8), st.integers(1, 6))
def test_prefix_marks(config: ModelConfig, seed: int, length: int, prefix: int):
    """A marked prefix is seen by its whole segment, whatever the pattern; nothing in it sees later tokens."""
    prefix = min(prefix, length)
    model, ids = build(config, seed), tokens(seed, 1, length)
    marks = (torch.arange(length) < prefix).long()[None]
    out = model(ids, marks=marks)
    alone = model(ids[:, :prefix], marks=marks[:, :prefix])
    close(out[:, :prefix], alone)


@pytest.mark.parametrize("where", ["source", "target"])
@given(config=models(shapes=("encoder-decoder",)), seed=seeds)
def test_an_empty_source_or_target_row_is_finite(where: str, config: ModelConfig, seed: int):
    """A row of nothing but padding yields no NaN, forward or backward, and leaves the other rows alone."""
    model, source, target = build(config, seed), tokens(seed, 2, 4), tokens(seed + 1, 2, 5)
    lengths = {"source": 4, "target": 5}
    segments = torch.zeros(2, lengths[where], dtype=torch.long)
    segments[1] = -1
    out = model(source, target, **{f"{where}_segments": segments})
    close(out[:1], model(source[:1], target[:1]))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())

"""Position biases on attention scores (ALiBi, T5) by their formulae."""

import math

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.attention.cache.ring import Step
from anyformer.attention.layout import make_layout
from anyformer.config import Alibi, Attention, Full, T5Bias, Window
from tests.nn.positions import decoder, random
from tests.strategies import build, close, seeds, tokens


def published_slopes(heads: int) -> list[float]:
    """As in the authors' code: powers of two directly, else every second slope of twice the last power as well."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * i / heads) for i in range(1, heads + 1)]
    power = 2 ** math.floor(math.log2(heads))
    return published_slopes(power) + published_slopes(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 25, 32, 112])
def test_alibi_slopes(heads: int):
    slopes = Alibi.slopes(heads)
    assert slopes == pytest.approx(published_slopes(heads), rel=1e-12)
    assert len(set(slopes)) == heads
    assert all(0 < slope < 1 for slope in slopes)


@given(
    st.integers(1, 6), st.lists(st.integers(0, 40), min_size=1, max_size=4), st.lists(st.integers(0, 40), min_size=1)
)
def test_alibi(heads: int, q: list[int], k: list[int]):
    """-m_h · |q - k|, in both directions alike."""
    for causal in (False, True):
        bias = Alibi().bias(torch.tensor([q]), torch.tensor([k]), heads, causal, {})
        expected = [[[-slope * abs(i - j) for j in k] for i in q] for slope in published_slopes(heads)]
        close(bias.double(), torch.tensor([expected], dtype=torch.float64), 1e-6)


def t5_bucket(distance: int, buckets: int, longest: int, causal: bool) -> int:
    """By whole numbers: near distances one by one, then the steps of a geometric series up to the longest."""
    ahead = 0
    if not causal:
        buckets //= 2
        ahead = buckets if distance < 0 else 0
    far = max(distance, 0) if causal else abs(distance)
    exact = buckets // 2
    if far < exact:
        return far + ahead
    n = buckets - exact  # step j begins at exact · (longest / exact)^(j/n)
    step = max(j for j in range(n) if far**n * exact**j >= longest**j * exact**n)
    return exact + step + ahead


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 12), (16, 100)])
def test_t5_buckets(buckets: int, longest: int, causal: bool):
    """Past the near ones, past the longest, and in both directions."""
    distances = range(-3 * longest, 3 * longest)
    found = T5Bias(buckets=buckets, max_distance=longest).bucket(torch.tensor(list(distances)), causal).tolist()
    assert found == [t5_bucket(distance, buckets, longest, causal) for distance in distances]
    # every bucket is used, but for a distance of 0 ahead
    assert set(found) == set(range(buckets)) - (set() if causal else {buckets // 2})


@given(seeds, st.booleans())
def test_t5_bias_is_a_lookup(seed: int, causal: bool):
    scheme = T5Bias(buckets=8, max_distance=12)
    table = random(seed, *scheme.tables(width=0, heads=3)["buckets"])
    q, k = torch.tensor([[0, 5, 30]]), torch.tensor([[2, 0, 7, 29]])
    bias = scheme.bias(q, k, 3, causal, {"buckets": table})
    assert bias.shape == (1, 3, 3, 4)
    for h in range(3):
        for i, m in enumerate(q[0].tolist()):
            for j, n in enumerate(k[0].tolist()):
                assert bias[0, h, i, j] == table[t5_bucket(m - n, 8, 12, causal), h]


@pytest.mark.parametrize(
    ("pattern", "causal"),
    [(None, True), (Window(before=3, after=0), True), (Window(before=3, after=1), False), (Full(), False)],
)
def test_t5_buckets_follow_the_pattern(pattern, causal: bool):
    """Where a layer can look ahead the two directions have half of the buckets each."""
    scheme = T5Bias(buckets=8, max_distance=12)
    model = build(decoder(scheme, Attention(heads=2, pattern=pattern)))
    layout = make_layout(1, 20, torch.device("cpu"))
    (relation,) = model.decoder.relations([layout], {None: Step(layout)}, cached=False)
    table = model.decoder.schemes[0].tables.buckets
    expected = scheme.bias(layout.positions, layout.positions, 2, causal, {"buckets": table})
    seen = relation.lowered.bias > -torch.inf
    assert torch.equal(relation.lowered.bias[seen], expected[seen])


@pytest.mark.parametrize(
    ("shared", "share", "tables"), [(True, False, 1), (False, False, 3), (True, True, 1), (False, True, 1)]
)
def test_t5_tables(shared: bool, share: bool, tables: int):
    """One for the stack, or one per layer (layers that share their weights share the table too)."""
    model = build(decoder(T5Bias(buckets=8, max_distance=12, shared=shared), depth=3, share=share))
    names = [name for name, _ in model.named_parameters() if ".schemes." in name]
    assert len(names) == tables
    model(tokens(0, 2, 5)).square().sum().backward()
    assert all(dict(model.named_parameters())[name].grad.any() for name in names)


def test_heads_of_different_number_have_tables_of_their_own():
    model = build(decoder(T5Bias(), Attention(heads=2), Attention(heads=4), depth=4))
    assert sorted(p.shape[1] for n, p in model.named_parameters() if ".schemes." in n) == [2, 4]
    assert model(tokens(0, 1, 4)).isfinite().all()

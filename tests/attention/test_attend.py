"""Attention kernels: `eager` by a plain loop, every other kernel by `eager`."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.attention.attend import attend, choose, lower_dense, mix, weigh
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import Layout, make_layout, sees
from anyformer.attention.lowered import Dense
from anyformer.attention.scores import Normalizer, Scoring
from anyformer.config import Causal, Full, InvSqrtKey, InvSqrtWidth, NoPosition, Times, Unscaled, Window, factor
from anyformer.kernels.runtime import Runtime
from tests.strategies import close, seeds

BACKENDS = ["eager", "sdpa"]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dense: Dense,
    scale: float,
    normalizer: Normalizer = "softmax",
    backend: str = "auto",
    dropout: float = 0.0,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`attend` by the kernel that is chosen for a backend on this CPU."""
    row, needs = make_layout(1, 1, q.device), Requirements(4, 4, normalizer, cap=cap, sinks=sinks is not None)
    choice = choose(backend, Full(), row, row, "self", NoPosition(), needs, Runtime("cpu", q.dtype, training=False))
    assert choice.kernel in BACKENDS
    return attend(q, k, v, dense._replace(kernel=choice.kernel), Scoring(scale, normalizer, cap, sinks, dropout))


@st.composite
def problems(draw: st.DrawFn, kinds: tuple[str, ...] = ("none", "causal", "mask", "bias", "fully masked")):
    """q, k, v, a dense mask of one kind, and who sees whom as plain facts: visible [b, t, s], added [b, h, t, s]."""
    seed, kind = draw(seeds), draw(st.sampled_from(kinds))
    b, t, s, k, k_v = (draw(st.integers(1, 3)), *(draw(st.integers(1, 5)) for _ in range(4)))
    g = draw(st.integers(1, 3))
    h = g * draw(st.integers(1, 3))
    s = t if kind == "causal" else s
    q, key, value = random(seed, b, h, t, k), random(seed + 1, b, g, s, k), random(seed + 2, b, g, s, k_v)
    visible, added = torch.ones(b, t, s, dtype=torch.bool), torch.zeros(b, h, t, s, dtype=torch.float64)
    dense = Dense()
    if kind == "causal":
        visible, dense = visible.tril(), Dense(causal=True)
    if kind in ("mask", "bias"):
        visible = random(seed + 3, b, t, s) > 0
        visible |= torch.eye(t, s, dtype=torch.bool)
        visible[:, :, 0] = True
        dense = Dense(mask=visible[:, None])
    if kind == "bias":
        added = random(seed + 4, b, h, t, s)
        dense = Dense(bias=added.masked_fill(~visible[:, None], -torch.inf))
    if kind == "fully masked":  # across to another sequence, where a row may see nothing
        rows, columns = (random(seed + 3, b, t) > 0).long() - 1, (random(seed + 4, b, s) > 0).long() - 1
        columns[0] = -1  # one row's source is empty
        rows[0] = 0
        queries, keys = (make_layout(b, n, q.device, segments=x) for n, x in ((t, rows), (s, columns)))
        visible, dense = sees(Full(), queries, keys), lower_dense(Full(), queries, keys, "cross")
    return q, key, value, dense, visible, added


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    added: Tensor,
    scale: float,
    normalizer: str,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """For each row, head and query: weights over the visible keys only, and nothing where there are none."""
    bend = (lambda x: x) if cap is None else (lambda x: cap * math.tanh(x / cap))
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    each = q.shape[1] // k.shape[1]  # query heads that share a key head
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [j for j in range(k.shape[2]) if visible[b, i, j]]
                scores = [bend(scale * float(q[b, h, i] @ k[b, h // each, j])) + float(added[b, h, i, j]) for j in keys]
                if normalizer == "softmax":
                    total = sum(math.exp(score) for score in scores) + (0 if sinks is None else math.exp(sinks[h]))
                    weights = [math.exp(score) / total for score in scores]
                else:
                    weights = [max(score, 0.0) / len(keys) for score in scores]
                for j, weight in zip(keys, weights, strict=True):
                    out[b, h, i] += weight * v[b, h // each, j]
    return out


@given(problems(), st.sampled_from([1.0, 0.5, -0.7]), st.sampled_from(["softmax", "relu"]))
def test_eager_equals_a_plain_loop(problem, scale: float, normalizer: str):
    q, k, v, dense, visible, added = problem
    expected = loop(q, k, v, visible, added, scale, normalizer)
    close(run(q, k, v, dense, scale, normalizer, backend="eager"), expected)


@pytest.mark.parametrize("backend", ["eager", "auto"])
@given(problem=problems(), cap=st.sampled_from([None, 0.5, 3.0]), sunk=st.booleans())
def test_cap_and_sinks(backend: str, problem, cap: float | None, sunk: bool):
    """Scores bent before biases come on top; a sink is one more score that takes weight, and has no value."""
    q, k, v, dense, visible, added = problem
    sinks = random(9, q.shape[1]) if sunk else None
    expected = loop(q, k, v, visible, added, 0.7, "softmax", cap, sinks)
    close(run(q, k, v, dense, 0.7, backend=backend, cap=cap, sinks=sinks), expected)


@given(problems(), st.sampled_from(["softmax", "relu"]))
def test_weights(problem, normalizer: str):
    """Nothing on what is not visible; softmax sums to 1, or to 0 where there is nothing to see."""
    q, k, v, dense, visible, _ = problem
    weights = weigh(q, k, dense, Scoring(0.5, normalizer))
    assert weights.shape == (*q.shape[:3], k.shape[2])
    assert (weights >= 0).all()
    assert not weights.masked_select(~visible[:, None]).any()
    if normalizer == "softmax":
        close(weights.sum(-1), visible.any(-1)[:, None].expand(q.shape[:3]).to(weights))
    close(mix(weights, v), run(q, k, v, dense, 0.5, normalizer, backend="eager"))


def differentiate(problem, backend: str, dtype: torch.dtype, scale: float) -> tuple[Tensor, ...]:
    """The output and the gradients of queries, keys, values and bias."""
    q, k, v = (x.to(dtype).detach().requires_grad_() for x in problem[:3])
    dense = problem[3]
    bias = None if dense.bias is None else dense.bias.to(dtype).detach().requires_grad_()
    out = run(q, k, v, dense._replace(bias=bias), scale, backend=backend)
    weight = random(7, *out.shape, dtype=dtype)
    grads = torch.autograd.grad((out * weight).sum(), [q, k, v, *([] if bias is None else [bias])])
    return out, *grads


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-5)], ids=["f64", "f32"])
@given(problem=problems(), scale=st.sampled_from([1.0, 0.5]))
def test_sdpa_equals_eager(dtype: torch.dtype, tolerance: float, problem, scale: float):
    ours, reference = (differentiate(problem, backend, dtype, scale) for backend in ("sdpa", "eager"))
    for a, b in zip(ours, reference, strict=True):
        assert a.isfinite().all()
        assert a.dtype is dtype
        close(a, b, tolerance)


def test_sdpa_equals_eager_in_bf16():
    """Within bf16's own rounding, 2⁻⁸ of the values, for a mask and for a bias."""
    q, k, v = random(0, 2, 4, 9, 8), random(1, 2, 2, 9, 8), random(2, 2, 2, 9, 8)
    visible = make_layout(2, 9, q.device)
    for dense in (
        lower_dense(Window(before=3, after=0), visible, visible, "self"),
        lower_dense(Causal(), visible, visible, "self", bias=random(3, 1, 4, 9, 9)),
    ):
        exact = run(q, k, v, dense, 8**-0.5, backend="eager")
        for backend in BACKENDS:
            low = run(*(x.to(torch.bfloat16) for x in (q, k, v)), dense, 8**-0.5, backend=backend)
            assert low.dtype is torch.bfloat16
            torch.testing.assert_close(low.double(), exact, rtol=0, atol=4 * 2**-8 * float(v.abs().max()))


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=problems())
def test_grouped_heads_equal_full_heads_with_repeated_keys(backend: str, problem):
    q, k, v, dense, *_ = problem
    each = q.shape[1] // k.shape[1]
    full = run(q, k.repeat_interleave(each, 1), v.repeat_interleave(each, 1), dense, 0.5, backend=backend)
    close(run(q, k, v, dense, 0.5, backend=backend), full)


@pytest.mark.parametrize("backend", BACKENDS)
@given(problem=problems(kinds=("mask",)))
def test_three_ways_to_mask_agree(backend: str, problem):
    """Adding -inf to the scores, replacing scores by -inf, and not computing with the key at all."""
    q, k, v, replaced, visible, _ = problem
    added = Dense(bias=torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, -torch.inf)[:, None])
    out = run(q, k, v, replaced, 0.5, backend=backend)
    close(run(q, k, v, added, 0.5, backend=backend), out)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            keep = visible[b, i]
            left_out = run(
                q[b : b + 1, :, i : i + 1],
                k[b : b + 1, :, keep],
                v[b : b + 1, :, keep],
                Dense(),
                0.5,
                backend=backend,
            )
            close(left_out, out[b : b + 1, :, i : i + 1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("normalizer", ["softmax", "relu"])
def test_a_row_that_sees_nothing_is_zero(backend: str, normalizer: str):
    """In cross-attention to an empty source: zero forward, no NaN backward, no gradient for that row's keys."""
    q, k, v = (random(i, 2, 2, 3, 4).requires_grad_() for i in range(3))
    source = make_layout(2, 3, q.device, segments=torch.tensor([[0, 0, -1], [-1, -1, -1]]))
    target = make_layout(2, 3, q.device)
    out = run(q, k, v, lower_dense(Full(), target, source, "cross"), 0.5, normalizer, backend=backend)
    assert not out[1].any()
    assert out[0].any()
    gradients = torch.autograd.grad(out.square().sum() + out.sum(), [q, k, v])
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert not gradient[1].any()
        assert gradient[0].any()
    assert not gradients[2][0, :, 2].any()  # the pad of the other row


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_rows_of_self_attention_are_finite(backend: str):
    """A row of nothing but padding attends to itself: no row is empty."""
    q, k, v = (random(i, 2, 1, 3, 4).requires_grad_() for i in range(3))
    layout = make_layout(2, 3, q.device, segments=torch.tensor([[0, 0, -1], [-1, -1, -1]]))
    for pattern in (Full(), Causal(), Window(before=0, after=0)):
        out = run(q, k, v, lower_dense(pattern, layout, layout, "self"), 0.5, backend=backend)
        gradients = torch.autograd.grad(out.sum(), [q, k, v])
        assert all(x.isfinite().all() for x in (out, *gradients))


@given(problems(), st.integers(1, 64), st.one_of(st.just(0.0), st.floats(-2, 2)))
def test_scales(problem, width: int, number: float):
    """A scale is a factor of q: 1/sqrt(k), 1/sqrt(d), none or any number (0 weighs all visible keys alike)."""
    q, k, v, dense, *_ = problem
    key_width = q.shape[-1]
    numbers = {
        InvSqrtKey(): 1 / math.sqrt(key_width),
        InvSqrtWidth(): 1 / math.sqrt(width),
        Unscaled(): 1.0,
        Times(value=number): number,
    }
    for spec, expected in numbers.items():
        scale = factor(spec, width, key_width)
        assert scale == pytest.approx(expected, rel=1e-15)
        scaled = run(q * expected, k, v, dense, 1.0, backend="eager")
        for backend in BACKENDS:
            close(run(q, k, v, dense, scale, backend=backend), scaled)


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_a_scale_that_is_not_positive(scale: float):
    """With 0 every visible key weighs the same; torch's causal kernel alone would give NaN."""
    q, k, v = (random(i, 1, 2, 5, 4) for i in range(3))
    for backend in BACKENDS:
        out = run(q, k, v, Dense(causal=True), scale, backend=backend)
        close(out, run(q * scale, k, v, Dense(causal=True), 1.0, backend="eager"))
        if scale == 0:
            close(out, v.cumsum(dim=2) / torch.arange(1, 6)[:, None])


def test_relu_divides_by_the_visible_keys():
    """relu(scores) / n, by hand on one row: scores 2, -1, 4 with the last one masked."""
    q, k, v = torch.ones(1, 1, 1, 1), torch.tensor([2.0, -1.0, 4.0]).view(1, 1, 3, 1), torch.eye(3).view(1, 1, 3, 3)
    dense = Dense(mask=torch.tensor([True, True, False]).view(1, 1, 1, 3))
    assert run(q, k, v, dense, 1.0, "relu").flatten().tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_preserves_the_mean(backend: str):
    """Weights are zeroed with probability p and scaled by 1/(1-p), so the mean over many draws stays."""
    n, p = 4000, 0.3
    q, k, v = random(0, 1, n, 1, 4), random(1, 1, 1, 3, 4), torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)
    q = q[:, :1].expand(1, n, 1, 4)  # n draws of one problem
    plain = run(q, k, v, Dense(), 1.0, backend=backend)
    dropped = run(q, k.expand(1, n, 3, 4), v.expand(1, n, 3, 3), Dense(), 1.0, dropout=p, backend=backend)
    ratio = dropped / plain
    close(ratio[ratio != 0], torch.full_like(ratio[ratio != 0], 1 / (1 - p)))
    spread = math.sqrt(p / (1 - p) / n)  # of the mean of n draws
    assert (ratio.mean(dim=1) - 1).abs().max() < 4 * spread
    assert 0 < (ratio == 0).double().mean() < 1


def test_auto_falls_back_where_no_kernel_can():
    """ReLU has no kernel: `sdpa` and `auto` then are `eager`, not something else."""
    q, k, v = (random(i, 1, 2, 3, 4) for i in range(3))
    results = [run(q, k, v, Dense(causal=True), 0.5, "relu", backend=b) for b in ("auto", "sdpa", "eager")]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[2])


def test_layout_facts_and_dense_masks_agree():
    """The causal flag, a mask and a bias of zeros are three lowerings of one mask."""
    q, k, v = (random(i, 2, 2, 5, 4) for i in range(3))
    flagged = make_layout(2, 5, q.device)
    unflagged = Layout(flagged.positions)
    zeros = torch.zeros(1, 2, 5, 5, dtype=torch.float64)
    forms = [
        lower_dense(Causal(), flagged, flagged, "self"),
        lower_dense(Causal(), unflagged, unflagged, "self"),
        lower_dense(Causal(), flagged, flagged, "self", bias=zeros),
    ]
    assert [(r.causal, r.mask is None, r.bias is None) for r in forms] == [
        (True, True, True),
        (False, False, True),
        (False, True, False),
    ]
    for backend in BACKENDS:
        first, *rest = (run(q, k, v, dense, 0.5, backend=backend) for dense in forms)
        for other in rest:
            close(other, first)

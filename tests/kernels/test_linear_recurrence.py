"""Linear recurrences: chunks of any size equal the loop over tokens, gradients included."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.chunked_recurrence import MIN_LOG_DECAY, invert_unit_lower, pass_states, recur_in_chunks
from anyformer.kernels.linear_recurrence import Recurrence, recur
from tests.strategies import close

KINDS = ("none", "head", "channel", "delta", "channel delta")
b, g, h, k, v = 2, 2, 4, 3, 5


def inputs(kind: str, length: int, resets: bool, seed: int, dtype: torch.dtype = torch.float64) -> Recurrence:
    torch.manual_seed(seed)
    q, keys, values = (torch.randn(b, n, length, w, dtype=dtype) for n, w in ((g, k), (g, k), (h, v)))
    log_decay, rate = None, None
    if kind.startswith("channel"):
        log_decay = torch.rand(b, h, length, k, dtype=dtype) * MIN_LOG_DECAY
    elif kind != "none":
        log_decay = -3 * torch.rand(b, h, length, dtype=dtype)
    if kind.endswith("delta"):
        keys, rate = F.normalize(keys, dim=-1), torch.rand(b, h, length, dtype=dtype)
    runs = (torch.rand(b, length) < 0.1).long().cumsum(dim=1) if resets else None
    return Recurrence(q, keys, values, log_decay, rate, runs)


def with_gradients(run, x: Recurrence, state: Tensor) -> list[Tensor]:
    """Outputs, the last state, and the gradients of everything that went in, for random slopes."""
    leaves = [y.detach().requires_grad_() for y in (*x[:5], state) if y is not None]
    rest = iter(leaves)
    given_ = Recurrence(*(None if y is None else next(rest) for y in x[:5]), x.runs)
    out, last = run(given_, next(rest))
    torch.manual_seed(1)
    slopes = (torch.randn(y.shape, device=y.device).to(y.dtype) for y in (out, last))  # whatever the strides of y
    loss = sum((y * slope).sum() for y, slope in zip((out, last), slopes, strict=True))
    return [out, last, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("kind", KINDS)
@given(
    length=st.integers(1, 40), resets=st.booleans(), size=st.sampled_from([None, 1, 2, 5, 16]), seed=st.integers(0, 9)
)
@settings(max_examples=10)
def test_chunks_equal_the_loop(kind: str, length: int, resets: bool, size: int | None, seed: int):
    x, state = inputs(kind, length, resets, seed), torch.randn(b, h, k, v, dtype=torch.float64)
    expected = with_gradients(recur, x, state)
    found = with_gradients(lambda x, s: recur_in_chunks(x, s, size), x, state)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_compiled_under_a_default_device():
    """torch 2.11 breaks the graph there, in the middle of the chunks."""
    x, state = inputs("head", 20, True, 0), torch.randn(b, h, k, v, dtype=torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(lambda *given: recur_in_chunks(Recurrence(*given[:-1]), given[-1]), backend="eager")
    with torch.device("cpu"):
        found = compiled(*x, state)
    for one, other in zip(found, recur(x, state), strict=True):
        close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_is_the_definition(kind: str):
    """By hand, with one row and one head: S ← a S + k (r (v - kᵀ S))ᵀ, or without r: S ← a S + k vᵀ."""
    x = inputs(kind, 6, resets=True, seed=3).expanded()
    out, last = recur(x)
    state, run = torch.zeros(k, v, dtype=torch.float64), 0
    for t in range(6):
        assert x.runs is not None
        state = state if x.runs[0, t] == run else torch.zeros_like(state)
        run = int(x.runs[0, t])
        if x.log_decay is not None:
            state = x.log_decay[0, 0, t].exp().reshape(-1, 1) * state
        key, value = x.k[0, 0, t], x.v[0, 0, t]
        new = value if x.rate is None else x.rate[0, 0, t] * (value - key @ state)
        state = state + key[:, None] * new
        close(out[0, 0, t], x.q[0, 0, t] @ state)
    close(last[0, 0], state)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_near(kind: str):
    """bf16 inputs: as near to the loop in fp64 as rounding of the inputs and outputs allows."""
    x = inputs(kind, 200, resets=False, seed=0, dtype=torch.float32)
    half = x._replace(q=x.q.bfloat16(), k=x.k.bfloat16(), v=x.v.bfloat16())
    wide = Recurrence(*(None if y is None else y.double() for y in half[:5]))
    expected = recur(wide)[0]
    found = recur_in_chunks(half)[0]
    assert found.dtype is torch.bfloat16
    assert (found - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_a_decay_of_nothing_forgets_everything():
    """The strongest decays and many tokens give finite values and gradients."""
    x = inputs("head", 300, resets=False, seed=0, dtype=torch.float32)
    for log_decay in (torch.full((b, h, 300), -200.0), torch.full((b, h, 300, k), MIN_LOG_DECAY)):
        found = with_gradients(recur_in_chunks, x._replace(log_decay=log_decay), torch.randn(b, h, k, v))
        assert all(y.isfinite().all() for y in found)


@given(st.integers(1, 33), st.integers(0, 9))
@settings(max_examples=10)
def test_the_inverse(size: int, seed: int):
    torch.manual_seed(seed)
    lower = torch.randn(2, size, size, dtype=torch.float64).tril(-1).requires_grad_()
    eye = torch.eye(size, dtype=torch.float64)
    slopes = torch.randn(2, size, size, dtype=torch.float64)
    found, expected = invert_unit_lower(lower), torch.linalg.inv(eye + lower)
    close(found, expected, 1e-7)
    one, other = (torch.autograd.grad((x * slopes).sum(), lower)[0] for x in (found, expected))
    close(one.tril(-1), other.tril(-1), 1e-6)


def test_equal_keys_are_well_conditioned():
    """Powers of a matrix of ones grow like binomials: an inverse by them would be noise in fp32."""
    lower = torch.ones(64, 64).tril(-1)
    close(invert_unit_lower(lower), torch.linalg.inv((torch.eye(64) + lower).double()).float(), 1e-5)


@given(st.integers(1, 70), st.booleans())
@settings(max_examples=10)
def test_groups_of_chunks_equal_one_after_the_other(n: int, matrices: bool):
    torch.manual_seed(n)
    shape = (2, 1, n, 3, 3) if matrices else (2, 1, n, 3, 1)
    maps, updates = torch.rand(shape, dtype=torch.float64) / 3, torch.randn(2, 1, n, 3, 4, dtype=torch.float64)
    apply = torch.matmul if matrices else torch.mul
    state = torch.randn(2, 1, 3, 4, dtype=torch.float64)
    states, last = pass_states(apply, maps, updates, state)
    for i in range(n):
        close(states[:, :, i], state)
        state = apply(maps[:, :, i], state) + updates[:, :, i]
    close(last, state)

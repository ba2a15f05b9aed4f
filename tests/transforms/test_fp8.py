"""Products in fp8: how far they may be off, what they are used for, and that models learn by them."""

import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer import presets
from anyformer.kernels import fp8
from anyformer.kernels.fp8 import to_fp8
from anyformer.nn.experts import SoftmaxRouter
from anyformer.nn.linear import Linear
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.fp8 import Float8Format, learn_in_fp8, linear

HALF = {fp8.E4M3: 2**-4, fp8.E5M2: 2**-3}  # of the last digit, of a number of usual size
LEAST = {fp8.E4M3: 2**-10, fp8.E5M2: 2**-17}  # half of the smallest number
ROUND = 1e-4  # of fp32's sums


def bound(x: Tensor, dtype: torch.dtype) -> Tensor:
    """How far each number may be off."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=fp8.MIN_ABSMAX) / torch.finfo(dtype).max
    return (HALF[dtype] * x.abs() + LEAST[dtype] * scale) * (1 + ROUND)


def off(a: Tensor, b: Tensor, by_a: Tensor, by_b: Tensor) -> Tensor:
    """How far each number of a bᵀ may be."""
    return by_a @ b.abs().T + a.abs() @ by_b.T + by_a @ by_b.T + ROUND * (a.abs() @ b.abs().T)


def numbers(seed: int, *shape: int, power: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10**power


@given(seed=st.integers(0, 1000), power=st.floats(-8, 8), dtype=st.sampled_from([fp8.E4M3, fp8.E5M2]))
def test_a_number_is_off_by_half_a_digit(seed: int, power: float, dtype: torch.dtype) -> None:
    x = numbers(seed, 4, 64, power=power) * numbers(seed + 1, 4, 64).exp()
    small, scale = to_fp8(x, dtype)
    assert ((small.float() * scale - x).abs() <= bound(x, dtype)).all()


def test_zeros_stay_zeros_and_what_is_not_finite_is_told() -> None:
    assert not linear(torch.zeros(2, 16), torch.ones(16, 16), None).any()
    x = torch.ones(2, 16)
    x[0, 3] = torch.inf
    found = linear(x, torch.ones(16, 16), None)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


@given(seed=st.integers(0, 1000), powers=st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)))
def test_products_are_within_their_bounds(seed: int, powers: tuple[float, float, float]) -> None:
    x, weight, dy = (
        numbers(seed + i, *shape, power=p)
        for i, (shape, p) in enumerate(zip(((8, 32), (16, 32), (8, 16)), powers, strict=True))
    )
    x.requires_grad_()
    weight.requires_grad_()
    y = linear(x, weight, None)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    x, weight = x.detach(), weight.detach()
    due = off(x, weight, bound(x, fp8.E4M3), bound(weight, fp8.E4M3))
    assert ((y.detach() - x @ weight.T).abs() <= due).all()
    turned = weight.T.contiguous()
    due = off(dy, turned, bound(dy, fp8.E5M2), bound(turned, fp8.E4M3))
    assert ((dx - dy @ weight).abs() <= due).all()
    assert torch.allclose(dw, dy.T @ x, rtol=1e-5, atol=1e-5 * float(dw.abs().max()))


def test_a_bias_is_added_and_learns() -> None:
    x, weight, bias = numbers(0, 8, 32), numbers(1, 16, 32), numbers(2, 16).requires_grad_()
    y, dy = linear(x, weight, bias), numbers(3, 8, 16)
    assert torch.allclose(y, linear(x, weight, None) + bias, atol=1e-5)
    assert torch.allclose(*torch.autograd.grad(y, bias, dy), dy.sum(0), atol=1e-5)


def test_in_all_they_are_off_by_a_few_hundredths() -> None:
    x, weight = numbers(0, 256, 128), numbers(1, 64, 128)
    y = x @ weight.T
    assert 1e-3 < float((linear(x, weight, None) - y).norm() / y.norm()) < 0.05


def test_a_large_number_rounds_its_own_row_only() -> None:
    x, weight = numbers(0, 4, 32), numbers(1, 16, 32)
    other = x.clone()
    other[0, 0] = 1e6
    assert torch.equal(linear(x, weight, None)[1:], linear(other, weight, None)[1:])


def test_under_autocast_it_is_of_that_precision() -> None:
    x = numbers(0, 2, 3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, numbers(1, 16, 32), numbers(2, 16)).dtype is torch.bfloat16
    assert linear(x, numbers(1, 16, 32), numbers(2, 16)).shape == (2, 3, 16)


def small() -> Transformer:
    torch.manual_seed(0)
    return Transformer(presets.gpt2(depth=2, width=64, heads=2, vocab=32, length=32, dropout=0.0))


def in_fp8(model: Transformer) -> Transformer:
    assert model.decoder is not None
    learn_in_fp8(model.decoder)
    return model


def test_all_matrices_of_blocks_change_and_their_weights_do_not() -> None:
    plain, model = small(), in_fp8(small())
    made = [name for name, m in model.named_modules() if isinstance(m, Linear) and isinstance(m.format, Float8Format)]
    assert {name.rsplit(".", 1)[1] for name in made} == {"qkv", "out", "up", "down"}
    assert len(made) == 2 * 4
    state = model.state_dict()
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(x, state[name]) for name, x in plain.state_dict().items())


def test_outside_training_nothing_changes() -> None:
    ids = torch.randint(32, (2, 32))
    plain, model = small().eval(), in_fp8(small())
    assert torch.equal(plain(ids), model.eval()(ids))
    assert not torch.equal(plain(ids), model.train()(ids))


def test_sizes_that_the_hardware_does_not_multiply_stay_and_so_do_routers() -> None:
    layers = nn.Sequential(Linear(24, 32), Linear(32, 24), Linear(32, 32))
    assert learn_in_fp8(layers) == (["2"], ["0", "1"])
    model = in_fp8(Transformer(presets.mixtral(depth=1, width=64, heads=2, kv_heads=2, vocab=32, experts=16)))
    routers = [m.linear for m in model.modules() if isinstance(m, SoftmaxRouter)]
    assert [type(router) for router in routers] == [nn.Linear]


def test_a_model_learns_as_in_fp32() -> None:
    """To say each word again."""
    ids, losses = torch.randint(32, (8, 32), generator=torch.Generator().manual_seed(0)), {}
    for name, model in (("fp32", small()), ("fp8", in_fp8(small()))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        curve = []
        for _ in range(40):
            loss = F.cross_entropy(model.train()(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(loss.detach()))
        losses[name] = torch.tensor(curve)
    assert losses["fp8"][-1] < 0.3 * losses["fp8"][0]
    assert not torch.equal(losses["fp8"], losses["fp32"])
    assert ((losses["fp8"] - losses["fp32"]).abs() < 0.05 * losses["fp32"][0]).all()

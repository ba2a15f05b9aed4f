"""Feed-forward layers and activations by their formulae."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from anyformer.attention.lowered import Relation
from anyformer.config import (
    Gated,
    Gelu,
    Identity,
    LeakyRelu,
    NoFeedForward,
    Plain,
    Relu,
    Sigmoid,
    Silu,
    SquaredRelu,
    Tanh,
)
from anyformer.nn.context import Context
from tests.strategies import HERE, close, seeds

FORMULAE = {
    Identity(): lambda x: x,
    Relu(): lambda x: max(0.0, x),
    LeakyRelu(): lambda x: x if x > 0 else 0.01 * x,
    LeakyRelu(slope=0.3): lambda x: x if x > 0 else 0.3 * x,
    SquaredRelu(): lambda x: max(0.0, x) ** 2,
    Sigmoid(): lambda x: 1 / (1 + math.exp(-x)),
    Tanh(): math.tanh,
    Gelu(): lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    Gelu(approximate="tanh"): lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Silu(): lambda x: x / (1 + math.exp(-x)),
}
activations = st.sampled_from(list(FORMULAE))
sizes = st.integers(1, 6)
NOWHERE = Context(HERE, HERE, Relation())


def build(spec, width: int, seed: int):
    torch.manual_seed(seed)
    return spec.build(width).double(), torch.randn(2, 5, width, dtype=torch.float64)


@pytest.mark.parametrize("spec", FORMULAE, ids=lambda spec: spec.kind)
def test_activations(spec):
    """Values by the formula, gradients by central differences, away from the kink at 0."""
    x = torch.cat((torch.linspace(-6, -0.05, 40), torch.linspace(0.05, 6, 40))).double().requires_grad_()
    y = spec.function()(x)
    close(y, torch.tensor([FORMULAE[spec](point) for point in x.tolist()], dtype=torch.float64))
    (slope,) = torch.autograd.grad(y.sum(), x)
    h = 1e-5
    differences = [(FORMULAE[spec](point + h) - FORMULAE[spec](point - h)) / (2 * h) for point in x.tolist()]
    close(slope, torch.tensor(differences, dtype=torch.float64), 1e-7)


@given(activations, sizes, sizes, st.booleans(), seeds)
def test_plain_is_a_convolution_of_width_one(act, width: int, hidden: int, bias: bool, seed: int):
    ffn, x = build(Plain(width=hidden, activation=act, bias=bias), width, seed)
    inner = F.conv1d(x.transpose(1, 2), ffn.up.weight[:, :, None], ffn.up.bias)  # channels first
    outer = F.conv1d(act.function()(inner), ffn.down.weight[:, :, None], ffn.down.bias)
    close(ffn(x, NOWHERE), outer.transpose(1, 2))
    assert (ffn.up.bias is None) == (ffn.down.bias is None) == (not bias)


@pytest.mark.parametrize(
    ("act", "gate"),
    [
        (Sigmoid(), torch.sigmoid),  # GLU
        (Relu(), lambda x: x.clamp(min=0)),  # ReGLU
        (Gelu(), lambda x: x * torch.special.ndtr(x)),  # GEGLU
        (Silu(), lambda x: x * torch.sigmoid(x)),  # SwiGLU
        (Identity(), lambda x: x),  # bilinear
    ],
    ids=["glu", "reglu", "geglu", "swiglu", "bilinear"],
)
@given(width=sizes, hidden=sizes, bias=st.booleans(), seed=seeds)
def test_gated(act, gate, width: int, hidden: int, bias: bool, seed: int):
    """(act(x W_g + b_g) ⊙ (x W_u + b_u)) W_d + b_d, where the fused matrix is the gate's rows and then up's."""
    ffn, x = build(Gated(width=hidden, activation=act, bias=bias), width, seed)
    w_gate, w_up = ffn.gate_up.weight[:hidden], ffn.gate_up.weight[hidden:]
    b_gate, b_up, b_down = (
        (ffn.gate_up.bias[:hidden], ffn.gate_up.bias[hidden:], ffn.down.bias) if bias else (0.0, 0.0, 0.0)
    )
    hidden_states = gate(x @ w_gate.T + b_gate) * (x @ w_up.T + b_up)
    close(ffn(x, NOWHERE), hidden_states @ ffn.down.weight.T + b_down)


@pytest.mark.parametrize("kind", [Plain, Gated])
@given(act=activations, seed=seeds)
def test_each_position_alone_gives_the_same(kind, act, seed: int):
    ffn, x = build(kind(activation=act), 4, seed)
    alone = [ffn(x[:, i : i + 1], NOWHERE) for i in range(x.shape[1])]
    close(torch.cat(alone, dim=1), ffn(x, NOWHERE))


@pytest.mark.parametrize(("kind", "inner"), [(Plain, "up"), (Gated, "gate_up")])
def test_width_by_default(kind, inner: str):
    """4 d hidden units, twice over in a fused gate."""
    ffn = kind().build(6)
    assert ffn.down.in_features == 24
    assert getattr(ffn, inner).out_features == 24 * (2 if kind is Gated else 1)


def test_none_is_no_sublayer():
    assert NoFeedForward().build(6) is None


@pytest.mark.parametrize("kind", [Plain, Gated])
def test_dropout_on_the_hidden_units(kind):
    """In training each hidden unit is zeroed with probability p or scaled by 1/(1-p); in eval nothing happens."""
    ffn, x = build(kind(width=4000, activation=Identity(), dropout=0.25), 3, seed=0)
    seen = {}
    ffn.down.register_forward_pre_hook(lambda module, args: seen.update(hidden=args[0]))
    ffn.eval()(x, NOWHERE)
    kept = seen["hidden"]
    ffn.train()(x, NOWHERE)
    ratio = seen["hidden"] / kept
    alive = ratio != 0
    torch.testing.assert_close(ratio[alive], torch.full_like(ratio[alive], 1 / 0.75))
    n = ratio.numel()
    assert abs(float(alive.double().mean()) - 0.75) < 4 * math.sqrt(0.75 * 0.25 / n)

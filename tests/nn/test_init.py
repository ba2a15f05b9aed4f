"""Initialisation: every weight by its rule, and building anywhere gives the same weights."""

import copy
import inspect
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anyformer.config import (
    LM,
    Attention,
    Audio,
    Block,
    FactorisedTable,
    FanIn,
    Gated,
    Init,
    InvSqrtKey,
    LayerNorm,
    Learned,
    ModelConfig,
    Normal,
    Patches,
    Plain,
    Projected,
    RMSNorm,
    Scale,
    Stack,
    T5Bias,
    Times,
    Tokens,
    Unscaled,
    Xavier,
)
from anyformer.nn.linear import Linear
from anyformer.nn.model import Transformer
from anyformer.nn.norm import RootMeanSquare
from anyformer.presets import PRESETS
from tests.strategies import tokens

WIDTH, VOCAB, DEPTH, HIDDEN, KEY = 64, 97, 3, 96, 8
SCALED = InvSqrtKey()


def wide(init: Init, scale: Scale = SCALED, tie: str = "none", gated: bool = False) -> Transformer:
    """An encoder–decoder with every part that has weights."""
    attention = Attention(
        heads=4, kv_heads=2, key_width=KEY, scale=scale, bias=True, output=Projected(bias=True), qk_norm=RMSNorm()
    )
    feedforward = Gated(width=HIDDEN, bias=True) if gated else Plain(width=HIDDEN)
    block = Block(mixer=attention, feedforward=feedforward, norm=RMSNorm(offset=1.0))
    reading = block.model_copy(update={"cross": attention, "norm": LayerNorm()})
    table = Tokens(vocab=VOCAB, types=40, pad=5)
    config = ModelConfig(
        width=WIDTH,
        source=table,
        target=table,
        encoder=Stack(depth=DEPTH, blocks=(block,), position=T5Bias(buckets=400, max_distance=999)),
        decoder=Stack(depth=DEPTH + 1, blocks=(reading,), position=Learned(length=40), final_norm=LayerNorm()),
        head=LM(bias=True),
        tie=tie,
        init=init,
    )
    torch.manual_seed(0)
    return Transformer(config)


def parts(model: nn.Module) -> dict[str, Tensor]:
    """Every matrix by name; parts of a fused layer separately."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            names = [name] if len(module.parts) == 1 else [f"{name}.{i}" for i in range(len(module.parts))]
            found |= {part: module.rows(i) for i, part in enumerate(names)}
        elif isinstance(module, nn.Linear):
            found[name] = module.weight
    return found


def assert_std(x: Tensor, std: float, name: str, kurtosis: float = 3.0) -> None:
    """Mean 0 and this standard deviation, within five standard errors."""
    x, n = x.detach(), x.numel()
    assert abs(float(x.mean())) < 5 * std / math.sqrt(n), name
    assert abs(float(x.std()) / std - 1) < 5 * math.sqrt((kurtosis - 1) / (4 * n)), name


def without(row: int, table: Tensor) -> Tensor:
    return table[[i for i in range(len(table)) if i != row]]


def assert_tables(model: Transformer, std: float, positions: float) -> None:
    for side in (model.source, model.target):
        assert_std(without(5, side.table.weight), std, "tokens")
        assert not side.table.weight[5].any()
        assert_std(side.types.weight, std, "types")
    assert_std(model.head.table, std, "head")
    assert_std(model.encoder.schemes[0].tables.buckets, positions, "T5 bias")
    assert_std(model.decoder.embedder.tables.positions, positions, "learned positions")


@pytest.mark.parametrize("init", [Normal(), Xavier(), FanIn()], ids=lambda init: init.kind)
def test_norms_are_neutral_and_biases_zero(init: Init):
    """Whatever the offset of an RMS norm, it begins as a gain of 1."""
    model = wide(init)
    norms = 0
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, RootMeanSquare)):
            norms += 1
            gain = module.weight + (module.offset if isinstance(module, RootMeanSquare) else 0.0)
            assert torch.equal(gain, torch.ones_like(gain))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
    assert norms == 4 * DEPTH + 7 * (DEPTH + 1) + 1


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_normal(residual: bool, gated: bool):
    """N(0, std²); what enters the residual stream, divided by sqrt(2 · depth of its stack) with `residual`."""
    model = wide(Normal(std=0.05, residual=residual), gated=gated)
    entering = 0
    for name, weight in parts(model).items():
        depth = DEPTH if name.startswith("encoder") else DEPTH + 1
        enters = name.endswith(("inner.out", "inner.down"))
        entering += enters
        assert_std(weight, 0.05 / math.sqrt(2 * depth) if residual and enters else 0.05, name)
    assert entering == 2 * DEPTH + 3 * (DEPTH + 1)
    assert_tables(model, 0.05, 0.05)


@pytest.mark.parametrize("gated", [False, True])
def test_xavier(gated: bool):
    """Uniform up to sqrt(6 / (in + out)), for each part of a fused layer by itself; tables N(0, 1/d)."""
    model = wide(Xavier(), gated=gated)
    bounds = set()
    for name, weight in parts(model).items():
        bound = math.sqrt(6 / sum(weight.shape))
        bounds.add(bound)
        assert weight.abs().max() <= bound
        assert_std(weight, bound / math.sqrt(3), name, kurtosis=1.8)
        assert weight.abs().max() > 0.98 * bound  # uniform reaches its ends
    assert len(bounds) == 3  # queries, keys and feed-forward differ in shape
    assert_tables(model, WIDTH**-0.5, WIDTH**-0.5)


@pytest.mark.parametrize("scale", [InvSqrtKey(), Unscaled(), Times(value=1.0), Times(value=0.5)])
def test_fan_in(scale: Scale):
    """N(0, 1/in); queries by another 1/sqrt(k) where scores are not scaled; tables N(0, 1), positions small."""
    model = wide(FanIn(), scale)
    unscaled = scale in (Unscaled(), Times(value=1.0))
    queries = 0
    for name, weight in parts(model).items():
        query = name.endswith(("inner.qkv.0", "inner.q"))
        queries += query
        assert_std(weight, (weight.shape[1] * (KEY if query and unscaled else 1)) ** -0.5, name)
    assert queries == DEPTH + 2 * (DEPTH + 1)
    assert_tables(model, 1.0, WIDTH**-0.5)


def test_fan_in_gives_scores_of_unit_variance():
    """The point of it: unscaled scores of normed inputs have the variance that scaled ones would have."""
    spreads = []
    for scale in (InvSqrtKey(), Unscaled()):
        attention = wide(FanIn(), scale).encoder.blocks[0]["mixer"].inner
        attention.q_norm = attention.k_norm = nn.Identity()
        q, k, _ = attention.qkv.split(torch.randn(1, 200, WIDTH))
        q, k = (x.unflatten(-1, (-1, KEY)).transpose(1, 2) for x in (q, k))
        spreads.append(float((attention.scale * q @ k.repeat_interleave(2, dim=1).mT).detach().std()))
    assert spreads[0] == pytest.approx(1.0, abs=0.15)
    assert spreads[1] == pytest.approx(spreads[0], rel=1e-4)  # from the same seed


def test_shared_weights_are_scaled_once():
    """A stack that runs one block many times counts its runs, and divides its weights a single time."""
    block = Block(mixer=Attention(heads=4), feedforward=Plain(width=HIDDEN))
    config = ModelConfig(
        width=WIDTH,
        target=Tokens(vocab=VOCAB, table=FactorisedTable(width=16)),
        decoder=Stack(depth=8, blocks=(block,), share=True),
        head=LM(),
        init=Normal(std=0.1, residual=True),
    )
    model = Transformer(config)
    assert len(model.decoder.blocks) == 1
    for name, weight in parts(model).items():
        assert_std(weight, 0.1 / 4 if name.endswith(("inner.out", "inner.down")) else 0.1, name)


# -- building -------------------------------------------------------------------------------------------------------


TINY = {"depth": 2, "width": 16, "heads": 4, "key_width": 24, "ff": 24, "vocab": 31, "image": 6, "patch": 2}


def tiny(name: str) -> ModelConfig:
    return PRESETS[name](**{n: TINY[n] for n in inspect.signature(PRESETS[name]).parameters if n in TINY})


def run(model: Transformer) -> Tensor:
    source, ids = model.config.source, tokens(0, 2, 6)
    given = ids
    if isinstance(source, Patches):
        ids = torch.linspace(-1, 1, 216).view(2, 3, 6, 6)
    elif isinstance(source, Audio):
        given = torch.linspace(-1, 1, 12 * source.mels).view(2, 6, -1)
    with torch.no_grad():
        return model.eval()(given, ids) if model.config.shape == "encoder-decoder" else model.eval()(ids)


presets = pytest.mark.parametrize("name", PRESETS)


@presets
def test_building_on_meta_and_filling_later_is_building(name: str):
    torch.manual_seed(7)
    direct = Transformer(tiny(name))
    after = torch.get_rng_state()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.device("meta"):
        later = Transformer(tiny(name))
    assert all(x.is_meta for x in later.state_dict().values())
    assert torch.equal(torch.get_rng_state(), before)  # building draws nothing
    later.materialise("cpu")
    assert torch.equal(torch.get_rng_state(), after)
    mine, other = direct.state_dict(), later.state_dict()
    assert list(mine) == list(other)
    assert all(torch.equal(mine[key], other[key]) for key in mine)
    assert all(x.isfinite().all() for x in mine.values())
    assert torch.equal(run(direct), run(later))
    assert torch.equal(torch.get_rng_state(), after)  # nor does running


@presets
def test_a_deep_copy_is_another_model_with_the_same_weights(name: str):
    model = Transformer(tiny(name))
    twin = copy.deepcopy(model)
    expected = run(model)
    assert torch.equal(run(twin), expected)
    assert twin.num_parameters() == model.num_parameters()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.5)
    assert torch.equal(run(model), expected)
    assert not torch.equal(run(twin), expected)


@presets
def test_safetensors(name: str, tmp_path: Path):
    """No tensor is shared, so the plain state is a file, and the file is the model."""
    model = Transformer(tiny(name))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = Transformer(tiny(name))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    assert torch.equal(run(other), run(model))


def test_materialise_again_draws_anew():
    model = Transformer(tiny("gpt2"))
    before = run(model)
    assert not torch.equal(run(model.materialise("cpu")), before)

"""Low-rank adapters: a model begins as it was, and ends as one without, whatever its parts."""

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from anyformer.config import LM, Attention, Block, ConfigError, LoRA, ModelConfig, Plain, Stack, Tokens
from anyformer.config.adapter import adapted, every_matrix, misfits
from anyformer.nn.inspection.count import count
from anyformer.nn.linear import Linear
from anyformer.nn.lora import LowRank
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.merge import merge
from anyformer.nn.transforms.quantise import quantise
from anyformer.nn.transforms.rounding import RoundedFormat
from tests.strategies import build, close, models, seeds, tokens

adapters = st.builds(
    LoRA,
    rank=st.integers(1, 2),
    alpha=st.sampled_from([None, 0.5, 3.0]),
    targets=st.sampled_from([("*.blocks",), ("*.blocks.0",)]),
)


@st.composite
def with_adapters(draw: st.DrawFn, shapes: tuple[str, ...] = ("decoder", "encoder", "encoder-decoder")) -> ModelConfig:
    config, adapter = draw(models(shapes)), draw(adapters)
    assume(not list(misfits(adapter, config.stacks, config.width)))
    return config.model_copy(update={"adapter": adapter})


def plain(config: ModelConfig) -> ModelConfig:
    return config.model_copy(update={"adapter": None})


def inputs(config: ModelConfig, seed: int) -> tuple[Tensor, ...]:
    ids = tokens(seed, 2, 6)
    return (tokens(seed + 1, 2, 4), ids) if config.shape == "encoder-decoder" else (ids,)


# -- which layers -----------------------------------------------------------------------------------------------------


@given(models())
def test_the_config_knows_every_linear_layer_of_the_blocks(config: ModelConfig) -> None:
    model = Transformer(config)
    stacks = ("encoder.blocks.", "decoder.blocks.")
    there = {
        name: (m.in_features, m.out_features)
        for name, m in model.named_modules()
        if isinstance(m, Linear) and name.startswith(stacks)
    }
    assert there == {name: (m.inputs, m.outputs) for name, m in every_matrix(config.stacks, config.width).items()}


@given(with_adapters())
def test_those_that_are_named_have_an_adapter(config: ModelConfig) -> None:
    assert config.adapter is not None
    model = Transformer(config)
    there = {name for name, m in model.named_modules() if isinstance(m, Linear) and m.lora is not None}
    assert there == adapted(config.adapter, config.stacks, config.width).keys()
    assert all(name.startswith(("encoder.blocks.", "decoder.blocks.")) for name in there)
    if config.adapter.targets == ("*.blocks.0",):
        assert all(".blocks.0." in name for name in there)


def small(**adapter: object) -> ModelConfig:
    block = Block(mixer=Attention(heads=2), feedforward=Plain(width=6))
    stack = Stack(depth=2, blocks=(block,))
    return ModelConfig(width=8, target=Tokens(vocab=11), decoder=stack, head=LM(), adapter=LoRA(**adapter))


def test_targets_are_parts_or_layers() -> None:
    named = {
        ("*.qkv",): ["mixer.inner.qkv"],
        ("*.mixer",): ["mixer.inner.qkv", "mixer.inner.out"],
        ("*.qkv", "*.down"): ["mixer.inner.qkv", "feedforward.inner.down"],
    }
    for targets, names in named.items():
        config = small(rank=2, targets=targets)
        assert config.adapter is not None
        expected = {f"decoder.blocks.{i}.{name}" for i in (0, 1) for name in names}
        assert adapted(config.adapter, config.stacks, 8).keys() == expected
    assert {n.partition(".lora.")[0] for n, _ in Transformer(config).named_parameters() if ".lora." in n} == expected


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"rank": 7}, r"adapter\.rank = 7: must be at most 6: decoder\.blocks\.0\.feedforward\.inner\.up is 6 x 8"),
        ({"rank": 2, "targets": ("*.kqv",)}, r"adapter\.targets\.0 = '\*\.kqv': .* did you mean '\*\.qkv'"),
        ({"rank": 2, "targets": ("*.mixer", "xyz")}, r"adapter\.targets\.1 = 'xyz': .* layers are qkv, out, up, down"),
        ({"rank": 2, "targets": ("head",)}, r"adapter\.targets\.0 = 'head': the blocks have no such linear layer"),
        ({"rank": 2, "targets": ()}, r"adapter\.targets = \[\]: must name at least one"),
        ({"rank": 0}, r"rank = 0: must be at least 1"),
    ],
)
def test_adapters_that_do_not_fit(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        small(**given)


# -- what they do -----------------------------------------------------------------------------------------------------


@given(with_adapters(), seeds)
def test_a_model_begins_as_without(config: ModelConfig, seed: int) -> None:
    """Bit by bit, and from the same seed all its weights are the same, too."""
    made = []
    for spec in (config, plain(config)):
        torch.manual_seed(seed)
        made.append(Transformer(spec).eval())
    model, other = made
    own, given = model.state_dict(), other.state_dict()
    assert all(torch.equal(own[name], given[name]) for name in given)
    assert {name for name in own if name not in given} == {name for name in own if ".lora." in name}
    args = inputs(config, seed)
    assert torch.equal(model(*args), other(*args))


@given(with_adapters(), seeds)
def test_merged_equals_unmerged(config: ModelConfig, seed: int) -> None:
    model = build(config, seed)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    other = merge(model)
    assert other.config == plain(config)
    args = inputs(config, seed)
    close(model(*args), other(*args))
    assert merge(other) is other
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@given(with_adapters(("decoder", "encoder-decoder")), seeds)
def test_merged_equals_unmerged_step_by_step(config: ModelConfig, seed: int) -> None:
    model, ids = build(config, seed), tokens(seed, 2, 6)
    other, cache = merge(model), model.new_cache(2, 6)
    memory = {"encoder_out": model.encode(tokens(seed + 1, 2, 4))} if config.encoder else {}
    steps = [model.decode(ids[:, i : i + 1], **(memory if i == 0 else {}), cache=cache) for i in range(6)]
    close(torch.cat(steps, dim=1), other.decode(ids, **memory))


@given(with_adapters(), seeds)
def test_what_they_cost(config: ModelConfig, seed: int) -> None:
    model, args = Transformer(config), inputs(config, seed)
    model.backend = "eager"  # torch's counter does not see into the CPU's fused kernel
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args)
    table = count(config, length=6, batch=2, source_length=4 if config.shape == "encoder-decoder" else None)
    assert table.parameters == model.num_parameters()
    assert table.flops == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert table.trained == sum(p.numel() for name, p in model.named_parameters() if ".lora." in name)
    assert f"trained: {table.trained:,} parameters" in str(table)
    assert count(plain(config)).trained == count(plain(config)).parameters


def test_alpha_is_a_factor() -> None:
    """Twice alpha is twice as much of it; dropout is of training."""
    found = []
    for alpha in (2.0, 4.0):
        model = build(small(rank=2, alpha=alpha, dropout=0.5))
        added = next(m for m in model.modules() if isinstance(m, LowRank))
        found.append(added(torch.ones(1, added.a.shape[1], dtype=torch.float64)))
    close(found[1], 2 * found[0])
    model.train()
    drawn = [added(torch.ones(1, added.a.shape[1], dtype=torch.float64)) for _ in range(4)]
    assert not all(torch.equal(drawn[0], other) for other in drawn)


def test_half_precision_is_merged_once_rounded() -> None:
    model = build(small(rank=2)).bfloat16()
    other = merge(model)
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    name = "decoder.blocks.0.mixer.inner.qkv"
    layer = model.get_submodule(name)
    assert isinstance(layer, Linear)
    assert layer.lora is not None
    exact = layer.rows().float() + layer.lora.b.float() @ layer.lora.a.float()
    assert torch.equal(other.get_submodule(name).weight, exact.bfloat16())


def test_quantising_merges_first() -> None:
    model = build(small(rank=2)).float()
    small_one = quantise(model, way="plain")
    assert small_one.config.adapter is None
    assert any(isinstance(m, RoundedFormat) for m in small_one.modules())
    ids = tokens(0, 2, 6)
    assert torch.equal(small_one(ids), quantise(merge(model), way="plain")(ids))

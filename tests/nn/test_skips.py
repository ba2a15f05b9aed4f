"""Gates, value residuals and skip connections: by hand, as nothing where they begin, and where they do not apply."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer.config import (
    LM,
    Attention,
    Block,
    ConfigError,
    Latent,
    ModelConfig,
    NoMixer,
    Plain,
    Pooling,
    Rotary,
    Stack,
    Tokens,
)
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.context import Tap
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.nn.stack import SkipConnections
from tests.strategies import close, tokens


def config(depth: int = 4, attention: dict[str, Any] | None = None, **stack: Any) -> ModelConfig:
    mixer = Attention(**{"heads": 2, "kv_heads": 1} | (attention or {}))
    layers = Stack(depth=depth, blocks=(Block(mixer=mixer, feedforward=Plain(width=8)),), position=Rotary(), **stack)
    return ModelConfig(width=8, target=Tokens(vocab=11), decoder=layers, head=LM())


def build(spec: ModelConfig, like: Transformer | None = None) -> Transformer:
    """A model, with the weights of another one where both have them."""
    torch.manual_seed(0)
    model = Transformer(spec).double().eval()
    if like is not None:
        model.load_state_dict(model.state_dict() | like.state_dict())
    return model


def look(model: Transformer, ids: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    model(ids, taps=Tap(lambda name, x: seen.setdefault(name, x)))
    return seen


def test_an_embedding_skip_begins_as_none() -> None:
    base = build(config())
    ids = tokens(0, 2, 7)
    close(build(config(embedding_skip=True), base)(ids), base(ids))


@pytest.mark.parametrize(("embedding", "unet"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_what_layers_read(embedding: bool, unet: bool, depth: int) -> None:
    """Each block is called on the input that the formula gives."""
    model = build(config(depth, embedding_skip=embedding, unet_skips=unet))
    skips = model.decoder.skips
    assert isinstance(skips, SkipConnections)
    for parameter in skips.parameters():
        parameter.data = torch.randn_like(parameter)
    read = dict[int, Tensor]()
    for i, block in enumerate(model.decoder.blocks):
        block.register_forward_pre_hook(lambda _, inputs, i=i: read.__setitem__(i, inputs[0]))
    seen = look(model, tokens(0, 2, 5))
    x0 = seen["decoder.embed"]
    for i in range(depth):
        x = x0 if i == 0 else seen[f"decoder.{i - 1}.out"]
        early = depth - 1 - i
        if unet and early < depth // 2:
            x = x + skips.unet[early] * seen[f"decoder.{early}.out"]
        if embedding:
            x = skips.own[i] * x + skips.embedding[i] * x0
        close(read[i], x)


def test_value_residual_by_hand() -> None:
    """v = a v + b v₁ with the values of the first layer; a = 1 and b = 0 is attention without it."""
    base, ids = build(config()), tokens(0, 2, 6)
    mixed = build(config(attention={"value_residual": True}), base)
    layers = [block["mixer"].inner for block in mixed.decoder.blocks]
    for layer in layers:
        assert isinstance(layer, MultiHeadAttention)
        assert layer.value_mix.tolist() == [0.5, 0.5]
        layer.value_mix.data = torch.tensor([1.0, 0.0], dtype=torch.float64)
    close(mixed(ids), base(ids))
    for i, layer in enumerate(layers):
        layer.value_mix.data = torch.tensor([0.25, 0.5 + i], dtype=torch.float64)
    inputs = dict[int, Tensor]()
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda _, args, i=i: inputs.__setitem__(i, args[0]))
    seen = look(mixed, ids)
    own = [layer.qkv.split(inputs[i])[2][:, None] for i, layer in enumerate(layers)]  # one key/value head
    for i in range(4):
        close(seen[f"decoder.{i}.mixer.v"], 0.25 * own[i] + (0.5 + i) * own[0])


@pytest.mark.parametrize("kind", ["head", "element"])
def test_open_and_closed_gates(kind: str) -> None:
    base, ids = build(config(1)), tokens(0, 2, 6)
    gated = build(config(1, {"gate": kind}), base)
    gate = gated.decoder.blocks[0]["mixer"].inner.gate
    gate.weight.data.zero_()
    half = look(gated, ids)
    close(half["decoder.0.mixer.gate"], torch.full_like(half["decoder.0.mixer.gate"], 0.5))
    close(half["decoder.0.mixer.out"], look(base, ids)["decoder.0.mixer.out"] / 2)
    assert gate.out_features == {"head": 2, "element": 8}[kind]


def test_gradients_with_recomputed_activations() -> None:
    """Values of the first layer and skipped outputs have the same gradients when blocks are recomputed."""
    spec = config(4, {"value_residual": True, "gate": "head"}, embedding_skip=True, unet_skips=True)
    gradients = []
    for recompute in (False, True):
        model = build(spec).train()
        model(tokens(0, 2, 6), recompute=recompute).pow(2).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        close(a, b)


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"attention": {"gate": "head"}}, 4 * 8 * 2),
        ({"attention": {"gate": "element"}}, 4 * 8 * 8),
        ({"attention": {"value_residual": True}}, 4 * 2),
        ({"embedding_skip": True}, 2 * 4),
        ({"unet_skips": True}, 2),
    ],
)
def test_parameters(changes: dict[str, Any], added: int) -> None:
    spec = config(**changes)
    assert build(spec).num_parameters() == build(config()).num_parameters() + added == count(spec, 16).parameters


def test_where_they_do_not_apply() -> None:
    with pytest.raises(ConfigError, match=r"decoder.unet_skips = True: needs two layers or more, and depth = 1"):
        config(1, unet_skips=True)
    latent = Latent(rank=4, rotary_width=2)
    with pytest.raises(ConfigError, match=r"value_residual = True: latent attention stores no values"):
        config(attention={"value_residual": True, "kv_heads": None, "compress": latent} | {"key_width": 4})
    one, two = (Block(mixer=Attention(heads=2, kv_heads=n, value_residual=True)) for n in (1, 2))
    with pytest.raises(ConfigError, match=r"decoder.blocks.1.mixer.value_residual = True: all layers that have"):
        ModelConfig(width=8, target=Tokens(vocab=5), decoder=Stack(depth=2, blocks=(one, two)), head=LM())
    across = Block(mixer=NoMixer(), cross=Attention(heads=2, value_residual=True))
    both = {"source": Tokens(vocab=5), "encoder": Stack(depth=1, blocks=(one,))}
    with pytest.raises(ConfigError, match=r"cross.value_residual = True: values across are those of the encoder"):
        ModelConfig(width=8, target=Tokens(vocab=5), decoder=Stack(depth=1, blocks=(across,)), **both)
    pooled = Stack(depth=2, blocks=(one,), pooling=Pooling(stages=(1, 1)), embedding_skip=True, unet_skips=True)
    with pytest.raises(ConfigError) as caught:
        ModelConfig(width=8, source=Tokens(vocab=5), encoder=pooled)
    assert [fault.path for fault in caught.value.faults] == [
        "encoder.embedding_skip",
        "encoder.unet_skips",
        "encoder.blocks.0.mixer.value_residual",
    ]


def test_a_gate_is_a_share() -> None:
    gates = look(build(config(attention={"gate": "element"})), tokens(0, 1, 4))["decoder.3.mixer.gate"].detach()
    assert gates.shape == (1, 2, 4, 4)
    assert 0 < float(gates.min()) < float(gates.max()) < 1

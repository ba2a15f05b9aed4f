"""Attention maps, taps and patches of real models."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import Tensor

from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    Gated,
    ModelConfig,
    NoFeedForward,
    Projected,
    Rotary,
    Stack,
    Tokens,
    Window,
)
from anyformer.nn.context import Tap
from anyformer.nn.inspection.attention_maps import attention_maps
from anyformer.nn.inspection.plot import plot_map
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.strategies import build, close, models, seeds, tokens

READ = Tokens(vocab=11)
BLOCK = Block(mixer=Attention(heads=2, kv_heads=1, key_width=4, value_width=3), feedforward=Gated(width=5))
ENCODER = Stack(depth=2, blocks=(BLOCK,))
DECODER = Stack(depth=3, blocks=(BLOCK.model_copy(update={"cross": Attention(heads=4)}),))
PAIR = ModelConfig(width=8, source=READ, target=READ, encoder=ENCODER, decoder=DECODER, head=LM())
ALONE = ModelConfig(width=8, target=READ, decoder=Stack(depth=2, blocks=(BLOCK,), position=Rotary()), head=LM())

SOURCE, TARGET = tokens(0, 2, 5), tokens(1, 2, 4)


# -- maps -----------------------------------------------------------------------------------------------------------


def test_shapes():
    """{side: [layers, b, heads, t, s]}, rows are queries; the cross maps on their own."""
    maps = attention_maps(build(PAIR), SOURCE, TARGET)
    assert {kind: tuple(x.shape) for kind, x in maps.items()} == {
        "encoder": (2, 2, 2, 5, 5),
        "decoder": (3, 2, 2, 4, 4),
        "cross": (3, 2, 4, 4, 5),
    }
    assert list(attention_maps(build(ALONE), TARGET)) == ["decoder"]
    encoder = ModelConfig(width=8, source=READ, encoder=ENCODER, head=LM())
    assert list(attention_maps(build(encoder), SOURCE)) == ["encoder"]


def test_rows_sum_to_one_and_are_causal():
    maps = attention_maps(build(PAIR), SOURCE, TARGET)
    for weights in maps.values():
        close(weights.sum(dim=-1), torch.ones(weights.shape[:-1], dtype=torch.float64))
        assert (weights >= 0).all()
    assert torch.equal(maps["decoder"], maps["decoder"].tril())
    assert maps["encoder"].triu(1).any()
    assert not maps["decoder"].requires_grad


@pytest.mark.parametrize("position", [Rotary(), Alibi()], ids=lambda position: position.kind)
@pytest.mark.parametrize("pattern", [None, Window(before=1, after=0)], ids=["causal", "window"])
def test_maps_are_the_reference_weights(position, pattern):
    """Maps equal softmax(q kᵀ / sqrt(k) + bias) over visible keys, computed from the tapped queries and keys.

    Times the values they give the outputs of the heads, so they are the weights that the fast kernel used.
    """
    block = Block(mixer=Attention(heads=2, kv_heads=1, pattern=pattern))
    stack = Stack(depth=2, blocks=(block,), position=position)
    model, ids = build(ModelConfig(width=8, target=READ, decoder=stack, head=LM())), tokens(0, 2, 5)
    segments = torch.tensor([[0, 0, 0, 1, 1], [-1, -1, 0, 0, 0]])
    maps = attention_maps(model, ids, segments=segments)["decoder"]
    _, seen = run_with_taps(model, ["decoder.*.mixer.*"], ids, segments=segments)
    for layer in range(2):
        q, k, v, heads = (seen[f"decoder.{layer}.mixer.{name}"] for name in ("q", "k", "v", "heads"))
        for b in range(2):
            for i in range(5):
                near = range(max(0, i - 1) if pattern else 0, i + 1)
                keys = [j for j in near if segments[b, j] == segments[b, i]]
                if segments[b, i] < 0:
                    continue
                for h in range(2):
                    slope = Alibi.slopes(2)[h] if position.kind == "alibi" else 0.0
                    scores = [q[b, h, i] @ k[b, 0, j] / 2 - slope * (i - j) for j in keys]
                    expected = torch.zeros(5, dtype=torch.float64)
                    expected[keys] = torch.stack(scores).softmax(dim=0).detach()
                    close(maps[layer, b, h, i], expected, 1e-6)
                    close(maps[layer, b, h, i] @ v[b, 0], heads[b, h, i].detach())


def test_cross_maps_see_real_sources_only():
    segments = torch.tensor([[0, 0, 0, -1, -1], [-1, -1, -1, -1, -1]])
    maps = attention_maps(build(PAIR), SOURCE, TARGET, source_segments=segments)["cross"]
    assert not maps[:, 0, :, :, 3:].any()
    close(maps[:, 0].sum(dim=-1), torch.ones(3, 4, 4, dtype=torch.float64))
    assert not maps[:, 1].any()  # all keys are padding


def test_relu_maps_do_not_sum_to_one():
    block = Block(mixer=Attention(heads=2, normalizer="relu"))
    config = ModelConfig(width=8, source=READ, encoder=Stack(depth=1, blocks=(block,)), head=LM())
    maps = attention_maps(build(config), SOURCE)["encoder"]
    assert (maps >= 0).all()
    assert (maps.sum(dim=-1) - 1).abs().max() > 0.1


def test_layers_with_different_numbers_of_heads_need_taps():
    blocks = tuple(Block(mixer=Attention(heads=heads)) for heads in (2, 4))
    config = ModelConfig(width=8, source=READ, encoder=Stack(depth=2, blocks=blocks), head=LM())
    model = build(config)
    with pytest.raises(ValueError, match=r"the encoder layers differ in heads \[2, 4\]: use run_with_taps"):
        attention_maps(model, SOURCE)
    assert run_with_taps(model, ["encoder.1.mixer.weights"], SOURCE)[1]["encoder.1.mixer.weights"].shape[1] == 4


# -- taps -----------------------------------------------------------------------------------------------------------


@given(models(), seeds)
def test_taps_change_no_bit(config: ModelConfig, seed: int):
    model = build(config, seed)
    args = (SOURCE, TARGET) if config.shape == "encoder-decoder" else (TARGET,)
    with torch.no_grad():
        out, seen = run_with_taps(model, ["*"], *args)
        assert torch.equal(out, model(*args))
    assert seen["head"] is out


def test_tap_names_and_shapes():
    model = build(PAIR)
    _, seen = run_with_taps(model, ["*"], SOURCE, TARGET)
    expected: dict[str, tuple[int, ...]] = {"head": (2, 4, 11)}
    for side, depth, t in (("encoder", 2, 5), ("decoder", 3, 4)):
        expected |= {f"{side}.embed": (2, t, 8), f"{side}.final": (2, t, 8)}
        for i in range(depth):
            at = f"{side}.{i}"
            expected[f"{at}.out"] = (2, t, 8)
            for sublayer in ("mixer", "feedforward", *(("cross",) if side == "decoder" else ())):
                expected |= {f"{at}.{sublayer}.in": (2, t, 8), f"{at}.{sublayer}.out": (2, t, 8)}
            expected[f"{at}.feedforward.hidden"] = (2, t, 5)
            heads = {"q": (2, 2, t, 4), "k": (2, 1, t, 4), "v": (2, 1, t, 3)}
            heads |= {"weights": (2, 2, t, t), "heads": (2, 2, t, 3)}
            expected |= {f"{at}.mixer.{name}": shape for name, shape in heads.items()}
            if side == "decoder":
                heads = {"q": (2, 4, t, 2), "k": (2, 4, 5, 2), "v": (2, 4, 5, 2)}
                heads |= {"weights": (2, 4, t, 5), "heads": (2, 4, t, 2)}
                expected |= {f"{at}.cross.{name}": shape for name, shape in heads.items()}
    assert {name: tuple(x.shape) for name, x in seen.items()} == expected


def test_the_residual_stream_is_a_sum():
    """Each layer adds the outputs of its sublayers; the head reads the last sum."""
    model = build(PAIR)
    _, seen = run_with_taps(model, ["*"], SOURCE, TARGET)
    x = seen["decoder.embed"]
    for i in range(3):
        x = x + sum(seen[f"decoder.{i}.{name}.out"] for name in ("mixer", "cross", "feedforward"))
        close(seen[f"decoder.{i}.out"], x)
    close(seen["head"], x @ model.head.table.T)


def test_only_matching_activations_are_recorded():
    _, seen = run_with_taps(build(PAIR), ["decoder.*.mixer.weights", "encoder.0.out"], SOURCE, TARGET)
    assert set(seen) == {"encoder.0.out", *(f"decoder.{i}.mixer.weights" for i in range(3))}


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"no activation is called decoder\.7\.out, nothing"):
        run_with_taps(build(ALONE), ["decoder.7.out", "decoder.0.out", "nothing"], TARGET)


# -- patches --------------------------------------------------------------------------------------------------------


def patched(model: Transformer, name: str, change, *args: Tensor) -> Tensor:
    return model(*args, taps=Tap(lambda _, x: change(x), lambda other: other == name))


@pytest.mark.parametrize("name", ["decoder.embed", "decoder.0.out", "decoder.1.out", "decoder.final", "head"])
def test_the_residual_stream_of_another_run_gives_its_output(name: str):
    """An activation that carries all information, patched in from another run, gives that run's output."""
    model, other = build(ALONE), (TARGET + 3) % 11
    expected, seen = run_with_taps(model, [name], other)
    assert not torch.allclose(model(TARGET), expected)
    close(patched(model, name, lambda x: seen[name], TARGET), expected)


@pytest.mark.parametrize("head", [0, 1])
def test_ablating_a_head_is_zeroing_its_columns(head: int):
    model = build(ALONE)

    def ablate(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[:, i : i + 1]) if i == head else x[:, i : i + 1] for i in range(2)], dim=1)

    out = patched(model, "decoder.1.mixer.heads", ablate, TARGET)
    assert not torch.allclose(out, model(TARGET))
    with torch.no_grad():
        model.decoder.blocks[1]["mixer"].inner.out.weight[:, 3 * head : 3 * head + 3] = 0.0
    close(out, model(TARGET))


def test_patched_weights_are_used():
    """Weights patched to the identity equal a window that holds only the query's own position."""
    model = build(ALONE)
    block = BLOCK.model_copy(update={"mixer": BLOCK.mixer.model_copy(update={"pattern": Window(before=0, after=0)})})
    both = Stack(depth=2, blocks=(BLOCK, block), position=Rotary())
    other = build(ALONE.model_copy(update={"decoder": both}))
    other.load_state_dict(model.state_dict())
    out = patched(model, "decoder.1.mixer.weights", lambda x: torch.eye(4, dtype=x.dtype).expand_as(x), TARGET)
    assert not torch.allclose(out, model(TARGET))
    close(out, other(TARGET))


def test_a_patch_at_one_position_changes_only_later_positions():
    model = build(ALONE)

    def push(x: Tensor) -> Tensor:
        return x + (torch.arange(x.shape[1]) == 2)[:, None] * torch.linspace(-1, 2, x.shape[2], dtype=x.dtype) ** 2

    moved = (patched(model, "decoder.0.out", push, TARGET) - model(TARGET)).abs().amax(dim=(0, 2)) > 1e-9
    assert moved.tolist() == [False, False, True, True]


def test_a_zeroed_sublayer_equals_a_model_without_it():
    """Patching the output of a feed-forward to zero equals having none."""
    without = BLOCK.model_copy(update={"feedforward": NoFeedForward()})
    small = build(ALONE.model_copy(update={"decoder": Stack(depth=2, blocks=(without,), position=Rotary())}))
    model = build(ALONE)
    small.load_state_dict({name: model.state_dict()[name] for name in small.state_dict()})
    taps = Tap(lambda _, x: torch.zeros_like(x), lambda name: name.endswith("feedforward.out"))
    close(model(TARGET, taps=taps), small(TARGET))


def test_gradients_flow_through_a_patch():
    """The gradient of a patch is that of the activation it replaces."""
    model = build(ALONE)
    _, seen = run_with_taps(model, ["decoder.0.out"], TARGET)
    patch = seen["decoder.0.out"].detach().clone().requires_grad_()
    (learned,) = torch.autograd.grad(patched(model, "decoder.0.out", lambda x: patch, TARGET).square().sum(), patch)
    out, seen = run_with_taps(model, ["decoder.0.out"], TARGET)
    (own,) = torch.autograd.grad(out.square().sum(), seen["decoder.0.out"])
    close(learned, own)


# -- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5)], ids=["one head", "three heads"])
def test_plot_map_writes_a_png(tmp_path: Path, shape: tuple[int, ...]):
    pytest.importorskip("matplotlib")
    weights = torch.rand(shape, requires_grad=True).softmax(dim=-1)
    path = plot_map(weights, list("abcd"), list("vwxyz"), tmp_path / "new" / "map.png", title="layer 0")
    assert path == tmp_path / "new" / "map.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_many_heads_fit_on_a_page(tmp_path: Path):
    image = pytest.importorskip("matplotlib.image")
    path = plot_map(torch.rand(12, 9, 9), list("abcdefghi"), list("abcdefghi"), tmp_path / "map.png")
    height, width, _ = image.imread(path).shape
    assert width < 9 * 130 < height  # in inches at 130 dots: four rows of three


def test_the_output_bias_is_part_of_a_sublayers_output():
    """`out`, which enters the residual stream, includes the bias of the projection; `heads` is before it."""
    block = Block(mixer=Attention(heads=2, output=Projected(bias=True)), feedforward=NoFeedForward())
    config = ModelConfig(width=8, source=READ, encoder=Stack(depth=1, blocks=(block,)), head=LM())
    model = build(config)
    _, seen = run_with_taps(model, ["encoder.0.mixer.*"], SOURCE)
    together = seen["encoder.0.mixer.heads"].transpose(1, 2).flatten(2)
    out = model.encoder.blocks[0]["mixer"].inner.out
    close(seen["encoder.0.mixer.out"], together @ out.weight.T + out.bias)

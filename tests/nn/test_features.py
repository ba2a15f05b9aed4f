"""Images and features in the place of ids: what they become, and the laws that hold of them."""

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from anyformer.config import (
    LM,
    Attention,
    Block,
    Classifier,
    ConfigError,
    Features,
    Head,
    Input,
    LayerNorm,
    Learned,
    ModelConfig,
    NoHead,
    NoPosition,
    Patches,
    Position,
    Sinusoidal,
    Special,
    Stack,
    TokenLabels,
    Tokens,
    io,
)
from anyformer.generation.generate import generate
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.strategies import build, close, models, seeds, tokens

WIDTH, VOCAB = 8, 11
NOWHERE, HIDDEN = NoPosition(), NoHead()
BLOCK = Block(mixer=Attention(heads=2))

FRAME = 3
IMAGES = Patches(image_height=6, image_width=9, patch=3, channels=2, norm=LayerNorm())
FRAMES = Features(size=FRAME, norm=LayerNorm())


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reading(source: Input, head: Head = HIDDEN, position: Position = NOWHERE) -> ModelConfig:
    stack = Stack(depth=1, blocks=(BLOCK,), position=position)
    return ModelConfig(width=WIDTH, source=source, encoder=stack, head=head)


def answering(source: Input) -> ModelConfig:
    """Reads anything, and answers in tokens."""
    crossing = BLOCK.model_copy(update={"cross": Attention(heads=2)})
    return ModelConfig(
        width=WIDTH,
        source=source,
        target=Tokens(vocab=VOCAB),
        encoder=Stack(depth=1, blocks=(BLOCK,)),
        decoder=Stack(depth=1, blocks=(crossing,), position=Sinusoidal()),
        head=LM(),
        special=Special(pad=0, start=1),
    )


def embedded(model: Transformer, given: Tensor) -> Tensor:
    return run_with_taps(model, ["encoder.embed"], given)[1]["encoder.embed"]


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_patches_are_a_strided_convolution(class_token: bool, bias: bool):
    """In value and in gradient; then positions are added, the class token's the first."""
    spec = IMAGES.model_copy(update={"class_token": class_token, "bias": bias})
    model, images = build(reading(spec, position=Learned(length=7))), numbers(0, 2, 2, 6, 9)
    read, weight = model.source, torch.randn(2, spec.length, WIDTH, dtype=torch.float64)
    kernel = read.project.weight.unflatten(1, (2, 3, 3))
    x = F.conv2d(images, kernel, read.project.bias, stride=3).flatten(2).transpose(1, 2)
    assert x.shape[1] == 6
    if class_token:
        x = torch.cat((read.class_token.weight.expand(2, 1, -1), x), dim=1)
    x = x + model.encoder.embedder.tables.positions[: spec.length]
    expected = F.layer_norm(x, (WIDTH,), read.norm.weight, read.norm.bias)
    close(embedded(model, images), expected)
    (ours,) = torch.autograd.grad((embedded(model, images) * weight).sum(), read.project.weight)
    (theirs,) = torch.autograd.grad((expected * weight).sum(), read.project.weight)
    close(ours, theirs)


def test_features_are_a_linear_map():
    model, frames = build(reading(FRAMES, position=Learned(length=9))), numbers(0, 2, 5, FRAME)
    read = model.source
    x = frames @ read.project.weight.T + read.project.bias + model.encoder.embedder.tables.positions[:5]
    close(embedded(model, frames), F.layer_norm(x, (WIDTH,), read.norm.weight, read.norm.bias))


def test_numbers_of_any_precision_are_read():
    model, frames = build(reading(FRAMES)), numbers(0, 2, 5, FRAME).float()
    assert torch.equal(model(frames), model(frames.double()))


@st.composite
def featured(draw: st.DrawFn, *shapes: str) -> ModelConfig:
    """Any model whose first input is features."""
    config = draw(models(shapes=shapes))
    frames = Features(size=FRAME, bias=draw(st.booleans()), norm=config.last_input.norm)
    if config.shape == "encoder-decoder":
        tie = "output" if config.tie in ("output", "all") else "none"
        return config.model_copy(update={"source": frames, "tie": tie})
    name = "target" if config.decoder else "source"
    return config.model_copy(update={name: frames, "head": TokenLabels(labels=4), "tie": "none", "special": Special()})


@given(featured("encoder", "decoder"), seeds, st.integers(1, 9), st.integers(0, 4), st.integers(0, 4))
def test_padding_of_features_changes_nothing(config: ModelConfig, seed: int, length: int, left: int, right: int):
    model, frames = build(config, seed), numbers(seed, 2, length, FRAME)
    padded = torch.cat((numbers(seed + 1, 2, left, FRAME), frames, numbers(seed + 2, 2, right, FRAME)), dim=1)
    segments = torch.tensor([[-1] * left + [0] * length + [-1] * right] * 2)
    close(model(padded, segments=segments)[:, left : left + length], model(frames))


@given(featured("encoder-decoder"), seeds, st.integers(1, 6), st.integers(1, 4))
def test_padding_of_a_featured_source_changes_nothing(config: ModelConfig, seed: int, length: int, pads: int):
    model, frames, target = build(config, seed), numbers(seed, 2, length, FRAME), tokens(seed, 2, 4)
    padded = torch.cat((frames, numbers(seed + 1, 2, pads, FRAME)), dim=1)
    segments = torch.tensor([[0] * length + [-1] * pads] * 2)
    close(model(padded, target, source_segments=segments), model(frames, target))


@given(featured("decoder"), seeds, st.sets(st.integers(1, 6)))
def test_cached_features_equal_uncached(config: ModelConfig, seed: int, cuts: set[int]):
    model, frames = build(config, seed), numbers(seed, 2, 7, FRAME)
    cache = model.new_cache(2, 7)
    chunks = [model.decode(frames[:, a:b], cache=cache) for a, b in pairwise([0, *sorted(cuts), 7])]
    close(torch.cat(chunks, dim=1), model.decode(frames))


@pytest.mark.parametrize("source", [IMAGES, FRAMES], ids=lambda source: source.kind)
def test_generate_answers_images_and_features(source: Input):
    """The cached answer is the uncached one, token by token; features may be padded."""
    model = build(answering(source))
    with torch.no_grad():
        model.decoder.blocks[0].cross.inner.kv.weight.mul_(9)  # so that the answer is the source's
    given = numbers(0, 3, 2, 6, 9) if source is IMAGES else numbers(0, 3, 5, FRAME)
    segments = None if source is IMAGES else torch.tensor([[0] * 5, [0] * 4 + [-1], [-1, -1, 0, 0, 0]])
    ids = torch.ones(3, 1, dtype=torch.long)
    for _ in range(6):
        new = model(given, ids, source_segments=segments)[:, -1:].argmax(-1)
        ids = torch.cat((ids, new), dim=1)
    assert ids.unique().numel() > 2
    assert torch.equal(generate(model, given, segments=segments, max_new_tokens=6), ids)


WRONG = {
    "ids for images": (IMAGES, tokens(0, 2, 5), "images must be floating-point [batch, 2, 6, 9]"),
    "an image of another size": (IMAGES, numbers(0, 2, 2, 9, 6), "got torch.float64 [2, 2, 9, 6]"),
    "one image without a batch": (IMAGES, numbers(0, 2, 6, 9), "got torch.float64 [2, 6, 9]"),
    "bytes": (IMAGES, torch.zeros(1, 2, 6, 9, dtype=torch.uint8), "got torch.uint8 [1, 2, 6, 9]"),
    "ids for features": (FRAMES, tokens(0, 2, 5), "features must be floating-point [batch, length, 3]"),
    "frames of another size": (FRAMES, numbers(0, 2, 5, 4), "got torch.float64 [2, 5, 4]"),
    "no frames": (FRAMES, numbers(0, 2, 0, FRAME), "features are empty, [2, 0, 3]"),
    "features for ids": (Tokens(vocab=VOCAB), numbers(0, 2, 5, FRAME), "ids must be integers [batch, length]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_one_clear_line(case: str):
    source, given, message = WRONG[case]
    alone, both = build(reading(source)), build(answering(source))
    calls = (alone, alone.encode, lambda x: both(x, tokens(0, 2, 3)), lambda x: generate(both, x))
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(message)):
            call(given)


@pytest.mark.parametrize("source", [IMAGES, FRAMES], ids=lambda source: source.kind)
def test_numbers_have_no_types(source: Input):
    given = numbers(0, 2, 2, 6, 9) if source is IMAGES else numbers(0, 2, 7, FRAME)
    with pytest.raises(ValueError, match="this model has no token types"):
        build(reading(source))(given, types=torch.zeros(2, 7, dtype=torch.long))


RULES = {
    "head.kind = 'lm': features have no vocabulary; 'token_labels' has its own labels": (FRAMES, {"head": LM()}),
    "special.pad = 0: patches have no ids": (IMAGES, {"special": Special(pad=0)}),
    "source.image_width = 8: must be a multiple of patch = 3": (IMAGES.model_copy(update={"image_width": 8}), {}),
    "encoder: has 6 learned positions: an image is 7 tokens": (
        IMAGES,
        {"encoder": Stack(depth=1, blocks=(BLOCK,), position=Learned(length=6))},
    ),
    "target: patches are read at once: only an encoder reads them": (
        IMAGES,
        {"source": None, "encoder": None, "target": IMAGES, "decoder": Stack(depth=1, blocks=(BLOCK,))},
    ),
}


@pytest.mark.parametrize("message", RULES)
def test_rules_between_inputs_and_the_rest(message: str):
    source, changes = RULES[message]
    fields = {"width": WIDTH, "source": source, "encoder": Stack(depth=1, blocks=(BLOCK,)), **changes}
    with pytest.raises(ConfigError) as error:
        ModelConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("tie", ["inputs", "all"])
def test_tied_inputs_are_tokens(tie: str):
    config = answering(FRAMES)
    with pytest.raises(ConfigError, match=f"tie = '{tie}': needs tokens on both sides, not features and tokens"):
        config.model_copy(update={"tie": tie})


def test_an_input_without_a_kind_is_tokens():
    text = "width = 8\nsource = {source}\n[encoder]\ndepth = 1\nblocks = [{{mixer = {{heads = 2}}}}]\n"
    read = {
        source: io.loads(ModelConfig, text.format(source=source)).source
        for source in ("{vocab = 5}", '"patches"', '{kind = "features", size = 80}')
    }
    assert list(read.values()) == [Tokens(vocab=5), Patches(), Features(size=80)]


@pytest.mark.parametrize("head", [NoHead(), Classifier(labels=3)], ids=lambda head: head.kind)
@pytest.mark.parametrize("source", [IMAGES, FRAMES], ids=lambda source: source.kind)
def test_count_is_what_is_there(source: Input, head: Head):
    config = reading(source, head)
    given = torch.randn(3, 2, 6, 9) if source is IMAGES else torch.randn(3, 7, FRAME)
    table, model = count(config, None if source is IMAGES else 7, batch=3), Transformer(config)
    model.backend = "eager"  # whose matmuls are counted
    with FlopCounterMode(display=False) as counter:
        model(given)
    assert table.length == 7
    assert table.parameters == model.num_parameters()
    assert table.flops == counter.get_total_flops()


def test_an_image_has_its_own_length():
    assert count(answering(IMAGES), 20).source_length == 7
    assert count(reading(IMAGES), 7).length == 7
    for config, lengths in ((answering(IMAGES), {"source_length": 8}), (reading(IMAGES), {"length": 8})):
        with pytest.raises(ConfigError, match="length = 8: an image is 7 tokens"):
            count(config, **lengths)

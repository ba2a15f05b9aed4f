"""The presets: published sizes, each family's own rules, and small variants."""

import inspect
from collections.abc import Callable
from functools import partial

import pytest

from anyformer.config import (
    LM,
    Attention,
    BigBird,
    Causal,
    Classifier,
    ConfigError,
    Embedder,
    Experts,
    Full,
    Gated,
    Latent,
    Learned,
    MaskedLM,
    ModelConfig,
    Patches,
    Plain,
    Rotary,
    Side,
    Special,
    Stack,
    Tokens,
    Window,
    pattern_of,
    position_of,
)
from anyformer.nn.inspection.count import count
from anyformer.presets import (
    PRESETS,
    bart,
    bert,
    bigbird,
    clip,
    deepseek,
    gemma,
    gemma2,
    gemma3,
    gpt1,
    gpt2,
    gpt3,
    llama,
    mistral,
    mixtral,
    modernbert,
    palm,
    qwen3,
    roberta,
    t5,
    vaswani,
    vit,
)

SMALL = {"depth": 2, "width": 64, "heads": 4, "vocab": 97}

Preset = Callable[..., ModelConfig]

every = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)


def takes(preset: Preset, name: str) -> bool:
    return name in inspect.signature(preset).parameters


def small(preset: Preset, **numbers: object) -> ModelConfig:
    """With those of the small numbers that the preset has: one that reads images has no vocabulary."""
    return preset(**{name: n for name, n in SMALL.items() if takes(preset, name)} | numbers)


def last_stack(config: ModelConfig) -> Stack:
    stack = config.decoder or config.encoder
    assert stack is not None
    return stack


def mixer(config: ModelConfig) -> Attention:
    return last_stack(config).blocks[0].mixer


def ff(config: ModelConfig) -> int:
    spec = last_stack(config).blocks[0].feedforward
    spec = spec.expert if isinstance(spec, Experts) else spec
    assert isinstance(spec, (Plain, Gated))
    return spec.hidden(config.width)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        (PRESETS["vaswani"], 63_045_632),
        (partial(vaswani, "big"), 214_171_648),
        (PRESETS["gpt1"], 116_534_784),
        (PRESETS["gpt2"], 124_439_808),
        (PRESETS["gpt3"], 174_604_259_328),  # "175 B": the paper gives no exact number
        (partial(gpt2, depth=48, width=1600, heads=25), 1_557_611_200),
        (PRESETS["bert"], 109_482_240),
        (partial(bert, depth=24, width=1024, heads=16), 335_141_888),
        (PRESETS["roberta"], 124_645_632),
        (PRESETS["bigbird"], 127_468_800),
        (PRESETS["modernbert"], 149_014_272),
        (partial(modernbert, depth=28, width=1024, heads=16, ff=2624), 394_781_696),
        (PRESETS["vit"], 86_389_248),
        (PRESETS["clip"], 151_277_313),
        (partial(vit, depth=24, width=1024, heads=16), 304_351_232),
        (PRESETS["t5"], 60_506_624),
        (partial(t5, depth=12, width=768, heads=12), 222_903_552),
        (PRESETS["whisper"], 37_184_640 + 12 * 384),  # and a bias of keys in each attention
        (PRESETS["bart"], 139_420_416),
        (partial(bart, depth=12, width=1024, heads=16), 406_291_456),
        (PRESETS["llama"], 6_738_415_616),
        (partial(llama, depth=40, width=5120, heads=40), 13_015_864_320),
        (PRESETS["mistral"], 7_241_732_096),
        (PRESETS["mixtral"], 46_702_792_704),
        (PRESETS["qwen3"], 596_049_920),
        (partial(qwen3, width=2048), 1_720_574_976),
        (PRESETS["gemma"], 2_506_172_416),
        (partial(gemma, depth=28, width=3072, heads=16, kv_heads=16), 8_537_680_896),
        (PRESETS["gemma2"], 2_614_341_888),
        (partial(gemma2, depth=42, width=3584, heads=16), 9_241_705_984),
        (PRESETS["gemma3"], 999_885_952),
        (PRESETS["deepseek"], 15_706_484_224),
        (PRESETS["neox"], 20_554_567_680),
        (PRESETS["bloom"], 559_214_592),
    ],
)
def test_published_sizes(preset: Preset, parameters: int) -> None:
    assert count(preset()).parameters == parameters


@pytest.mark.parametrize(
    ("numbers", "billions"),
    [
        ({"depth": 32, "width": 4096, "heads": 16}, 8.63),
        ({"depth": 64, "width": 8192, "heads": 32}, 62.50),
        ({}, 540.35),
    ],
)
def test_the_three_sizes_of_palm(numbers: dict[str, int], billions: float) -> None:
    assert count(palm(**numbers)).parameters / 1e9 == pytest.approx(billions, abs=0.01)


@every
def test_every_preset_takes_the_common_numbers(preset: Preset) -> None:
    config = small(preset)
    assert config.width == 64
    assert not isinstance(config.last_input, Tokens) or config.last_input.vocab == 97
    for stack in config.stacks.values():
        assert sum(isinstance(block.mixer, Attention) for block in stack.unrolled()) == 2
    assert mixer(config).heads == 4
    assert takes(preset, "kv_heads") != isinstance(mixer(config).compress, Latent)
    if takes(preset, "kv_heads"):
        assert mixer(small(preset, kv_heads=2)).kv_heads == 2
    assert ff(small(preset, ff=100)) == 100
    assert mixer(small(preset, key_width=24)).widths(64)[0] == 24
    assert small(preset, dropout=0.25).last_input.dropout == 0.25


@every
def test_presets_are_values(preset: Preset) -> None:
    assert hash(preset()) == hash(preset())
    for config in (preset(), small(preset)):
        assert ModelConfig.model_validate(config.model_dump()) == config
        assert ModelConfig.model_validate_json(config.model_dump_json()) == config


@every
def test_every_preset_says_what_it_is(preset: Preset) -> None:
    first = (inspect.getdoc(preset) or "").split("\n")[0]
    assert first.endswith(".")
    assert PRESETS[preset.__name__] is preset


@every
def test_a_small_vocabulary_has_no_ids_past_its_end(preset: Preset) -> None:
    few, whole = small(preset).special, preset().special
    assert dict(few.named()) == {name: id for name, id in whole.named() if id < 97}


def test_special_ids_are_the_published_ones() -> None:
    assert gpt2().special == Special(bos=50_256, eos=50_256)
    assert t5().special == Special(pad=0, eos=1, start=0)
    assert bart().special == Special(pad=1, bos=0, eos=2, start=2)
    assert roberta().special == Special(pad=1, bos=0, eos=2)


@pytest.mark.parametrize("preset", [preset for preset in PRESETS.values() if takes(preset, "kv_heads")])
def test_key_value_heads_must_divide(preset: Preset) -> None:
    with pytest.raises(ConfigError, match="kv_heads = 3: must divide heads = 4"):
        small(preset, kv_heads=3)


RATIOS = [(llama, 1), (mistral, 4), (mixtral, 4), (qwen3, 2), (gemma, 8), (gemma2, 2), (gemma3, 4)]


@pytest.mark.parametrize(("preset", "ratio"), RATIOS)
def test_key_value_heads_keep_the_ratio(preset: Preset, ratio: int) -> None:
    for heads in (1, 2, 3, 4, 6, 8, 9, 12, 16, 32):
        groups = mixer(preset(width=96, heads=heads, key_width=8)).groups
        assert heads % groups == 0
        if heads % ratio == 0:
            assert groups == heads // ratio
        else:
            assert 1 <= groups <= max(heads // ratio, 1)


@pytest.mark.parametrize(
    ("preset", "width", "expected", "key_width"),
    [
        (gpt2, 64, 256, 16),
        (vaswani, 64, 256, 16),
        (t5, 64, 256, 64),  # the head width stays
        (llama, 5120, 13_824, 1280),
        (llama, 64, 256, 16),
        (llama, 96, 256, 24),  # 2/3 · 4 d is 256
        (llama, 104, 512, 26),  # and here a little more
        (mistral, 64, 224, 16),
        (qwen3, 64, 192, 128),
        (gemma, 64, 512, 256),
        (gemma2, 64, 256, 256),
        (gemma3, 64, 384, 256),
        (mixtral, 64, 224, 16),
        (palm, 64, 256, 256),
        (modernbert, 64, 96, 16),
        (vit, 64, 256, 16),
        (clip, 64, 256, 16),
    ],
)
def test_widths_follow_the_family(preset: Preset, width: int, expected: int, key_width: int) -> None:
    config = preset(width=width, heads=4)
    assert ff(config) == expected
    assert mixer(config).widths(width) == (key_width, key_width)


def test_learned_positions_have_the_given_length() -> None:
    for preset, offset in ((gpt1, 0), (gpt2, 0), (gpt3, 0), (bert, 0), (bigbird, 0), (roberta, 2), (bart, 2)):
        for stack in preset(length=33).stacks.values():
            assert stack.position == Learned(length=33, offset=offset)


def test_big_is_twice_base() -> None:
    base, big = vaswani(), vaswani("big")
    assert (big.width, ff(big), mixer(big).heads) == (2 * base.width, 2 * ff(base), 2 * mixer(base).heads)
    assert (base.last_input.dropout, big.last_input.dropout) == (0.1, 0.3)
    assert vaswani("big", dropout=0.0).last_input.dropout == 0.0
    with pytest.raises(ConfigError, match="size = 'huge': must be 'base' or 'big'"):
        vaswani("huge")  # type: ignore[arg-type]


def test_the_output_is_tied_where_there_is_a_vocabulary() -> None:
    assert bert().tie == "none"
    assert bert(head=MaskedLM()).tie == "output"
    assert gpt2(head=Classifier(labels=3, pool="last")).tie == "none"
    assert t5(head=Embedder()).tie == "inputs"
    assert t5().tie == bart().tie == vaswani().tie == "all"
    assert llama(head=LM()).tie == mistral().tie == "none"


def layers(config: ModelConfig, side: Side) -> list[tuple[object, object]]:
    """Pattern and position of each attention."""
    stack = config.stacks[side]
    mixers = [block.mixer for block in stack.unrolled() if isinstance(block.mixer, Attention)]
    return [(pattern_of(mixer, side), position_of(mixer, stack)) for mixer in mixers]


def test_layers_take_turns() -> None:
    """Local and global layers alternate as published, in what they see and in how they tell positions."""
    band = Window(before=255, after=0)
    assert [pattern for pattern, _ in layers(gpt3(depth=4), "decoder")] == [Causal(), band, Causal(), band]
    window = Window(before=4095, after=0)
    assert layers(gemma2(depth=3), "decoder") == [(window, Rotary()), (Causal(), Rotary()), (window, Rotary())]
    near = Window(before=511, after=0), Rotary(theta=1e4)
    assert layers(gemma3(depth=7), "decoder") == [*[near] * 5, (Causal(), Rotary(theta=1e6)), near]
    near, far = (Window(before=64, after=64), Rotary(theta=1e4)), (Full(), Rotary(theta=1.6e5))
    assert layers(modernbert(depth=7), "encoder") == [far, near, near, far, near, near, far]


def test_bigbird_sees_in_blocks() -> None:
    assert {pattern for pattern, _ in layers(bigbird(), "encoder")} == {
        BigBird(ahead=True, block=64, globals=2, randoms=3)
    }


def test_deepseek_begins_with_one_dense_layer() -> None:
    first, *rest = last_stack(deepseek()).unrolled()
    assert first.feedforward == Gated(width=10_944)
    assert all(isinstance(block.feedforward, Experts) for block in rest)


def test_positions_of_images_follow_their_size() -> None:
    config = vit(image=96, patch=8, channels=1)
    assert config.source == Patches(image_height=96, patch=8, channels=1)
    assert last_stack(config).position == Learned(length=145)
    with pytest.raises(ConfigError, match=r"source.image_height = 100: must be a multiple of patch = 8"):
        vit(image=100, patch=8)

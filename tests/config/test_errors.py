"""Errors are part of the product: what is wrong, where, what would be right; all of it, and nothing twice."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, strategies as st

from anyformer.config import Attention, Block, ConfigError, ModelConfig, Rotary, Spec, io
from tests.config.strategies import models

DECODER = """
width = 64
tie = "output"
head = "lm"
target = {{ vocab = 100 {target} }}
{root}
[decoder]
depth = 2
{stack}
[[decoder.blocks]]
{block}
[decoder.blocks.mixer]
heads = {heads}
{mixer}
"""
PAIR = """
width = 64
tie = "{tie}"
head = "lm"
source = {{ vocab = 100 }}
target = {{ vocab = {vocab} }}
special = {{ eos = 1, start = 100 }}
[encoder]
depth = 2
blocks = {{ mixer = {{ heads = 4 {encoder} }} }}
[decoder]
depth = 2
blocks = {{ mixer = {{ heads = 4 }} {cross} }}
"""
FREE = {"target": "", "root": "", "stack": "", "block": "", "heads": "4", "mixer": ""}
FREE_PAIR = {"tie": "all", "vocab": "100", "encoder": "", "cross": ", cross = { heads = 4 }"}


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        io.loads(ModelConfig, text)
    return str(error.value).splitlines()


MIXER = "decoder.blocks.0.mixer"
KINDS = "did you mean 'rotary'?"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # rules between parts
        ({"heads": "6"}, [f"{MIXER}.heads = 6: must divide width = 64, or give key_width"]),
        ({"mixer": "kv_heads = 3"}, [f"{MIXER}.kv_heads = 3: must divide heads = 4 (1, 2, 4)"]),
        (
            {"heads": "6", "mixer": "kv_heads = 4\nkey_width = 8"},
            [f"{MIXER}.kv_heads = 4: must divide heads = 6 (1, 2, 3, 6)"],
        ),
        (
            {"mixer": "key_width = 15", "stack": 'position = "rotary"'},
            ["decoder.position: rotary rotates pairs, and key_width is 15: it must be even and at least 2"],
        ),
        (
            {"mixer": "position = { kind = 'rotary', fraction = 0.2 }"},
            [f"{MIXER}.position: rotary rotates pairs, and 0.2 of key_width = 16 is 3: it must be even and at least 2"],
        ),
        (
            {"mixer": "compress = { kind = 'latent', rank = 8, rotary_width = 16 }"},
            [f"{MIXER}.compress.rotary_width = 16: must be less than key_width = 16"],
        ),
        (
            {"mixer": "compress = { kind = 'latent', rank = 8, rotary_width = 3 }", "stack": 'position = "rotary"'},
            ["decoder.position: rotary rotates pairs, and compress.rotary_width is 3: it must be even and at least 2"],
        ),
        (
            {"mixer": "kv_heads = 2\nqk_norm = 'rms'\ncompress = { kind = 'latent', rank = 8, rotary_width = 0 }"},
            [
                f"{MIXER}.kv_heads = 2: in latent attention every head has its own keys: leave kv_heads out",
                f"{MIXER}.qk_norm: latent attention norms what it compresses: set compress.norm instead",
            ],
        ),
        (
            {"mixer": "projections = 'shared_qk'\ncompress = { kind = 'latent', rank = 8, rotary_width = 0 }"},
            [f"{MIXER}.projections = 'shared_qk': latent attention compresses keys and values, not queries"],
        ),
        (
            {"mixer": 'position = "sinusoidal"'},
            [f"{MIXER}.position: sinusoidal positions act on the embeddings: set them on the stack"],
        ),
        (
            {"block": "cross = { heads = 4 }"},
            [
                "decoder.blocks.0.cross: there is no encoder to read: "
                "only the decoder of an encoder-decoder has cross-attention"
            ],
        ),
        ({"root": "source = { vocab = 9 }"}, ["source: nothing reads it: there is no encoder"]),
        ({"target": ", pad = 100"}, ["target.pad = 100: must be an id below vocab = 100"]),
        ({"root": "special = { eos = 100 }"}, ["special.eos = 100: must be an id below vocab = 100"]),
        # values by themselves
        ({"heads": "0"}, [f"{MIXER}.heads = 0: must be at least 1"]),
        ({"heads": "4.0"}, [f"{MIXER}.heads = 4.0: must be a whole number"]),
        ({"heads": "true"}, [f"{MIXER}.heads = True: must be a whole number"]),
        ({"mixer": "bias = 1"}, [f"{MIXER}.bias = 1: must be true or false"]),
        ({"mixer": 'dropout = "x"'}, [f"{MIXER}.dropout = 'x': must be a finite number"]),
        ({"block": "dropout = 1.0"}, ["decoder.blocks.0.dropout = 1.0: must be less than 1"]),
        (
            {"stack": "position = { kind = 'rotary', theta = -1 }"},
            ["decoder.position.theta = -1: must be greater than 0"],
        ),
        (
            {"stack": "position = { kind = 'rotary', fraction = 1.5 }"},
            ["decoder.position.fraction = 1.5: must be at most 1"],
        ),
        ({"mixer": "scale = { kind = 'value', value = 'x' }"}, [f"{MIXER}.scale.value = 'x': must be a finite number"]),
        ({"mixer": "scale = 'value'"}, [f"{MIXER}.scale.value: is required"]),
        (
            {"block": 'placement = "pst"'},
            ["decoder.blocks.0.placement = 'pst': must be 'pre', 'post', 'branch' or 'sandwich'; did you mean 'post'?"],
        ),
        ({"block": "norm = 3"}, ["decoder.blocks.0.norm = 3: must be a table"]),
        ({"stack": "prefix = 3"}, ["decoder.prefix.0 = 3: must be a table"]),
        # keys and kinds
        ({"mixer": "kv_head = 2"}, [f"{MIXER}.kv_head: unknown key; did you mean 'kv_heads'?"]),
        (
            {"root": "vocabulary_size = 9"},
            [
                "vocabulary_size: unknown key; known here: "
                "adapter, context, decoder, encoder, head, image_tower, init, source, special, target, tie, width"
            ],
        ),
        ({"stack": 'position = "rotray"'}, [f"decoder.position.kind = 'rotray': unknown kind; {KINDS}"]),
        ({"stack": 'position = { kind = "rotray" }'}, [f"decoder.position.kind = 'rotray': unknown kind; {KINDS}"]),
        (
            {"stack": "position = { theta = 5.0 }"},
            [
                "decoder.position = {'theta': 5.0}: must name its kind: "
                "a table with `kind = ...`, or just the kind as a string"
            ],
        ),
        (
            {"stack": "position = { kind = 'alibi', theta = 5.0 }"},
            ["decoder.position.theta: unknown key for kind 'alibi'; these have it: rotary, rotary_axes"],
        ),
        ({"stack": 'position = "learned"'}, ["decoder.position.length: is required"]),
        # several, with and without consequences
        (
            {"heads": "6", "mixer": "kv_heads = 4", "target": ", pad = -1"},
            [
                "target.pad = -1: must be at least 0",
                f"{MIXER}.kv_heads = 4: must divide heads = 6 (1, 2, 3, 6)",
                f"{MIXER}.heads = 6: must divide width = 64, or give key_width",
            ],
        ),
        ({"heads": "6", "mixer": "key_widht = 8"}, [f"{MIXER}.key_widht: unknown key; did you mean 'key_width'?"]),
        ({"heads": '"six"', "mixer": "kv_heads = 5"}, [f"{MIXER}.heads = 'six': must be a whole number"]),
        (
            {"heads": "5", "root": "special = { eos = 100, bos = 'x' }", "stack": "positions = 'alibi'"},
            [
                "decoder.positions: unknown key; did you mean 'position'?",
                "special.bos = 'x': must be a whole number",
                f"{MIXER}.heads = 5: must divide width = 64, or give key_width",
                "special.eos = 100: must be an id below vocab = 100",
            ],
        ),
    ],
)
def test_decoder(given: dict[str, str], expected: list[str]) -> None:
    assert faults(DECODER.format(**{**FREE, **given})) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"cross": ', cross = { heads = 4, position = "alibi", sinks = true, normalizer = "relu" }'},
            [
                "decoder.blocks.0.cross.sinks = True: "
                "a sink takes its share of a softmax, and the normalizer is 'relu'",
                "decoder.blocks.0.cross.position: "
                "alibi does not apply across: source and target positions are not comparable",
                "special.start = 100: must be an id below vocab = 100",
            ],
        ),
        (
            {"cross": ""},
            [
                "decoder.blocks: no block reads the encoder: give at least one a `cross` attention, "
                "or a recurrent mixer with begin = 'encoder'",
                "special.start = 100: must be an id below vocab = 100",
            ],
        ),
        (  # no word of `cross`, which is there, nor of `tie`, which may fit
            {"cross": ", cros = { heads = 4 }", "vocab": "'x'"},
            [
                "target.vocab = 'x': must be a whole number",
                "decoder.blocks.0.cros: unknown key; did you mean 'cross'?",
            ],
        ),
        ({"vocab": "101"}, ["tie = 'all': source and target must agree in vocab, table and pad"]),
        (
            {"tie": "al", "encoder": ", heds = 4"},
            [
                "encoder.blocks.0.mixer.heds: unknown key; did you mean 'heads'?",
                "tie = 'al': must be 'none', 'output', 'inputs' or 'all'; did you mean 'all'?",
                "special.start = 100: must be an id below vocab = 100",
            ],
        ),
    ],
)
def test_encoder_decoder(given: dict[str, str], expected: list[str]) -> None:
    assert faults(PAIR.format(**{**FREE_PAIR, **given})) == expected


def test_nothing_at_all() -> None:
    assert faults("") == ["width: is required", "a model needs an encoder, a decoder, or both"]


def test_python_gets_the_same_words() -> None:
    with pytest.raises(ConfigError, match=r"^heads = 0: must be at least 1$"):
        Attention(heads=0)
    with pytest.raises(ConfigError, match=r"^norm\.kind = 'rmss': unknown kind; did you mean 'rms'\?$"):
        Block(mixer=Attention(heads=2), norm="rmss")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^thta: unknown key; did you mean 'theta'\?$"):
        Rotary(thta=1.0)  # type: ignore[call-arg]


def test_sizes_without_end_are_refused_at_once() -> None:
    """Only divisors up to 1024 are listed."""
    heads = 65_536
    assert (
        f"{MIXER}.kv_heads = 7: must divide heads = {heads} (1, 2, "
        in faults(DECODER.format(**{**FREE, "heads": str(heads), "mixer": "kv_heads = 7"}))[0]
    )


# -- one mistake, one fault -------------------------------------------------------------------------------------------


def leaves(data: Any, *steps: str | int) -> Iterator[tuple[str | int, ...]]:
    if isinstance(data, (dict, list)) and data:
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from leaves(value, *steps, key)
    elif steps[-1] != "kind":
        yield steps


@given(models(), st.data())
def test_a_wrong_value_has_no_consequences(config: ModelConfig, data: st.DataObject) -> None:
    """Whatever else depends on the value, only the value is reported."""
    tree = io.to_data(config)
    steps = data.draw(st.sampled_from(list(leaves(tree))))
    node: Any = tree
    for step in steps[:-1]:
        node = node[step]
    node[steps[-1]] = data.draw(st.sampled_from(["?!", [[]], {"kind": 3, "x": {}}]))
    with pytest.raises(ConfigError) as error:
        io.build(ModelConfig, tree)
    assert all(fault.path.startswith(".".join(map(str, steps))) for fault in error.value.faults)


@given(models(), st.data())
def test_one_misspelt_part_is_one_fault(config: ModelConfig, data: st.DataObject) -> None:
    """A misspelt kind, with the fields of the right one beside it."""
    tree = io.to_data(config)
    tables = [steps for steps in kinds(config) if steps]
    steps = data.draw(st.sampled_from(tables))
    node: Any = tree
    for step in steps:
        node = node[step]
    node["kind"] += "x"
    with pytest.raises(ConfigError) as error:
        io.build(ModelConfig, tree)
    (fault,) = error.value.faults
    assert fault.path == ".".join([*map(str, steps), "kind"])


def kinds(value: Any, *steps: str | int) -> Iterator[tuple[str | int, ...]]:
    """Where a table with a kind stands."""
    if isinstance(value, Spec):
        if "kind" in type(value).model_fields:
            yield steps
        for name in type(value).model_fields:
            yield from kinds(getattr(value, name), *steps, name)
    elif isinstance(value, tuple):
        for i, element in enumerate(value):
            yield from kinds(element, *steps, i)

"""Configs changed by dotted paths, and told apart."""

import math

import pytest
from hypothesis import given

from anyformer import presets
from anyformer.config import ConfigError, ModelConfig, Rotary, io
from tests.config.strategies import models


def lines(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return str(error.value).splitlines()


ONE = presets.gpt2()
assert ONE.decoder
TWO = ONE.model_copy(update={"decoder": ONE.decoder.model_copy(update={"blocks": ONE.decoder.blocks * 2})})
LIST = "is a list, and has no"


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["decoder.depth=4"], ["decoder.depth: 12 -> 4"]),
        ([" decoder.depth = 4 "], ["decoder.depth: 12 -> 4"]),
        (["decoder.depth=4", "decoder.depth=6"], ["decoder.depth: 12 -> 6"]),
        (["decoder.blocks.1.mixer.heads=8"], ["decoder.blocks.1.mixer.heads: 12 -> 8"]),
        (
            ["decoder.blocks.*.placement=post"],
            ["decoder.blocks.0.placement: pre -> post", "decoder.blocks.1.placement: pre -> post"],
        ),
        (
            ["decoder.blocks.mixer.heads=8"],
            ["decoder.blocks.0.mixer.heads: 12 -> 8", "decoder.blocks.1.mixer.heads: 12 -> 8"],
        ),
        (["decoder.position=rotary"], ["decoder.position: learned(length=1024) -> rotary"]),
        (["decoder.position.kind=rotary"], ["decoder.position: learned(length=1024) -> rotary"]),
        (["decoder.position.kind=learned"], []),
        (
            ['decoder.position={kind="rotary", theta=5e5}'],
            ["decoder.position: learned(length=1024) -> rotary(theta=500000)"],
        ),
        (
            [
                "decoder.position=rotary",
                "decoder.position.theta=5e5",
                "decoder.position.scaling={kind='ntk', factor=2}",
                "decoder.position.scaling.factor=3",
            ],
            ["decoder.position: learned(length=1024) -> rotary(theta=500000, scaling=ntk(factor=3))"],
        ),
        (["decoder.blocks.0.mixer.kv_heads=4", "decoder.blocks.*.mixer.kv_heads=none"], []),
        (["decoder.blocks.0.mixer.pattern=causal", "decoder.blocks.0.mixer.pattern=none"], []),
        (["decoder.blocks.0.mixer.position=none"], ["decoder.blocks.0.mixer.position: (unset) -> none"]),
        (["tie=none", "decoder.share=true"], ["decoder.share: false -> true", "tie: output -> none"]),
        (
            [
                "decoder.blocks.0.mixer.pattern.kind=window",
                "decoder.blocks.0.mixer.pattern.before=8",
                "decoder.blocks.0.mixer.pattern.after=0",
            ],
            ["decoder.blocks.0.mixer.pattern: (unset) -> window(before=8, after=0)"],
        ),
        (
            ["decoder.blocks.*.norm={kind='rms'}", "decoder.blocks.0.norm.eps=1e-3"],
            ["decoder.blocks.0.norm: layer -> rms(eps=0.001)", "decoder.blocks.1.norm: layer -> rms"],
        ),
    ],
)
def test_overrides(assignments: list[str], expected: list[str]) -> None:
    assert list(map(str, io.diff(TWO, io.override(TWO, assignments)))) == expected


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("decodr.depth=4", ["decodr: unknown key; did you mean 'decoder'?"]),
        ("decoder.dept=4", ["decoder.dept: unknown key; did you mean 'depth'?"]),
        (
            "decoder.position.theta=5e5",
            ["decoder.position.theta: unknown key for kind 'learned'; these have it: rotary, rotary_axes"],
        ),
        ("decoder.blocks.2.placement=pre", [f"decoder.blocks: {LIST} '2'; known here: 0 to 1, or * for all"]),
        ("decoder.blocks.plcement=pre", [f"decoder.blocks: {LIST} 'plcement'; known here: 0 to 1, or * for all"]),
        ("decoder.prefix.*.placement=pre", [f"decoder.prefix: {LIST} '*'; known here: nothing, it is empty"]),
        ("decoder.depth.x=3", ["decoder.depth = 12: is a value, and has no 'x'"]),
        ("decoder.depth=none", ["decoder.depth = 'none': must be a whole number"]),
        ("decoder.depth", ["'decoder.depth' is no assignment: write key=value, such as decoder.depth=4"]),
        ("decoder..depth=1", ["'decoder..depth=1' is no assignment: write key=value, such as decoder.depth=4"]),
        ("=1", ["'=1' is no assignment: write key=value, such as decoder.depth=4"]),
        ("tie=\udcff", [r"'tie=\udcff' holds bytes that are not UTF-8"]),
        ("tie='none", ["tie = 'none: Expected \"'\" (at end of document)"]),
        pytest.param("a." * 2000 + "a=1", ["'" + "a." * 20 + "...' is nested too deeply"], id="deep"),
        ("decoder.depth=nan", ["decoder.depth = nan: must be a whole number"]),
        ("decoder.blocks.0.dropout=1e400", ["decoder.blocks.0.dropout = inf: must be a finite number"]),
        ("decoder.blocks=[]", ["decoder.blocks: must hold at least one block"]),
        ("width=1\ntie='none'", ["width = \"1\\ntie='none'\": must be a whole number"]),
        (
            "encoder.depth=2",
            [
                "encoder.blocks: is required",
                "source: is required: the encoder reads it",
                "decoder.blocks: no block reads the encoder: give at least one a `cross` attention, "
                "or a recurrent mixer with begin = 'encoder'",
            ],
        ),
    ],
)
def test_overrides_that_are_wrong(assignment: str, expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        io.override(TWO, [assignment])
    assert lines(error) == expected


def test_all_faults_of_overrides_are_told() -> None:
    with pytest.raises(ConfigError) as error:
        io.override(TWO, ["decoder.depth", "head=lmm", "decoder.blocks.1.mixer.heads=7"])
    assert lines(error) == [
        "'decoder.depth' is no assignment: write key=value, such as decoder.depth=4",
        "head.kind = 'lmm': unknown kind; did you mean 'lm'?",
        "decoder.blocks.1.mixer.heads = 7: must divide width = 768, or give key_width",
    ]


@given(models())
def test_nothing_changed_is_the_same(config: ModelConfig) -> None:
    assert io.override(config, []) == config
    assert io.diff(config, config) == []


@given(models(), models())
def test_a_difference_is_told_where_it_is(a: ModelConfig, b: ModelConfig) -> None:
    found = io.diff(a, b)
    assert bool(found) == (a != b)
    assert len({path for path, _, _ in found}) == len(found)
    assert [(path, right, left) for path, left, right in io.diff(b, a)] == found


def test_numbers_in_words_are_told_apart() -> None:
    (found,) = io.diff(Rotary(theta=1e4), Rotary(theta=math.nextafter(1e4, 0)))
    assert found.left == "10000"
    assert float(found.right) == math.nextafter(1e4, 0)


def test_long_differences_are_cut() -> None:
    (found,) = [d for d in io.diff(presets.gpt2(), presets.t5()) if d.path == "encoder"]
    assert found.left == "(unset)"
    assert found.right.startswith("(depth=6, blocks=[(mixer=attention(heads=8, ")
    assert len(found.right) == 100

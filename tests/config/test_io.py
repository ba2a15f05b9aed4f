"""Configs in TOML and JSON: there and back, and what is no config."""

import json
import re
import tomllib
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, strategies as st

from anyformer import presets
from anyformer.config import Block, ConfigError, ModelConfig, Parallel, RMSNorm, Spec, YarnScaling, io
from tests.config.strategies import ALTERNATIVES, models, specs

FORMATS: tuple[io.Format, ...] = ("toml", "json")
both = pytest.mark.parametrize("format", FORMATS)


class Folder(Spec):
    """Something with a free text, as a recipe has."""

    name: str
    sizes: tuple[int, ...] = ()


def lines(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return str(error.value).splitlines()


# -- there and back ---------------------------------------------------------------------------------------------------


@both
@given(config=models())
def test_a_model_comes_back(format: io.Format, config: ModelConfig) -> None:
    assert io.loads(ModelConfig, io.dumps(config, format), format) == config


@both
@given(data=st.data())
def test_every_part_comes_back(format: io.Format, data: st.DataObject) -> None:
    spec = data.draw(specs(data.draw(st.sampled_from(ALTERNATIVES))))
    back = io.loads(type(spec), io.dumps(spec, format), format)
    assert back == spec
    assert repr(back) == repr(spec)  # 1 == 1.0 == True, but they do not look alike


@both
@given(text=st.text(st.characters(exclude_categories=["Cs"])), sizes=st.lists(st.integers(-(2**62), 2**62)))
def test_any_text_comes_back(format: io.Format, text: str, sizes: list[int]) -> None:
    spec = Folder(name=text, sizes=tuple(sizes))
    assert io.loads(Folder, io.dumps(spec, format), format) == spec


@both
@pytest.mark.parametrize("name", presets.PRESETS)
def test_presets_come_back_from_files(format: io.Format, name: str, tmp_path: Path) -> None:
    config = presets.PRESETS[name]()
    path = tmp_path / f"Modell – {name}.{format}"
    io.save(config, path)
    assert io.load(ModelConfig, path) == config
    assert list(tmp_path.iterdir()) == [path]  # nothing temporary is left


def test_what_is_written() -> None:
    """None is left out, every other default is there; whole floats stay floats; TOML has words, JSON tables."""
    block = Block(mixer={"heads": 4}, norm=RMSNorm(eps=1.0), order=Parallel())
    data = json.loads(io.dumps(block, "json"))
    assert "kv_heads" not in data["mixer"]
    assert data["placement"] == "pre"
    assert data["feedforward"]["activation"] == {"kind": "relu"}
    assert '"eps": 1.0' in io.dumps(block, "json")
    assert "eps = 1.0\n" in io.dumps(block)
    assert tomllib.loads(io.dumps(block))["feedforward"]["activation"] == "relu"


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.toml"
    io.save(presets.gpt2(), path)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match=r"model\.toml: cannot be written: No space left on device"):
        io.save(presets.gpt1(), path)
    assert io.load(ModelConfig, path) == presets.gpt2()
    assert list(tmp_path.iterdir()) == [path]


def test_a_mark_and_foreign_line_ends_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_bytes(b"\xef\xbb\xbf" + io.dumps(presets.gpt2()).replace("\n", "\r\n").encode())
    assert io.load(ModelConfig, path) == presets.gpt2()


# -- what is not a config ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("toml", "width = \n", "line 1, column 9: invalid value"),
        ("toml", "width = 64\n[decoder", "line 2, column 9: expected ']' at the end of a table declaration"),
        ("toml", "width = 1\nwidth = 2\n", "line 2, column 10: cannot overwrite a value"),
        ("toml", 'a = "\\ud800"', "line 1, column 12: escaped character is not a Unicode scalar value"),
        ("json", '{"width": 64,\n "head" "lm"}', "line 2, column 9: expecting ':' delimiter"),
        ("json", "", "line 1, column 1: expecting value"),
        ("json", "[1, 2]", "must be a table: { ... }"),
        pytest.param("json", "[" * 100_000, "nested too deeply", id="deep list"),
        pytest.param("json", '{"a":' * 990 + "1" + "}" * 990, "nested too deeply", id="deep JSON"),
        pytest.param("toml", ".".join("a" * 990) + " = 1", "nested too deeply", id="deep TOML"),
        pytest.param("json", '{"a": 1' + "0" * 5000 + "}", "Exceeds the limit (4300 digits) for integer", id="digits"),
        ("json", '{"width": 1, "decoder": {"depth": 1, "depth": 2}}', "decoder.depth: is given more than once"),
        ("json", '{"a": ["\\ud800"]}', r"a.0: holds half a character (a lone surrogate): '\ud800'"),
        ("json", '{"a": {"\\udfff": 1}}', r"a.\udfff: holds half a character (a lone surrogate): '\udfff'"),
    ],
)
def test_broken_text(format: io.Format, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        io.loads(ModelConfig, text, format)
    assert lines(error)[0].startswith(expected)


@pytest.mark.parametrize(
    ("format", "value"),
    [("toml", "nan"), ("toml", "-inf"), ("toml", "1e400"), ("json", "NaN"), ("json", "-Infinity"), ("json", "1e400")],
)
def test_numbers_are_finite(format: io.Format, value: str) -> None:
    text = f'kind = "rms"\neps = {value}' if format == "toml" else f'{{"kind": "rms", "eps": {value}}}'
    with pytest.raises(ConfigError, match=r"^eps = .*: must be a finite number$"):
        io.loads(RMSNorm, text, format)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_bytes(b'head = "\xff"')
    (tmp_path / "wrong.json").write_text('{"width": }')
    (tmp_path / "ends.toml").write_text("width = 0\n")
    for name, expected in {
        "model.toml": "not UTF-8: byte 0xff at offset 8",
        "modle.toml": f"no such file; did you mean '{tmp_path / 'model.toml'}'?",
        "Übung.toml": "no such file",
        "no/where.toml": "no such file",
        "model.yaml": "has '.yaml': a config ends in .toml or .json",
        "model": "has no suffix: a config ends in .toml or .json",
        ".": "is a folder, not a file",
        "x" * 300 + ".toml": "cannot be read: File name too long",
        "wrong.json": "line 1, column 11: expecting value",
    }.items():
        with pytest.raises(ConfigError) as error:
            io.load(ModelConfig, tmp_path / name)
        assert lines(error) == [f"{tmp_path / name}: {expected}"]
    with pytest.raises(ConfigError) as error:
        io.load(ModelConfig, tmp_path / "ends.toml")
    assert lines(error) == [
        f"{tmp_path / 'ends.toml'}: width = 0: must be at least 1",
        f"{tmp_path / 'ends.toml'}: a model needs an encoder, a decoder, or both",
    ]


def test_any_spec_will_do() -> None:
    """Not only models: a root of another class, with text, with lists of alternatives."""

    class Recipe(Spec):
        name: str
        scalings: tuple[YarnScaling, ...] = ()
        model: ModelConfig | None = None
        logger: Literal["none", "file"] = "file"

    recipe = Recipe(name="ü", scalings=(YarnScaling(factor=2.0, original_length=8),), model=presets.gpt2())
    for format in FORMATS:
        assert io.loads(Recipe, io.dumps(recipe, format), format) == recipe
    changed = io.override(recipe, ["model.decoder.depth=3", "scalings.*.factor=4", "name=none", "logger=none"])
    assert list(map(str, io.diff(recipe, changed))) == [
        "name: ü -> none",
        "scalings.0.factor: 2 -> 4",
        "model.decoder.depth: 12 -> 3",
        "logger: file -> none",
    ]
    with pytest.raises(ConfigError, match=re.escape("model.decoder.blocks.0.mixer.heads = 7: must divide width = 768")):
        io.override(recipe, ["model.decoder.blocks.0.mixer.heads=7"])
    assert io.schema(Recipe)["properties"]["name"] == {"title": "Name", "type": "string"}

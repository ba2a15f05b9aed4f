"""The command line: what it prints, and how it ends."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anyformer import __version__, presets
from anyformer.cli import app
from anyformer.config import ModelConfig, io
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.memory import training_memory
from anyformer.recipe import ready as recipes


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def done(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert not result.stderr or result.stderr.startswith("stopped at the limit of ")
    return result.stdout


def refused(*arguments: str | Path) -> list[str]:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    return result.stderr.splitlines()


def test_version() -> None:
    assert done("--version") == f"anyformer {__version__}\n"


def test_help_names_every_verb() -> None:
    text = done("--help")
    for word in ("presets", "count", "config", "tokenizer", "doctor", "Exit codes"):
        assert word in text


def test_presets() -> None:
    lines = done("presets").splitlines()[1:]
    assert [line.split()[0] for line in lines] == list(presets.PRESETS)
    (gpt2,) = [line for line in lines if line.startswith("gpt2 ")]
    assert "124,439,808  decoder " in gpt2
    assert "Radford et al. 2019" in gpt2


# -- models by name ---------------------------------------------------------------------------------------------------


def test_count() -> None:
    assert done("count", "gpt2") == counted(presets.gpt2())
    options = ("--length", "8", "--source-length", "4", "--batch", "2", "--json")
    sizes = {"length": 8, "source_length": 4, "batch": 2}
    told = {**count(presets.t5(), **sizes).to_dict(), "training": training_memory(presets.t5(), **sizes).to_dict()}
    assert json.loads(done("count", "t5", *options)) == json.loads(json.dumps(told))


def counted(config: ModelConfig) -> str:
    return f"{count(config)}\n{training_memory(config)}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gpt2"], presets.gpt2()),
        (["gpt2", "depth=2", "width=64", "heads=4", "vocab=97"], presets.gpt2(depth=2, width=64, heads=4, vocab=97)),
        (["vaswani", "size=big"], presets.vaswani("big")),
        (["bert", "head=masked_lm"], io.override(presets.bert(), ["head=masked_lm", "tie=output"])),
        (["llama", "kv_heads=4", "kv_heads=none"], presets.llama()),
        (
            ["llama", "depth=2", "decoder.position.theta=5e5"],
            io.override(presets.llama(depth=2), ["decoder.position.theta=5e5"]),
        ),
    ],
)
def test_presets_with_changes(arguments: list[str], expected: ModelConfig) -> None:
    assert io.loads(ModelConfig, done("config", "show", *arguments)) == expected


def test_what_is_shown_is_a_file_to_start_from(tmp_path: Path) -> None:
    for suffix in io.SUFFIXES:
        path = tmp_path / f"größer – 模型{suffix}"
        path.write_text(done("config", "show", "qwen3", "--format", suffix[1:]), encoding="utf-8")
        assert done("config", "check", path) == f"{path}: right\n"
        assert done("config", "diff", path, "qwen3") == "no difference\n"
        assert done("count", path) == done("count", "qwen3")
    assert done("config", "diff", "qwen3", path).startswith("no difference")
    assert io.loads(ModelConfig, done("config", "show", path, "decoder.depth=3")).decoder.depth == 3  # type: ignore[union-attr]


def test_diff() -> None:
    assert "decoder.position.length: 1024 -> 512\n" in done("config", "diff", "gpt2", "gpt1")
    assert "decoder.position: learned(length=1024) -> alibi\n" in done("config", "diff", "gpt2", "bloom")


def test_schema() -> None:
    assert json.loads(done("config", "schema")) == json.loads(done("config", "schema", "model"))
    assert json.loads(done("config", "schema")) == io.schema(ModelConfig)
    assert json.loads(done("config", "schema", "recipe")) == recipes.schema()


# -- recipes and runs by name -----------------------------------------------------------------------------------------


def test_a_name_means_one_thing() -> None:
    assert not set(presets.PRESETS) & set(recipes.names())


def test_recipes_are_shown_checked_and_compared(tmp_path: Path) -> None:
    for name in recipes.names():
        path = tmp_path / f"{name}.toml"
        path.write_text(done("config", "show", name), encoding="utf-8")
        assert done("config", "check", path) == f"{path}: right\n"
        assert done("config", "diff", path, name) == "no difference\n"
    assert "train.steps: 1600 -> 9\n" in done("config", "diff", "sort", _saved(tmp_path, "train.steps=9"))
    path = tmp_path / "sort.toml"
    path.write_text(path.read_text(encoding="utf-8").replace("steps =", "stesp ="), encoding="utf-8")
    assert f"{path}: train.stesp: unknown key; did you mean 'steps'?" in refused("config", "check", path)
    assert refused("config", "diff", "gpt2", "sort") == [
        "'sort' is a recipe and 'gpt2' a model: they cannot be compared"
    ]


def _saved(folder: Path, *changes: str) -> Path:
    path = folder / "changed.json"
    path.write_text(done("config", "show", "sort", *changes, "--format", "json"), encoding="utf-8")
    return path


def test_the_cost_of_a_recipe() -> None:
    model = recipes.read_recipe("multi30k-en-de", ["model.source.vocab=10000", "model.target.vocab=10000"]).model
    assert done("count", "multi30k-en-de") == counted(model)  # by the size of its BPE
    assert refused("count", "sort") == [
        "model.target.vocab: is not set: the tokenizer words takes it from the data; add model.target.vocab=8000"
    ]
    known = counted(recipes.read_recipe("sort", ["model.target.vocab=262"]).model)
    assert done("count", "sort", "model.target.vocab=262") == done("count", "sort", "tokenizer=bytes") == known
    assert done("count", "scan", *(f"model.{side}.vocab=20" for side in ("source", "target")))


def test_the_cost_of_a_tokenizer_file(prose: Path, tmp_path: Path) -> None:
    train(prose, "--kind", "chars", "--out", tmp_path / "letters")
    size = TextTokenizer.load(tmp_path / "letters").size
    changes = [f'tokenizer={{kind="file", path="{tmp_path / "letters"}"}}']
    assert done("count", "sort", *changes) == done("count", "sort", f"model.target.vocab={size}")


def test_the_cost_of_a_run(tmp_path: Path) -> None:
    config = presets.gpt2(depth=2, width=64, heads=4, vocab=97)
    assert refused("count", tmp_path) == [f"{tmp_path}: is not the folder of a run: it has no config.json"]
    for name in ("step-000000001", "step-000000012"):
        (tmp_path / "state" / name).mkdir(parents=True)
        io.save(config, tmp_path / "state" / name / "config.json")
        config = io.override(config, ["decoder.depth=3"])
    assert done("count", tmp_path) == counted(config)  # of the newest checkpoint
    io.save(presets.gpt2(), tmp_path / "config.json")
    assert done("count", tmp_path) == done("count", "gpt2")
    assert done("count", tmp_path, "decoder.depth=4") == done("count", "gpt2", "decoder.depth=4")


def test_a_model_without_a_vocabulary(tmp_path: Path) -> None:
    io.save(recipes.read_recipe("sort").model, tmp_path / "model.toml")
    assert refused("count", tmp_path / "model.toml") == ["target.vocab: is not set; add target.vocab=8000"]


# -- wrong input: one line per fault, exit code 2 ---------------------------------------------------------------------


def test_unknown_models() -> None:
    assert refused("count", "gtp2") == ["'gtp2' is not a preset, a recipe, a run or a file; did you mean 'gpt2'?"]
    (line,) = refused("config", "show", "transformer.yaml")
    assert line.startswith("'transformer.yaml' is not a preset, a recipe, a run or a file; known: vaswani, ")
    assert refused("count", "no.toml") == ["no.toml: no such file"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["dept=2"], ["dept: unknown key; did you mean 'depth'?"]),
        (["depth=0", "width=x"], ["depth = 0: must be at least 1", "width = 'x': must be a whole number"]),
        (["depth"], ["'depth' is no assignment: write key=value, such as decoder.depth=4"]),
        (["width=100"], ["decoder.blocks.0.mixer.heads = 12: must divide width = 100, or give key_width"]),
        (["decoder.blocks.0.norm=rmss"], ["decoder.blocks.0.norm.kind = 'rmss': unknown kind; did you mean 'rms'?"]),
        (["tie=inputs"], ["tie = 'inputs': needs a source and a target; with one input use 'output'"]),
    ],
)
def test_wrong_changes(arguments: list[str], expected: list[str]) -> None:
    assert refused("count", "gpt2", *arguments) == expected


def test_check_tells_everything(tmp_path: Path) -> None:
    right, wrong, broken = tmp_path / "right.toml", tmp_path / "wrong.toml", tmp_path / "broken.json"
    io.save(presets.gpt2(), right)
    wrong.write_text(io.dumps(presets.gpt2()).replace("heads = 12", "heads = 7\nhead = 3"), encoding="utf-8")
    broken.write_text("{", encoding="utf-8")
    result = run("config", "check", right, wrong, broken)
    assert result.exit_code == 2
    assert result.stdout == f"{right}: right\n"
    assert result.stderr.splitlines() == [
        f"{wrong}: decoder.blocks.0.mixer.head: unknown key; did you mean 'heads'?",
        f"{wrong}: decoder.blocks.0.mixer.heads = 7: must divide width = 768, or give key_width",
        f"{broken}: line 1, column 2: expecting property name enclosed in double quotes",
    ]


def test_wrong_options_are_wrong_input() -> None:
    for arguments in (
        ["count"],
        ["cuont"],
        ["count", "gpt2", "--length", "0"],
        ["config", "show", "gpt2", "--format", "x"],
    ):
        assert run(*arguments).exit_code == 2
    assert refused("count", "gpt2", "--source-length", "3")[0].startswith("source_length: ")


def test_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(io, "dumps", stop)
    result = run("config", "show", "gpt2")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "interrupted\n")


def test_our_own_mistakes_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(io, "dumps", fail)
    result = run("config", "show", "gpt2")
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError)


# -- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_bytes("Größe 크기\r\n尺寸 größe\n".encode() * 3)
    return path


def train(*arguments: str | Path) -> Result:
    result = run("tokenizer", "train", *arguments)
    assert result.exit_code == 0, result.output
    return result


def test_a_tokenizer_is_trained_and_shown(prose: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "tokenizer"
    result = train(prose, "--kind", "chars", "--lowercase", "--out", out)
    assert result.stderr.startswith("read 6 lines in ")
    first, tokens, ids = result.stdout.splitlines()
    assert first == f"{out / 'tokenizer.json'}: {6 + len(set('größe 크기尺寸') | {chr(10)})} tokens"
    assert tokens == "tokens: g r ö ß e ▁ 크 기"
    shown = [line.split() for line in done("tokenizer", "show", out, "Größe 크기!").splitlines()]
    assert [token for _, token in shown] == [*"größe▁크기", "<unk>"]
    assert [number for number, _ in shown][:-1] == ids.split()[1:]


@pytest.mark.parametrize("kind", ["chars", "bytes", "words", "bpe", "unigram", "wordpiece"])
def test_files_may_be_packed_or_in_another_encoding(kind: str, prose: Path, tmp_path: Path) -> None:
    packed, other, marked = tmp_path / "packed.txt.gz", tmp_path / "other.txt", tmp_path / "marked.txt"
    packed.write_bytes(gzip.compress(prose.read_bytes()))
    other.write_bytes(prose.read_text(encoding="utf-8").encode("utf-16"))
    marked.write_bytes(b"\xef\xbb\xbf" + prose.read_bytes())
    made = []
    for path, encoding in ((prose, "utf-8"), (packed, "utf-8"), (other, "utf-16"), (marked, "utf-8")):
        out = tmp_path / f"{path.name}.json"
        size = [] if kind in ("chars", "bytes") else ["--size", "300"]
        train(path, "--kind", kind, "--out", out, "--encoding", encoding, *size)
        made.append(out.read_bytes())
    assert len(set(made)) == 1


def test_progress_in_plain_lines(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.data.lines.EVERY", 0.0)
    monkeypatch.setattr("anyformer.data.lines.CHUNK", 2)
    *lines, last = train(prose, prose, "--kind", "bytes", "--out", tmp_path / "new").stderr.splitlines()
    assert len(lines) == 6
    assert all(re.fullmatch(r"read \d+ lines, 0\.0 of 0\.0 MB, [\d.]+ MB/s, \d+ s left", line) for line in lines)
    assert last.startswith("read 12 lines in ")


def test_a_tokenizer_is_not_written_over(prose: Path, tmp_path: Path) -> None:
    train(prose, "--kind", "bytes", "--out", tmp_path / "new")
    before = (tmp_path / "new" / "tokenizer.json").read_bytes()
    for out in (tmp_path / "new", tmp_path / "new" / "tokenizer.json", prose):
        (line,) = refused("tokenizer", "train", prose, "--kind", "chars", "--out", out)
        assert line.endswith("exists already; choose another --out")
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "size: is required"),
        (["--kind", "bytes", "--size", "9"], "size: unknown key; known here: kind"),
        (["--size", "9"], "size = 9: bpe needs at least 262 for these texts"),
        (["--size", "300", "--encoding", "utf-88"], "encoding = 'utf-88': unknown; such as utf-8, latin-1, cp949"),
        (["--size", "300", "--encoding", "ascii"], "prose.txt: not ascii, somewhere after line 0: set --encoding"),
        (["--size", "300", "no.txt"], "no.txt: no such file"),
    ],
)
def test_wrong_trainings(arguments: list[str], expected: str, prose: Path, tmp_path: Path) -> None:
    *_, line = refused("tokenizer", "train", prose, "--out", tmp_path / "new", *arguments)
    assert line.endswith(expected)
    assert not (tmp_path / "new").exists()


def test_wrong_files_for_tokenizers(tmp_path: Path) -> None:
    (broken := tmp_path / "broken.gz").write_bytes(b"no gzip")
    (line,) = refused("tokenizer", "train", broken, "--size", "300", "--out", tmp_path / "new")
    assert "broken.gz: is not a whole gzip file" in line
    (line,) = refused("tokenizer", "train", tmp_path, "--size", "300", "--out", tmp_path / "new")
    assert line == f"{tmp_path}: cannot be read (Is a directory)"
    (tmp_path / "empty.txt").touch()
    *_, line = refused("tokenizer", "train", tmp_path / "empty.txt", "--size", "300", "--out", tmp_path / "new")
    assert line == "there is no text to train a tokenizer on"
    (line,) = refused("tokenizer", "show", tmp_path, "text")
    assert line.startswith(f"{tmp_path}: holds no tokenizer")


# -- as a program -----------------------------------------------------------------------------------------------------


def test_as_a_module_in_an_old_terminal(tmp_path: Path) -> None:
    path = tmp_path / "größer – 模型.toml"
    io.save(presets.gpt2(), path)
    command = [sys.executable, "-m", "anyformer", "config", "check", path]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    root = Path(__file__).parent.parent
    found = subprocess.run(command, env=environment, cwd=root, capture_output=True, encoding="latin-1", timeout=60)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.endswith("größer \\u2013 \\u6a21\\u578b.toml: right\n")

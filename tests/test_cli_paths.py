"""A path that cannot be used is one line on stderr and exit code 2, whichever verb it is given to."""

import errno
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_cli import done, run
from tests.test_cli_interop import write_run

SMALL = ["train.steps=1", "data.train.count=200", "data.valid.count=5", "data.test.count=5", "task.max_target=12"]
LORA = 'adapter={rank=2, targets=["*.mixer"]}'

READ = {
    "train": ["train", "BAD.toml", "--out", "NEW"],
    "train, data": [
        "train", "sort", *SMALL, "--out", "NEW", "data.train={kind='parallel', source='BAD', target='TEXT'}",
    ],
    "train, init_from": ["train", "sort", *SMALL, "--out", "NEW", "train.init_from=BAD"],
    "train, tokenizer": ["train", "sort", *SMALL, "--out", "NEW", "tokenizer={kind='file', path='BAD'}"],
    "evaluate": ["evaluate", "BAD"],
    "predict, run": ["predict", "BAD", "TEXT"],
    "predict, file": ["predict", "RUN", "BAD"],
    "generate": ["generate", "BAD", "--prompt", "the"],
    "generate, schema": ["generate", "RUN", "--prompt", "the", "--json-schema", "BAD.json"],
    "inspect": ["inspect", "BAD", "1 2"],
    "explore": ["explore", "BAD", "--no-browser"],
    "import": ["import", "BAD", "--out", "NEW"],
    "import, tokenizer": ["import", "RUN", "--tokenizer", "BAD", "--out", "NEW"],
    "export": ["export", "BAD", "NEW"],
    "merge": ["merge", "BAD", "--out", "NEW"],
    "count": ["count", "BAD.toml"],
    "config check": ["config", "check", "BAD.toml"],
    "config show": ["config", "show", "BAD.json"],
    "lab": ["lab", "run", "BAD.toml", "--out", "NEW"],
    "data prepare": ["data", "prepare", "BAD", "--tokenizer", "bytes", "--out", "NEW"],
    "data show": ["data", "show", "BAD"],
    "tokenizer train": ["tokenizer", "train", "BAD", "--out", "NEW"],
    "tokenizer show": ["tokenizer", "show", "BAD", "1 2"],
}  # fmt: skip
WRITE = {
    "train": ["train", "sort", *SMALL, "--out", "BAD"],
    "predict": ["predict", "RUN", "TEXT", "--out", "BAD"],
    "inspect": ["inspect", "RUN", "the", "--out", "BAD.svg"],
    "import": ["import", "PUBLIC", "--out", "BAD"],
    "export": ["export", "RUN", "BAD"],
    "merge": ["merge", "ADAPTED", "--out", "BAD"],
    "lab": ["lab", "run", "GRID", "--out", "BAD"],
    "data prepare": ["data", "prepare", "TEXT", "--tokenizer", "bytes", "--out", "BAD"],
    "tokenizer train": ["tokenizer", "train", "TEXT", "--out", "BAD"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files and runs that are as they should be."""
    folder = tmp_path_factory.mktemp("made")
    write_run(folder / "run")
    write_run(folder / "adapted", LORA)
    done("export", folder / "run", folder / "public")
    (folder / "text.txt").write_text("the fox\na dog\n", encoding="utf-8")
    grid = 'base = "sort"\nseeds = [0]\nbudget = { kind = "steps", count = 20 }\n'
    grid += '[[axes]]\nname = "depth"\nfields = ["model.decoder.depth"]\nvalues = [1, 2]\n'
    (folder / "grid.toml").write_text(grid, encoding="utf-8")
    names = {"RUN": "run", "ADAPTED": "adapted", "PUBLIC": "public"}
    files = {"TEXT": "text.txt", "GRID": "grid.toml"}
    return {key: str(folder / name) for key, name in (names | files).items()}


def is_a_file(verb: str, written: bool) -> bool:
    """Return True if a verb reads or writes a file there; all others use a folder."""
    if written:
        return verb in ("predict", "inspect")
    return verb not in ("evaluate", "predict, run", "generate", "inspect", "explore", "export", "merge", "data show")


def bad(kind: str, folder: Path, suffix: str, file: bool, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir()
    match kind:
        case "long":
            return folder / ("x" * 300 + suffix)
        case "below a file":
            (folder / "file").touch()
            return folder / "file" / f"inner{suffix}"
        case "the other kind":
            path = folder / f"other{suffix}"
            path.mkdir() if file else path.touch()
            return path
        case _:
            path = folder / f"forbidden{suffix}"
            forbid(path, monkeypatch)
            return path


def forbid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse what a user without permissions is refused: to open a file, or to make a folder."""
    path.write_text("{}", encoding="utf-8")

    def wrapped(real: Any) -> Any:
        def call(at: Any, *args: Any, **options: Any) -> Any:
            if isinstance(at, str | Path) and (Path(at) == path or path in Path(at).parents):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(at))
            return real(at, *args, **options)

        return call

    for module, name in ((io, "open"), (os, "open"), (os, "mkdir"), (os, "listdir"), (os, "scandir")):
        monkeypatch.setattr(module, name, wrapped(getattr(module, name)))
    monkeypatch.setattr("builtins.open", io.open)


def one_line(command: list[str], words: dict[str, str], wrong: Path) -> None:
    found = run(*(_filled(word, words, wrong) for word in command))
    assert found.exit_code == 2, found.output + repr(found.exception)
    assert len(found.stderr.splitlines()) == 1, found.stderr
    assert not isinstance(found.exception, OSError)


def _filled(word: str, words: dict[str, str], wrong: Path) -> str:
    for key, value in words.items():
        word = re.sub(rf"\b{key}\b", value, word)
    return (
        word.replace("BAD.toml", str(wrong))
        .replace("BAD.json", str(wrong))
        .replace("BAD.svg", str(wrong))
        .replace("BAD", str(wrong))
    )


def suffix_of(command: list[str]) -> str:
    return next((f".{word.rpartition('.')[2]}" for word in command if word.startswith("BAD.")), "")


@pytest.mark.parametrize("kind", ["long", "forbidden"])
@pytest.mark.parametrize("verb", READ)
def test_what_cannot_be_read(
    verb: str, kind: str, made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = READ[verb]
    wrong = bad(kind, tmp_path / "given", suffix_of(command), is_a_file(verb, written=False), monkeypatch)
    one_line(command, {**made, "NEW": str(tmp_path / "new")}, wrong)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["long", "below a file", "the other kind"])
@pytest.mark.parametrize("verb", WRITE)
def test_what_cannot_be_written(
    verb: str, kind: str, made: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = WRITE[verb]
    wrong = bad(kind, tmp_path / "given", suffix_of(command), is_a_file(verb, written=True), monkeypatch)
    one_line(command, made, wrong)


# -- memory -----------------------------------------------------------------------------------------------------------


def exhaust(*_: Any, **__: Any) -> None:
    torch.empty(1 << 60)


def test_out_of_memory_is_one_line_and_exit_code_1(made: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.runs.run.Run.predict", exhaust)
    found = run("predict", made["RUN"], made["TEXT"])
    assert found.exit_code == 1, found.output
    (line,) = found.stderr.splitlines()
    assert line.startswith("out of memory: ")  # then torch's words, which depend on the processor
    assert ": you tried to allocate" in line


@pytest.mark.parametrize("where", ["prepare.Transformer", "step.TrainingStep.__call__"])
def test_a_training_without_memory_does_not_block_its_folder(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(f"anyformer.training.{where}", exhaust)
        found = run("train", "sort", *SMALL, "--out", out)
    assert (found.exit_code, len(found.stderr.splitlines())) == (1, 1), found.output
    assert "out of memory" in found.stderr
    done("train", "sort", *SMALL, "batches.tokens=256", "--out", out)


def test_a_dry_run_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.training.prepare.Transformer", exhaust)
    found = run("train", "sort", *SMALL, "--dry-run")
    assert (found.exit_code, found.stderr.splitlines()[-1][:13]) == (1, "out of memory"), found.output

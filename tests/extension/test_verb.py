"""A verb from outside is in the help, reads its options, and ends like ours: of a file, or of an installed package."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from tests.extension.test_extension import anyformer

FILE = Path(__file__).with_name("my_verb.py")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_a_verb_of_a_file(tmp_path: Path) -> None:
    text = tmp_path / "말.txt"
    text.write_text("밥 먹자 밥 猫 밥 猫\n", encoding="utf-8")
    assert run("words", text, "--import", FILE) == "3 밥\n2 猫\n1 먹자\n"
    assert run("--import", FILE, "words", text, "--top", 1) == "3 밥\n"
    assert "Count the words of a text file." in run("--import", FILE, "--help")
    assert "Number of words to print." in run("--import", FILE, "words", "-h")
    assert f"{tmp_path}: is no file" in run("--import", FILE, "words", tmp_path, code=2)
    run("--import", FILE, "words", text, "--top", 0, code=2)
    other = tmp_path / "other.py"
    other.write_text(FILE.read_text().replace('"words"', '"train"'))
    assert "train: is a verb of anyformer" in anyformer("--import", other, "--help").stderr
    assert "cannot be read" in run("--import", tmp_path / "no.py", "--help", code=2)


@pytest.mark.system
def test_a_verb_of_an_installed_package(tmp_path: Path) -> None:
    (tmp_path / "lab_verbs.py").write_text(FILE.read_text())
    info = tmp_path / "lab_verbs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-verbs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[anyformer.verbs]\nlab = lab_verbs\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert "Count the words" in anyformer("--help", PYTHONPATH=path).stdout
    assert anyformer("words", FILE, "--top", "1", PYTHONPATH=path).returncode == 0

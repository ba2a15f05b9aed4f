"""Every command about data of one's own does what it says."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.recipe.ready import read_recipe
from tests.pages import FENCE, ROOT, Block, blocks, commands

PAGE = (ROOT / "docs" / "your-data.md").read_text(encoding="utf-8")
SMALL = (
    "train.steps=3",
    "train.evaluate_every=none",
    "train.save_every=none",
    "train.average=1",
    "train.schedule.warmup=1",
    "model.width=24",
)
# Other blocks that are not run need files from elsewhere.
HERE = [
    block
    for block, found in zip(blocks(PAGE), FENCE.finditer(PAGE), strict=True)
    if not found["skip"] or "test_your_data.py" in found["skip"]
]
SECTIONS = [block for block in HERE if block.language == "bash" and "hf:" not in block.body]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Two folders with the files that the page makes, for sessions of three commands and of five."""
    made = {count: tmp_path_factory.mktemp("own") for count in (3, 5)}
    for folder in made.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setenv("ANYFORMER_DATA", "")
            for block in HERE:
                if block.language == "python":
                    exec(block.body, {})
    return made


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: str(section.line))
def test_sessions(section: Block, folders: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = commands(section.body)
    assert len(lines) == (3 if lines[0].startswith("anyformer new") else 5)
    monkeypatch.chdir(folders[len(lines)])
    monkeypatch.setenv("ANYFORMER_DATA", "")
    for line in lines:
        assert len(line) <= 100 or "config show" in line
        said = act(line)
        if " predict " in line or " generate " in line:
            assert said  # after three steps, a translation may be an empty line


def act(line: str) -> str:
    """Runs a line in this process: `anyformer ... > FILE` or `echo ... | anyformer ...`."""
    line, _, file = line.partition(" > ")
    before, _, after = line.rpartition(" | ")
    words = shlex.split(after)
    assert words[0] == "anyformer"
    if words[1] == "new":
        words += ["--minutes", "0.01"]
    elif words[1] == "train" and len(words) == 3:  # a recipe of `anyformer new`
        words += ["train.minutes=none", "train.steps=3", "train.evaluate_every=none"]
    if words[1:3] == ["config", "show"]:
        words += [
            *SMALL,
            *(["batches.tokens=256"] if "tokens" in type(read_recipe(words[3]).batches).model_fields else []),
        ]
    done = CliRunner().invoke(app, words[1:], input=" ".join(shlex.split(before)[1:]) + "\n" if before else None)
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
    if file:
        Path(file.strip()).write_text(done.stdout, encoding="utf-8")
    return done.stdout

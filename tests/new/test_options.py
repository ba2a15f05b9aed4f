"""`anyformer new`: every option changes the recipe or is refused by name, whatever the task and the format."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
import typer.main
from pyarrow import parquet

from anyformer.cli import app
from anyformer.config import ConfigError
from anyformer.training.new_recipe.draft import ROLES, TASKS, RecipeRequest, draft, task_kind
from tests.test_cli import refused

Command = typer.main.get_command(app).commands["new"]  # type: ignore[attr-defined]
COLUMNS = [param.name for param in Command.params if param.metavar == "COLUMN"]
NAMES = ["one", "two", "three", "four"]  # two columns of words, then two of few values
ROWS = [(f"a dog runs {i}", f"the cat sleeps {i}", str(i % 2), str(i % 3)) for i in range(30)]


def write_table(path: Path) -> None:
    separator = {".tsv": "\t", ".csv": ","}[path.suffix]
    path.write_text("".join(separator.join(row) + "\n" for row in (NAMES, *ROWS)), encoding="utf-8")


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(dict(zip(NAMES, row, strict=True))) + "\n" for row in ROWS), encoding="utf-8")


def write_parquet(path: Path) -> None:
    parquet.write_table(pyarrow.table(dict(zip(NAMES, zip(*ROWS, strict=True), strict=True))), path)


def write_labelled(path: Path) -> None:
    path.write_text("".join(f"{row[2]} {row[0]}\n" for row in ROWS), encoding="utf-8")


def write_text(path: Path) -> None:
    path.write_text("".join(f"{row[0]}\n" for row in ROWS), encoding="utf-8")


def write_folders(path: Path) -> None:
    for i, row in enumerate(ROWS):
        (path / row[2]).mkdir(parents=True, exist_ok=True)
        (path / row[2] / f"{i}.txt").write_text(row[0], encoding="utf-8")


def write_conll(path: Path) -> None:
    path.write_text("\n".join(f"a x1 y{i % 2}\ndog x2 y0\n" for i in range(30)), encoding="utf-8")


def write_conllu(path: Path) -> None:
    words = "1\ta\tA\tDET\tDT\tn={i}\t2\tdet\t_\t_\n2\tdog\tdog\tNOUN\tNN\t_\t0\troot\t_\t_\n"
    path.write_text("\n".join(words.format(i=i % 3) for i in range(30)), encoding="utf-8")


FORMATS: dict[str, tuple[Callable[[Path], None], int]] = {
    "x.tsv": (write_table, 1),
    "x.csv": (write_table, 1),
    "x.jsonl": (write_jsonl, 1),
    "x.parquet": (write_parquet, 1),
    "labelled.txt": (write_labelled, 1),
    "plain.txt": (write_text, 1),
    "side.one": (write_text, 2),
    "folder": (write_folders, 1),
    "x.conll": (write_conll, 1),
    "x.conllu": (write_conllu, 1),
}
USUAL = {
    "text": "one",
    "pair": "two",
    "source": "one",
    "target": "two",
    "label": "three",
    "words": "one",
    "tags": "two",
}
OTHER = {"text": "two", "pair": "one", "source": "two", "target": "one", "label": "four", "words": "two", "tags": "one"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def drafted(task: str, paths: list[str], columns: dict[str, str]) -> str:
    """Return the recipe of a request, or the reasons why there is none."""
    try:
        return draft(RecipeRequest(task, paths, columns, None, False, False)).text(100)  # type: ignore[arg-type]
    except ConfigError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("task", dict.fromkeys(TASKS.values()))
def test_no_column_is_accepted_and_ignored(task: str, name: str) -> None:
    write, count = FORMATS[name]
    paths = [name, "side.two"][:count]
    for path in paths:
        write(Path(path))
    is_table = name.startswith("x.") and "conll" not in name
    usual = {role: USUAL[role] for role in ROLES[task_kind(task)]} if is_table else {}
    for option in COLUMNS:
        rest = {role: column for role, column in usual.items() if role != option}
        before = {drafted(task, paths, rest), drafted(task, paths, usual)}
        for value in (OTHER[option], "5", "nonsense"):
            found = drafted(task, paths, {**rest, option: value})
            if found.startswith("refused: "):
                assert f"--{option}" in found or before & {found}, (option, value)
            else:
                assert value != "nonsense", (option, value)
                assert found not in before, (option, value)


def test_columns_may_be_numbers() -> None:
    """As the help says: of tables with a header, too."""
    for name in ("x.tsv", "x.jsonl"):
        FORMATS[name][0](Path(name))
        by_number = drafted("classify", [name], {"text": "0", "label": "2"})
        assert by_number == drafted("classify", [name], {"text": "one", "label": "three"})
        assert "--label" in drafted("classify", [name], {"text": "0", "label": "4"})


@pytest.mark.parametrize(
    ("given", "column"),
    [("feats", 5), ("FEATS", 5), ("upos", 3), ("XPOS", 4), ("deprel", 7), ("5", 5), ("4", 4)],
)
def test_columns_of_conllu(given: str, column: int) -> None:
    write_conllu(Path("x.conllu"))
    from anyformer.recipe.ready import read_recipe

    Path("x.toml").write_text(drafted("tag", ["x.conllu"], {"tags": given}), encoding="utf-8")
    tag = read_recipe("x.toml").data.train.tag  # type: ignore[union-attr]
    assert (3 if tag is None else tag) == column


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("nonsense", "--tags = 'nonsense': no such column in x.conllu"),
        ("10", "--tags = '10': no such column in x.conllu"),
        ("form", "--tags = 'form': is also the column of the words"),
    ],
)
def test_columns_that_conllu_does_not_have(given: str, why: str) -> None:
    write_conllu(Path("x.conllu"))
    (line,) = refused("new", "tag", "--data", "x.conllu", "--tags", given)
    assert line.startswith(why)


@pytest.mark.parametrize("option", ["--label", "--out", "--minutes"])
def test_a_repeated_option_is_refused(option: str) -> None:
    write_table(Path("x.csv"))
    (line,) = refused("new", "classify", "--data", "x.csv", option, "1", "--text", "one", option, "2")
    assert line == f"{option}: is given twice: give it once"
    assert not [*Path().glob("*.toml")]


# -- folders of texts --------------------------------------------------------------------------------------------------


def write_notes(root: Path) -> int:
    """Write texts of two encodings of line ends in nested folders, and other files; return the number of characters."""
    texts = {f"{i}.txt": f"note {i} 한국어\n" * 40 for i in range(8)}
    texts |= {f"sub/{i}.md": f"deeper {i}\r\n" * 40 for i in range(3)} | {"sub/a/b/last.txt": "deepest 猫\n" * 40}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "picture.png").write_bytes(b"\x89PNG\0")
    (root / "sub" / "table.csv").write_text("a,b\n")
    (root / "sub" / "other.PNG").write_bytes(b"\x89PNG\0")
    (root / ".hidden.txt").write_text("hidden\n")
    return sum(len(text.replace("\r\n", "\n")) for text in texts.values())


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_a_folder_of_texts_is_read_as_a_whole(task: str) -> None:
    from anyformer.recipe.ready import read_recipe
    from anyformer.training.prepare import read_rows

    characters = write_notes(Path("notes"))
    made = draft(RecipeRequest(task, ["notes"], {}, None, False, False))
    told = {what: (choice, why) for what, choice, why in made.reasons}
    assert told["format"][0].startswith("12 text files in notes and folders below")
    assert told["left out"][0] == "2 .png, 1 .csv"
    Path("x.toml").write_text(made.text(100), encoding="utf-8")
    recipe = read_recipe("x.toml")
    parts = read_rows(recipe)
    found = [text for rows in parts.values() for text in rows.columns["text"]]
    read = "".join(found) if task == "lm" else "".join(f"{line}\n" for line in found)
    assert len(read) == characters
    assert "deepest 猫" in read
    assert "hidden" not in read
    assert "label" not in next(iter(parts.values())).columns


def test_a_folder_without_texts_is_refused() -> None:
    Path("empty").mkdir()
    Path("empty/a.png").write_bytes(b"")
    (line,) = refused("new", "lm", "--data", "empty")
    assert line.startswith("--data: empty has no text files (.txt, ")
    assert "left out: 1 .png" in line


def test_a_classifier_notes_the_files_that_it_leaves_out() -> None:
    write_folders(Path("folder"))
    Path("folder/README.md").write_text("about\n")
    reasons = draft(RecipeRequest("classify", ["folder"], {}, None, False, False)).reasons
    assert ("left out", "1 .md", "files outside the folders of the classes") in reasons


# -- KEY=VALUE --------------------------------------------------------------------------------------------------------

SETTINGS = [
    ["data.on_bad_row=skip"],
    ["train.optimizer.lr=0.01", "train.steps=7"],
    ["batches.tokens=128", "seed=3"],
    ["model.encoder.blocks.*.mixer.heads=2", "model.encoder.depth=3"],
    ["model.encoder.position={kind='rotary', theta=5e5}"],
    ["model.encoder={depth=1, blocks={mixer='none'}}"],
    ["train.evaluate_every=none", "train.best=loss", "data.valid=none", "data.test=none"],
    ["train.precision=fp32", "train.optimizer={kind='muon', lr=0.02}"],
    ["model.width=64", "model.width=96"],
    ["data.train.path=other.csv"],
]


@pytest.mark.parametrize("overrides", SETTINGS)
def test_a_setting_is_in_the_recipe(overrides: list[str]) -> None:
    """The written recipe is the drafted one with the settings changed as `train` would."""
    from anyformer.recipe.ready import read_recipe

    write_table(Path("x.csv"))
    columns = {"text": "one", "label": "three"}
    Path("x.toml").write_text(drafted("classify", ["x.csv"], columns), encoding="utf-8")  # type: ignore[arg-type]
    made = draft(RecipeRequest("classify", ["x.csv"], columns, None, False, False, tuple(overrides)))  # type: ignore[arg-type]
    Path("y.toml").write_text(made.text(100), encoding="utf-8")
    assert read_recipe("y.toml") == read_recipe("x.toml", overrides)
    assert [reason for reason in made.reasons if reason[0] == "given"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("data.on_bad_rows=skip",), "data.on_bad_rows: unknown key"),
        (("train.steps=5", "--minutes", "1"), "--minutes = 1: train.steps is given"),
        (("model.from=runs/x",), "model.from: is set by --from"),
        (("train.steps=many",), "train.steps"),
        (("x=1.csv",), "x: unknown key"),
    ],
)
def test_settings_that_a_recipe_cannot_have_are_refused(arguments: tuple[str, ...], why: str) -> None:
    write_table(Path("x.csv"))
    lines = refused("new", "classify", "--data", "x.csv", "--text", "one", "--label", "three", *arguments)
    assert any(line.startswith(why) for line in lines), lines
    assert not [*Path().glob("*.toml")]

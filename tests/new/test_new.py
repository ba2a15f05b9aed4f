"""`anyformer new`: a recipe for files of every format, encoding and script, which trains and predicts."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pyarrow
import pytest
from pyarrow import parquet

from anyformer.recipe import MAX_CYCLES
from anyformer.recipe.ready import read_recipe
from anyformer.training import plan
from anyformer.training.new_recipe.budget import (
    MIN_LEARNING_STEPS,
    MIN_STEPS,
    cycles_within,
    minutes_note,
    steps_within,
)
from anyformer.training.new_recipe.draft import TASKS
from tests.interop.test_encoders import bert
from tests.interop.test_sentence_transformers import sentences as save_sentences
from tests.test_cli import done, refused, run

WORDS = {
    "en": ["a", "dog", "runs", "past", "the", "café", "while", "two", "cats", "sleep", "naïve", "old", "man"],
    "ko": ["개가", "달린다", "고양이가", "잔다", "오늘", "날씨가", "좋다", "나는", "책을", "읽는다", "노래를"],
    "zh": ["今天", "天气", "很", "好", "我", "在", "看", "书", "他们", "喜欢", "唱歌", "猫", "睡", "了"],
}
ENCODINGS = {"en": ("utf-8", "latin-1"), "ko": ("utf-8", "cp949"), "zh": ("utf-8", "gb18030")}
LABELS = {"en": ("good", "bad"), "ko": ("좋음", "나쁨"), "zh": ("好评", "差评")}
Row = tuple[str, str, str]  # two texts and a label


def rows(language: str, count: int = 60) -> list[Row]:
    chance = random.Random(0)
    joint = "" if language == "zh" else " "
    texts = [joint.join(chance.choices(WORDS[language], k=chance.randint(4, 9))) for _ in range(2 * count)]
    return [(texts[2 * i], texts[2 * i + 1], LABELS[language][i % 2]) for i in range(count)]


def write_tsv(path: Path, made: list[Row], encoding: str) -> None:
    lines = ["opinion\tother note\tverdict", *("\t".join(row) for row in made)]
    path.write_text("\n".join(lines) + "\n", encoding=encoding)


def write_csv(path: Path, made: list[Row], encoding: str) -> None:
    with path.open("w", encoding=encoding, newline="") as file:
        csv.writer(file).writerows([("text", "label"), *((f'{text}, "quoted"', label) for text, _, label in made)])


def write_jsonl(path: Path, made: list[Row], encoding: str) -> None:
    records = ({"id": i, "meta": {"text": text}, "label": label} for i, (text, _, label) in enumerate(made))
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records), encoding=encoding)


def write_parquet(path: Path, made: list[Row], _: str) -> None:
    texts, _, labels = zip(*made, strict=True)
    parquet.write_table(pyarrow.table({"text": texts, "label": labels}), path)


def write_lines(path: Path, made: list[Row], encoding: str) -> None:
    path.write_text("".join(f"__label__{label} {text}\n" for text, _, label in made), encoding=encoding)


def write_folders(path: Path, made: list[Row], encoding: str) -> None:
    for i, (text, _, label) in enumerate(made):
        (path / label).mkdir(parents=True, exist_ok=True)
        (path / label / f"{i}.txt").write_text(text, encoding=encoding)


FORMATS: dict[str, Callable[[Path, list[Row], str], None]] = {
    "reviews.tsv": write_tsv,
    "reviews.csv": write_csv,
    "reviews.jsonl": write_jsonl,
    "reviews.parquet": write_parquet,
    "reviews.txt": write_lines,
    "reviews": write_folders,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder; dry runs take few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANYFORMER_DATA", "elsewhere")  # paths begin where the user is
    monkeypatch.setattr(plan, "MIN_TIMED_SECONDS", 0.0)
    monkeypatch.setattr(plan, "MIN_TIMED_STEPS", 1)
    return tmp_path


def train(recipe: str, text: str = "a dog 개 书") -> str:
    """Train two steps by a recipe, and return the prediction for a line: the three commands of a newcomer."""
    result = run(
        "train", recipe, "train.minutes=none", "train.steps=2", "train.evaluate_every=none", "train.snapshots=0"
    )
    assert result.exit_code == 0, result.output
    Path("new.txt").write_text(f"{text}\n", encoding="utf-8")
    result = run("predict", f"runs/{Path(recipe).stem}", "new.txt")
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def new(*arguments: str | Path) -> str:
    result = run("new", *arguments)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


CASES = [
    (name, language, encoding)
    for name in FORMATS
    for language in WORDS
    for encoding in ENCODINGS[language]
    # Parquet is always UTF-8; other formats share the code that decodes
    if encoding == "utf-8" or name in ("reviews.tsv", "reviews.txt", "reviews")
    if language == "ko" or name in ("reviews.tsv", "reviews.txt")
]


@pytest.mark.parametrize(("name", "language", "encoding"), CASES)
def test_formats_and_encodings(name: str, language: str, encoding: str) -> None:
    FORMATS[name](Path(name), rows(language), encoding)
    columns = ("--text", "opinion", "--label", "verdict") if name.endswith("tsv") else ()
    shown = new("classify", "--data", name, *columns)
    assert "anyformer train reviews.toml" in shown
    recipe = read_recipe("reviews.toml")
    source = recipe.data.train
    assert getattr(source, "encoding", encoding) == encoding
    assert len(Path("reviews.toml").read_text(encoding="utf-8").splitlines()) <= 45
    assert train("reviews.toml").strip().removeprefix("__label__") in LABELS[language]


def write_conll(path: Path, made: list[Row], encoding: str) -> None:
    tagged = (
        "".join(f"{word} {'B-x' if i % 3 else 'O'}\n" for i, word in enumerate(text.split())) for text, _, _ in made
    )
    path.write_text("\n".join(tagged), encoding=encoding)


def test_two_files() -> None:
    made = rows("ko", 300)
    for side, name in enumerate(("talk.one", "talk.two")):
        Path(name).write_text("".join(f"{row[side]}\n" for row in made), encoding="cp949")
    shown = new("translate", "--data", "talk.one", "talk.two", "--minutes", "0.01")
    assert "two files" in shown
    data = read_recipe("talk.toml").data
    assert {source.group for source in (data.train, data.valid, data.test)} == {"source"}
    train("talk.toml")


def test_other_tasks() -> None:
    made = rows("en", 40)
    write_conll(Path("news.conll"), made, "latin-1")
    assert "CRF" in (new("tag", "--data", "news.conll") and Path("news.toml").read_text(encoding="utf-8"))
    train("news.toml")
    Path("book.txt").write_text("\n".join(text for text, _, _ in rows("zh", 200)), encoding="gb18030")
    new("lm", "--data", "book.txt")
    new("mlm", "--data", "book.txt", "--out", "masked.toml")
    train("book.toml")
    train("masked.toml", "我 <mask> 书")
    lines = ["a\tb\thow alike", *(f"{one}\t{other}\t{i % 5}.5" for i, (one, other, _) in enumerate(made))]
    Path("alike.tsv").write_text("\n".join(lines), encoding="utf-8")
    new("regress", "--data", "alike.tsv", "--text", "a", "--pair", "b", "--label", "how alike")
    train("alike.toml", "a dog\ttwo cats")
    new("regress", "--data", "alike.tsv", "--text", "a", "--out", "one.toml")
    train("one.toml", "a dog")
    new("embed", "--data", "alike.tsv", "--out", "vectors.toml")
    train("vectors.toml", "a dog")


def test_splits_by_name_and_joined_files() -> None:
    for name in ("my.train.tsv", "my.dev.tsv", "my-test.tsv"):
        write_tsv(Path(name), rows("en"), "utf-8")
    columns = ("--text", "opinion", "--label", "verdict")
    new("classify", "--data", "my.train.tsv", "my.dev.tsv", "--data", "my-test.tsv", *columns)
    data = read_recipe("my.toml").data
    assert [data.train.path, data.valid.path, data.test.path] == ["my.train.tsv", "my.dev.tsv", "my-test.tsv"]
    for name in ("one.tsv", "two.tsv"):
        write_tsv(Path(name), rows("en"), "utf-8")
    new("classify", "one.tsv", "two.tsv", *columns)
    assert [part.path for part in read_recipe("one.toml").data.train.parts] == ["one.tsv", "two.tsv"]


def test_equal_texts_are_in_one_part() -> None:
    from anyformer.training.prepare import read_rows

    write_tsv(Path("reviews.tsv"), rows("ko", 150) * 3, "utf-8")
    new("classify", "--data", "reviews.tsv", "--text", "opinion", "--label", "verdict")
    parts = [{*split.columns["text"]} for split in read_rows(read_recipe("reviews.toml")).values()]
    assert len(parts) == 3
    assert all(parts)
    assert sum(map(len, parts)) == len(parts[0] | parts[1] | parts[2])


@pytest.mark.parametrize(("name", "write"), [("films.csv", write_csv), ("films.txt", write_lines)])
def test_few_labels_do_not_stop_the_split(name: str, write: Callable[[Path, list[Row], str], None]) -> None:
    write(Path(name), rows("ko"), "utf-8")  # 60 texts, two labels
    new("classify", "--data", name)
    assert read_recipe("films.toml").data.valid is not None


def test_three_rows() -> None:
    Path("few.csv").write_text("text,label\none,a\ntwo,b\nthree,a\n")
    assert "too few" in new("classify", "--data", "few.csv")
    assert read_recipe("few.toml").data.valid is None
    assert train("few.toml").strip() in ("a", "b")


def test_a_few_bad_rows_are_skipped() -> None:
    lines = ["text\tlabel", *(f"text {i}\t{i % 2}" for i in range(100)), "a\ttab\ttoo many"]
    Path("mine.tsv").write_text("\n".join(lines))
    assert "1 skipped" in new("classify", "--data", "mine.tsv")
    assert read_recipe("mine.toml").data.on_bad_row == "skip"
    assert train("mine.toml").strip() in ("0", "1")


def test_a_long_row_is_cut_or_skipped_as_the_user_says() -> None:
    """One long row of many is no dead end: a classifier reads its beginning, and other tasks can skip it."""
    lines = [*(f"word{i % 7} other\t{i % 2}" for i in range(60)), "word3 " * 3000 + "\t1"]
    Path("x.tsv").write_text("\n".join(["text\tlabel", *lines]), encoding="utf-8")
    found = run("new", "classify", "--data", "x.tsv")
    assert found.exit_code == 0, found.output
    assert "rows are read, which exceed task.max_length" in found.stderr
    told = refused("new", "regress", "--data", "x.tsv", "--text", "text", "--label", "label", "--out", "y.toml")
    assert 'set data.on_bad_row = "skip"' in told[-2]
    new("regress", "x.tsv", "data.on_bad_row=skip", "--text", "text", "--label", "label", "--out", "y.toml")
    assert read_recipe("y.toml").data.on_bad_row == "skip"
    train("y.toml")


def test_a_label_that_training_does_not_have() -> None:
    """A label of few rows may be in the validation rows only."""
    made = [(f"text {i} of many", f"label{i % 5}" if i % 3 else f"rare{i}") for i in range(60)]
    Path("rare.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in made))
    new("classify", "--data", "rare.csv", "--label", "label")
    train("rare.toml")


# -- fine-tuning ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "small"
    save_sentences(folder, bert("Model"), "cls", unit=True)
    return folder


@pytest.mark.parametrize("lora", [(), ("--lora",)])
def test_fine_tuning(public: Path, lora: tuple[str, ...]) -> None:
    Path("mine.csv").write_text("text,label\n" + "".join(f"{'ab' * (i % 3 + 1)} z,{'xy'[i % 2]}\n" for i in range(50)))
    shown = new("classify", "--data", "mine.csv", "--from", public, *lora)
    assert "runs/small" in shown
    text = Path("mine.toml").read_text(encoding="utf-8")
    assert 'from = "runs/small"' in text
    assert "position" not in text  # the body is not copied
    recipe = read_recipe("mine.toml")
    assert (recipe.model.adapter is not None) == bool(lora)
    assert (recipe.train.init_from, recipe.tokenizer.kind, recipe.model.head.pool) == ("runs/small", "run", "first")
    assert train("mine.toml", "ab z").strip() in ("x", "y")
    assert "imported before" in new("classify", "--data", "mine.csv", "--from", public, "--force")
    new("classify", "--data", "mine.csv", "--from", "runs/mine", "--out", "more.toml")


# -- wrong input ------------------------------------------------------------------------------------------------------


def test_ambiguous_columns_are_named() -> None:
    write_tsv(Path("reviews.tsv"), rows("en"), "utf-8")
    (line,) = refused("new", "classify", "--data", "reviews.tsv", "--label", "verdict")
    assert line.startswith("--text: several columns of reviews.tsv could be the text: 'opinion' (")
    assert "'other note' (" in line
    assert line.endswith("write --text COLUMN")
    (line,) = refused("new", "classify", "--data", "reviews.tsv", "--label", "verdic")
    assert "did you mean 'verdict'?" in line


@pytest.mark.parametrize(
    ("files", "arguments", "words"),
    [
        ({"x.csv": "text,label\na,1\nb,1\nc,1\nd,1\n"}, ("classify",), "--label: all rows have the label '1'"),
        ({"x.csv": ""}, ("classify",), "x.csv: is empty"),
        ({"x.csv": "text,label\n"}, ("classify",), "x.csv: has a header and no rows"),
        ({"x.txt": "one\ntwo\n"}, ("translate",), "x.txt: is plain text: the task needs `source` and `target`"),
        ({"x.en": "a\nb\n", "x.de": "a\n"}, ("translate",), "parallel files must have the same number of lines"),
        ({"x.json": '[{"text": 1}]'}, ("lm",), "x.json: is one JSON list"),
        ({"x.conll": "word\nword\n"}, ("tag",), "x.conll: is not CoNLL"),
        ({"x.csv": "text,label\na,1\nb,2\n"}, ("clasify",), "TASK = 'clasify': unknown; did you mean 'classify'?"),
        ({"x.csv": "text,label\na,1\nb,2\n"}, ("classify", "--source", "text"), "--source: the task classify reads"),
        (
            {"x.csv": "text,label\na,1\nb,2\n"},
            ("classify", "--from", "nowhere"),
            "--from = 'nowhere': is neither a run",
        ),
        ({"x.csv": "text,label\na,1\nb,2\n"}, ("classify", "--lora"), "--lora: needs a pretrained model"),
        ({"x.csv": "text,label\na,1\nb,2\n"}, ("classify", "--out", "x.json"), "--out = 'x.json': a recipe ends in"),
        ({"x.csv": "text,score\na,bad\nb,good\n"}, ("regress",), "--label: x.csv has no column of numbers"),
        ({}, ("classify", "--data", "x.csv"), "no file"),
        ({}, ("classify",), "--data: is missing"),
    ],
)
def test_refused(files: dict[str, str], arguments: tuple[str, ...], words: str, folder: Path) -> None:
    for name, text in files.items():
        Path(name).write_text(text)
    lines = refused("new", *arguments, *(word for name in files for word in ("--data", name)))
    assert any(words in line for line in lines), lines
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)


def test_an_existing_recipe_is_kept() -> None:
    Path("few.csv").write_text("text,label\none,a\ntwo,b\nthree,a\n")
    Path("few.toml").write_text("# mine\n")
    (line,) = refused("new", "classify", "--data", "few.csv")
    assert line == "few.toml: exists already: choose another --out, or add --force to overwrite it"
    assert Path("few.toml").read_text() == "# mine\n"
    (line,) = refused("new", "classify", "--data", "fewx.csv", "--out", "few.toml")  # the input is checked first
    assert line == "--data = 'fewx.csv': no file of this name; did you mean 'few.csv'?"
    new("classify", "--data", "few.csv", "--force")
    assert read_recipe("few.toml").task.kind == "classify"


def test_files_of_two_encodings_are_refused_with_a_command() -> None:
    Path("a b.fr").write_text("un été\n" * 30, encoding="latin-1")
    Path("a.en").write_text("a summer’s day\n" * 30, encoding="utf-8")
    (line,) = refused("new", "translate", "--data", "a b.fr", "a.en")
    command = line.split("`")[1]
    assert command == "iconv -f latin1 -t utf-8 'a b.fr' > 'utf8-a b.fr'"
    assert line == f"--data: a b.fr is latin-1 and a.en utf-8: convert to UTF-8 with `{command}`"


def test_help_names_every_task() -> None:
    shown = " ".join(done("new", "--help").split())
    assert all(name in shown for name in {*TASKS.values()} - {"seq2seq"})


def test_steps_suffice_to_learn_unless_minutes_are_given() -> None:
    """Without `--minutes` a slow model gets the steps it needs, or all epochs if these are fewer."""
    measured = Mock(seconds=10.0, epochs=1.0)
    measured.recipe.train.steps = 1000
    scratch, tuned = Mock(epochs=40, first=None), Mock(epochs=4, first=("run", None))
    assert steps_within(measured, None, scratch)[0] == MIN_LEARNING_STEPS[False]
    assert steps_within(measured, None, tuned)[0] == MIN_LEARNING_STEPS[True]
    assert steps_within(measured, 20.0, scratch) == (120, "about 120 updates here")
    assert steps_within(measured, 0.01, scratch) == (1, "about 1 updates here")
    measured.seconds = 0.001
    assert steps_within(measured, None, scratch) == (40_000, "40 epochs")
    measured.epochs = 1000.0
    assert steps_within(measured, None, scratch) == (MIN_STEPS, "no fewer make sense")


@pytest.mark.parametrize("ratio", [0.01, 0.5, 1, 6.9, 7.1, 20, 200, 1e5])
def test_cycles_for_time_that_suffices_for_many_epochs(ratio: float) -> None:
    """The first of several takes about the epochs of the task, at most twice as many."""
    measured, facts = Mock(epochs=100.0), Mock(epochs=20)
    measured.recipe.train.steps = 100_000
    cycles = cycles_within(measured, round(20_000 * ratio), facts)
    assert (cycles > 1) == (ratio >= 7)
    if cycles > 1:
        assert ratio / 2 <= 2**cycles - 1 <= ratio or cycles == MAX_CYCLES


def test_too_few_minutes_are_noted() -> None:
    measured = Mock(seconds=1.0, epochs=1.0)
    measured.recipe.train.steps = 1000
    scratch, tuned = Mock(epochs=40, first=None), Mock(epochs=4, first=("run", None))
    assert minutes_note(measured, 10.0, 600, scratch) == (
        "600 steps are too few to learn well; expect poor results; 1,500 need about 25 min: --minutes sets the time"
    )
    assert minutes_note(measured, None, 600, scratch) is minutes_note(measured, 10.0, 600, tuned) is None
    measured.epochs = 70.0
    assert minutes_note(measured, 60.0, 570, scratch) is None  # all 40 epochs


def test_columns_that_are_not_read_are_named() -> None:
    write_tsv(Path("reviews.tsv"), rows("en"), "utf-8")
    assert "ignored    'other note'" in new("classify", "--data", "reviews.tsv", "--text", "opinion")
    columns = ("--source", "opinion", "--target", "other note")
    assert "ignored    'verdict'" in new("translate", "--data", "reviews.tsv", *columns, "--force")
    write_csv(Path("two.csv"), rows("en"), "utf-8")
    assert "ignored" not in new("classify", "--data", "two.csv")

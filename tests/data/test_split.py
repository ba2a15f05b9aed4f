"""`start`, `stop`, `split` and `group`: parts of a file are a partition, and no group is in two of them."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError, io
from anyformer.data.readers import common_inputs
from anyformer.recipe import ClassFolders, Classify, ConllFile, MatchedLines, ParallelFiles, Recipe, Source, TableFile
from tests.data.source_files import faults, rows, write
from tests.training.small import labelled, make, parities, quiet, said

pytestmark = pytest.mark.usefixtures("empty_folder")

CUTS = st.lists(st.floats(0.001, 0.999), max_size=4).map(lambda cuts: sorted({0.0, *cuts, 1.0}))
GROUPS = st.lists(st.sampled_from(["", "a", "나", " b", "wide value, 3"]), min_size=1, max_size=40)


def parts(source: Source, cuts: list[float]) -> list[list[int]]:
    """The lines of each part between two cuts; none of an empty part."""
    found = []
    for start, stop in itertools.pairwise(cuts):
        try:
            found.append(list(rows(source.model_copy(update={"start": start, "stop": stop})).lines))
        except ConfigError:  # no rows
            found.append([])
    return found


def sources(groups: list[str]) -> dict[str, Source]:
    numbered = [f"text {n}" for n in range(len(groups))]
    lines = "".join(f"{text}\t{group}\n" for text, group in zip(numbered, groups, strict=True))
    write("table.tsv", f"text\tuser\n{lines}")
    write("lines.txt", lines)
    write("a", "".join(f"{text}\n" for text in numbered))
    write("b", "".join(f"[{group}]\n" for group in groups))
    write("words.conll", "".join(f"{text} O\n\n" for text in numbered))
    Path("folder/x").mkdir(parents=True, exist_ok=True)
    for old in Path("folder/x").iterdir():
        old.unlink()
    for n, text in enumerate(numbered):
        write(f"folder/x/{n:02}", text)
    return {
        "table": TableFile(path="table.tsv", text="text"),
        "lines": MatchedLines(path="lines.txt", pattern=r"(?P<text>.*)\t(?P<user>.*)"),
        "parallel": ParallelFiles(source="a", target="b"),
        "conll": ConllFile(path="words.conll"),
        "folders": ClassFolders(path="folder"),
    }


@given(groups=GROUPS, cuts=CUTS)
@pytest.mark.parametrize("kind", ["table", "lines", "parallel", "conll", "folders"])
def test_parts_are_a_partition(kind: str, groups: list[str], cuts: list[float]) -> None:
    source = sources(groups)[kind]
    every = list(rows(source).lines)
    spread = parts(source, cuts)
    assert sum(map(len, spread)) == len(every)
    if kind != "folders":  # where each row is in a file of its own
        assert sorted(itertools.chain(*spread)) == every
        contiguous = parts(source.model_copy(update={"split": "rows"}), cuts)
        assert list(itertools.chain(*contiguous)) == every


@given(groups=GROUPS, cuts=CUTS)
@pytest.mark.parametrize(("kind", "column"), [("table", "user"), ("lines", "user"), ("parallel", "target")])
def test_a_group_is_in_one_part(kind: str, column: str, groups: list[str], cuts: list[float]) -> None:
    source = sources(groups)[kind]
    every = list(rows(source).lines)
    found = parts(source.model_copy(update={"group": column}), cuts)
    assert sorted(itertools.chain(*found)) == every
    first = every[0]
    homes = {groups[line - first]: {n for n, part in enumerate(found) if line in part} for line in every}
    for line in every:
        assert homes[groups[line - first]] == {n for n, part in enumerate(found) if line in part}
    assert all(len(part) == 1 for part in homes.values())


def test_groups_fill_their_share() -> None:
    """The fraction of values, and a value is in the same part of any file that has it."""
    write("table.tsv", "text\tuser\n" + "".join(f"text {n}\t{n % 2000}\n" for n in range(4000)))
    part = TableFile(path="table.tsv", text="text", group="user", stop=0.9)
    found = rows(part).columns["text"]
    assert 0.88 < len(found) / 4000 < 0.92
    write("table.tsv", "user\ttext\n" + "".join(f"{n}\ttext {n}\n" for n in reversed(range(2000))))
    assert {*rows(part).columns["text"]} == {text for text in found if int(text[5:]) < 2000}


def test_unreadable_rows_are_in_one_part() -> None:
    write("table.tsv", "text\tuser\na\tx\nb\nc\ty\n")
    source = TableFile(path="table.tsv", text="text", group="user")
    bad = []
    for start, stop in ((0.0, 0.5), (0.5, 1.0)):
        try:
            bad += rows(source.model_copy(update={"start": start, "stop": stop}), skip=True).bad
        except ConfigError:
            continue
    assert [row.line for row in bad] == [3]


def test_wrong_groups_are_told() -> None:
    write("table.tsv", "text\tuser\na\tx\n")
    source = TableFile(path="table.tsv", text="text", group="usr")
    assert faults(source) == [
        "data.train.group = 'usr': no such column in table.tsv, separated by tabs; did you mean 'user'?"
    ]
    alone = source.model_copy(update={"group": "user", "start": 0.3, "stop": 0.300001})
    assert faults(alone) == [
        "data.train.group = 'user': has 1 value, and none is in the part from 0.3 to 0.300001: "
        "use a larger part, or other columns"
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("data.train.split=random", "data.train.split = 'random': must be 'spread' or 'rows'"),
        (
            "data.train={kind='table', path='a.tsv', text='t', label='l', group='u', split='rows'}",
            "data.train.group = 'u'",
        ),
        (
            "data.train={kind='lines', path='a', pattern='(?P<label>.) (?P<text>.*)', group='u'}",
            "data.train.group = 'u'",
        ),
        ("data.train={kind='folders', path='a', group='u'}", "data.train.group: unknown key for kind 'folders'"),
    ],
)
def test_wrong_settings_are_faults_of_the_recipe(change: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        io.override(labelled(tmp_path, Classify(), parities()), [change])
    assert [str(fault).startswith(why) for fault in error.value.faults] == [True]


# -- rows on both sides -----------------------------------------------------------------------------------------------


def test_inputs_that_occur_in_training_are_told(tmp_path: Path) -> None:
    recipe = labelled(tmp_path, Classify(), [(f"{n // 2} {n % 2 * 'x'}", "ab"[n % 2]) for n in range(40)], steps=2)

    def lines(*changes: str) -> str:
        console = quiet()
        make(io.override(recipe, changes), tmp_path / "run", console=console)
        return said(console)

    assert "valid: the inputs of 40 of 40 rows occur in training, too" in lines()
    assert "occur in training" not in lines("data.train.stop=0.9", "data.valid.start=0.9")
    assert "occur in training" not in lines(
        *(f"data.{s}.group=text" for s in ("train", "valid")), "data.train.stop=0.5", "data.valid.start=0.5"
    )


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from("01")), min_size=1, max_size=9))
def test_common_inputs_are_counted(drawn: list[tuple[str, str, str]]) -> None:
    write("one.tsv", "text\tpair\tlabel\n" + "".join("\t".join(row) + "\n" for row in drawn))
    write("two.tsv", "text\tpair\tlabel\na\tx\t0\nb\ty\t0\n")
    one, two = (rows(TableFile(path=f"{name}.tsv", text="text", pair="pair", label="label")) for name in ("one", "two"))
    expected = sum(row[:2] in {("a", "x"), ("b", "y")} for row in drawn)
    assert common_inputs(one, two, ("text", "pair", "label")) == expected


def test_recipes_keep_their_meaning(tmp_path: Path) -> None:
    """Without the new keys, as files written before have none, rows are spread."""
    recipe = labelled(tmp_path, Classify(), parities())
    text = "\n".join(line for line in io.dumps(recipe).splitlines() if not line.startswith(("split", "group")))
    assert "split" not in text
    assert io.loads(Recipe, text) == recipe

"""Parts of a file: rows are shared out evenly and for good. And where a tokenizer's file is looked for."""

import gzip
import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from anyformer.config import ConfigError, io
from anyformer.data.lines import read_lines
from anyformer.data.readers import Rows, read
from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import (
    Bytes,
    Data,
    MatchedLines,
    ParallelFiles,
    Recipe,
    Seq2Seq,
    TableFile,
    TextFile,
    TokenizerFile,
)
from anyformer.recipe.ready import read_recipe
from tests.training.small import make, pairs


@pytest.fixture(autouse=True)
def _nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ANYFORMER_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


Kind = type[TableFile] | type[ParallelFiles] | type[MatchedLines]
KINDS: dict[Kind, dict[str, Any]] = {
    TableFile: {"path": "rows.tsv", "source": "0", "target": "0", "header": False},
    ParallelFiles: {"source": "rows.tsv", "target": "rows.tsv"},
    MatchedLines: {"path": "rows.tsv", "pattern": "(?P<source>(?P<target>.*))"},
}


def part(kind: Kind, count: int, start: float, stop: float, skip: bool = False) -> Rows:
    lines = [f"row {n}" if not skip or n % 3 else " " for n in range(count)]
    Path("rows.tsv").write_text("\n".join(lines), encoding="utf-8")
    source = kind(**KINDS[kind], start=start, stop=stop)
    return read(source, Data(train=source, on_bad_row="skip" if skip else "error"), "train", 0)


@pytest.mark.parametrize("kind", KINDS)
@given(count=st.integers(50, 300), cuts=st.lists(st.floats(0.2, 0.8), max_size=2))
def test_parts_cover_the_rows_and_do_not_overlap(kind: Kind, count: int, cuts: list[float]) -> None:
    edges = [0.0, *sorted(set(cuts)), 1.0]
    found: list[int] = []
    for start, stop in itertools.pairwise(edges):
        if (stop - start) * count < 5:
            return
        mine = list(part(kind, count, start, stop).lines)
        assert mine == sorted(mine)
        found += mine
    assert sorted(found) == list(range(1, count + 1))


@given(
    start=st.floats(0, 0.8),
    share=st.floats(0.05, 0.2),
    stretch=st.tuples(st.integers(0, 1500), st.integers(200, 500)),
    step=st.integers(1, 6),
)
def test_every_stretch_of_a_file_gives_its_share(
    start: float, share: float, stretch: tuple[int, int], step: int
) -> None:
    """However the file is sorted, and whatever comes again every so many rows."""
    begin, length = stretch[0], stretch[1] * step
    mine = {line - 1 for line in part(TableFile, 6000, start, start + share).lines}
    taken = len(mine & {*range(begin, begin + length, step)})
    assert abs(taken - share * length / step) < 8


def test_a_row_stays_in_its_part_when_others_are_added_or_mended() -> None:
    before, after = (set(part(TableFile, count, 0.9, 1.0).lines) for count in (500, 800))
    assert {line for line in after if line <= 500} == before
    skipped = part(ParallelFiles, 500, 0.9, 1.0, skip=True)
    assert {*skipped.lines, *(bad.line for bad in skipped.bad)} == before
    assert 0 < len(skipped.bad) < len(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_must_begin_before_it_ends(kind: Kind) -> None:
    source = kind(**KINDS[kind], start=0.95, stop=0.9)
    with pytest.raises(ConfigError, match=r"^data\.train\.start = 0\.95: must be before stop = 0\.9$"):
        pairs().model_copy(update={"data": Data(train=source)})


# -- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "pattern", "told"),
    [
        ("scan", "(?P<text>.*)", "needs the named groups (?P<source>...) and (?P<target>...)"),
        ("scan", "(?P<source>.*)", "needs the named groups (?P<target>...)"),
        ("scan", "(?P<source>.*", "is not a regular expression (missing ), unterminated subpattern at position 0)"),
        ("shakespeare", "(?P<source>.*) (?P<target>.*)", "needs the named groups (?P<text>...)"),
    ],
)
def test_a_pattern_must_have_the_groups_of_the_task(recipe: str, pattern: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        io.override(read_recipe(recipe), [f"data.valid={{kind='lines', path='x', pattern='{pattern}'}}"])
    assert str(caught.value) == f"data.valid.pattern = {pattern!r}: {told}"


# -- one way to a file ------------------------------------------------------------------------------------------------


def with_tokenizer(path: str, **data: Any) -> Recipe:
    recipe = pairs(valid=None)
    changed = recipe.data.model_copy(update=data)
    return recipe.model_copy(update={"tokenizer": TokenizerFile(path=path), "data": changed, "task": Seq2Seq()})


def test_a_tokenizer_is_found_where_data_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tokenizer(Bytes(), []).save(tmp_path / "root" / "made" / "tokenizer.json")
    for path in ("made", "made/tokenizer.json"):
        assert make(with_tokenizer(path, root="root"), tmp_path / path.replace("/", "-")).task.tokenizer.size == 262
    monkeypatch.setenv("ANYFORMER_DATA", str(tmp_path / "root"))
    assert make(with_tokenizer("made"), tmp_path / "by-environment").task.tokenizer.size == 262


def test_a_tokenizer_that_is_not_there_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make(with_tokenizer("none.json", root="root"), tmp_path / "run")
    told = f"tokenizer.path = 'none.json': no file {tmp_path}/root/none.json; set data.root to the folder where"
    assert str(caught.value).startswith(told)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^tokenizer\.path = 'bad\.json': .*bad\.json: is no tokenizer\.json"):
        make(with_tokenizer("bad.json"), tmp_path / "other")


WHOLE = gzip.compress(b"one\ntwo\n" * 100, mtime=0)


@pytest.mark.parametrize(
    "raw", [b"no archive", WHOLE[:-9], WHOLE[:20] + b"\xff\xff" + WHOLE[22:]], ids=["none", "cut", "harmed"]
)
def test_a_broken_archive_is_told_alike_by_both_readers(raw: bytes) -> None:
    Path("a.txt.gz").write_bytes(raw)
    source, told = TextFile(path="a.txt.gz"), []
    for reading in (
        lambda: read(source, Data(train=source), "train", 0),
        lambda: list(read_lines([Path("a.txt.gz")], "utf-8", Console(quiet=True))),
    ):
        with pytest.raises(ConfigError) as caught:
            reading()
        told.append(caught.value.faults[0].message.removeprefix("= 'a.txt.gz': a.txt.gz "))
    assert told[0] == told[1]
    assert told[0].startswith("is not a whole gzip file (")

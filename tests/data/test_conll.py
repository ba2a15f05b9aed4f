"""Sentences of words with tags: from CoNLL, CoNLL-U, and lists in tables."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.conll import sentences
from anyformer.data.files import File
from anyformer.data.readers import Rows, read
from anyformer.recipe import ConllFile, Data, Source, TableFile

Sentence = list[tuple[str, str]]


def rows(source: Source, folder: Path, skip: bool = False) -> Rows:
    data = Data(train=source, root=str(folder), on_bad_row="skip" if skip else "error")
    return read(source, data, "train", 0)


def found(got: Rows) -> list[Sentence]:
    every = zip(got.columns["words"], got.columns["tags"], strict=True)
    return [list(zip(words.split("\n"), tags.split("\n"), strict=True)) for words, tags in every]


def parsed(text: str, **fields: Any) -> list[Sentence | tuple[int, str]]:
    """Sentences, or the line and the reason of those that are bad."""
    source = ConllFile(**{"path": "x.conll", **fields})
    out: list[Sentence | tuple[int, str]] = []
    for line, row in sentences(source, File("x", "utf-8", text)):
        good = (
            None if isinstance(row, str) else list(zip(row["words"].split("\n"), row["tags"].split("\n"), strict=True))
        )
        out.append(good if good is not None else (line, str(row)))
    return out


# -- what is written is read ------------------------------------------------------------------------------------------

marks = st.sampled_from(
    ["#", "# a", "#b", "-DOCSTART-", "1-2", "1.1", "\u00a0x", "나는", "学校", "👩‍🚀", "a b", "'", '"', "\u200b"]
)
words = marks | st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=6).filter(str.strip)
tags = st.sampled_from(["O", "B-x", "I-x", "NOUN", "_", "#"])
corpora = st.lists(st.lists(st.tuples(words, tags), min_size=1, max_size=5), min_size=1, max_size=4)


def no_docstart(corpus: list[Sentence]) -> bool:
    return all(word != "-DOCSTART-" for sentence in corpus for word, _ in sentence)


@given(corpora.filter(no_docstart), st.sampled_from(["\n", "\r\n"]), st.booleans(), st.sampled_from(["", "\t", " "]))
def test_two_columns_come_back(corpus: list[Sentence], end: str, last: bool, blank: str) -> None:
    text = f"{end}{blank}{end}".join(end.join("\t".join(pair) for pair in sentence) for sentence in corpus)
    assert parsed(text + end * last) == corpus


@given(corpora, st.sampled_from(["\n", "\r\n"]))
def test_conllu_comes_back(corpus: list[Sentence], end: str) -> None:
    """Whatever words look like; comments, words of several and words that are not written are passed over."""
    lines: list[str] = []
    for sentence in corpus:
        lines += ["# text = a\tb", "#", "1-2\tzum\t_\t_\t_\t_\t_\t_\t_\t_"]
        for i, (word, tag) in enumerate(sentence, 1):
            lines += ["\t".join((str(i), word, "_", tag, *"______")), f"{i}.1\tnull\t_\tX\t_\t_\t_\t_\t_\t_"]
        lines.append("")
    text = end.join(lines)
    assert parsed(text, path="x.conllu") == corpus
    assert parsed(text, path="x.txt", format="conllu", tag=-7) == corpus
    assert parsed(text, path="x.CONLLU.gz", word=3, tag=1) == [[(b, a) for a, b in sentence] for sentence in corpus]


spaceless = words.filter(lambda word: " " not in word)


@given(
    st.lists(st.lists(st.tuples(spaceless, tags), min_size=1, max_size=4), min_size=1, max_size=3).filter(no_docstart)
)
def test_columns_apart_by_spaces(corpus: list[Sentence]) -> None:
    """Of any number; a # is a word like any other, and a space that does not break is part of a word."""
    text = "-DOCSTART- -X- O O\n\n" + "\n\n".join(
        "\n".join(f"{word}  NN B-NP {tag} " for word, tag in sentence) for sentence in corpus
    )
    assert parsed(text) == corpus
    assert parsed(text, tag=2) == [[(word, "B-NP") for word, _ in sentence] for sentence in corpus]


def test_comments_of_plain_files() -> None:
    """Between columns that are apart by tabs, what has no tab is no word."""
    assert parsed("# id 1\n#\tO\n# x\tO\n#ff\tO\n") == [[("#", "O"), ("# x", "O"), ("#ff", "O")]]
    assert parsed("# id\n# O\n") == [[("#", "id"), ("#", "O")]]
    assert parsed("a\tO\n#ff\n") == [(2, "has 1 column apart by tabs: a word, and no tag")]
    assert parsed("a b\tO\n", separator="spaces") == [[("a", "O")]]
    assert parsed("a b O\n", separator="tab") == [(1, "has 1 column apart by tabs: a word, and no tag")]


def test_documents_end_sentences() -> None:
    assert parsed("a O\n-DOCSTART- O\nb O\n") == [[("a", "O")], [("b", "O")]]
    assert parsed("-DOCSTART-\na\tO\n-DOCSTART-S\tO") == [[("a", "O"), ("-DOCSTART-S", "O")]]


# -- bad rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fields", "why"),
    [
        ("a\tO\n\nb\tO\nc\n\nd\tO", {}, "4: has 1 column apart by tabs: a word, and no tag"),
        ("a O\n\nb O\nc\n\nd O", {}, "4: has 1 column: a word, and no tag"),
        ("a\tO\n\nb\t \n\nd\tO", {}, "3: the tag is empty"),
        ("a\tO\n\n\tO\n\nd\tO", {}, "3: the word is empty"),
        ("a x O\n\nb x O\nc O\n\nd x O", {"tag": 2}, "4: has 2 columns, and the tag is in column 2 (from 0)"),
        ("a O\n\nb O\nc O\n\nd O", {"word": -3}, "1: has 2 columns, and the word is in column -3 (from 0)"),
        ("a\tO\n\nb\tO\nc\0\tO\n\nd\tO", {}, "4: holds a NUL character"),
        (
            "1\ta\t_\tX\n\n1\tb\n",
            {"format": "conllu"},
            "3: has 2 columns apart by tabs, and the tag is in column 3 (from 0)",
        ),
    ],
)
def test_bad_lines(tmp_path: Path, content: str, fields: dict[str, Any], why: str) -> None:
    (tmp_path / "x.conll").write_text(content, encoding="utf-8")
    source = ConllFile(path="x.conll", **fields)
    with pytest.raises(ConfigError) as caught:
        rows(source, tmp_path)
    assert f"{tmp_path / 'x.conll'}:{why}" in str(caught.value)
    if "word" not in fields:
        kept = rows(source, tmp_path, skip=True)
        assert len(kept.bad) == 1
        assert kept.lines[0] == 1


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.conll").write_bytes(b"a\tO\n\nb\tO\nc\xff\tO\n")
    got = rows(ConllFile(path="x.conll"), tmp_path, skip=True)
    assert [str(bad) for bad in got.bad] == [f"{tmp_path / 'x.conll'}:4: byte 0xff is not utf-8; set `encoding`"]


def test_a_part_of_the_sentences(tmp_path: Path) -> None:
    corpus = [[(f"w{i}", "O"), ("x", "B-y")] for i in range(100)]
    text = "\n\n".join("\n".join("\t".join(pair) for pair in sentence) for sentence in corpus)
    (tmp_path / "x.conll").write_text(text, encoding="utf-8")
    parts = [found(rows(ConllFile(path="x.conll", **part), tmp_path)) for part in ({"stop": 0.8}, {"start": 0.8})]
    assert sorted(map(str, parts[0] + parts[1])) == sorted(map(str, corpus))
    assert 15 < len(parts[1]) < 25


# -- tables -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(words, tags), min_size=1, max_size=5), min_size=1, max_size=3))
def test_lists_in_json(tmp_path_factory: pytest.TempPathFactory, corpus: list[Sentence]) -> None:
    folder = tmp_path_factory.mktemp("json")
    lines = ({"tokens": [word for word, _ in one], "meta": {"ner": [tag for _, tag in one]}} for one in corpus)
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert found(rows(TableFile(path="x.jsonl", words="tokens", tags="meta.ner"), folder)) == corpus


def test_cells_with_spaces(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("w\tt\nthe  cat \tDET NOUN\n", encoding="utf-8")
    (tmp_path / "x.jsonl").write_text('{"w": "the cat", "t": "DET NOUN"}', encoding="utf-8")
    for name in ("x.tsv", "x.jsonl"):
        got = rows(TableFile(path=name, words="w", tags="t"), tmp_path)
        assert found(got) == [[("the", "DET"), ("cat", "NOUN")]]


def test_lists_that_are_none(tmp_path: Path) -> None:
    lines = [
        '{"w": ["a"], "t": ["O"]}',
        '{"w": [], "t": ["O"]}',
        '{"w": ["a", 1.5, null], "t": "O"}',
        '{"w": {}, "t": 1}',
    ]
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")
    got = rows(TableFile(path="x.jsonl", words="w", tags="t"), tmp_path, skip=True)
    assert [bad.line for bad in got.bad] == [2, 3, 4]
    assert got.bad[0].why == "the words are empty"
    assert "must be a list of strings" in got.bad[1].why

"""Read sentences with one word per line and its tags in columns: CoNLL and CoNLL-U. Imports no torch.

A sentence is one row: its words as one text with a word per line, and its tags alike. If a line is bad, the sentence
is a bad row with the number of that line.
"""

import re
from collections.abc import Iterator

from anyformer.data.files import File, Parsed, open_files
from anyformer.data.readers import Rows, collect, part_of
from anyformer.recipe import ConllFile, Root

Numbered = list[tuple[int, str]]
NO_WORD = re.compile(r"[0-9]+[-.][0-9]+")  # a word that is several (1-2), or that is not written (1.1)


def conll_rows(source: ConllFile, data: Root) -> Rows:
    """Return the sentences of a file; the words as a text, too."""
    file = open_files(source, data, "path")["path"]
    rows = collect(part_of(source, sentences(source, file)), {"words": file, "tags": file})
    rows.columns["text"] = [words.replace("\n", " ") for words in rows.columns["words"]]
    return rows


def sentences(source: ConllFile, file: File) -> Parsed:
    """Yield the line where a sentence begins, and its words and tags, or the fault of one of its lines."""
    conllu, lines = is_conllu(source), file.lines()
    tabs = conllu or (
        source.separator == "tab" if source.separator else any("\t" in line.strip(" \t") for line in lines)
    )
    word = (1 if conllu else 0) if source.word is None else source.word
    tag = (3 if conllu else -1) if source.tag is None else source.tag
    for sentence in _sentences(lines, source.comment, conllu, tabs):
        found = list[tuple[str, str]]()
        for number, line in sentence:
            row = file.flaw(line) or _word(line, tabs, word, tag)
            if isinstance(row, str):
                yield number, row
                break
            found.append(row)
        else:
            words, tags = zip(*found, strict=True)
            yield sentence[0][0], {"words": "\n".join(words), "tags": "\n".join(tags)}


def is_conllu(source: ConllFile) -> bool:
    name = source.path.lower().removesuffix(".gz")
    return name.endswith(".conllu") if source.format is None else source.format == "conllu"


def _sentences(lines: list[str], comment: str | None, conllu: bool, tabs: bool) -> Iterator[Numbered]:
    """The lines of words between those that are none."""
    sentence: Numbered = []
    for number, line in enumerate(lines, 1):
        if comment is not None and line.startswith(comment):
            continue
        if not line.strip(" \t") or (not conllu and re.match(r"-DOCSTART-([ \t]|$)", line)):
            if sentence:
                yield sentence
            sentence = []
        elif not _passed_over(line, conllu, tabs):
            sentence.append((number, line))
    if sentence:
        yield sentence


def _passed_over(line: str, conllu: bool, tabs: bool) -> bool:
    if conllu:  # where a line of a word begins with its number
        return line.startswith("#") or NO_WORD.fullmatch(line.partition("\t")[0]) is not None
    return tabs and line.startswith("# ") and "\t" not in line


def _word(line: str, tabs: bool, word: int, tag: int) -> tuple[str, str] | str:
    """A word and its tag, or why there is none."""
    cells = line.split("\t") if tabs else re.split("[ \t]+", line.strip(" \t"))
    found = []
    for name, column in (("word", word), ("tag", tag)):
        if not -len(cells) <= column < len(cells):
            return f"has {_columns(len(cells))}{' apart by tabs' * tabs}, and the {name} is in column {column} (from 0)"
        found.append(cells[column])
        if not (cells[column] if name == "word" else cells[column].strip()):  # a word may be a space
            return f"the {name} is empty"
    if word != tag and word % len(cells) == tag % len(cells):
        return f"has {_columns(len(cells))}{' apart by tabs' * tabs}: a word, and no tag"
    return found[0], found[1]


def _columns(count: int) -> str:
    return f"{count} column{'s' * (count > 1)}"

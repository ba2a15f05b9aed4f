"""Rows of plain text: documents, parallel lines, lines that a pattern matches, class folders. Imports no torch."""

import re
from collections.abc import Iterable
from pathlib import Path

from anyformer.config.spec import ConfigError, Fault, did_you_mean, faults_under, visible
from anyformer.data.files import (
    TEXT_SUFFIXES,
    File,
    Parsed,
    files_below,
    is_text_file,
    locate,
    open_below,
    open_files,
)
from anyformer.data.media_rows import refer
from anyformer.data.readers import Rows, collect, concatenate, labelled, part_of, selected
from anyformer.recipe import ClassFolders, MatchedLines, ParallelFiles, Root, TextFile

ROLES = ("source", "target", "rejected", "text", "pair", "label", "words", "tags")  # of groups in a pattern


def text_rows(source: TextFile, data: Root) -> Rows:
    """Return the documents of some files; `start` and `stop` are fractions of the characters of all of them."""
    files = _open_texts(source, data)
    texts = [file.text.replace("\r\n", "\n") for file in files]
    total, begin, rows = sum(map(len, texts)), 0, list[Rows]()
    start, stop = int(total * source.start), int(total * source.stop)
    for file, text in zip(files, texts, strict=True):
        found = _documents(source, file, text, max(0, start - begin), max(0, stop - begin))
        rows.append(collect(found, {"text": file}))
        begin += len(text)
    return labelled(rows[0] if len(rows) == 1 else concatenate(rows, visible(source.path)), source.label)


def parallel_rows(source: ParallelFiles, data: Root) -> Rows:
    """Return pairs of lines."""
    files = open_files(source, data, "source", "target")
    return collect(selected(source, _pairs(files), source.group), files)


def matched_rows(source: MatchedLines, data: Root, by: str | None) -> Rows:
    """Return the groups of the pattern in each line."""
    pattern = re.compile(source.pattern)
    file = open_files(source, data, "path")["path"]
    roles = [role for role in ROLES if role in pattern.groupindex]
    if by is not None and by not in pattern.groupindex:
        what = f"the pattern has no group of this name; {did_you_mean(by, pattern.groupindex)}"
        raise ConfigError([Fault("by", f"= {by!r}: {what}")])
    matched = selected(source, _matches(pattern, file, by), source.group)
    return labelled(collect(matched, dict.fromkeys([*roles, *(["by"] if by else [])], file)), source.label)


def _open_texts(source: TextFile, data: Root) -> list[File]:
    """The file that a source names, or the text files in a folder and those below it, in the order of their names."""
    with faults_under("path"):
        path = locate(source.path, data)
    if not path.is_dir():
        return [open_files(source, data, "path")["path"]]
    if not (paths := list(filter(is_text_file, files_below(path)))):
        what = f"= {source.path!r}: {visible(str(path))} has no text files ({', '.join(TEXT_SUFFIXES)})"
        raise ConfigError([Fault("path", what)])
    return [open_below(source.path, path, source.encoding) for path in paths]


def _documents(source: TextFile, file: File, text: str, start: int, stop: int) -> Parsed:
    """Yield the documents of a file from a character to another; a line belongs to the part with its first one."""
    if source.document == "line":
        at = 0
        for number, line in enumerate(text.split("\n"), 1):
            if start <= at < stop and line.strip():
                yield number, {"text": line}
            at += len(line) + 1
        return
    part, first = text[start:stop], 1 + text.count("\n", 0, start)
    readable = []
    for number, line in enumerate(part.split("\n"), first):
        if why := file.flaw(line):
            yield number, why
        else:
            readable.append(line)
    if any(map(str.strip, readable)):
        yield first, {"text": "\n".join(readable)}


def _pairs(files: dict[str, File]) -> Parsed:
    """Yield the lines of two files with the same number of lines, as source and target."""
    sources, targets = files["source"].lines(), files["target"].lines()
    if len(sources) != len(targets):
        counts = f"{files['source'].name} has {len(sources)} lines, {files['target'].name} has {len(targets)}"
        raise ConfigError([Fault("", f"{counts}: parallel files must have the same number of lines")])
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        yield number, {"source": source, "target": target}


def _matches(pattern: re.Pattern[str], file: File, by: str | None) -> Parsed:
    """Yield the groups of a pattern in each line, and the group `by` as such."""
    for number, line in enumerate(file.lines(), 1):
        if not line:
            continue
        if why := file.flaw(line):
            yield number, why
        elif match := pattern.fullmatch(line):
            row = {role: value or "" for role, value in match.groupdict().items()}
            yield number, row if by is None else {**row, "by": row[by]}
        else:
            yield number, f"does not match the pattern: {line[:40]!r}"


# -- folders, one for each class: texts, or references to images and sounds --------------------------------------------


def folder_rows(source: ClassFolders, data: Root) -> Rows:
    """Return a row for each file, in the order of names; whitespace around a text is removed."""
    paths, shown = part_of(source, _files(source, data)), visible(source.path)
    if source.media is not None:
        folder = File(shown, "utf-8", "")
        return collect(_references(source, paths), {"text": folder, "label": folder})
    rows = [_text(path, source) for path in paths]
    return concatenate(rows, shown) if rows else Rows({"text": [], "label": []}, shown, [])


def _text(path: Path, source: ClassFolders) -> Rows:
    file = open_below(source.path, path, source.encoding)
    text = file.text.replace("\r\n", "\n")
    flaws = ((number, why) for number, line in enumerate(text.split("\n"), 1) if (why := file.flaw(line)))
    row: tuple[int, dict[str, str] | str] = next(flaws, (1, {"text": text.strip(), "label": path.parent.name}))
    return collect(iter([row]), {"text": file, "label": file})


def _references(source: ClassFolders, members: Iterable[Path]) -> Parsed:
    """Yield a row for each file of all classes."""
    assert source.media is not None
    for number, path in enumerate(members, 1):
        try:
            if source.media == "audio" and "+" in str(path):
                raise ValueError(f"{str(path)!r}: the name of a sound must not have a +, which joins sounds")
            yield number, {"text": refer(source.media, str(path)), "label": path.parent.name}
        except ValueError as error:
            yield number, str(error)


def _files(source: ClassFolders, data: Root) -> list[Path]:
    """Return the files of all classes in the order of their names, without hidden ones."""

    def error(what: str) -> ConfigError:
        return ConfigError([Fault("path", f"= {source.path!r}: {what}")])

    try:
        root = locate(source.path, data)
        if not root.is_dir():
            raise error(f"{visible(str(root))} is not a folder")
        classes = [folder for folder in _visible(root) if folder.is_dir()]
        if not classes:
            raise error(f"no folder in {visible(str(root))}: each class is a folder, and each file in it a text")
        members = []
        for folder in classes:
            inside = _visible(folder)
            if not inside:
                raise error(f"no file in {visible(str(folder))}: each file in a class folder is a text")
            if deeper := [path for path in inside if path.is_dir()]:
                raise error(f"{visible(str(deeper[0]))} is a folder inside a class folder, which may hold files only")
            members += inside
    except OSError as failure:
        raise error(f"cannot be read ({failure.strerror})") from None
    return members


def _visible(folder: Path) -> list[Path]:
    """Return the entries of a folder that are not hidden, by name."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))

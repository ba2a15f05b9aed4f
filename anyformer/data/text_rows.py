"""Rows of plain text: documents, parallel lines, and lines that a pattern matches. Imports no torch."""

import re

from anyformer.config.spec import ConfigError, Fault
from anyformer.data.files import File, Parsed
from anyformer.recipe import TextFile


def documents(source: TextFile, file: File, text: str, start: int, stop: int) -> Parsed:
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


def parallel_rows(files: dict[str, File]) -> Parsed:
    """Yield the lines of two files with the same number of lines, as source and target."""
    sources, targets = files["source"].lines(), files["target"].lines()
    if len(sources) != len(targets):
        counts = f"{files['source'].name} has {len(sources)} lines, {files['target'].name} has {len(targets)}"
        raise ConfigError([Fault("", f"{counts}: parallel files must have the same number of lines")])
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
        yield number, {"source": source, "target": target}


def matched_rows(pattern: re.Pattern[str], file: File, by: str | None) -> Parsed:
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

"""Small SentencePiece folders of every tokenizer class, with the ids of the slow classes of `transformers` 4.x.

`slow_ids.tar.xz` holds them: `models/`, `cases.json` and `versions.json`. Make it again with

    python tests/interop/slow_ids.py

Rows of a case are stored without the tokens around a text, and as differences to the rows of the case `like`.
"""

import json
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

ARCHIVE = Path(__file__).with_name("slow_ids.tar.xz")


class Case(NamedTuple):
    """A folder and the expected ids of each line."""

    model_type: str
    files: dict[str, str]  # name in the folder: name of a model
    settings: dict[str, dict[str, Any]]  # JSON files
    before: list[int]
    after: list[int]
    rows: list[list[int]]
    target: list[list[int]]  # rows of texts that are targets, where another model reads them


def load() -> tuple[dict[str, Case], dict[str, bytes], dict[str, str]]:
    """Return cases, models and versions."""
    with tarfile.open(ARCHIVE) as archive:
        data = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    cases: dict[str, Case] = {}
    for name, stored in json.loads(data["cases.json"]).items():
        if like := stored.pop("like"):
            stored["rows"] = shifted(stored["rows"], cases[like].rows, 1)
        cases[name] = Case(**stored)
    models = {key.removeprefix("models/"): value for key, value in data.items() if key.startswith("models/")}
    return cases, models, json.loads(data["versions.json"])


def shifted(rows: list[list[int]], like: list[list[int]], sign: int) -> list[list[int]]:
    """Add or subtract rows of the same length."""
    return [
        [a + sign * b for a, b in zip(row, base, strict=True)] if len(row) == len(base) else row
        for row, base in zip(rows, like, strict=True)
    ]


def lay_out(case: Case, models: dict[str, bytes], folder: Path) -> Path:
    """Write the files of a case into a folder."""
    for name, model in case.files.items():
        (folder / name).write_bytes(models[model])
    for name, table in case.settings.items():
        (folder / name).write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")
    return folder

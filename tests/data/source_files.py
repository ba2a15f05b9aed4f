"""Write files of rows, and read them back or their errors."""

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from anyformer.config import ConfigError
from anyformer.data.readers import Rows, read
from anyformer.recipe import Data, Source

QA = {"source": "Q", "target": "A"}


def rows(source: Source, skip: bool = False, **more: Any) -> Rows:
    data = Data(train=source, on_bad_row="skip" if skip else "error", **more)
    return read(source, data, "train", 0)


def faults(source: Source, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        rows(source, **more)
    return str(error.value).splitlines()


def write(name: str, content: str | bytes, encoding: str = "utf-8") -> str:
    raw = content if isinstance(content, bytes) else content.encode(encoding)
    Path(name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return name


def pairs(found: Rows) -> list[tuple[str, str]]:
    return list(zip(found.columns["source"], found.columns["target"], strict=True))


ANY = st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff")
TABLE = st.lists(st.tuples(*[st.text(ANY, min_size=1).filter(str.strip)] * 2), min_size=1)


def write_parquet(name: str, fields: list[dict[str, Any]]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(fields), name)
    return name

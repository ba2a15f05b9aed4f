"""Reading Parquet, by the optional package pyarrow. Imports no torch."""

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from anyformer.config.spec import LARGEST, ConfigError, Fault
from anyformer.data.files import unusual, usual_bytes

DAMAGED = (OSError, ValueError, KeyError, MemoryError, OverflowError)  # beside its own, what pyarrow raises


class Reader:
    """An open file."""

    def __init__(self, path: Path):
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            what = "is read by the package pyarrow: pip install 'anyformer[parquet]'"
            raise ConfigError([Fault("", f"{path} {what}")]) from None
        self.path, self._damaged = path, (pyarrow.ArrowException, *DAMAGED)
        try:
            self._file = parquet.ParquetFile(path)
            self.names: list[str] = self._file.schema_arrow.names  # of a damaged file, they may be no text
        except self._damaged as error:
            raise ConfigError([Fault("", f"{path} is no Parquet file ({_first_line(error)})")]) from None
        self.count: int = self._file.metadata.num_rows

    def rows(self, columns: list[str], into_memory: bool = False) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """Yield rows by number from 1, some columns of them, read a thousand at a time.

        Those that are too large to be held in memory are refused.
        """
        number, size = 0, 0
        limit = usual_bytes(self.path.stat().st_size) if into_memory else LARGEST
        try:
            for batch in self._file.iter_batches(batch_size=1000, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    size += _size(row)
                    if size > limit:
                        what = f"unpacks to more than {limit / 2**20:,.0f} MiB: {unusual('save it as .jsonl')}"
                        raise ConfigError([Fault("", f"{self.path} {what}")])
                    yield number, {name: _plain(value) for name, value in row.items()}
        except ConfigError:
            raise
        except self._damaged as error:
            what = f"cannot be read after row {number} ({_first_line(error)})"
            raise ConfigError([Fault("", f"{self.path} {what}")]) from None


def _size(value: Any) -> int:
    """Return about how many bytes a value has in memory; batches of Arrow may hold equal ones once."""
    match value:
        case str() | bytes():
            return len(value)
        case dict():
            return sum(map(_size, value.values()))
        case list():
            return sum(map(_size, value))
        case _:
            return 8


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _plain(value: Any) -> Any:
    """As JSON has it here: numbers as they would be written."""
    match value:
        case bool():
            return value
        case int() | float() | Decimal():
            return str(value)
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case _:
            return value

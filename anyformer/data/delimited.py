"""Records of CSV with any delimiter, and delimiters in messages. Imports no torch."""

import csv
import json
from collections.abc import Iterator

DELIMITERS = {"\t": "tabs", ";": "semicolons", "|": "vertical bars", ",": "commas"}


def read_csv(text: str, delimiter: str = ",") -> list[tuple[int, list[str] | str]]:
    """Records, or the reason why there is none, with the line where each begins.

    After a bad record the reading continues at its second line: a quote that is never closed does not swallow the rest.
    """
    limit = csv.field_size_limit(max(len(text), csv.field_size_limit()))
    try:
        return list(_Csv(text, delimiter))
    finally:
        csv.field_size_limit(limit)


class _Csv:
    """The records of a CSV in linear time.

    At the start of a line the reader is either between records or within quotes. From a line that starts within quotes
    the result is the same wherever the quotes began. So every line inside a bad record is remembered with the error,
    and no other record is read through it.
    """

    def __init__(self, text: str, delimiter: str):
        self.delimiter = delimiter
        self.lines = [f"{line}\n" for line in text.split("\n")]
        self.first = self.next = 0  # the line where a record begins, and the line to be read next
        self.bad: dict[int, str] = {}  # lines that lead to an error if they begin within quotes

    def __iter__(self) -> Iterator[tuple[int, list[str] | str]]:
        while self.first < len(self.lines):
            self.next = self.first
            reader = csv.reader(self._feed(), strict=True, delimiter=self.delimiter)
            try:
                for cells in reader:
                    if cells:
                        yield self.first + 1, cells
                    self.first = self.next
            except csv.Error as error:
                why = str(error)
                if why.startswith("unexpected end"):  # of the file, or of the lines that were fed
                    why = self.bad.get(self.next, why)
                self.bad |= dict.fromkeys(range(self.first + 1, self.next), why)
                yield self.first + 1, _csv_reason(why)
                self.first += 1

    def _feed(self) -> Iterator[str]:
        """The lines for a reader; it ends early, which is an error within quotes, where the error is known."""
        while self.next < len(self.lines) and not (self.next > self.first and self.next in self.bad):
            self.next += 1
            yield self.lines[self.next - 1]


def _csv_reason(message: str) -> str:
    if message.startswith("unexpected end"):
        return "a quote is opened and never closed"
    if message.startswith("new-line character"):
        return "a carriage return is outside of quotes"
    return f"not valid CSV: {message}"


def separated(delimiter: str) -> str:
    """Return the separator of columns in words."""
    return f"separated by {DELIMITERS.get(delimiter, repr(delimiter))}"


def other_delimiter(cells: list[str], form: str) -> str:
    """Return what to set if the only cell of the first row has other delimiters; empty if it has none."""
    for delimiter in DELIMITERS:
        if len(cells) == 1 and (count := cells[0].count(delimiter)):
            found = f"; its first row has {count} {DELIMITERS[delimiter]}: set "
            return found + ("" if form == "csv" else 'format = "csv" and ') + f"delimiter = {json.dumps(delimiter)}"
    return ""

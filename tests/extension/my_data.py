"""Data sources and a tokenizer as a user writes them."""

import re
from random import Random
from typing import Literal

from anyformer.config import Size
from anyformer.recipe import RowFile, Segmented, SingleSource


class Counting(SingleSource):
    """Three numbers in order, and the next one: 3 4 5 -> 6."""

    kind: Literal["counting"] = "counting"
    count: Size  # number of rows
    gives = (("source", "target"),)

    def read(self, data, split, seed, by):
        from anyformer.data.readers import Rows

        rng = Random(f"{split} {seed if split == 'train' else 0}")
        firsts = [rng.randrange(90) for _ in range(self.count)]
        sources = [f"{n} {n + 1} {n + 2}" for n in firsts]
        return Rows.made(f"counting ({split})", {"source": sources, "target": [f"{n + 3}" for n in firsts]})


class Cards(RowFile):
    """One card in each line: front :: back."""

    kind: Literal["cards"] = "cards"
    path: str  # the file
    encoding: str = "utf-8"  # a Python codec
    start: float = 0.0  # beginning of the selected part
    stop: float = 1.0  # its end
    split: Literal["spread", "rows"] = "spread"
    gives = (("source", "target"),)

    def read(self, data, split, seed, by):
        from anyformer.data.files import open_files
        from anyformer.data.readers import collect, part_of

        file = open_files(self, data, "path")["path"]
        return collect(part_of(self, self.cards(file)), {"source": file, "target": file})

    def cards(self, file):
        for number, line in enumerate(file.lines(), 1):
            front, marks, back = line.partition(" :: ")
            yield number, {"source": front, "target": back} if marks else "has no ::"


class Syllables(Segmented):
    """Tokens are spaces, Hangul syllables, numbers, and other runs of letters."""

    kind: Literal["syllables"] = "syllables"

    def segment(self, text):
        return re.findall(r"\s|[가-힣]|\d+|[^\s가-힣\d]+", text)

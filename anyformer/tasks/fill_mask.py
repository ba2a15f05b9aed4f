"""Texts with special tokens written in them by name, such as masks and sentinels, that a model is to put words for."""

import re
from collections.abc import Iterable, Sequence

from torch import Tensor

from anyformer.data.tokenizer import TextTokenizer


def split_at(tokenizer: TextTokenizer, text: str, special: Iterable[int]) -> list[str]:
    """A text apart at the names of some special ids: what is between them, name, what is between them, ..."""
    return re.split("(" + "|".join(re.escape(tokenizer.token(id)) for id in special) + ")", text)


def encode_with(tokenizer: TextTokenizer, text: str, special: Iterable[int]) -> list[int]:
    """The ids of a text in which the names of some special ids stand for these.

    Where words bring the space before them along, so does what stands in the place of a word; and where a tokenizer
    puts a space before a text, what stands behind a special id has one already.
    """
    names = {tokenizer.token(id): id for id in special}
    parts = split_at(tokenizer, text, names.values())
    out: list[int] = []
    for i, part in enumerate(parts):
        if i % 2:
            out.append(names[part])
            continue
        if tokenizer.spaced and i + 1 < len(parts):
            part = part.removesuffix(" ")
        if tokenizer.lead and i:
            part = part.removeprefix(" ")
        out += tokenizer.encode(part)
    return out


def filled(row: Sequence[int], mask: int, logits: Tensor) -> list[int]:
    """The ids of a row with the likeliest one in the place of each mask; logits [n, v], maybe of pads behind it."""
    best = logits.argmax(dim=-1).tolist()
    return [best[i] if id == mask else id for i, id in enumerate(row)]

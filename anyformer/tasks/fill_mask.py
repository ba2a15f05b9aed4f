"""Texts that contain special tokens by name, such as masks and sentinels, which a model fills."""

import re
from collections.abc import Iterable, Sequence

from torch import Tensor

from anyformer.data.tokenizer import TextTokenizer


def split_at(tokenizer: TextTokenizer, text: str, special: Iterable[int]) -> list[str]:
    """Split a text at the names of special ids: text, name, text, name, ..., text."""
    return re.split("(" + "|".join(re.escape(tokenizer.token(id)) for id in special) + ")", text)


def encode_with(tokenizer: TextTokenizer, text: str, special: Iterable[int]) -> list[int]:
    """Encode a text in which the names of special ids are replaced by these.

    If the tokenizer's words include the space before them, a special id replaces that space, too. If it adds a space
    before a text, the space after a special id is dropped first.
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
        out += tokenizer.encode_batch([part])[0]  # which reads references, too
    return out


def filled(row: Sequence[int], mask: int, logits: Tensor) -> list[int]:
    """Return a row with the top-1 id at each mask; logits [n, v] may include padding after the row."""
    best = logits.argmax(dim=-1).tolist()
    return [best[i] if id == mask else id for i, id in enumerate(row)]

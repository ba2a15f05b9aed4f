"""Parts shared by several families. Imports no torch."""

from typing import Literal, TypeVar

from anyformer.config import (
    LM,
    MAX_HEADS,
    Attention,
    Embedder,
    Gelu,
    Head,
    InvSqrtWidth,
    Projected,
    Special,
    Tanh,
    Transform,
)

T = TypeVar("T")

GELU_TANH = Gelu(approximate="tanh")
NEXT_TOKEN = LM()
NEXT_TOKEN_SCALED = LM(scale=InvSqrtWidth())  # of T5 and PaLM, whose tied embeddings are N(0, 1)
POOLER = Embedder(pool="first", transform=Transform(activation=Tanh()))


def biased(heads: int, kv_heads: int | None, key_width: int | None, dropout: float) -> Attention:
    """Attention with a bias on all four projections."""
    out = Projected(bias=True)
    return Attention(heads=heads, kv_heads=kv_heads, key_width=key_width, bias=True, output=out, dropout=dropout)


def tied(head: Head) -> Literal["output", "none"]:
    """Tied, where the head has a vocabulary."""
    return "output" if head.predicts_tokens else "none"


def given(value: T | None, rule: T) -> T:
    return rule if value is None else value


def groups(heads: int, kv_heads: int | None, ratio: int) -> int:
    """Key/value heads: given, or the most that divide `heads` and keep at least the family's ratio."""
    most = min(max(heads // ratio, 1), MAX_HEADS)
    return given(kv_heads, next(n for n in range(most, 0, -1) if heads % n == 0))


def special_ids(vocab: int, **ids: int) -> Special:
    """Return the special token ids of a family, without those that are not below `vocab`."""
    return Special.model_validate({name: id for name, id in ids.items() if id < vocab})

"""Parts that presets share: their arguments, and parts of several families. Imports no torch."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_type_hints

from anyformer.config import (
    LM,
    MAX_HEADS,
    Attention,
    Block,
    Embedder,
    Gelu,
    Head,
    InvSqrtWidth,
    ModelConfig,
    Projected,
    Special,
    Stack,
    Tanh,
    Tokens,
    Transform,
)

T = TypeVar("T")

GELU_TANH = Gelu(approximate="tanh")
NEXT_TOKEN = LM()
NEXT_TOKEN_SCALED = LM(scale=InvSqrtWidth())  # of T5 and PaLM, whose tied embeddings are N(0, 1)
POOLER = Embedder(pool="first", transform=Transform(activation=Tanh()))


class Preset(Protocol):
    """A family as a function. A preset has the arguments that its signature names; each has a default."""

    __name__: str

    def __call__(
        self,
        *,
        depth: int = ...,
        width: int = ...,
        heads: int = ...,
        kv_heads: int | None = ...,
        key_width: int | None = ...,
        ff: int | None = ...,
        experts: int = ...,
        top_k: int = ...,
        vocab: int = ...,
        mels: int = ...,
        length: int = ...,
        image: int = ...,
        patch: int = ...,
        channels: int = ...,
        dropout: float = ...,
        head: Head = ...,
    ) -> ModelConfig: ...


@dataclass(frozen=True)
class Arguments:
    """The arguments of a preset, in the order of its signature, and the parts that they determine."""

    depth: int
    width: int
    heads: int
    kv_heads: int | None
    key_width: int | None
    ff: int | None
    experts: int
    top_k: int
    vocab: int
    mels: int
    length: int
    image: int
    patch: int
    channels: int
    dropout: float
    head: Head

    def attention(self, **parts: Any) -> Attention:
        """Attention of these heads."""
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "key_width": self.key_width, "dropout": self.dropout}
        return Attention(**(sizes | parts))

    def grouped(self, ratio: int, **parts: Any) -> Attention:
        """Attention with key/value heads as given, or the most that divide the heads and keep at least this ratio."""
        most = min(max(self.heads // ratio, 1), MAX_HEADS)
        shared = next(n for n in range(most, 0, -1) if self.heads % n == 0)
        return self.attention(kv_heads=given(self.kv_heads, shared), **parts)

    def biased(self, **parts: Any) -> Attention:
        """Attention of these heads with a bias on all four projections."""
        return self.attention(bias=True, output=Projected(bias=True), **parts)

    def block(self, mixer: Any, feedforward: Any, **parts: Any) -> Block:
        return Block(mixer=mixer, feedforward=feedforward, dropout=self.dropout, **parts)

    def stack(self, *blocks: Block, **parts: Any) -> Stack:
        return Stack(depth=self.depth, blocks=blocks, **parts)

    def tokens(self, **parts: Any) -> Tokens:
        return Tokens(vocab=self.vocab, dropout=self.dropout, **parts)

    def decoder(self, stack: Stack, *, tokens: Tokens | None = None, tie: bool = True, **parts: Any) -> ModelConfig:
        """A decoder, whose output is tied if `tie` says so and the head has a vocabulary."""
        tying = tied(self.head) if tie else "none"
        return ModelConfig(
            width=self.width, target=tokens or self.tokens(), decoder=stack, head=self.head, tie=tying, **parts
        )

    def encoder(self, stack: Stack, tokens: Tokens, **parts: Any) -> ModelConfig:
        """An encoder of texts, tied if the head has a vocabulary."""
        return ModelConfig(width=self.width, source=tokens, encoder=stack, head=self.head, tie=tied(self.head), **parts)

    def ids(self, **ids: int) -> Special:
        """Return the special token ids of a family, without those that are not below `vocab`."""
        return special_ids(self.vocab, **ids)


OPTIONAL = ("kv_heads", "key_width", "ff")  # arguments of every preset whose default may be the family's rule


def preset(
    *, dropout: float = 0.0, head: Head = NEXT_TOKEN, fixed: tuple[str, ...] = (), **numbers: int
) -> Callable[[Callable[[Arguments], ModelConfig]], Preset]:
    """Make a preset of a function from sizes to a config; `numbers` are the defaults of its further arguments.

    `fixed`: optional arguments that it does not have.
    """
    defaults: dict[str, Any] = dict.fromkeys(name for name in OPTIONAL if name not in fixed)
    defaults |= numbers | {"dropout": dropout, "head": head}
    hints = {name: hint for name, hint in get_type_hints(Arguments).items() if name in defaults}
    hints |= dict.fromkeys(numbers, int)
    keyword = inspect.Parameter.KEYWORD_ONLY
    arguments = [inspect.Parameter(name, keyword, default=defaults[name], annotation=hints[name]) for name in hints]
    signature = inspect.Signature(arguments, return_annotation=ModelConfig)
    absent: dict[str, Any] = dict.fromkeys(get_type_hints(Arguments).keys() - defaults.keys(), 0) | dict.fromkeys(fixed)

    def decorate(build: Callable[[Arguments], ModelConfig]) -> Preset:
        def made(**given: Any) -> ModelConfig:
            try:
                signature.bind(**given)
            except TypeError as error:
                raise TypeError(f"{build.__name__}() {error}") from None
            return build(Arguments(**absent, **(defaults | given)))

        made.__name__, made.__qualname__, made.__module__ = build.__name__, build.__qualname__, build.__module__
        made.__doc__, made.__annotations__ = build.__doc__, hints | {"return": ModelConfig}
        made.__signature__ = signature  # type: ignore[attr-defined]
        return made

    return decorate


def biased(heads: int, kv_heads: int | None, key_width: int | None, dropout: float) -> Attention:
    """Attention with a bias on all four projections."""
    out = Projected(bias=True)
    return Attention(heads=heads, kv_heads=kv_heads, key_width=key_width, bias=True, output=out, dropout=dropout)


def tied(head: Head) -> Literal["output", "none"]:
    """Tied, where the head has a vocabulary."""
    return "output" if head.predicts_tokens else "none"


def given(value: T | None, rule: T) -> T:
    return rule if value is None else value


def special_ids(vocab: int, **ids: int) -> Special:
    """Return the special token ids of a family, without those that are not below `vocab`."""
    return Special.model_validate({name: id for name, id in ids.items() if id < vocab})

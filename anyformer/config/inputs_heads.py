"""Where a model begins and ends: inputs, heads, initialisation, special ids. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal

from anyformer.config.feedforward import Activation, Gelu, Tanh
from anyformer.config.mixer import InvSqrtWidth, SqrtWidth, Times, Unscaled
from anyformer.config.norm import LayerNorm, NoNorm, Norm, TokenNorm
from anyformer.config.spec import BY_KIND, ConfigError, Count, Fault, Flag, Positive, Probability, Size, Spec, by_kind

InputScale = Annotated[Unscaled | Times | SqrtWidth, *BY_KIND]
LogitScale = Annotated[Unscaled | Times | InvSqrtWidth, *BY_KIND]


class FullTable(Spec):
    """One vector of width d per token."""

    kind: Literal["full"] = "full"


class FactorisedTable(Spec):
    """Narrower vectors, and a linear layer to d: after the norm (ALBERT) or before positions are added (OPT)."""

    kind: Literal["factorised"] = "factorised"
    width: Size
    project: Literal["before_position", "after_norm"] = "after_norm"
    bias: Flag = True  # of that layer


Table = Annotated[FullTable | FactorisedTable, *BY_KIND]


class NoSpelling(Spec):
    """Tokens are read by their ids alone."""

    kind: Literal["none"] = "none"


class ByteSpelling(Spec):
    """Each token is also read as the UTF-8 bytes of its word: embeddings, a convolution, the largest of each channel,
    and a linear layer (dos Santos & Zadrozny 2014). Of a longer word, its first bytes and its last are read."""

    kind: Literal["bytes"] = "bytes"
    width: Size = 32  # of a byte's vector
    channels: Size = 128  # of the convolution
    kernel: Size = 3  # bytes that it sees at once
    longest: Size = 16  # bytes that are read of a word


Spelling = Annotated[NoSpelling | ByteSpelling, *BY_KIND]


class Tokens(Spec):
    """A learned lookup: table, scale, spelling, positions, types, norm, dropout, in this order."""

    kind: Literal["tokens"] = "tokens"
    vocab: Size | None = None  # None: in a recipe, the tokenizer's
    table: Table = FullTable()
    types: Count = 0  # how many token types (BERT's sentence A and B)
    spelling: Spelling = NoSpelling()  # for the task tag, which knows the words
    scale: InputScale = Unscaled()
    norm: Norm = NoNorm()
    dropout: Probability = 0.0
    pad: Count | None = None  # this row is zero and stays zero

    @property
    def rows(self) -> int:
        """v, once it is known."""
        if self.vocab is None:
            raise ConfigError([Fault("vocab", "is not set: give it, or let a recipe's tokenizer do so")])
        return self.vocab

    def table_width(self, width: int) -> int:
        """e, of the table's rows."""
        return self.table.width if isinstance(self.table, FactorisedTable) else width

    def inner_width(self, width: int) -> int:
        """Where positions and types are added."""
        late = isinstance(self.table, FactorisedTable) and self.table.project == "after_norm"
        return self.table_width(width) if late else width


class Patches(Spec):
    """Images [b, channels, height, width] in squares, each projected to d: a strided convolution (ViT).

    Projection, class token, positions, norm, dropout, in this order. Squares are read row by row.
    """

    kind: Literal["patches"] = "patches"
    image_height: Size = 224  # in pixels
    image_width: Size | None = None  # None: as high
    patch: Size = 16  # pixels on a side
    channels: Size = 3
    class_token: Flag = True  # a learned vector, read first
    bias: Flag = True
    norm: Norm = NoNorm()
    dropout: Probability = 0.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of patches of one image."""
        return self.channels, self.image_height, self.image_width or self.image_height

    @property
    def size(self) -> int:
        """Numbers in a patch."""
        return self.channels * self.patch**2

    @property
    def length(self) -> int:
        """Patches in an image, and the class token."""
        _, height, width = self.shape
        return (height // self.patch) * (width // self.patch) + self.class_token


class Features(Spec):
    """Frames [b, t, size] of numbers, each projected to d: speech, trajectories, time series.

    Projection, positions, norm, dropout, in this order.
    """

    kind: Literal["features"] = "features"
    size: Size  # numbers in a frame
    bias: Flag = True
    norm: Norm = NoNorm()
    dropout: Probability = 0.0


Input = Annotated[Tokens | Patches | Features, *by_kind("tokens")]


class Transform(Spec):
    """Dense, activation, norm: BERT's pooler (tanh) and masked-LM transform."""

    kind: Literal["dense"] = "dense"
    activation: Activation = Tanh()
    norm: TokenNorm = NoNorm()
    bias: Flag = True


class NoTransform(Spec):
    """Hidden states as they are."""

    kind: Literal["none"] = "none"


HeadTransform = Annotated[NoTransform | Transform, *BY_KIND]
Pool = Literal["first", "mean", "max", "last"]  # over the real tokens of a row
Labels = Size | Literal["auto"]  # auto: in a recipe, as many as the training rows have


class NoHead(Spec):
    """Hidden states [b, t, d]."""

    kind: Literal["none"] = "none"


class LM(Spec):
    """Logits [b, t, v] for the next token."""

    kind: Literal["lm"] = "lm"
    bias: Flag = False
    scale: LogitScale = Unscaled()
    cap: Positive | None = None  # c · tanh(logits / c): none is larger (Gemma 2)


class MaskedLM(Spec):
    """Logits [b, t, v] for the token itself, after a transform."""

    kind: Literal["masked_lm"] = "masked_lm"
    transform: HeadTransform = Transform(activation=Gelu(), norm=LayerNorm(eps=1e-12))
    bias: Flag = True


class TokenLabels(Spec):
    """Logits [b, t, labels]: tagging. With `crf`, potentials [b, t, labels + 1, labels]: logits and how well a label
    fits after each other label, or (the last row) at the beginning."""

    kind: Literal["token_labels"] = "token_labels"
    labels: Labels
    crf: Flag = False
    transform: HeadTransform = NoTransform()
    dropout: Probability = 0.0


class Classifier(Spec):
    """Logits [b, labels] from one vector per row."""

    kind: Literal["classifier"] = "classifier"
    labels: Labels
    pool: Pool = "first"
    transform: HeadTransform = NoTransform()
    dropout: Probability = 0.0


def label_count(head: TokenLabels | Classifier) -> int:
    """Return the number of labels, once it is known."""
    if head.labels == "auto":
        raise ConfigError([Fault("head.labels", "= 'auto': only a recipe counts the labels of its data: set a number")])
    return head.labels


class Embedder(Spec):
    """One vector [b, d] per row; `normalize` gives it length 1."""

    kind: Literal["embedder"] = "embedder"
    pool: Pool = "mean"
    transform: HeadTransform = NoTransform()
    normalize: Flag = False


Head = Annotated[NoHead | LM | MaskedLM | TokenLabels | Classifier | Embedder, *BY_KIND]


class Normal(Spec):
    """Every weight from N(0, std²); `residual`: what enters the residual stream is divided by sqrt(2·depth) (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: Positive = 0.02
    residual: Flag = False


class Xavier(Spec):
    """Glorot's uniform for matrices, N(0, 1/d) for embeddings (the 2017 Transformer)."""

    kind: Literal["xavier"] = "xavier"


class FanIn(Spec):
    """N(0, 1/inputs) for matrices (queries also by 1/k when scores are unscaled), N(0, 1) for embeddings (T5)."""

    kind: Literal["fan_in"] = "fan_in"


Init = Annotated[Normal | Xavier | FanIn, *BY_KIND]


class Special(Spec):
    """Token ids with a meaning; `start` is what a decoder reads first."""

    pad: Count | None = None
    bos: Count | None = None
    eos: Count | None = None
    start: Count | None = None
    stops: tuple[Count, ...] = ()  # others that end a text, as `eos` does (Llama 3's <|eot_id|>)

    def named(self) -> Iterator[tuple[str, int]]:
        """Each id with its name."""
        one = {"pad": self.pad, "bos": self.bos, "eos": self.eos, "start": self.start}
        yield from ((name, id) for name, id in one.items() if id is not None)
        yield from ((f"stops.{i}", id) for i, id in enumerate(self.stops))

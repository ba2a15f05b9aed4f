"""Where a model begins and ends: inputs, heads, initialisation, special ids. Imports no torch."""

from typing import Annotated, Literal

from anyformer.config.feedforward import Activation, Gelu, Tanh
from anyformer.config.mixer import InvSqrtWidth, SqrtWidth, Times, Unscaled
from anyformer.config.norm import LayerNorm, NoNorm, Norm
from anyformer.config.spec import BY_KIND, ConfigError, Count, Fault, Flag, Positive, Probability, Size, Spec

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


class Tokens(Spec):
    """A learned lookup: table, scale, positions, types, norm, dropout, in this order."""

    kind: Literal["tokens"] = "tokens"
    vocab: Size | None = None  # None: in a recipe, the tokenizer's
    table: Table = FullTable()
    types: Count = 0  # how many token types (BERT's sentence A and B)
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


Input = Tokens


class Transform(Spec):
    """Dense, activation, norm: BERT's pooler (tanh) and masked-LM transform."""

    kind: Literal["dense"] = "dense"
    activation: Activation = Tanh()
    norm: Norm = NoNorm()
    bias: Flag = True


class NoTransform(Spec):
    """Hidden states as they are."""

    kind: Literal["none"] = "none"


HeadTransform = Annotated[NoTransform | Transform, *BY_KIND]
Pool = Literal["first", "mean", "last"]  # over the real tokens of a row


class NoHead(Spec):
    """Hidden states [b, t, d]."""

    kind: Literal["none"] = "none"


class LM(Spec):
    """Logits [b, t, v] for the next token."""

    kind: Literal["lm"] = "lm"
    bias: Flag = False
    scale: LogitScale = Unscaled()


class MaskedLM(Spec):
    """Logits [b, t, v] for the token itself, after a transform."""

    kind: Literal["masked_lm"] = "masked_lm"
    transform: HeadTransform = Transform(activation=Gelu(), norm=LayerNorm(eps=1e-12))
    bias: Flag = True


class TokenLabels(Spec):
    """Logits [b, t, labels]: tagging."""

    kind: Literal["token_labels"] = "token_labels"
    labels: Size
    dropout: Probability = 0.0


class Classifier(Spec):
    """Logits [b, labels] from one vector per row."""

    kind: Literal["classifier"] = "classifier"
    labels: Size
    pool: Pool = "first"
    transform: HeadTransform = NoTransform()
    dropout: Probability = 0.0


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

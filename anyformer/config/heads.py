"""Heads: output layers, from hidden states to logits, labels or vectors. Imports no torch."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from anyformer.config.attention import InvSqrtWidth, Times, Unscaled, factor
from anyformer.config.block import Stack
from anyformer.config.cost import Cost, linear
from anyformer.config.families import Head as Head, Input, LabelHead as LabelHead, Output, Pool as Pool
from anyformer.config.feedforward import Activation, Gelu, Tanh
from anyformer.config.inputs import Patches
from anyformer.config.norm import LayerNorm, TokenNorm
from anyformer.config.spec import BY_KIND, ConfigError, Fault, Flag, Positive, Probability, Size, Spec

if TYPE_CHECKING:
    from torch import nn

LogitScale = Annotated[Unscaled | Times | InvSqrtWidth, *BY_KIND]


class Transform(Spec):
    """Dense, activation, norm: BERT's pooler (tanh) and masked-LM transform."""

    kind: Literal["dense"] = "dense"
    activation: Activation = Tanh()  # function after the linear layer
    norm: TokenNorm = TokenNorm.none()  # norm after the activation
    bias: Flag = True  # a bias of the linear layer

    def build(self, width: int, to: int) -> "nn.Module":
        """Return the module between hidden states and the output table."""
        from anyformer.nn.heads import DenseTransform

        return DenseTransform(width, to, self.activation.function(), self.norm.build(to), self.bias)

    def cost(self, width: int, to: int, rows: int) -> Cost:
        activation = Cost(saved=rows * to * self.activation.saves_input)
        return linear(width, to, rows, self.bias) + activation + self.norm.cost(to, rows)


class NoTransform(Spec):
    """Hidden states as they are."""

    kind: Literal["none"] = "none"

    def build(self, width: int, to: int) -> "nn.Module":
        from torch import nn

        return nn.Identity() if width == to else nn.Linear(width, to, bias=False)

    def cost(self, width: int, to: int, rows: int) -> Cost:
        return Cost() if to == width else linear(width, to, rows, bias=False)


HeadTransform = Annotated[NoTransform | Transform, *BY_KIND]


class NoHead(Head):
    """Hidden states [b, t, d]."""

    kind: Literal["none"] = "none"

    def build(self, width: int, read: Input, tied: bool) -> "nn.Module":
        from anyformer.nn.heads import HiddenHead

        return HiddenHead()

    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        return Cost()

    def values(self, width: int, vocab: int) -> int:
        return width


class MultiToken(Spec):
    """Layers that predict the tokens after the next one from the same hidden state (Gloeckle et al. 2024, Medusa 2024).

    Layer k reads h + silu(h W_k) through the same output table. In training its loss is on the token k places after the
    next one, of the same text. In decoding `self_draft` uses these layers to draft tokens.
    """

    tokens: Size = 2  # further tokens that are predicted, one layer each
    weight: Positive = 0.3  # of the mean of their losses, which is added to the training loss


class TableHead(Head):
    """A head with an output table, its own or the input's."""

    if TYPE_CHECKING:  # a field of each, in its own order
        bias: bool

    def table_width(self, width: int, read: Input) -> int:
        return read.table_width(width) or width

    def values(self, width: int, vocab: int) -> int:
        return vocab

    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        e, v = self.table_width(width, read), read.rows
        return Cost((e * (not tied) + self.bias) * v, 2 * b * t * e * v, saved=b * t * (e + v))


class LM(TableHead):
    """Logits [b, t, v] for the next token."""

    kind: Literal["lm"] = "lm"
    bias: Flag = False  # a bias per token of the vocabulary
    scale: LogitScale = Unscaled()  # factor of the logits
    cap: Positive | None = None  # soft cap: logits become cap · tanh(logits / cap) (Gemma 2); None: no cap
    multi_token: MultiToken | None = None  # layers that predict further tokens; None: the next token only
    output: ClassVar[Output] = "lm"

    def build(self, width: int, read: Input, tied: bool) -> "nn.Module":
        from anyformer.nn.heads import FurtherTokens, VocabularyHead

        e = self.table_width(width, read)
        return VocabularyHead(
            NoTransform().build(width, e),
            e,
            read,
            tied=tied,
            bias=self.bias,
            scale=factor(self.scale, width),
            cap=self.cap,
            further=FurtherTokens(self.multi_token, width) if self.multi_token else None,
        )

    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        e, v, more, d, rows = self.table_width(width, read), read.rows, self.further, width, b * t
        further = Cost(more * d * d, more * 2 * rows * (d * d + e * v), saved=more * rows * (2 * d + e + v))
        return NoTransform().cost(d, e, rows) + super().cost(d, read, b, t, tied) + further

    @property
    def further(self) -> int:
        return self.multi_token.tokens if self.multi_token else 0

    @property
    def soft_cap(self) -> float | None:
        return self.cap

    def for_width(self, base: int, ratio: float) -> Self | None:
        return self.model_copy(update={"scale": Times(value=factor(self.scale, base) * ratio)})


class MaskedLM(TableHead):
    """Logits [b, t, v] for the token itself, after a transform."""

    kind: Literal["masked_lm"] = "masked_lm"
    transform: HeadTransform = Transform(activation=Gelu(), norm=LayerNorm(eps=1e-12))  # layer before the logits
    bias: Flag = True  # a bias per token of the vocabulary
    output: ClassVar[Output] = "masked_lm"

    def build(self, width: int, read: Input, tied: bool) -> "nn.Module":
        from anyformer.nn.heads import VocabularyHead

        e = self.table_width(width, read)
        return VocabularyHead(self.transform.build(width, e), e, read, tied=tied, bias=self.bias)

    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        before = self.transform.cost(width, self.table_width(width, read), b * t)
        return before + super().cost(width, read, b, t, tied)


class TokenLabels(LabelHead):
    """Logits [b, t, labels]: tagging. With `crf`, potentials [b, t, labels + 1, labels]: logits and how well a label
    fits after each other label, or (the last row) at the beginning."""

    kind: Literal["token_labels"] = "token_labels"
    crf: Flag = False  # a conditional random field: labels depend on their neighbours
    transform: HeadTransform = NoTransform()  # layer before the logits
    dropout: Probability = 0.0  # on the input of the head
    output: ClassVar[Output] = "token_labels"

    def build(self, width: int, read: Input, tied: bool) -> "nn.Module":
        from anyformer.nn.heads import TokenHead

        return TokenHead(self.transform.build(width, width), width, self.count, self.dropout, self.crf)

    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        rows, values = b * t, self.values(width, 0)
        logits = linear(width, self.count, rows, True) + Cost(values * self.crf, saved=rows * values)
        return self.transform.cost(width, width, rows) + logits

    def values(self, width: int, vocab: int) -> int:
        return self.count * (self.count + 1 if self.crf else 1)

    @property
    def joint(self) -> bool:
        return self.crf


class SpanBounds(Head):
    """Logits [b, t, 2] of each token as the first and as the last of a span: answers to questions (Rajpurkar et al.
    2016, Devlin et al. 2019)."""

    kind: Literal["span"] = "span"
    transform: HeadTransform = NoTransform()  # layer before the logits
    dropout: Probability = 0.0  # on the input of the head
    output: ClassVar[Output] = "span"

    def build(self, width: int, read: Input, tied: bool) -> "nn.Module":
        from anyformer.nn.heads import SpanHead

        return SpanHead(self.transform.build(width, width), width, self.dropout)

    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        logits = linear(width, 2, b * t, True) + Cost(saved=b * t * 2)
        return self.transform.cost(width, width, b * t) + logits

    def values(self, width: int, vocab: int) -> int:
        return 2


class Classifier(LabelHead):
    """Logits [b, labels] from one vector per row."""

    kind: Literal["classifier"] = "classifier"
    pool: Pool = "first"  # how the vectors of a row become one
    transform: HeadTransform = NoTransform()  # layer before the logits
    dropout: Probability = 0.0  # on the input of the head
    bias: Flag = True  # a bias per label
    output: ClassVar[Output] = "classifier"

    def build(self, width: int, read: Input, tied: bool) -> "nn.Module":
        from torch import nn

        from anyformer.nn.heads import PooledHead

        classify = nn.Sequential(nn.Dropout(self.dropout), nn.Linear(width, self.count, bias=self.bias))
        return PooledHead(self.pool, self.transform.build(width, width), classify)

    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        logits = linear(width, self.count, b, self.bias) + Cost(saved=b * self.count)
        return self.transform.cost(width, width, b) + logits

    def values(self, width: int, vocab: int) -> int:
        return self.count

    @property
    def pooling(self) -> Pool:
        return self.pool


class DenseLayer(Spec):
    """act(x W + b), of any width."""

    width: Size  # width of the output
    activation: Activation = Tanh()  # function after the linear layer
    bias: Flag = True  # a bias of the linear layer


class Embedder(Head):
    """One vector [b, d] per row; `normalize` gives it length 1."""

    kind: Literal["embedder"] = "embedder"
    pool: Pool = "mean"  # how the vectors of a row become one
    transform: HeadTransform = NoTransform()  # layer after pooling
    layers: tuple[DenseLayer, ...] = ()  # further layers after it, of any width (sentence-transformers)
    projection: Size | None = None  # width of the vectors after a last linear layer without bias; None: no such layer
    normalize: Flag = False  # gives every vector length 1
    # after normalize, vectors have a learned length: cosines are divided by a learned temperature, as in CLIP
    learned_scale: Flag = False
    output: ClassVar[Output] = "embedder"

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.learned_scale and not self.normalize:
            raise ConfigError([Fault("learned_scale", "= True: scales cosines: set normalize = true")])
        return self

    def build(self, width: int, read: Input, tied: bool) -> "nn.Module":
        from anyformer.nn.heads import EmbeddingHead

        return EmbeddingHead(self, width)

    def cost(self, width: int, read: Input, b: int, t: int, tied: bool) -> Cost:
        found, inputs = self.transform.cost(width, width, b) + Cost(int(self.learned_scale)), width
        for layer in self.layers:
            found += Transform(activation=layer.activation, bias=layer.bias).cost(inputs, layer.width, b)
            inputs = layer.width
        project = linear(inputs, self.projection, b, bias=False) if self.projection else Cost()
        return found + project + Cost(saved=b * self.values(width, 0))

    def values(self, width: int, vocab: int) -> int:
        return self.projection or (self.layers[-1].width if self.layers else width)

    @property
    def pooling(self) -> Pool:
        return self.pool

    @property
    def learns_length(self) -> bool:
        return self.learned_scale

    def for_images(self, pool: Pool, width: int) -> Head:
        return Embedder(pool=pool, projection=self.values(width, 0))


class ImageTower(Spec):
    """An encoder of images beside the model, of any width. Its vectors, after a linear layer without bias, are in
    the same space as those of the model's head (CLIP, Radford et al. 2021)."""

    width: Size  # d of the tower
    source: Patches  # how an image is cut and embedded
    encoder: Stack  # layers of the tower
    pool: Pool = "first"  # how the vectors of an image become one

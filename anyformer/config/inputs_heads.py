"""Where a model begins and ends: inputs, heads, initialisation, special ids. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import model_validator

from anyformer.config.attention import InvSqrtWidth, SqrtWidth, Times, Unscaled
from anyformer.config.block import Stack
from anyformer.config.feedforward import Activation, Gelu, Tanh
from anyformer.config.media import Media, Spectrogram
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
    width: Size  # width of the table's vectors
    project: Literal["before_position", "after_norm"] = "after_norm"  # where the linear layer to d is
    bias: Flag = True  # a bias of that linear layer


Table = Annotated[FullTable | FactorisedTable, *BY_KIND]


class NoSpelling(Spec):
    """Tokens are read by their ids alone."""

    kind: Literal["none"] = "none"


class ByteSpelling(Spec):
    """Each token is also read as the UTF-8 bytes of its word: embeddings, a convolution, the largest of each channel,
    and a linear layer (dos Santos & Zadrozny 2014). Of a longer word, its first bytes and its last are read."""

    kind: Literal["bytes"] = "bytes"
    width: Size = 32  # width of a byte's vector
    channels: Size = 128  # channels of the convolution
    kernel: Size = 3  # kernel width of the convolution, in bytes
    longest: Size = 16  # number of bytes that are read of a word


Spelling = Annotated[NoSpelling | ByteSpelling, *BY_KIND]


class Tokens(Spec):
    """A learned lookup: table, scale, spelling, segments of other modalities, positions, types, norm, dropout, in this
    order."""

    kind: Literal["tokens"] = "tokens"
    vocab: Size | None = None  # number of tokens; None: in a recipe, that of the tokenizer
    table: Table = FullTable()  # the embedding table
    types: Count = 0  # number of token types (BERT's sentence A and B); 0: none
    spelling: Spelling = NoSpelling()  # reads also the bytes of each word; for the task tag
    scale: InputScale = Unscaled()  # factor of the vectors from the table
    norm: Norm = NoNorm()  # norm of the embeddings
    dropout: Probability = 0.0  # on the embeddings
    pad: Count | None = None  # id of padding: its row of the table is zero and stays zero
    media: Media | None = None  # images, sounds and feature vectors between the tokens; None: tokens only

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
    image_height: Size = 224  # height of an image, in pixels
    image_width: Size | None = None  # width of an image, in pixels; None: its height
    patch: Size = 16  # side of a square patch, in pixels
    channels: Size = 3  # channels of an image
    class_token: Flag = True  # a learned vector, read first
    bias: Flag = True  # a bias of the projection
    norm: Norm = NoNorm()  # norm of the embeddings
    dropout: Probability = 0.0  # on the embeddings

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
    size: Size  # elements of a frame
    bias: Flag = True  # a bias of the projection
    norm: Norm = NoNorm()  # norm of the embeddings
    dropout: Probability = 0.0  # on the embeddings


class Audio(Spectrogram):
    """Sounds [b, frames, mels] as log-mel frames, and convolutions over these (Whisper's encoder).

    Convolutions, positions, norm, dropout, in this order.
    """

    kind: Literal["audio"] = "audio"
    norm: Norm = NoNorm()  # norm of the embeddings
    dropout: Probability = 0.0  # on the embeddings


Input = Annotated[Tokens | Patches | Features | Audio, *by_kind("tokens")]


class Transform(Spec):
    """Dense, activation, norm: BERT's pooler (tanh) and masked-LM transform."""

    kind: Literal["dense"] = "dense"
    activation: Activation = Tanh()  # function after the linear layer
    norm: TokenNorm = NoNorm()  # norm after the activation
    bias: Flag = True  # a bias of the linear layer


class NoTransform(Spec):
    """Hidden states as they are."""

    kind: Literal["none"] = "none"


HeadTransform = Annotated[NoTransform | Transform, *BY_KIND]
Pool = Literal["first", "mean", "max", "last"]  # over the real tokens of a row
Labels = Size | Literal["auto"]  # auto: in a recipe, as many as the training rows have


class NoHead(Spec):
    """Hidden states [b, t, d]."""

    kind: Literal["none"] = "none"


class MultiToken(Spec):
    """Layers that predict the tokens after the next one from the same hidden state (Gloeckle et al. 2024, Medusa 2024).

    Layer k reads h + silu(h W_k) through the same output table. In training its loss is on the token k places after the
    next one, of the same text. In decoding `self_draft` uses these layers to draft tokens.
    """

    tokens: Size = 2  # further tokens that are predicted, one layer each
    weight: Positive = 0.3  # of the mean of their losses, which is added to the training loss


class LM(Spec):
    """Logits [b, t, v] for the next token."""

    kind: Literal["lm"] = "lm"
    bias: Flag = False  # a bias per token of the vocabulary
    scale: LogitScale = Unscaled()  # factor of the logits
    cap: Positive | None = None  # soft cap: logits become cap · tanh(logits / cap) (Gemma 2); None: no cap
    multi_token: MultiToken | None = None  # layers that predict further tokens; None: the next token only


class MaskedLM(Spec):
    """Logits [b, t, v] for the token itself, after a transform."""

    kind: Literal["masked_lm"] = "masked_lm"
    transform: HeadTransform = Transform(activation=Gelu(), norm=LayerNorm(eps=1e-12))  # layer before the logits
    bias: Flag = True  # a bias per token of the vocabulary


class TokenLabels(Spec):
    """Logits [b, t, labels]: tagging. With `crf`, potentials [b, t, labels + 1, labels]: logits and how well a label
    fits after each other label, or (the last row) at the beginning."""

    kind: Literal["token_labels"] = "token_labels"
    labels: Labels  # number of labels; auto: in a recipe, that of the data
    crf: Flag = False  # a conditional random field: labels depend on their neighbours
    transform: HeadTransform = NoTransform()  # layer before the logits
    dropout: Probability = 0.0  # on the input of the head


class Classifier(Spec):
    """Logits [b, labels] from one vector per row."""

    kind: Literal["classifier"] = "classifier"
    labels: Labels  # number of labels; auto: in a recipe, that of the data
    pool: Pool = "first"  # how the vectors of a row become one
    transform: HeadTransform = NoTransform()  # layer before the logits
    dropout: Probability = 0.0  # on the input of the head
    bias: Flag = True  # a bias per label


class SpanBounds(Spec):
    """Logits [b, t, 2] of each token as the first and as the last of a span: answers to questions (Rajpurkar et al.
    2016, Devlin et al. 2019)."""

    kind: Literal["span"] = "span"
    transform: HeadTransform = NoTransform()  # layer before the logits
    dropout: Probability = 0.0  # on the input of the head


def label_count(head: TokenLabels | Classifier) -> int:
    """Return the number of labels, once it is known."""
    if head.labels == "auto":
        raise ConfigError([Fault("head.labels", "= 'auto': only a recipe counts the labels of its data: set a number")])
    return head.labels


class DenseLayer(Spec):
    """act(x W + b), of any width."""

    width: Size  # width of the output
    activation: Activation = Tanh()  # function after the linear layer
    bias: Flag = True  # a bias of the linear layer


class Embedder(Spec):
    """One vector [b, d] per row; `normalize` gives it length 1."""

    kind: Literal["embedder"] = "embedder"
    pool: Pool = "mean"  # how the vectors of a row become one
    transform: HeadTransform = NoTransform()  # layer after pooling
    layers: tuple[DenseLayer, ...] = ()  # further layers after it, of any width (sentence-transformers)
    projection: Size | None = None  # width of the vectors after a last linear layer without bias; None: no such layer
    normalize: Flag = False  # gives every vector length 1
    # after normalize, vectors have a learned length: cosines are divided by a learned temperature, as in CLIP
    learned_scale: Flag = False

    @model_validator(mode="after")
    def _check_scale(self) -> Self:
        if self.learned_scale and not self.normalize:
            raise ConfigError([Fault("learned_scale", "= True: scales cosines: set normalize = true")])
        return self

    def vector_width(self, width: int) -> int:
        """Width of the vectors, given or derived."""
        return self.projection or (self.layers[-1].width if self.layers else width)


Head = Annotated[NoHead | LM | MaskedLM | TokenLabels | SpanBounds | Classifier | Embedder, *BY_KIND]


class ImageTower(Spec):
    """An encoder of images beside the model, of any width. Its vectors, after a linear layer without bias, are in
    the same space as those of the model's head (CLIP, Radford et al. 2021)."""

    width: Size  # d of the tower
    source: Patches  # how an image is cut and embedded
    encoder: Stack  # layers of the tower
    pool: Pool = "first"  # how the vectors of an image become one


class Normal(Spec):
    """Every weight from N(0, std²); `residual`: what enters the residual stream is divided by sqrt(2·depth) (GPT-2)."""

    kind: Literal["normal"] = "normal"
    std: Positive = 0.02  # standard deviation of the weights
    residual: Flag = False  # weights of layers that end in the residual stream are divided by sqrt(2 · depth)


class Xavier(Spec):
    """Glorot's uniform for matrices, N(0, 1/d) for embeddings (the 2017 Transformer)."""

    kind: Literal["xavier"] = "xavier"


class FanIn(Spec):
    """N(0, 1/inputs) for matrices (queries also by 1/k when scores are unscaled), N(0, 1) for embeddings (T5)."""

    kind: Literal["fan_in"] = "fan_in"


Init = Annotated[Normal | Xavier | FanIn, *BY_KIND]


class Special(Spec):
    """Token ids with a meaning; `start` is what a decoder reads first."""

    pad: Count | None = None  # id of padding
    bos: Count | None = None  # id of the begin-of-text token
    eos: Count | None = None  # id of the end-of-text token: generation stops there
    start: Count | None = None  # id that a decoder reads first
    stops: tuple[Count, ...] = ()  # other ids that end a text, as `eos` does (Llama 3's <|eot_id|>)

    def named(self) -> Iterator[tuple[str, int]]:
        """Each id with its name."""
        one = {"pad": self.pad, "bos": self.bos, "eos": self.eos, "start": self.start}
        yield from ((name, id) for name, id in one.items() if id is not None)
        yield from ((f"stops.{i}", id) for i, id in enumerate(self.stops))

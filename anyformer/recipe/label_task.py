"""Tasks that give labels, numbers, vectors or spans. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from anyformer.config import ConfigError, Fault, Head, LabelHead, ModelConfig, Pictures
from anyformer.config.spec import Count, Flag, Positive, Size
from anyformer.recipe.task import Served, Task

if TYPE_CHECKING:
    from anyformer.data.readers import Rows
    from anyformer.data.tokenizer import TextTokenizer
    from anyformer.tasks.base import BuiltTask

LARGEST_TARGET = 1e18  # largest value of a regression target: its square fits into fp32

Target = Annotated[float, Field(strict=True, ge=-LARGEST_TARGET, le=LARGEST_TARGET)]
Deviation = Annotated[float, Field(strict=True, ge=1 / LARGEST_TARGET, le=LARGEST_TARGET)]


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError([Fault("", f"= {list(names)}: '{repeated[0]}' occurs twice")])
    return names


Names = Annotated[tuple[str, ...], AfterValidator(_unique)]


class OneOutput(Task):
    """A task with one output for each row."""

    batches: ClassVar = ("padded",)
    reads: ClassVar = "has one output per row"

    @property
    def columns(self) -> tuple[str, ...]:
        return ("text", "pair", "label") if getattr(self, "pairs", False) else ("text", "label")


class Classify(OneOutput):
    """Predict a label of each text or pair of texts; with a `separator`, any number of labels."""

    kind: Literal["classify"] = "classify"
    pairs: Flag = False  # a row is a pair of texts
    separator: Annotated[str, Field(min_length=1)] | None = None  # string between the labels of a row; None: one label
    max_length: Size | None = None  # longer rows are cut to this many tokens, special ones included; None: not cut
    labels: Names = ()  # names, in the order of their ids; empty: those of the training rows, sorted

    head_kind: ClassVar = "classifier"
    measures: ClassVar = ("loss", "accuracy", "macro_f1")
    is_completed: ClassVar = True
    predict_options: ClassVar = ("scores",)

    @property
    def without_distribution(self) -> str:
        return "" if self.separator is None else "with task.separator each label is decided separately"

    @property
    def several_labels(self) -> bool:
        return self.separator is not None

    def complete(self, train: "Rows") -> Self:
        from anyformer.tasks.classify import label_names

        return self.model_copy(update={"labels": label_names(self, train.columns["label"])})

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.classify import Classifying

        return Classifying(self, tokenizer)


class Regress(OneOutput):
    """Predict a number for each pair of texts, or for each text."""

    kind: Literal["regress"] = "regress"
    pairs: Flag = True  # a row is a pair of texts
    apart: Flag = False  # embed each text separately and predict the cosine; needs an embedding head
    # the model predicts (label - mean) / deviation; None: mean of the training rows; `apart`: their minimum
    mean: Target | None = None
    deviation: Deviation | None = None  # see mean; None: standard deviation of the training rows; `apart`: range

    measures: ClassVar = ("loss", "pearson", "spearman")
    has_distribution: ClassVar = False
    is_completed: ClassVar = True

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.apart and not self.pairs:
            raise ConfigError([Fault("apart", "= True: needs pairs of texts: set pairs = true")])
        return self

    @property
    def head_kind(self) -> str:
        return "embedder" if self.apart else "classifier"

    @property
    def title(self) -> str:
        return f"{self.kind} with apart = true" if self.apart else self.kind

    @property
    def real_rows(self) -> str:
        return "compares the rows of a batch" if self.apart else ""

    def model_faults(self, model: ModelConfig) -> Iterator[Fault]:
        if not self.apart and isinstance(model.head, LabelHead) and model.head.labels != 1:
            yield Fault(
                "model.head.labels", f"= {model.head.labels}: the task {self.kind} predicts one number: set it to 1"
            )
        yield from super().model_faults(model)

    def serves(self, head: Head) -> Served:
        return "number"

    def complete(self, train: "Rows") -> Self:
        from anyformer.tasks.regress import scale

        return self.model_copy(update=scale(self, train.columns["label"]))

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.regress import Regressing

        return Regressing(self, tokenizer)


class Embed(OneOutput):
    """Embed texts so that the two of a pair are closer than other pairs of the batch.

    InfoNCE over cosines (van den Oord et al. 2018), in both directions as in CLIP.
    """

    kind: Literal["embed"] = "embed"
    # divisor of the cosines; learned: that of a head with learned_scale
    temperature: Positive | Literal["learned"] = 0.05
    # how picture files are resized and scaled; None: not resized, values from -1 to 1
    pictures: Pictures | None = None

    head_kind: ClassVar = "embedder"
    columns: ClassVar = ("text", "pair")
    apart: ClassVar = True  # each text is read alone
    predict_options: ClassVar = ("labels",)
    measures: ClassVar = ("loss", "accuracy", "mrr")
    has_distribution: ClassVar = False
    real_rows: ClassVar = "compares the rows of a batch"
    one_process: ClassVar = "each pair is compared with all others of its batch in one process"

    def model_faults(self, model: ModelConfig) -> Iterator[Fault]:
        if model.head.output == self.head_kind and (self.temperature == "learned") != model.head.learns_length:
            what = f"= {str(model.head.learns_length).lower()}: task.temperature = {self.temperature!r}"
            yield Fault("model.head.learned_scale", f"{what}; a learned temperature needs both")
        yield from super().model_faults(model)

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.embed import EmbedTask

        return EmbedTask(self, tokenizer)


class Tag(Task):
    """Predict a label of each word of a sentence."""

    kind: Literal["tag"] = "tag"
    labels: Names = ()  # names, in the order of their ids; empty: those of the training rows, sorted
    spans: Flag | None = None  # score spans, such as names; None: if labels are O, B-x and I-x

    head_kind: ClassVar = "token_labels"
    columns: ClassVar = ("words", "tags")
    batches: ClassVar = ("padded", "packed")
    reads: ClassVar = "reads sentences"
    reads_words: ClassVar = True
    is_completed: ClassVar = True

    @property
    def measures(self) -> tuple[str, ...]:
        return ("loss", "accuracy") if self.spans is False else ("loss", "accuracy", "span_f1")

    def unfit_batches(self, kind: str, model: ModelConfig) -> str:
        if kind == "packed" and model.head.joint:
            return "a CRF reads one sentence per row: use 'padded', or model.head.crf = false"
        return super().unfit_batches(kind, model)

    def unknown_measure(self, metric: str) -> str:
        if metric == "span_f1" and self.spans is False:
            return "the labels mark no spans (O, B-x and I-x): set 'accuracy' or 'loss'"
        return super().unknown_measure(metric)

    def complete(self, train: "Rows") -> Self:
        from anyformer.tasks.tag import tags_of

        return self.model_copy(update=tags_of(self, train.columns["tags"]))

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.tag import TagTask

        return TagTask(self, tokenizer)


class QuestionAnswering(OneOutput):
    """Find the answer to a question as a span of a text (SQuAD, Rajpurkar et al. 2016)."""

    kind: Literal["span"] = "span"
    # most tokens of a row, with the question and special tokens; longer texts are read in several windows
    window: Size = 384
    overlap: Count = 128  # tokens of a text that two consecutive windows share; at most half of a window
    longest: Size = 30  # most tokens of an answer
    unanswerable: Flag = False  # some questions have no answer in their text (SQuAD 2.0): it is then empty
    # the answer is empty if its score exceeds that of the best span by more than this
    threshold: Annotated[float, Field(strict=True, ge=-1e6, le=1e6)] = 0.0

    head_kind: ClassVar = "span"
    shapes: ClassVar = ("encoder", "decoder", "encoder-decoder")
    columns: ClassVar = ("text", "pair", "answers")
    predict_options: ClassVar = ("scores", "n_best")
    measures: ClassVar = ("loss", "exact_match", "f1")
    has_distribution: ClassVar = False
    smooths_labels: ClassVar = True
    real_rows: ClassVar = "finds a span in each row"

    @model_validator(mode="after")
    def _check_threshold(self) -> Self:
        if self.threshold and not self.unanswerable:
            raise ConfigError([Fault("threshold", f"= {self.threshold}: is for unanswerable = true")])
        return self

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.span import SpanAnswering

        return SpanAnswering(self, tokenizer)

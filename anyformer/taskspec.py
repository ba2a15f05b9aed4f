"""The grammar of tasks: what is asked of a model. Imports no torch."""

from typing import Annotated, Literal, Self, assert_never

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, Spec
from anyformer.config.spec import BY_KIND, Count, Flag, Number, Positive, Size


class Seq2Seq(Spec):
    """A target for each source: an encoder–decoder, or a decoder that reads `source <sep> target`."""

    kind: Literal["seq2seq"] = "seq2seq"
    metrics: tuple[Literal["exact_match", "bleu", "chrf"], ...] = ("exact_match",)
    bleu_tokenize: Literal["13a", "none", "char", "zh", "ko-mecab", "ja-mecab", "intl"] = "13a"
    max_source: Size | None = None  # in tokens; longer rows are bad rows
    max_target: Size | None = None
    beams: Size = 1  # of the search for answers, in every evaluation and in `predict`; 1: the likeliest token each time
    length_penalty: Number = 1.0  # of that search: above 0 it favours long answers
    framed: Flag = False  # texts stand in the special tokens that the tokenizer's file puts around them
    start: Count | None = None  # what an encoder–decoder's target begins with; None: <bos>

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> Self:
        if self.beams == 1 and self.length_penalty != 1:
            raise ConfigError([Fault("length_penalty", f"= {self.length_penalty}: needs beams, and there is 1")])
        return self


class LanguageModel(Spec):
    """The next token of a text."""

    kind: Literal["lm"] = "lm"
    framed: Flag = False  # texts begin with the special tokens that the tokenizer's file puts before them


class Classify(Spec):
    """A label for each text, or for each pair of texts; with a `separator`, any number of labels."""

    kind: Literal["classify"] = "classify"
    pairs: Flag = False  # whether a row is a text and its pair
    separator: Annotated[str, Field(min_length=1)] | None = None  # between the labels of a row
    labels: tuple[str, ...] = ()  # their names, by number; none: those of the training rows, sorted

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if twice := [name for name in self.labels if self.labels.count(name) > 1]:
            raise ConfigError([Fault("labels", f"= {list(self.labels)}: '{twice[0]}' is there twice")])
        return self


class Regress(Spec):
    """A number for each pair of texts, or for each text."""

    kind: Literal["regress"] = "regress"
    pairs: Flag = True  # whether a row is a text and its pair
    mean: Number | None = None  # which the model says by 0; None: that of the training rows
    deviation: Positive | None = None  # that is 1 to the model; None: that of the training rows


class Encoder(Spec):
    """What an encoder that comes from elsewhere says of a text: a vector, a label, labels of its tokens, or the words
    where it is masked."""

    kind: Literal["encoder"] = "encoder"
    labels: tuple[str, ...] = ()  # their names, by number
    max_length: Size | None = (
        None  # tokens of a text that are read, with those around it; None: longer ones are refused
    )


Task = Annotated[Seq2Seq | LanguageModel | Classify | Regress, *BY_KIND]  # that a recipe trains
AnyTask = Annotated[Seq2Seq | LanguageModel | Classify | Regress | Encoder, *BY_KIND]


def columns(task: Task) -> tuple[str, ...]:
    """What a task reads of a row."""
    match task:
        case Seq2Seq():
            return ("source", "target")
        case LanguageModel():
            return ("text",)
        case Classify(pairs=pairs) | Regress(pairs=pairs):
            return ("text", "pair", "label") if pairs else ("text", "label")
        case _:
            assert_never(task)


Metric = Literal["loss", "exact_match", "bleu", "chrf", "accuracy", "macro_f1", "pearson", "spearman"]


def measures(task: Task) -> tuple[Metric, ...]:
    """By what a task may tell how good a model is."""
    match task:
        case Seq2Seq():
            return ("loss", *task.metrics)
        case LanguageModel():
            return ("loss",)
        case Classify():
            return ("loss", "accuracy", "macro_f1")
        case Regress():
            return ("loss", "pearson", "spearman")
        case _:
            assert_never(task)


class TaskFile(Spec):
    """What the task.json of a run holds."""

    task: AnyTask

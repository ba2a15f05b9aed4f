"""The grammar of tasks: what is asked of a model. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self, assert_never

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, ModelConfig, Spec, TokenLabels, Tokens
from anyformer.config.spec import BY_KIND, Count, Flag, Fraction, Number, Positive, Size

LARGEST_TARGET = 1e18  # of a regression: its square fits into fp32

Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Target = Annotated[float, Field(strict=True, ge=-LARGEST_TARGET, le=LARGEST_TARGET)]
Deviation = Annotated[float, Field(strict=True, ge=1 / LARGEST_TARGET, le=LARGEST_TARGET)]


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
    prefix: Flag = False  # in a decoder-only model, all of the source is seen from everywhere in it

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> Self:
        if self.beams == 1 and self.length_penalty != 1:
            raise ConfigError([Fault("length_penalty", f"= {self.length_penalty}: needs beams, and there is 1")])
        return self


class MixturePart(Seq2Seq):
    """One task of a mixture."""

    name: Annotated[str, Field(pattern="^[a-z0-9][a-z0-9_-]*$")]
    weight: Positive = 1.0  # how often each of its rows is read in an epoch


class Mixture(Spec):
    """Several sequence-to-sequence tasks by one model: each source begins with a token of its task."""

    kind: Literal["mixture"] = "mixture"
    parts: Annotated[tuple[MixturePart, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [part.name for part in self.parts]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError([Fault("parts", f"two are called '{twice[0]}'")])
        return self


class LanguageModel(Spec):
    """The next token of a text."""

    kind: Literal["lm"] = "lm"
    framed: Flag = False  # texts begin with the special tokens that the tokenizer's file puts before them


class PrefixLM(Spec):
    """How a text goes on from a random place in it; what comes before sees all of itself (Liu et al. 2018)."""

    kind: Literal["prefix_lm"] = "prefix_lm"
    framed: Flag = False  # texts begin with the special tokens that the tokenizer's file puts before them


class MaskedLanguageModel(Spec):
    """Which tokens stand where a text is masked (BERT, Devlin et al. 2019)."""

    kind: Literal["mlm"] = "mlm"
    rate: Fraction = 0.15  # of the tokens that are asked; others in each epoch
    masked: Share = 0.8  # of these, how many are hidden by <mask>
    random: Share = 0.1  # and how many by a random token; the others stay

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.masked + self.random > 1:
            raise ConfigError([Fault("random", f"= {self.random}: with masked = {self.masked} it is more than all")])
        return self


class SpanCorruption(Spec):
    """What is missing from a text: spans of it give way to sentinels, and are said behind these (T5, Raffel et al.
    2020)."""

    kind: Literal["spans"] = "spans"
    rate: Fraction = 0.15  # of the tokens that are left out; others in each epoch
    mean_span: Annotated[float, Field(strict=True, ge=1)] = 3.0  # tokens
    sentinels: Annotated[int, Field(strict=True, ge=2)] = 100  # <extra_id_0> and so on, that a tokenizer is given
    start: Count | None = None  # what a target begins with; None: <bos>


class Classify(Spec):
    """A label for each text, or for each pair of texts; with a `separator`, any number of labels."""

    kind: Literal["classify"] = "classify"
    pairs: Flag = False  # whether a row is a text and its pair
    separator: Annotated[str, Field(min_length=1)] | None = None  # between the labels of a row
    labels: tuple[str, ...] = ()  # their names, by number; none: those of the training rows, sorted

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _each_once(self.labels)
        return self


def _each_once(labels: tuple[str, ...]) -> None:
    if twice := [name for name in labels if labels.count(name) > 1]:
        raise ConfigError([Fault("labels", f"= {list(labels)}: '{twice[0]}' is there twice")])


class Regress(Spec):
    """A number for each pair of texts, or for each text."""

    kind: Literal["regress"] = "regress"
    pairs: Flag = True  # whether a row is a text and its pair
    apart: Flag = False  # each text has a vector of its own, and the number is their cosine; for heads that embed
    mean: Annotated[float, Field(strict=True, ge=-LARGEST_TARGET, le=LARGEST_TARGET)] | None = (
        None  # which the model says by 0; None: that of the training rows, apart their lowest
    )
    deviation: Annotated[float, Field(strict=True, ge=1 / LARGEST_TARGET, le=LARGEST_TARGET)] | None = (
        None  # that is 1 to the model; None: that of the training rows, apart their range
    )

    @model_validator(mode="after")
    def _of_pairs(self) -> Self:
        if self.apart and not self.pairs:
            raise ConfigError([Fault("apart", "= True: needs pairs, whose texts are read apart")])
        return self


class Embed(Spec):
    """A vector for each text, so that those of a pair are nearer to each other than to the other pairs of a batch
    (InfoNCE, van den Oord et al. 2018; both ways, as CLIP)."""

    kind: Literal["embed"] = "embed"
    temperature: Positive = 0.05  # by which cosines are divided


class Tag(Spec):
    """A label for each word of a sentence."""

    kind: Literal["tag"] = "tag"
    labels: tuple[str, ...] = ()  # their names, by number; none: those of the training rows, sorted
    spans: Flag | None = None  # whether spans are scored, such as names; None: if labels are O, B-x and I-x

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        _each_once(self.labels)
        return self


class Encoder(Spec):
    """What an encoder that comes from elsewhere says of a text: a vector, a label, labels of its tokens, or the words
    where it is masked."""

    kind: Literal["encoder"] = "encoder"
    labels: tuple[str, ...] = ()  # their names, by number
    multi_label: Flag = False  # any number of labels of a text, each by itself; else the one that is most probable
    max_length: Size | None = (
        None  # tokens of a text that are read, with those around it; None: longer ones are refused
    )


Drawn = MaskedLanguageModel | SpanCorruption | PrefixLM  # whose examples are made of texts by chance
# what a recipe trains, and what a run may be of
Task = Annotated[Seq2Seq | Mixture | LanguageModel | Drawn | Classify | Regress | Embed | Tag, *BY_KIND]
AnyTask = Annotated[Seq2Seq | Mixture | LanguageModel | Drawn | Classify | Regress | Embed | Tag | Encoder, *BY_KIND]


def columns(task: Task) -> tuple[str, ...]:
    """What a task reads of a row."""
    match task:
        case Seq2Seq() | Mixture():
            return ("source", "target")
        case LanguageModel() | MaskedLanguageModel() | SpanCorruption() | PrefixLM():
            return ("text",)
        case Classify(pairs=pairs) | Regress(pairs=pairs):
            return ("text", "pair", "label") if pairs else ("text", "label")
        case Embed():
            return ("text", "pair")
        case Tag():
            return ("words", "tags")
        case _:
            assert_never(task)


Metric = Literal["loss", "exact_match", "bleu", "chrf", "accuracy", "macro_f1", "pearson", "spearman", "mrr", "span_f1"]


def measures(task: Task) -> tuple[Metric, ...]:
    """By what a task may tell how good a model is."""
    match task:
        case Seq2Seq():
            return ("loss", *task.metrics)
        case Mixture(parts=parts):
            return ("loss", *dict.fromkeys(metric for part in parts for metric in part.metrics))
        case LanguageModel():
            return ("loss",)
        case MaskedLanguageModel() | SpanCorruption() | PrefixLM():
            return ("loss", "accuracy")
        case Classify():
            return ("loss", "accuracy", "macro_f1")
        case Regress():
            return ("loss", "pearson", "spearman")
        case Embed():
            return ("loss", "accuracy", "mrr")
        case Tag(spans=spans):
            return ("loss", "accuracy") if spans is False else ("loss", "accuracy", "span_f1")
        case _:
            assert_never(task)


def misshapen(task: Drawn, model: ModelConfig) -> Iterator[Fault]:
    """What is wrong with a model for a task."""
    match task:
        case MaskedLanguageModel():
            shape, head = "encoder", "masked_lm"
        case SpanCorruption():
            shape, head = "encoder-decoder", "lm"
        case PrefixLM():
            shape, head = "decoder", "lm"
        case _:
            assert_never(task)
    if model.shape != shape:
        only = "" if shape == "encoder-decoder" else "-only"
        yield Fault("model", f"has the shape '{model.shape}': the task {task.kind} is for {shape}{only} models")
    if model.head.kind != head:
        yield Fault("model.head", f"= '{model.head.kind}': the task {task.kind} needs '{head}'")


def words_faults(task: Task, model: ModelConfig, batches: str, smoothing: float) -> Iterator[Fault]:
    """What is wrong with a model, with batches of a kind, and with smoothed labels for a task that reads words, and
    with models that read words for any other."""
    if not isinstance(task, Tag):
        for name, read in (("source", model.source), ("target", model.target)):
            if isinstance(read, Tokens) and read.spelling.kind != "none":
                what = f"the task {task.kind} reads texts, and no single words: it is for the task tag"
                yield Fault(f"model.{name}.spelling", f"= '{read.spelling.kind}': {what}")
        return
    crf = isinstance(model.head, TokenLabels) and model.head.crf
    if not isinstance(model.head, TokenLabels):
        yield Fault("model.head", f"= '{model.head.kind}': the task tag needs 'token_labels'")
    if model.shape == "encoder-decoder":
        yield Fault("model.decoder", "the task tag reads each sentence once: leave out the decoder or the encoder")
    if batches not in ("padded", "packed"):
        yield Fault("batches.kind", f"= '{batches}': the task tag reads sentences, which are 'padded' or 'packed'")
    if crf and batches == "packed":
        yield Fault("batches.kind", "= 'packed': a CRF goes from word to word of a row, which must be one sentence")
    if crf and smoothing:
        what = "a CRF chooses among whole rows of labels; set it to 0, or model.head.crf = false"
        yield Fault("train.label_smoothing", f"= {smoothing}: {what}")


class TaskFile(Spec):
    """The task.json of a run."""

    task: AnyTask
    source_tokenizer: Flag | None = None  # whether source_tokenizer.json is required; None: an earlier version's file

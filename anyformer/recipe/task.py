"""Tasks: what a run learns, the columns it reads, its metrics, and the models it needs. Imports no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self, assert_never

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, LabelHead, ModelConfig, Pictures, Shape, Spec
from anyformer.config.spec import BY_KIND, Count, Flag, Fraction, Positive, Size
from anyformer.recipe.bins import Bins
from anyformer.recipe.imported_task import Encoder, Transcribe
from anyformer.recipe.seq2seq_task import Mixture, Preferences, Rewards, Seq2Seq

LARGEST_TARGET = 1e18  # largest value of a regression target: its square fits into fp32

Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Target = Annotated[float, Field(strict=True, ge=-LARGEST_TARGET, le=LARGEST_TARGET)]
ActionName = Annotated[str, Field(pattern=r"^\w[\w -]*$")]
Deviation = Annotated[float, Field(strict=True, ge=1 / LARGEST_TARGET, le=LARGEST_TARGET)]


class LanguageModel(Spec):
    """Predict the next token of a text."""

    kind: Literal["lm"] = "lm"
    framed: Flag = False  # add the special tokens that the tokenizer's file puts before texts


class Chat(Spec):
    """Answer conversations: predict each message of the assistant, with its end, after the messages before it."""

    kind: Literal["chat"] = "chat"
    # how conversations are written: chatml adds its special tokens to the tokenizer, plain uses <bos>, <sep> and <eos>;
    # None: the chat template of the tokenizer
    template: Literal["chatml", "plain"] | None = None


class PrefixLM(Spec):
    """Continue a text from a random position; the tokens before it attend in both directions (Liu et al. 2018)."""

    kind: Literal["prefix_lm"] = "prefix_lm"
    framed: Flag = False  # add the special tokens that the tokenizer's file puts before texts


class MaskedLanguageModel(Spec):
    """Predict masked tokens from both sides (BERT, Devlin et al. 2019)."""

    kind: Literal["mlm"] = "mlm"
    rate: Fraction = 0.15  # fraction of tokens to predict; drawn again in each epoch
    masked: Share = 0.8  # fraction of these that are replaced by <mask>
    random: Share = 0.1  # fraction replaced by a random token; the rest are unchanged

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.masked + self.random > 1:
            what = f"masked + random must be at most 1, and masked = {self.masked}"
            raise ConfigError([Fault("random", f"= {self.random}: {what}")])
        return self


class SpanCorruption(Spec):
    """Predict the spans that sentinels replace in a text; in the target each span follows its sentinel (T5, Raffel et
    al. 2020)."""

    kind: Literal["spans"] = "spans"
    rate: Fraction = 0.15  # fraction of tokens in spans; drawn again in each epoch
    mean_span: Annotated[float, Field(strict=True, ge=1)] = 3.0  # mean length of a span, in tokens
    # number of sentinels <extra_id_0>, …, which are added to the tokenizer
    sentinels: Annotated[int, Field(strict=True, ge=2)] = 100
    start: Count | None = None  # id of the first token of a target; None: <bos>


class Classify(Spec):
    """Predict a label of each text or pair of texts; with a `separator`, any number of labels."""

    kind: Literal["classify"] = "classify"
    pairs: Flag = False  # a row is a pair of texts
    separator: Annotated[str, Field(min_length=1)] | None = None  # string between the labels of a row; None: one label
    max_length: Size | None = None  # longer rows are cut to this many tokens, special ones included; None: not cut
    labels: tuple[str, ...] = ()  # names, in the order of their ids; empty: those of the training rows, sorted

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        _check_unique(self.labels)
        return self


def _check_unique(labels: tuple[str, ...]) -> None:
    if repeated := [name for name in labels if labels.count(name) > 1]:
        raise ConfigError([Fault("labels", f"= {list(labels)}: '{repeated[0]}' occurs twice")])


class Regress(Spec):
    """Predict a number for each pair of texts, or for each text."""

    kind: Literal["regress"] = "regress"
    pairs: Flag = True  # a row is a pair of texts
    apart: Flag = False  # embed each text separately and predict the cosine; needs an embedding head
    # the model predicts (label - mean) / deviation; None: mean of the training rows; `apart`: their minimum
    mean: Target | None = None
    deviation: Deviation | None = None  # see mean; None: standard deviation of the training rows; `apart`: range

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.apart and not self.pairs:
            raise ConfigError([Fault("apart", "= True: needs pairs of texts: set pairs = true")])
        return self


class Embed(Spec):
    """Embed texts so that the two of a pair are closer than other pairs of the batch.

    InfoNCE over cosines (van den Oord et al. 2018), in both directions as in CLIP.
    """

    kind: Literal["embed"] = "embed"
    # divisor of the cosines; learned: that of a head with learned_scale
    temperature: Positive | Literal["learned"] = 0.05
    # how picture files are resized and scaled; None: not resized, values from -1 to 1
    pictures: Pictures | None = None


class Tag(Spec):
    """Predict a label of each word of a sentence."""

    kind: Literal["tag"] = "tag"
    labels: tuple[str, ...] = ()  # names, in the order of their ids; empty: those of the training rows, sorted
    spans: Flag | None = None  # score spans, such as names; None: if labels are O, B-x and I-x

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        _check_unique(self.labels)
        return self


class QuestionAnswering(Spec):
    """Find the answer to a question as a span of a text (SQuAD, Rajpurkar et al. 2016)."""

    kind: Literal["span"] = "span"
    # most tokens of a row, with the question and special tokens; longer texts are read in several windows
    window: Size = 384
    overlap: Count = 128  # tokens of a text that two consecutive windows share; at most half of a window
    longest: Size = 30  # most tokens of an answer
    unanswerable: Flag = False  # some questions have no answer in their text (SQuAD 2.0): it is then empty
    # the answer is empty if its score exceeds that of the best span by more than this
    threshold: Annotated[float, Field(strict=True, ge=-1e6, le=1e6)] = 0.0

    @model_validator(mode="after")
    def _check_threshold(self) -> Self:
        if self.threshold and not self.unanswerable:
            raise ConfigError([Fault("threshold", f"= {self.threshold}: is for unanswerable = true")])
        return self


class Actions(Spec):
    """Predict the actions of an episode from its instruction, observations and earlier actions (behaviour cloning).

    A row is `instruction observation action observation action ...`, with a loss on the actions only. With `returns`,
    the sum of the rewards still to come is a token before each observation (decision transformer, Chen et al. 2021).
    """

    kind: Literal["actions"] = "actions"
    actions: tuple[ActionName, ...] = ()  # names of the actions, in the order of their numbers
    action_bins: Bins | None = None  # bins for each number of a continuous action; None: actions have names
    action_size: Size = 1  # numbers of a continuous action
    state_bins: Bins | None = None  # bins for each number of an observation; None: it is an image or a vector
    returns: Bins | None = None  # bins of the return to go; None: rows have no returns
    history: Size = 64  # most steps that the model reads; of longer episodes, at least the last half of this

    @model_validator(mode="after")
    def _check_actions(self) -> Self:
        if bool(self.actions) == (self.action_bins is not None):
            raise ConfigError([Fault("actions", "set the names of the actions, or action_bins, and not both")])
        if repeated := [name for name in self.actions if self.actions.count(name) > 1]:
            raise ConfigError([Fault("actions", f"'{repeated[0]}' occurs twice")])
        if self.actions and self.action_size > 1:
            raise ConfigError([Fault("action_size", f"= {self.action_size}: is for action_bins")])
        return self

    @property
    def action_tokens(self) -> list[str]:
        """Special tokens of the actions."""
        if self.action_bins is not None:
            return self.action_bins.tokens("action")
        return [f"<{name}>" for name in self.actions]

    @property
    def special_tokens(self) -> list[str]:
        """All special tokens of rows."""
        states = [] if self.state_bins is None else self.state_bins.tokens("state")
        return [*self.action_tokens, *states, *([] if self.returns is None else self.returns.tokens("return"))]


DynamicTask = MaskedLanguageModel | SpanCorruption | PrefixLM  # examples are drawn from texts, new ones in each epoch
# Tasks of a recipe, and tasks of a run, which may also be imported.
TextTask = Classify | Regress | Embed | Tag | QuestionAnswering
OneTask = Seq2Seq | Preferences | Rewards | Mixture | LanguageModel | Chat | DynamicTask | TextTask | Actions
Task = Annotated[OneTask, *BY_KIND]
AnyTask = Annotated[OneTask | Encoder | Transcribe, *BY_KIND]


def columns(task: Task) -> tuple[str, ...]:
    """Return the columns of a row that a task reads."""
    match task:
        case Preferences():
            return ("source", "target", "rejected")
        case Seq2Seq() | Mixture():
            return ("source", "target")
        case LanguageModel() | MaskedLanguageModel() | SpanCorruption() | PrefixLM():
            return ("text",)
        case Chat():
            return ("messages",)
        case Classify(pairs=pairs) | Regress(pairs=pairs):
            return ("text", "pair", "label") if pairs else ("text", "label")
        case Embed():
            return ("text", "pair")
        case Tag():
            return ("words", "tags")
        case QuestionAnswering():
            return ("text", "pair", "answers")
        case Actions():
            return ("text", "observations", "actions", "rewards")
        case _:
            assert_never(task)


def compares_with_start(task: AnyTask) -> bool:
    """Return whether the loss compares the model with the frozen run of `train.init_from`."""
    return isinstance(task, Preferences) or (isinstance(task, Rewards) and task.kl > 0)


# fmt: off
Metric = Literal[
    "loss", "exact_match", "bleu", "chrf", "word_error_rate", "accuracy", "macro_f1", "pearson", "spearman", "mrr",
    "span_f1", "f1",
]
# fmt: on
LOWER_IS_BETTER = ("loss", "word_error_rate")  # of other metrics the highest value is the best


def measures(task: Task) -> tuple[Metric, ...]:
    """Return the metrics of a task, by which the best checkpoint can be selected."""
    match task:
        case Preferences():
            return ("loss", "accuracy", *task.metrics)
        case Seq2Seq():
            return ("loss", *task.metrics)
        case Mixture(parts=parts):
            return ("loss", *dict.fromkeys(metric for part in parts for metric in part.metrics))
        case LanguageModel():
            return ("loss",)
        case Chat() | MaskedLanguageModel() | SpanCorruption() | PrefixLM() | Actions():
            return ("loss", "accuracy")
        case Classify():
            return ("loss", "accuracy", "macro_f1")
        case Regress():
            return ("loss", "pearson", "spearman")
        case Embed():
            return ("loss", "accuracy", "mrr")
        case QuestionAnswering():
            return ("loss", "exact_match", "f1")
        case Tag(spans=spans):
            return ("loss", "accuracy") if spans is False else ("loss", "accuracy", "span_f1")
        case _:
            assert_never(task)


def head_kind(task: AnyTask) -> str | None:
    """Return the kind of head that a model needs for a task; None if a task accepts several."""
    match task:
        case Seq2Seq() | Mixture() | LanguageModel() | Chat() | SpanCorruption() | PrefixLM() | Actions():
            return "lm"
        case Transcribe():
            return "lm"
        case MaskedLanguageModel():
            return "masked_lm"
        case Classify() | Regress(apart=False):
            return "classifier"
        case Regress() | Embed():
            return "embedder"
        case Tag():
            return "token_labels"
        case QuestionAnswering():
            return "span"
        case Encoder():
            return None
        case _:
            assert_never(task)


def model_shapes(task: AnyTask) -> tuple[Shape, ...]:
    """Return the shapes that a model may have for a task."""
    match task:
        case Preferences() | Rewards() | LanguageModel() | Chat() | PrefixLM() | Actions():
            return ("decoder",)
        case MaskedLanguageModel():
            return ("encoder",)
        case SpanCorruption() | Transcribe():
            return ("encoder-decoder",)
        case Seq2Seq() | Mixture():
            return ("decoder", "encoder-decoder")
        case Classify() | Regress() | Embed() | Tag():
            return ("encoder", "decoder")
        case Encoder() | QuestionAnswering():
            return ("encoder", "decoder", "encoder-decoder")
        case _:
            assert_never(task)


def model_faults(task: Task, model: ModelConfig) -> Iterator[Fault]:
    """Yield what makes a model unfit for a task: its head, its shape, its inputs."""
    head, shapes = head_kind(task), model_shapes(task)
    if model.head.output != head:
        name = f"{task.kind} with apart = true" if isinstance(task, Regress) and task.apart else task.kind
        yield Fault("model.head", f"= '{model.head.kind}': the task {name} needs '{head}'")
    elif isinstance(task, Regress) and isinstance(model.head, LabelHead) and model.head.labels != 1:
        yield Fault("model.head.labels", f"= {model.head.labels}: the task regress predicts one number: set it to 1")
    elif isinstance(task, Embed) and (task.temperature == "learned") != model.head.learns_length:
        what = f"= {str(model.head.learns_length).lower()}: task.temperature = {task.temperature!r}"
        yield Fault("model.head.learned_scale", f"{what}; a learned temperature needs both")
    if model.shape not in shapes:
        needed = " or ".join(f"'{shape}'" for shape in shapes)
        yield Fault("model", f"has the shape '{model.shape}': the task {task.kind} needs {needed}")
    elif isinstance(task, Seq2Seq) and task.prefix and model.shape == "encoder-decoder":
        yield Fault("task.prefix", "= true: is for decoder-only models; an encoder sees the whole source anyway")
    for side, inputs in model.inputs.items():
        if not isinstance(task, Tag) and inputs.spelled_bytes is not None:
            what = f"the task {task.kind} reads texts; only the task tag reads single words"
            yield Fault(f"model.{side}.spelling", f"= 'bytes': {what}")


class TaskFile(Spec):
    """The contents of a run's task.json."""

    task: AnyTask  # the task, with its settings
    source_tokenizer: Flag | None = None  # source_tokenizer.json is required; None: written by an earlier version
    media_required: Flag = False  # every training row had an image, sound or vector: texts without one are refused

"""Tasks as families: what a run learns, the columns it reads, its metrics, and the models it needs. Imports no torch.

A task is one class: its fields, and the methods of its family. `build` imports what learns and predicts: the examples,
the loss and the answers (`anyformer.tasks`). To add one, derive a class from `Task` and give it a `kind`.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, Head, ModelConfig, Pictures, Shape, Spec
from anyformer.config.part import Part
from anyformer.config.spec import Count, Flag, Size, did_you_mean

if TYPE_CHECKING:
    from anyformer.data.readers import Rows
    from anyformer.data.tokenizer import TextTokenizer
    from anyformer.tasks.base import BuiltTask

Share = Annotated[float, Field(strict=True, ge=0, le=1)]

Served = Literal["embed", "classify", "number", "tag", "fill_mask"]


class AnyTask(Part):
    """The task of a run, learnt here or of an imported model."""

    shapes: ClassVar[tuple[Shape, ...]] = ("encoder", "decoder")  # that a model may have
    command: ClassVar[str] = "predict {run} FILE"  # that uses a run
    reads_words: ClassVar[bool] = False  # a text is a list of words, which a model may read by their spelling
    predict_options: ClassVar[tuple[str, ...]] = ()  # keywords of `predict`, other than those of generation

    @property
    @abstractmethod
    def head_kind(self) -> str | None:
        """The `output` of the head that a model needs; None: the task accepts several."""

    @abstractmethod
    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        """Return the task with its tokenizers, which learns and predicts."""

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Names of the labels, in the order of their ids; None: the head has no named outputs."""
        return getattr(self, "labels", None)

    @property
    def several_labels(self) -> bool:
        """True if a text may have any number of labels, each decided separately."""
        return False

    @property
    def joins_pairs(self) -> bool:
        """True if a row holds two texts."""
        return getattr(self, "pairs", False) and not getattr(self, "apart", False)

    def serves(self, head: Head) -> Served | None:
        """Return what a program gets from a model with this head, other than texts that it writes."""
        match head.output:
            case "embedder" | "none":
                return "embed"
            case "classifier":
                return "number" if self.label_names is None else "classify"
            case "token_labels":
                return "tag"
            case "masked_lm":
                return "fill_mask"
        return None


class Task(AnyTask):
    """The task that a run learns."""

    batches: ClassVar[tuple[str, ...]] = ("padded", "packed", "crops", "ordered")  # kinds that it can be trained on
    reads: ClassVar[str] = ""  # why it can be trained on no others
    one_process: ClassVar[str] = ""  # why it is trained without torchrun
    takes_own_tokens: ClassVar[bool] = False  # the decoder may read the model's own tokens in training
    has_distribution: ClassVar[bool] = True  # over tokens or labels, in each row
    is_completed: ClassVar[bool] = False  # some fields follow from the training rows, as `complete` sets them
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "word_error_rate")  # of other metrics, the highest value

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Columns of a row that it reads."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Metrics by which the best checkpoint can be selected."""
        return ("loss",)

    def row_measures(self, predicted: str, target: str) -> dict[str, float]:
        """Return metrics of one row, whose means `compare` tests; of our own tasks it knows them."""
        return {}

    @property
    def real_rows(self) -> str:
        """Why each row of a batch must hold an example; empty if rows may fill it up."""
        return ""

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.kind

    @property
    def compares_with_start(self) -> bool:
        """True if the loss compares the model with the frozen run of `train.init_from`."""
        return False

    @property
    def without_distribution(self) -> str:
        """Why a row has no distribution that a teacher could have, too; empty if it has."""
        return "" if self.has_distribution else f"the task {self.kind} has none"

    @property
    def smooths_labels(self) -> bool:
        """True if the loss is a softmax cross-entropy, whose labels can be smoothed."""
        return not self.without_distribution

    def complete(self, train: "Rows") -> Self:
        """Return the task completed from the training rows: names of labels, or the range of targets."""
        return self

    def with_tokens(self, tokenizer: "TextTokenizer", is_new: bool) -> "TextTokenizer":
        """Return a tokenizer with what the task needs of it; a new one may get further tokens."""
        return tokenizer

    # -- what does not fit it -----------------------------------------------------------------------------------------

    def model_faults(self, model: ModelConfig) -> Iterator[Fault]:
        """Yield what makes a model unfit: its head, its shape, its inputs."""
        if model.head.output != self.head_kind:
            yield Fault("model.head", f"= '{model.head.kind}': the task {self.title} needs '{self.head_kind}'")
        if model.shape not in self.shapes:
            needed = " or ".join(f"'{shape}'" for shape in self.shapes)
            yield Fault("model", f"has the shape '{model.shape}': the task {self.kind} needs {needed}")
        for side, inputs in model.inputs.items():
            if not self.reads_words and inputs.spelled_bytes is not None:
                what = f"the task {self.kind} reads texts; only the task tag reads single words"
                yield Fault(f"model.{side}.spelling", f"= 'bytes': {what}")

    def unfit_batches(self, kind: str, model: ModelConfig) -> str:
        """Return why it cannot be trained on this kind of batches; empty if it can."""
        usable = " or ".join(f"'{name}'" for name in self.batches)
        return "" if kind in self.batches else f"the task {self.kind} {self.reads}: use {usable}"

    def unknown_measure(self, metric: str) -> str:
        """Return why the best checkpoint cannot be selected by a metric; empty if it can."""
        return "" if metric in self.measures else f"the metrics of the task are {', '.join(self.measures)}"

    def faults(self, recipe: Any) -> Iterator[Fault]:
        """Yield what else in a `Recipe` does not fit the task."""
        yield from ()


def is_lower_better(metric: str) -> bool:
    """Return whether the lowest value of a metric is the best, by what the tasks say."""
    return any(metric in getattr(task, "lower_is_better", ()) for task in Task.choices())


# -- tasks of imported models, which only predict ----------------------------------------------------------------------


class Prompt(Spec):
    """A text that is read before every text, under a name (sentence-transformers)."""

    name: str  # such as "query"
    text: str  # read before each text, without a separator


class Encoder(AnyTask):
    """Predict with an imported encoder: a vector, a label, labels of the tokens, or the tokens at masks.

    A model of patches reads picture files.
    """

    kind: Literal["encoder"] = "encoder"
    labels: tuple[str, ...] = ()  # names, in the order of their ids
    multi_label: Flag = False  # any number of labels per text, each decided separately; else the most probable one
    max_length: Size | None = None  # longer texts are cut to this many tokens, special ones included; None: refused
    pictures: Pictures | None = None  # how picture files are resized and scaled; None: unknown, so none are read
    framed: Flag = True  # <bos> and <eos> are around texts if the tokenizer's file puts nothing there
    prompts: tuple[Prompt, ...] = ()  # texts to be read before a text, selected by name
    default_prompt: str | None = None  # name of the prompt where none is given; None: no prompt

    head_kind: ClassVar = None
    shapes: ClassVar = ("encoder", "decoder", "encoder-decoder")
    predict_options: ClassVar = ("prompt_name",)

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        names = [prompt.name for prompt in self.prompts]
        if len(set(names)) < len(names):
            raise ConfigError([Fault("prompts", f"= {', '.join(names)}: each name must occur once")])
        if self.default_prompt is not None:
            self.prompt_text(self.default_prompt, "default_prompt")
        return self

    @property
    def several_labels(self) -> bool:
        return self.multi_label

    def serves(self, head: Head) -> Served | None:
        return None if head.joint else super().serves(head)

    def prompt_text(self, name: str | None = None, path: str = "prompt_name") -> str:
        """Return the prompt of a name, by default the default one; "" if there is none, or for the name ""."""
        name = self.default_prompt if name is None else name
        if not name:
            return ""
        known = {prompt.name: prompt.text for prompt in self.prompts}
        if name not in known:
            what = did_you_mean(name, known) if known else "the model has no prompts"
            raise ConfigError([Fault(path, f"= '{name}': {what}")])
        return known[name]

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.imported_encoder import Encoding

        return Encoding(self, tokenizer)


class Transcribe(AnyTask):
    """Predict with an imported speech model, such as Whisper: the text of a WAV file."""

    kind: Literal["transcribe"] = "transcribe"
    # ids that an answer begins with, step by step: one, or the most probable of several, such as languages
    opening: tuple[tuple[Count, ...], ...] = ()
    suppress: tuple[Count, ...] = ()  # ids that no answer contains
    suppress_first: tuple[Count, ...] = ()  # ids that are not the first after the opening

    head_kind: ClassVar = "lm"
    shapes: ClassVar = ("encoder-decoder",)

    def build(self, tokenizer: "TextTokenizer", source_tokenizer: "TextTokenizer | None" = None) -> "BuiltTask":
        from anyformer.tasks.transcribe import Transcribing

        return Transcribing(self, tokenizer)

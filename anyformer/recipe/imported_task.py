"""Tasks of imported models, which only predict. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from anyformer.config import ConfigError, Fault, Head, Pictures, Spec
from anyformer.config.spec import Count, Flag, Size, did_you_mean
from anyformer.recipe.task import AnyTask, Served

if TYPE_CHECKING:
    from anyformer.data.tokenizer import TextTokenizer
    from anyformer.tasks.base import BuiltTask


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

"""Tasks of imported models, which only predict. Imports no torch."""

from typing import Literal, Self

from pydantic import model_validator

from anyformer.config import ConfigError, Fault, Pictures, Spec
from anyformer.config.spec import Count, Flag, Size, did_you_mean


class Prompt(Spec):
    """A text that is read before every text, under a name (sentence-transformers)."""

    name: str  # such as "query"
    text: str  # read before each text, without a separator


class Encoder(Spec):
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

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        names = [prompt.name for prompt in self.prompts]
        if len(set(names)) < len(names):
            raise ConfigError([Fault("prompts", f"= {', '.join(names)}: each name must occur once")])
        if self.default_prompt is not None:
            self.prompt_text(self.default_prompt, "default_prompt")
        return self

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


class Transcribe(Spec):
    """Predict with an imported speech model, such as Whisper: the text of a WAV file."""

    kind: Literal["transcribe"] = "transcribe"
    # ids that an answer begins with, step by step: one, or the most probable of several, such as languages
    opening: tuple[tuple[Count, ...], ...] = ()
    suppress: tuple[Count, ...] = ()  # ids that no answer contains
    suppress_first: tuple[Count, ...] = ()  # ids that are not the first after the opening

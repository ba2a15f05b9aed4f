"""The run folder: what training leaves and everything else reads.

    config.json              the model
    task.json                the task
    tokenizer.json           with its chat template (and source_tokenizer.json where the source has its own)
    model.safetensors        the weights
    generation.json          default options of generation, if the run has some
    manifest.json            SHA-256 of each of these, written last: see `runs/atomic_folder.py`

Loading also checks that these files belong together: the weights have the shapes of the model, the tokenizers fit its
vocabularies, and its head fits the task.
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, IdInput, LabelHead, ModelConfig, io
from anyformer.config.outside import RECORD, check_record, record
from anyformer.config.spec import visible
from anyformer.data.tokenizer import CHAT, FILE, TextTokenizer
from anyformer.kernels.hardware import default_device
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.substitute import substitute
from anyformer.nn.uncached import check_parts
from anyformer.recipe import AnyTask, Recipe, Task, TaskFile
from anyformer.runs.atomic_folder import (
    MANIFEST as MANIFEST,
    check_weights as check_weights,
    leftovers as leftovers,
    must_be_file as must_be_file,
    new_folder as new_folder,
    read_json as read_json,
    read_tensors as read_tensors,
    remove as remove,
    remove_leftovers as remove_leftovers,
    seal as seal,
    verify as verify,
    write_folder as write_folder,
    write_tensors as write_tensors,
    writing as writing,
)
from anyformer.tasks.base import BuiltTask, Writer, check_media, media_of, open_media
from anyformer.tasks.generation_defaults import NO_DEFAULTS, GenerationDefaults

if TYPE_CHECKING:
    from anyformer.data.chat_template import ChatTemplate
    from anyformer.nn.transforms.rounding import Bits
    from anyformer.tasks.chat import Conversation
    from anyformer.tasks.generation import Hypothesis
    from anyformer.tasks.scoring import Alternative, TextScore

RECIPE = "recipe.toml"  # of a run that was trained here, and of its checkpoints
SOURCE_TOKENIZER = "source_tokenizer.json"
GENERATION = "generation.json"  # of a run that has defaults of generation
STATE = "state.safetensors"  # beside the weights of a checkpoint
PLACES = "places.txt"  # of steps in a schedule by time, see `training/pace.py`
SNAPSHOTS = "snapshots"  # weights at some steps of a training, see `training/saving.py`
REQUIRED = frozenset({"config.json", "task.json", "tokenizer.json", "model.safetensors"})


@dataclass(frozen=True)
class Run:
    """A trained model with its task and tokenizers.

    A method imports what it needs when it is called: loading a run reads no decoder, and scoring no chat template.

    Attributes:
        model: the `Transformer`.
        task: the task with its tokenizers: it encodes rows, computes losses and metrics, and predicts.
        spec: the task as the recipe has it.
        folder: the folder that the run was loaded from.
        defaults: options of generation that a call need not give.

    Example:
        >>> run = af.load("runs/sort")
        >>> run.predict(["3 1 2"])
        ['1 2 3']
    """

    model: Transformer
    task: BuiltTask
    spec: AnyTask
    folder: Path
    defaults: GenerationDefaults = NO_DEFAULTS  # options of generation that a call need not give

    def __post_init__(self) -> None:
        substitute(self.model)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.task.tokenizer

    @cached_property
    def chat_template(self) -> "ChatTemplate | None":
        """The chat template of the run's tokenizer; None: it has none. See `data/chat_template.py`.

        Raises:
            ConfigError: the template cannot be compiled.

        Example:
            >>> af.load("runs/sort").chat_template is None
            True
        """
        from anyformer.data.chat_template import ChatTemplate

        return ChatTemplate.of(self.tokenizer, f"{visible(str(self.folder / FILE))}: {CHAT}")

    def predict(self, texts: Sequence[str], **options: Any) -> list[str]:
        """Return the task's answers: labels, numbers, translations or continuations.

        Args:
            texts: texts as the task reads them; for models of images the paths of files.
            options: of a task that writes, those of `generate`; of others, such as `prompt_name`, those of the task.

        Returns:
            One answer for each text, in their order, as the files of predictions have it.

        Raises:
            ConfigError: a text or an option does not fit the task or the model.

        Example:
            >>> run = af.load("runs/sort")
            >>> run.predict(["3 1 2", "9 7 8 7"])
            ['1 2 3', '7 7 8 9']
        """
        check_media(self.task, texts)
        if self.defaults != NO_DEFAULTS:  # of a run that generates
            options = self.defaults.merged(options)
        with _finite(self.model):
            return self.task.predict(self.model.eval(), texts, **options)

    def generate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """Return continuations or answers of texts.

        Args:
            texts: prompts of a language model, or sources.
            options: every option of decoding: `max_new_tokens`, `temperature`, `beams`, `stop`, `regex` and others.

        Returns:
            One text for each, without its prompt.

        Raises:
            ConfigError: an option does not fit the strategy or the model, or the model does not write.

        Example:
            >>> run = af.load("runs/sort")
            >>> run.generate(["3 1 2"], max_new_tokens=2)
            ['1 2']
        """
        from anyformer.tasks import generation

        return generation.generate(self.writer(), self.model, texts, **self.defaults.merged(options))

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """Yield the output for one text in pieces; joined, they are the result of `generate`.

        Args:
            text: a prompt or a source.
            options: those of `generate`.

        Yields:
            Text that no later token changes.

        Raises:
            ConfigError: as `generate`, before the first piece.

        Example:
            >>> run = af.load("runs/sort")
            >>> "".join(run.stream("3 1 2"))
            '1 2 3'
        """
        from anyformer.tasks import generation

        return generation.stream(self.writer(), self.model, text, **self.defaults.merged(options))

    def hypotheses(self, texts: Sequence[str], **options: Any) -> "list[list[Hypothesis]]":
        """Return several answers to each text by beam search.

        Args:
            texts: prompts or sources.
            options: `beams`, `n_best` (by default 1) and other options of `generate`.

        Returns:
            For each text the best hypotheses, the first with the highest `score`, each with its `text`.

        Raises:
            ConfigError: `beams` is missing, `n_best` is above it, or an option does not fit.

        Example:
            >>> run = af.load("runs/sort")
            >>> [found] = run.hypotheses(["3 1 2"], beams=3, n_best=2)
            >>> len(found), found[0].text, found[0].score > found[1].score
            (2, '1 2 3', True)
        """
        from anyformer.tasks import generation

        return generation.hypotheses(self.writer(), self.model, texts, **self.defaults.merged(options))

    def score(
        self,
        texts: Sequence[str],
        answers: Sequence[str] | None = None,
        *,
        window: int | None = None,
        stride: int | None = None,
    ) -> "list[TextScore]":
        """Return the log-probability of each text, or of an answer to each.

        Args:
            texts: texts of a language model, or sources.
            answers: one for each text; None: the texts themselves are scored.
            window: of texts that are longer than the model reads, the tokens that it reads at once.
            stride: tokens by which the window moves.

        Returns:
            For each text its `ids`, the `logprobs` of each, their `total` and the `perplexity`.

        Raises:
            ConfigError: a text is longer than the model reads, or the model does not write.

        Example:
            >>> run = af.load("runs/sort")
            >>> right, wrong = run.score(["3 1 2", "3 1 2"], ["1 2 3", "3 2 1"])
            >>> right.total > wrong.total
            True
        """
        from anyformer.tasks import scoring

        check_media(self.task, texts)
        return scoring.score(self.writer(), self.model, texts, answers, window=window, stride=stride)

    def alternatives(self, text: str, k: int = 10, *, answer: str = "", at: int | None = None) -> "list[Alternative]":
        """Return the k most probable next tokens, or those for a mask of a masked language model.

        Args:
            text: a prompt, a source, or a text with a mask.
            k: how many tokens to return.
            answer: the beginning of the answer, before the next token.
            at: number of the token that is predicted, or of the mask; None: the next one, or the only mask.

        Returns:
            Each `token` with its `id` and `probability`, the most probable first.

        Raises:
            ConfigError: a position is outside of the text, or the model neither writes nor fills masks.

        Example:
            >>> run = af.load("runs/sort")
            >>> [first, *_] = run.alternatives("3 1 2", k=3, answer="1")
            >>> first.token
            '2'
        """
        from anyformer.tasks import scoring

        check_media(self.task, [text])
        if self.config.head.output == "masked_lm":
            if answer:
                raise ConfigError([Fault("answer", "is for models that write: this one fills masks")])
            masking: Any = self.task
            return scoring.fillings(masking, self.model, text, k, at=at)
        return scoring.alternatives(self.writer(), self.model, text, k, answer=answer, at=at)

    def chat(self, system: str | None = None) -> "Conversation":
        """Return a new conversation with a model whose tokenizer has a chat template.

        Args:
            system: the message before those of the user; None: none.

        Returns:
            A conversation, whose `reply` yields the answer to a message in pieces.

        Raises:
            ConfigError: the tokenizer has no chat template.

        Example:
            >>> run = af.load("runs/assistant")  # doctest: +SKIP
            >>> conversation = run.chat(system="Answer in one word.")  # doctest: +SKIP
            >>> "".join(conversation.reply("What is the capital of Korea?"))  # doctest: +SKIP
            'Seoul'
        """
        from anyformer.tasks.chat import Conversation

        self.writer()
        if self.chat_template is None or self.config.encoder is not None:
            what = "is no chat model: its tokenizer has no chat template; `anyformer generate` continues texts"
            raise ConfigError([Fault(visible(str(self.folder)), what)])
        return Conversation(self.chat_template, self.model, system, self.defaults)

    def part(self, name: str) -> "Run":
        """Return one task of a mixture as a run with the same model.

        Args:
            name: the name of the task in the recipe.

        Returns:
            A run whose answers are those of this task.

        Raises:
            ConfigError: there is no such task, or the run is no mixture.

        Example:
            >>> run = af.load("runs/multitask")  # doctest: +SKIP
            >>> run.part("sst2").predict(["a fine film"])  # doctest: +SKIP
            ['positive']
        """
        task = self.task.part(name)
        return replace(self, task=task, spec=task.spec)

    def quantise(self, bits: "Bits" = 8) -> "Run":
        """Return the run with weights of 8 or 4 bits, for decoding.

        Args:
            bits: 8 or 4.

        Returns:
            A run whose model cannot be trained; this one keeps its own. See `af.quantise`.

        Raises:
            ValueError: bits are neither 8 nor 4.

        Example:
            >>> run = af.load("runs/sort").quantise(8)
            >>> run.predict(["3 1 2"])
            ['1 2 3']
        """
        from anyformer.nn.transforms.quantise import quantise

        return replace(self, model=quantise(self.model, bits))

    def merge(self) -> "Run":
        """Return the run with its LoRA adapter merged into the weights.

        Returns:
            A run with the same outputs and without an adapter; of a run without one, an equal run.

        Example:
            >>> af.load("runs/sort").merge().config.adapter is None
            True
        """
        from anyformer.nn.transforms.merge import merge

        return replace(self, model=merge(self.model))

    def writer(self) -> Writer:
        """Return the task that generates text.

        Returns:
            The run's task, or of a mixture the one that is used without a name.

        Raises:
            ConfigError: the model does not write.

        Example:
            >>> af.load("runs/sort").writer().spec.kind
            'seq2seq'
        """
        task = self.task.part(None)
        if not isinstance(task, Writer):
            raise ConfigError([Fault("task.kind", f"= '{self.spec.kind}': its model does not write")])
        return task


@contextmanager
def _finite(model: Transformer) -> Iterator[None]:
    """Raise `FloatingPointError` where a head other than a language model's returns NaN: its argmax means nothing."""

    def check(_: Any, __: Any, out: Any) -> None:
        if model.config.head.output != "lm" and out.isnan().any():
            raise FloatingPointError("the model's output is not finite: its weights hold NaN or Inf")

    hook = model.register_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


def load(folder: str | Path, device: str | torch.device | None = None) -> Run:
    """Return a run from its folder, with the weights that are evaluated.

    An unfinished run is loaded from its newest checkpoint. A damaged one is passed over with a warning.

    Args:
        folder: a run folder, or one of its checkpoints.
        device: such as "cpu" or "cuda:1"; None: a GPU where there is one.

    Returns:
        The run; its model is in evaluation mode.

    Raises:
        ConfigError: the folder is no run, a file is missing or differs from its checksum, or the run needs parts from
            outside that are not known (`register`, `--import`).

    Example:
        >>> run = af.load("runs/sort", device="cpu")
        >>> run.config.shape
        'decoder'
    """
    from anyformer.nn.inspection.memory import check_model

    folder = _home(Path(folder))
    listed = verify(folder)
    if missing := REQUIRED - listed:  # a file without a checksum is not read
        raise ConfigError([Fault(str(folder / name), "is not in manifest.json") for name in sorted(missing)])
    check_record(folder / RECORD)
    config = io.load(ModelConfig, folder / "config.json")
    check_model(config, str(folder / "config.json"), bytes_per_value=1)  # whatever the precision of the weights
    file, task = _read_task(folder, listed)
    if faults := [*_task_faults(folder, file.task, config), *_vocabulary_faults(folder, task, config)]:
        raise ConfigError(faults)
    with torch.device("meta"):
        model = Transformer(config)
    weights = weights_at(folder, listed)
    check_weights(folder, model.state_dict(), weights)
    model.load_state_dict(weights, assign=True)
    model.to(device or default_device())
    if (media := open_media(task, config)) is not None:
        media.required = file.media_required
    defaults = io.load(GenerationDefaults, folder / GENERATION) if GENERATION in listed else NO_DEFAULTS
    return Run(model.eval(), task, file.task, folder, defaults)


def unfinished(run: Run, folder: str | Path) -> str | None:
    """Return a line about a run that was loaded from a checkpoint, as its training has not finished; else None."""
    if run.folder == Path(folder):
        return None
    path = run.folder / RECIPE  # verified by its manifest, except in runs of earlier versions
    recipe = io.load(Recipe, path if path.exists() else must_be_file(Path(folder) / RECIPE))
    step = int(run.folder.name.removeprefix("step-"))
    of_all = "" if recipe.train.minutes is not None else f" of {recipe.train.steps:,}"
    return f"training has not finished: this is its checkpoint at step {step:,}{of_all}"


def _home(folder: Path) -> Path:
    """Return the folder whose files are loaded: that of a finished run, else its newest checkpoint that is complete."""
    if os.path.lexists(folder / MANIFEST):
        return folder
    damaged: list[Fault] = []
    state = newest(folder, damaged)
    if state is None and damaged:
        raise ConfigError(damaged)
    if state is None:
        return folder
    if damaged:
        what = "; ".join(map(str, damaged))
        warnings.warn(f"a newer checkpoint is damaged: {what}; {state} is loaded instead", stacklevel=3)
    elif (folder / "model.safetensors").exists():
        warnings.warn(f"{folder}: training has not finished: {state} is loaded", stacklevel=3)
    return state


def weights_at(folder: Path, listed: Iterable[str]) -> dict[str, Tensor]:
    """Return the weights of a run or checkpoint that are evaluated: the moving average where a checkpoint has one."""
    found = read_tensors(folder / "model.safetensors")
    return found | read_tensors(folder / STATE, "ema.") if STATE in listed else found


def load_task(folder: Path) -> BuiltTask:
    """Return the task of a run or checkpoint with its tokenizers, without the model."""
    return _read_task(folder, verify(folder))[1]


def _read_task(folder: Path, listed: Iterable[str]) -> tuple[TaskFile, BuiltTask]:
    found, source = io.load(TaskFile, folder / "task.json"), folder / SOURCE_TOKENIZER
    required = found.source_tokenizer
    if required is None:  # written by an earlier version
        required = source.exists()
    if required != (source.name in listed):
        what = "is not in manifest.json" if required else "is in manifest.json, but task.json needs none"
        raise ConfigError([Fault(str(source), what)])
    source_tokenizer = TextTokenizer.load(source) if required else None
    return found, found.task.build(TextTokenizer.load(folder / "tokenizer.json"), source_tokenizer)


# -- do the files belong together? ------------------------------------------------------------------------------------


def _task_faults(folder: Path, spec: AnyTask, config: ModelConfig) -> Iterator[Fault]:
    """Yield where task.json and config.json contradict each other."""
    path, head = str(folder / "task.json"), config.head
    names = spec.label_names if isinstance(spec, Task) else None
    if spec.head_kind not in (None, head.output):
        yield Fault(path, f"task.kind = '{spec.kind}' does not fit the head '{head.kind}' of config.json")
    elif names is not None and isinstance(head, LabelHead):
        if len(names) != head.labels:
            yield Fault(path, f"has {len(names)} labels, and the head of config.json has {head.labels}")
    elif config.shape not in spec.shapes:
        yield Fault(path, f"task.kind = '{spec.kind}' does not fit the shape '{config.shape}' of config.json")


def _vocabulary_faults(folder: Path, task: BuiltTask, config: ModelConfig) -> Iterator[Fault]:
    """Where a tokenizer has ids beyond the vocabulary of config.json; special tokens may be beyond it."""
    for side, tokenizer in (("source", task.source_tokenizer or task.tokenizer), ("target", task.tokenizer)):
        tokens = getattr(config, side)
        if not isinstance(tokens, IdInput) or tokens.vocab is None or tokenizer.size <= tokens.vocab:
            continue
        if any(i >= tokens.vocab and i not in tokenizer.special for i in tokenizer.inner.get_vocab().values()):
            name = SOURCE_TOKENIZER if tokenizer is task.source_tokenizer else "tokenizer.json"
            what = f"has {tokenizer.size} ids, and {side}.vocab of config.json is {tokens.vocab}"
            yield Fault(str(folder / name), what)


# -- checkpoints and snapshots ----------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return _steps(folder / "state")


def snapshots(folder: Path) -> list[Path]:
    """Return the snapshots of a run, oldest first."""
    return _steps(folder / SNAPSHOTS)


def _steps(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("step-*") if path.name.removeprefix("step-").isdecimal())


def newest(folder: Path, damaged: list[Fault] | None = None) -> Path | None:
    """Return the newest checkpoint of an unfinished run that is complete. Add the faults of newer ones."""
    for state in reversed(checkpoints(folder)):
        try:
            verify(state)
        except ConfigError as error:
            if damaged is not None:
                damaged += error.faults
            continue
        return state
    return None


def write_run(folder: Path, run: Run) -> None:
    """Write the files of a run into another folder."""
    check_parts(run.model, "is saved with it:")
    write_model(folder, run.model.state_dict(), run.config, run.spec, run.task)
    if run.defaults != NO_DEFAULTS:
        io.save(run.defaults, folder / GENERATION)


def write_model(folder: Path, weights: dict[str, Tensor], config: ModelConfig, spec: AnyTask, task: BuiltTask) -> None:
    """Write the files that make a folder loadable."""
    io.save(config, folder / "config.json")
    tokenizers = [task.tokenizer, *filter(None, [task.source_tokenizer])]
    record((config, spec, *(tokenizer.part for tokenizer in tokenizers)), folder / RECORD)
    media, source = media_of(task), task.source_tokenizer is not None
    required = media is not None and media.required
    io.save(TaskFile(task=spec, source_tokenizer=source, media_required=required), folder / "task.json")
    task.tokenizer.save(folder / "tokenizer.json")
    if task.source_tokenizer is not None:
        task.source_tokenizer.save(folder / SOURCE_TOKENIZER)
    write_tensors(folder / "model.safetensors", weights)

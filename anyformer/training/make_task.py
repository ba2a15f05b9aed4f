"""The task of a recipe with its tokenizers, and the model's config with their vocabularies."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from anyformer.config import ConfigError, Fault, IdInput, LabelHead, ModelConfig, Special, io
from anyformer.config.position import RotaryScheme, Sinusoidal
from anyformer.config.spec import MAX_WORD, shorten
from anyformer.data.conversations import MESSAGES, texts_of
from anyformer.data.media import without_references
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.recipe import (
    AnyTokenizer,
    DataTokenizer,
    Recipe,
    RunTokenizer,
    Task,
    scaled_model,
)
from anyformer.runs.run import RECIPE, STATE, Run, load, must_be_file
from anyformer.tasks.base import BuiltTask
from anyformer.tasks.chat import ChatWriter
from anyformer.training.finetune import config_differences

MAX_LABELS, MAX_DIFFERENCES = 10, 10  # that a message lists
TEACHER = "train.teacher.run"
TEXT_COLUMNS = ("text", "pair", "source", "target", "rejected", "words", "messages")  # that a tokenizer reads


def make_task(recipe: Recipe, train: Rows, console: Console) -> BuiltTask:
    """Return the task with its tokenizers.

    With `train.init_from`, the tokenizers are those of the first run if both recipes name the same kind: its weights
    depend on them. Else those of a teacher are, likewise.
    """
    first, teacher, spec = recipe.train.init_from, recipe.train.teacher, recipe.task.complete(train)
    key, folder = (TEACHER, teacher.run) if first is None and teacher is not None else ("train.init_from", first)
    if folder is None:
        return _new_task(recipe, spec, train)
    other, saved = load_other(folder, key), must_be_file(Path(folder) / RECIPE)
    is_run = saved.exists() and not (saved.parent / STATE).exists()  # of a checkpoint, any recipe uses the tokenizer
    before = io.load(Recipe, saved) if is_run else recipe
    same = (before.tokenizer, before.source_tokenizer) == (recipe.tokenizer, recipe.source_tokenizer)
    if same or isinstance(recipe.tokenizer, RunTokenizer):
        console.print(f"tokenizer: that of {folder}", markup=False, soft_wrap=True)
        tokenizer = spec.with_tokens(other.task.tokenizer, is_new=False)
        task = spec.build(tokenizer, other.task.source_tokenizer)
    else:
        task = _new_task(recipe, spec, train)
    faults = []
    if (
        "source" in spec.columns
        and task.tokenizer.chat
        and not isinstance(task, ChatWriter)
        and recipe.model.encoder is None
    ):
        what = "has a chat template, and rows of this task are `source <sep> target`, which no chat has"
        fix = "set task.kind = 'chat', and messages = [SOURCE, TARGET] in the place of `source` and `target`"
        raise ConfigError([Fault("task.kind", f"= '{spec.kind}': the tokenizer of {folder} {what}: {fix}")])
    if vocabularies(task) != vocabularies(other.task):
        faults.append("its tokenizer differs: set tokenizer = 'run', the tokenizer of its recipe, or its file")
    if not faults and first is not None:
        faults = config_differences(other.config, fit_config(recipe, task), task.spec)[:MAX_DIFFERENCES]
    if faults:
        raise ConfigError(Fault(key, f"= '{folder}': {what}") for what in faults)
    return task


def load_other(folder: str, key: str) -> Run:
    """Return the run that a key of the recipe names."""
    try:
        return load(folder)
    except ConfigError as error:
        raise ConfigError(Fault(key, f"= '{folder}': {fault}") for fault in error.faults) from None


def vocabularies(task: BuiltTask) -> list[str]:
    """Return the tokenizers of a task as JSON, without chat templates: weights do not depend on these."""
    both = (task.tokenizer, task.source_tokenizer)
    return [tokenizer.with_chat(None).to_json() for tokenizer in both if tokenizer is not None]


def _new_task(recipe: Recipe, spec: Task, train: Rows) -> BuiltTask:
    """Return the task with tokenizers that are trained on the training data or read from a file."""
    reads_media = any(read.stream for read in recipe.model.inputs.values())

    def texts(*names: str) -> Iterator[str]:
        for column in names:
            for cell in train.columns[column]:
                yield from texts_of(column, without_references(cell) if reads_media else cell)

    def make(name: str, tokenizer: AnyTokenizer, *columns: str) -> TextTokenizer:
        assert not isinstance(tokenizer, RunTokenizer)
        if isinstance(tokenizer, DataTokenizer):
            assert train.stream is not None
            return train.stream.tokenizer()
        try:
            return spec.with_tokens(train_tokenizer(tokenizer, texts(*columns), recipe.data), is_new=True)
        except ConfigError as error:
            raise ConfigError(fault.under(name) for fault in error.faults) from None

    if recipe.source_tokenizer is None:
        wanted = {*spec.columns, MESSAGES} & train.columns.keys()
        read = (name for name in TEXT_COLUMNS if name in wanted)
        return spec.build(make("tokenizer", recipe.tokenizer, *read))
    target, source = make("tokenizer", recipe.tokenizer, "target"), recipe.source_tokenizer
    return spec.build(target, make("source_tokenizer", source, "source"))


def fit_config(recipe: Recipe, task: BuiltTask) -> ModelConfig:
    """Return the recipe's model with what only its data know: vocabularies, special ids, labels, the longest text."""
    model, target, source = recipe.model, task.tokenizer, task.source_tokenizer or task.tokenizer
    faults = []
    changes: dict[str, object] = {}
    for name, tokenizer in (("source", source), ("target", target)):
        spec = getattr(model, name)
        if spec is None:
            continue
        if not isinstance(spec, IdInput):
            faults.append(Fault(f"model.{name}", f"reads {spec.kind}: recipes train on text, so it must be tokens"))
            continue
        if spec.vocab is not None and spec.vocab < tokenizer.size:
            faults.append(Fault(f"model.{name}.vocab", f"= {spec.vocab}: the tokenizer has {tokenizer.size} ids"))
        changes[name] = spec.model_copy(update={"vocab": spec.vocab or tokenizer.size})
    if (names := task.spec.label_names) is not None and isinstance(model.head, LabelHead):
        size = model.head.labels
        if size == "auto":
            changes["head"] = model.head.model_copy(update={"labels": len(names)})
        elif len(names) != size:
            shown = ", ".join([shorten(name, MAX_WORD) for name in names[:MAX_LABELS]])
            shown += f", and {len(names) - MAX_LABELS} more" if len(names) > MAX_LABELS else ""
            faults.append(Fault("model.head.labels", f"= {size}: the task has {len(names)} labels: {shown}"))
    assert isinstance(task.spec, Task)
    if why := task.spec.unknown_measure(recipe.train.best):
        faults.append(Fault("train.best", f"= '{recipe.train.best}': {why}"))
    if faults:
        raise ConfigError(faults)
    start = getattr(task.spec, "start", None)
    start = target.bos if start is None else start
    stops = tuple(task.stops) if isinstance(task, ChatWriter) else ()
    changes["special"] = Special(pad=target.pad, bos=target.bos, eos=target.eos, start=start, stops=stops)
    if (length := _longest_row(recipe)) is not None:
        changes["context"] = max(length, model.context or 0)
    return scaled_model(model.model_copy(update=changes), recipe.train.scale)


def _longest_row(recipe: Recipe) -> int | None:
    """Return the tokens of a row in training, beyond which the positions of a decoder mean nothing; None: no limit."""
    decoder, batches = recipe.model.decoder, recipe.batches
    if decoder is None or recipe.model.encoder is not None or decoder.memory:
        return None
    return batches.row_length if isinstance(decoder.position, Sinusoidal | RotaryScheme) else None

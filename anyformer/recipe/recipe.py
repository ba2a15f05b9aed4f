"""The recipe of a run, and the rules between its parts. Imports no torch."""

from collections.abc import Iterator
from typing import Self

from pydantic import model_validator

from anyformer.config import Block, ConfigError, Fault, IdInput, ModelConfig, Spec
from anyformer.config.spec import Count, Flag, did_you_mean
from anyformer.data.datasets.registry import registry
from anyformer.recipe import label_task as label_task, seq2seq_task as seq2seq_task, text_task as text_task
from anyformer.recipe.batches import Batches, Packed, TextBatches
from anyformer.recipe.data import Data, splits
from anyformer.recipe.source import source_faults
from anyformer.recipe.task import AnyTask, Task
from anyformer.recipe.tokenizer import AnyTokenizer, DataTokenizer, RunTokenizer, Tokenizer
from anyformer.recipe.train import Processes, Train
from anyformer.recipe.width_transfer import scale_faults


class Recipe(Spec):
    """Everything a run is made from."""

    task: Task  # what the model learns
    data: Data  # the examples
    tokenizer: AnyTokenizer  # tokenizer of the texts; of the target if `source_tokenizer` is given
    source_tokenizer: Tokenizer | None = None  # tokenizer of the source; None: one tokenizer for source and target
    model: ModelConfig  # the model; a `vocab` that is not given is the size of the tokenizer's
    batches: Batches  # how examples are grouped into batches
    train: Train  # the training loop
    parallel: Processes = Processes()  # how the model is divided among processes
    seed: Count = 0  # seed of weights, order of the data and dropout

    @model_validator(mode="after")
    def _check(self) -> Self:
        rules = (_batch_faults, _data_faults, _tokenizer_faults, _train_faults, _tensor_faults, _context_faults)
        faults = [*self.task.model_faults(self.model), *(fault for rule in rules for fault in rule(self))]
        faults += self.task.faults(self)
        if faults:
            raise ConfigError(faults)
        return self


def _batch_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what makes the batches unfit for the task and the model."""
    batches, model = recipe.batches, recipe.model
    if why := _unfit_batches(recipe):
        yield Fault("batches.kind", f"= '{batches.kind}': {why}")
    if batches.rounds_lengths and (why := recipe.task.real_rows):
        what = f"the task {recipe.task.kind} {why}, and some would be empty"
        yield Fault("batches.few_shapes", f"= true: {what}")
    if isinstance(batches, Packed) and batches.length > batches.tokens:
        yield Fault("batches.length", f"= {batches.length}: must be at most tokens = {batches.tokens}")
    side, stack = next(reversed(model.stacks.items()))
    if isinstance(batches, TextBatches) and stack.limit is not None and batches.length > stack.limit:
        yield Fault("batches.length", f"= {batches.length}: the {side} has {stack.limit} positions")


def _unfit_batches(recipe: Recipe) -> str:
    """Return why the task or the model cannot be trained on this kind of batches; empty if it can."""
    kind, decoder = recipe.batches.kind, recipe.model.decoder
    if why := recipe.task.unfit_batches(kind, recipe.model):
        return why
    if decoder and decoder.memory and kind != "ordered":
        return "a model with memory continues from batch to batch: use 'ordered'"
    if recipe.data.train.is_tokenised and kind not in ("crops", "ordered"):
        return "shards are one long text: use 'crops' or 'ordered'"
    return ""


def _data_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what makes the sources unfit for the task."""
    task, data = recipe.task, recipe.data
    for i, one in enumerate(data.sets):
        if one not in registry():
            yield Fault(f"data.sets.{i}", f"= '{one}': no such data set; {did_you_mean(one, registry())}")
    for _, key, _, source in splits(data):
        yield from (f.under(key) for f in source_faults(source, task.kind, task.columns))
    media = [read.stream for read in recipe.model.inputs.values()]
    for kind in ("image", "audio"):
        if getattr(data.augment, kind, None) is not None and not any(getattr(one, kind, None) for one in media):
            yield Fault(f"data.augment.{kind}", f"the model reads no {kind}: set `media` of its input")


def _tokenizer_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what makes the tokenizers unfit for the model and the data."""
    model, tokenizer = recipe.model, recipe.tokenizer
    if recipe.source_tokenizer and model.shape != "encoder-decoder":
        yield Fault("source_tokenizer", "only an encoder-decoder has a vocabulary for the source: leave it out")
    if recipe.source_tokenizer and model.ties_inputs:
        yield Fault("model.tie", f"= '{model.tie}': two tokenizers have two vocabularies, which cannot share a table")
    if isinstance(tokenizer, RunTokenizer) and recipe.train.init_from is None and recipe.train.teacher is None:
        yield Fault("tokenizer", "= 'run': set train.init_from to the run that has the tokenizer")
    if recipe.data.train.is_tokenised:
        if not tokenizer.is_ready:
            yield Fault("tokenizer", f"= '{tokenizer.kind}': shards include their tokenizer: use 'data'")
    elif isinstance(tokenizer, DataTokenizer):
        yield Fault("tokenizer", f"= 'data': only shards have one, and data.train is {recipe.data.train.kind}")


def _train_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield training settings that do not fit the task, the model, or each other."""
    task, head, train = recipe.task, recipe.model.head, recipe.train
    if train.own_tokens and not task.takes_own_tokens:
        yield Fault("train.own_tokens", f"is for the tasks seq2seq and mixture, and this is {task.kind}")
    if train.label_smoothing and (head.joint or not task.smooths_labels):
        what = "needs one correct label among several, as in classify without a separator"
        if head.joint:
            what = "a CRF has no loss per word; set it to 0, or model.head.crf = false"
        yield Fault("train.label_smoothing", f"= {train.label_smoothing}: {what}")
    if train.teacher and (why := _without_distribution(recipe)):
        yield Fault("train.teacher", f"needs a softmax over tokens or labels: {why}")
    if recipe.model.adapter and train.init_from is None:
        yield Fault("model.adapter", "LoRA needs pretrained weights: set train.init_from")
    if train.base_bits and recipe.model.adapter is None:
        yield Fault("train.base_bits", f"= {train.base_bits}: rounds the weights under an adapter: set model.adapter")
    if train.base_bits and train.precision == "fp8":
        yield Fault("train.precision", f"= 'fp8': weights of train.base_bits = {train.base_bits} need 'auto' or 'bf16'")
    if train.average > 1 and train.save_every is None:
        yield Fault("train.average", f"= {train.average}: needs checkpoints to average: set train.save_every")
    if why := task.unknown_measure(train.best):
        yield Fault("train.best", f"= '{train.best}': {why}")
    for name, divided in (("shard", recipe.parallel.shard == "full"), ("tensor", recipe.parallel.tensor > 1)):
        if divided and train.optimizer.needs_whole:
            what = f"needs whole weights, and parallel.{name} = {getattr(recipe.parallel, name)!r} divides them"
            instead = "use 'muon', which also stores less than 'adamw'"
            yield Fault("train.optimizer.kind", f"= '{train.optimizer.kind}': {what}; {instead}")
    yield from scale_faults(recipe.model, train.scale, train.optimizer, train.init_from)
    if train.patience and (train.evaluate_every is None or recipe.data.valid is None):
        yield Fault("train.patience", f"= {train.patience}: needs data.valid and train.evaluate_every")


def _tensor_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what cannot be trained with weights that are split among processes (tensor parallelism).

    Sizes that cannot be split are found later, when the vocabulary is known.
    """
    size, train = recipe.parallel.tensor, recipe.train
    if size == 1:
        return
    if train.precision in ("fp16", "fp8"):
        what = "loss scaling" if train.precision == "fp16" else "matmuls in fp8"
        yield Fault("train.precision", f"= '{train.precision}': parallel.tensor = {size} has no {what}; use 'bf16'")
    if train.base_bits is not None:
        what = f"rounded weights cannot be split: set parallel.tensor = 1, not {size}, or leave base_bits out"
        yield Fault("train.base_bits", f"= {train.base_bits}: {what}")


def _context_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield what cannot be trained on a part of each row (context parallelism)."""
    train = recipe.train
    if recipe.parallel.context == 1:
        return
    yield from (_context_fault(recipe, what) for what in context_faults(recipe.model))
    if train.teacher:
        yield _context_fault(recipe, "train.teacher reads whole rows")
    if train.own_tokens:
        yield _context_fault(recipe, "train.own_tokens replaces tokens in whole rows")
    if train.compile == "on":
        yield _context_fault(recipe, "train.compile = 'on' cannot compile the exchange of keys: use 'auto'")


def _context_fault(recipe: Recipe, what: str) -> Fault:
    return Fault("parallel.context", f"= {recipe.parallel.context}: {what}")


def _without_distribution(recipe: Recipe) -> str:
    """Return why a teacher has no distributions for the student to learn; empty if it has."""
    head = recipe.model.head
    if why := recipe.task.without_distribution:
        return why
    if head.joint:
        return "a CRF has none per word; set model.head.crf = false"
    if head.further:
        return "a teacher has none for the further tokens of model.head.multi_token; leave it out"
    return ""


class TaskFile(Spec):
    """The contents of a run's task.json."""

    task: AnyTask  # the task, with its settings
    source_tokenizer: Flag | None = None  # source_tokenizer.json is required; None: written by an earlier version
    media_required: Flag = False  # every training row had an image, sound or vector: texts without one are refused


# -- models that several processes share: their layers (parallel.tensor) or rows (parallel.context) --------------------


def context_faults(model: ModelConfig) -> Iterator[str]:
    """Yield the parts of a model that need whole rows, each with the reason."""
    for name, source in model.inputs.items():
        if not isinstance(source, IdInput):
            yield f"model.{name} = '{source.kind}' is read as a whole"
    for side, stack in model.stacks.items():
        for name, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
            for i, block in enumerate(blocks):
                if block.mixer.has_state:
                    yield f"model.{side}.{name}.{i}.mixer = '{block.mixer.kind}' reads one token after the other"
        if stack.memory:
            yield f"model.{side}.memory = {stack.memory} stores whole rows"
        if stack.pooling:
            yield f"model.{side}.pooling pools tokens that different processes hold"
    if model.head.further:
        yield "model.head.multi_token predicts tokens that other processes hold"


def tensor_faults(config: ModelConfig, size: int) -> Iterator[Fault]:
    """Yield faults of a model whose layers `size` processes share (`parallel.tensor`)."""
    for side, stack in config.stacks.items():
        for field, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
            for i, block in enumerate(blocks):
                yield from (fault.under(f"{side}.{field}.{i}") for fault in _block_faults(block, config.width, size))
    if config.head.further:
        what = f"is computed by one process: leave it out, or set parallel.tensor = 1, not {size}"
        yield Fault("head.multi_token", what)
    for name, tokens in config.inputs.items():
        if tokens.rows % size:
            fix = f"set it to {-(-tokens.rows // size) * size}, and the last rows are unused"
            yield Fault(f"{name}.vocab", f"= {tokens.rows}: {_must_divide(size)}; {fix}")


def _block_faults(block: Block, width: int, size: int) -> Iterator[Fault]:
    for name, mixer in block.attentions():
        if mixer.qk_norm_over != "head" and size > 1:
            what = f"= '{mixer.qk_norm_over}': heads with their own norms, or one for all, cannot be split"
            yield Fault(f"{name}.qk_norm_over", f"{what}; set parallel.tensor = 1")
        for field, heads in (("heads", mixer.heads), ("kv_heads", mixer.groups)):
            if heads % size and (field == "heads" or mixer.heads % size == 0):
                fix = "lower parallel.tensor, or change the heads"
                yield Fault(f"{name}.{field}", f"= {heads}: {_must_divide(size)}; {fix}")
    for field, value, whole in block.feedforward.divided_sizes(width):
        if whole % size and whole == value:
            fix = f"set it to {-(-whole // size) * size}"
            yield Fault(f"feedforward.{field}", f"= {whole}: {_must_divide(size)}; {fix}")
        elif whole % size:
            what = f"= {value}: the {field} network is {whole} wide, and this {_must_divide(size)}"
            yield Fault(f"feedforward.{field}", what)


def _must_divide(size: int) -> str:
    return f"must be a multiple of parallel.tensor = {size}"

"""Preparation of a training run: read the data, train or load the tokenizer, build the model, find the checkpoint."""

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from anyformer.config import Classifier, ConfigError, Fault, ModelConfig, Special, TokenLabels, Tokens, io
from anyformer.config.spec import MAX_WORD, shorten
from anyformer.data.conversations import texts_of, with_template
from anyformer.data.fingerprint import fingerprint
from anyformer.data.loader import CropLoader, Cursor, Loader
from anyformer.data.media import without_references
from anyformer.data.readers import Rows, check_bad_rows, common_inputs, read
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.inspection.capacity import check_model, exceeding
from anyformer.nn.model import Transformer
from anyformer.parallel.tensor import split_faults
from anyformer.recipe import (
    Actions,
    AnyTask,
    AnyTokenizer,
    Chat,
    Classify,
    Crops,
    DataTokenizer,
    Embed,
    Mixture,
    NamedSplit,
    Ordered,
    Padded,
    Recipe,
    Regress,
    RunTokenizer,
    Seq2Seq,
    SpanCorruption,
    Tag,
    columns,
    scaled_model,
    splits,
)
from anyformer.run import (
    RECIPE,
    STATE,
    Run,
    check_weights,
    load,
    load_task,
    must_be_file,
    read_tensors,
    remove_leftovers,
)
from anyformer.tasks.base import Task, open_media, readable
from anyformer.tasks.build import build_task
from anyformer.tasks.chat import Conversing
from anyformer.tasks.classify import with_labels
from anyformer.tasks.mixture import task_token
from anyformer.tasks.regress import scaled
from anyformer.tasks.tag import with_tags
from anyformer.training.checkpoint import TrainState, read_state
from anyformer.training.compiler import compile_options
from anyformer.training.finetune import config_differences, copy_weights, describe_new, freeze
from anyformer.training.hidden_matrices import hidden_matrices
from anyformer.training.job import Job
from anyformer.training.machine import advise_if_busy, choose_execution
from anyformer.training.optimisers import training_optimizer
from anyformer.training.parallel import SINGLE, Ranks, divide_model
from anyformer.training.resume import changed_data, find_checkpoint
from anyformer.training.snapshots import drop_snapshots
from anyformer.training.weight_formats import convert_to_fp8, round_frozen
from anyformer.training.width_transfer import scale_weights

MAX_LABELS, MAX_DIFFERENCES = 10, 10  # that a message lists
TEXT_COLUMNS = ("text", "pair", "source", "target", "words", "messages")  # that a tokenizer reads


def prepare(
    recipe: Recipe,
    out: Path,
    resume: bool,
    console: Console,
    ranks: Ranks = SINGLE,
    *,
    allow_changed_data: bool = False,
) -> Job:
    """Build a training run in the folder `out`. Data that changed since a checkpoint is refused unless allowed."""
    memory = recipe.model.decoder.memory if recipe.model.decoder else 0
    if memory and ranks.size > 1:
        what = f"= {memory}: the memory of a batch is held by one process; train without torchrun"
        raise ConfigError([Fault("model.decoder.memory", what)])
    if isinstance(recipe.task, Embed) and ranks.size > 1:
        what = "= 'embed': each pair is compared with all others of its batch in one process; train without torchrun"
        raise ConfigError([Fault("task.kind", what)])
    checkpoint, damaged = ranks.on_first(lambda: find_checkpoint(recipe, out, resume))
    changed = ranks.on_first(lambda: changed_data(recipe, checkpoint, allow_changed_data, console))
    read_splits = ranks.on_each(lambda: read_rows(recipe))
    data = ranks.on_first(lambda: fingerprint(recipe.data))

    def get_task() -> Task:
        return make_task(recipe, read_splits["train"], console) if checkpoint is None else load_task(checkpoint)

    task = ranks.on_first(get_task)
    train, valid = ranks.on_each(lambda: fit_rows(recipe, task, read_splits, console))
    read_splits.clear()  # frees the rows that do not fit

    def prepare_folder() -> None:
        out.mkdir(parents=True, exist_ok=True)
        remove_leftovers(out)
        remove_leftovers(out / "state")
        for path, error in damaged.items():
            aside = path.with_name(f"damaged-{path.name}-{secrets.token_hex(4)}")
            path.rename(aside)  # its step will be saved again
            for fault in error.faults:
                console.print(f"skipped: {fault}; the checkpoint is now {aside.name}", markup=False, soft_wrap=True)
        if checkpoint is None:
            drop_snapshots(out, after=-1)  # of a run that ended before its first checkpoint
            io.save(recipe, out / RECIPE)

    job = build(recipe, out, task, train, valid, console, checkpoint, ranks)
    job.data = data
    ranks.on_first(prepare_folder)  # after all checks: a refused training leaves no folder
    if checkpoint is None:
        return job
    job.state, scaler_state, changes = read_state(checkpoint, job.model, job.optimizer, ranks)
    if scaler_state:
        job.scaler.load_state_dict(scaler_state)
    if any(key.startswith("data.train.") for key in changed) and not isinstance(job.loader, CropLoader):
        next_epoch = Cursor(job.state.cursor.epoch + 1, 0)  # the rest of this epoch would be other rows
        job.state.cursor, job.state.segment_memory = next_epoch, None
    console.print(f"resuming from step {job.state.step}", markup=False)
    if changes:
        console.print(f"bits may differ from an uninterrupted run: {'; '.join(changes)}", markup=False)
    return job


def build(
    recipe: Recipe,
    out: Path,
    task: Task,
    train: Rows,
    valid: Rows | None,
    console: Console,
    checkpoint: Path | None = None,
    ranks: Ranks = SINGLE,
) -> Job:
    """Build model (with the weights of a checkpoint), optimiser and loader at the first step; nothing is written."""
    padded = isinstance(recipe.batches, Padded)
    compile = "off" if recipe.parallel.context > 1 else recipe.train.compile  # the exchange of keys is not compiled
    execution = choose_execution(recipe.train.precision, compile, padded=padded)
    device, precision = torch.device(execution.device.value), execution.precision.value
    compiled = execution.compile.value == "on"
    advise_if_busy(device, console)

    def make() -> tuple[Transformer, Loader]:
        torch.manual_seed(recipe.seed)
        config = fit_config(recipe, task)
        bits = recipe.train.base_bits
        with torch.device("cpu" if bits else device):  # weights that will be rounded are never on the device in fp32
            model = Transformer(config)
        scale_weights(model, recipe.train.scale)
        if precision == "fp8":
            convert_to_fp8(model, console)
        new = list[str]()
        if checkpoint is not None:
            weights = read_tensors(checkpoint / "model.safetensors")
            check_weights(checkpoint, model, weights)
            model.load_state_dict(weights)
        elif recipe.train.init_from is not None:
            first = recipe.train.init_from
            if new := [name for name in copy_weights(model, task.spec, load(first)) if ".lora." not in name]:
                console.print(describe_new(first, new), markup=False, soft_wrap=True)
        freeze(model, recipe.train.freeze, new)
        if bits:
            round_frozen(model, bits)
            model.to(device)
        return model, task.loader(train, recipe.batches, recipe.seed, model)

    model, loader = ranks.on_each(make)
    options = compile_options(model.config, precision == "fp8")
    compile_part = (lambda part: part.compile(options=options)) if compiled else None
    matrices = hidden_matrices(model)  # before they are split
    divide_model(model, ranks, recipe.parallel.shard, device, compile_part)
    optimizer = training_optimizer(recipe.train, model, matrices)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return Job(
        recipe=recipe,
        out=out,
        device=device,
        precision=precision,
        compiled=compiled,
        task=task,
        model=model,
        optimizer=optimizer,
        loader=loader,
        valid=valid,
        state=TrainState(),
        scaler=scaler,
        console=console,
        ranks=ranks,
    )


Splits = dict[str, Rows]  # "train", "valid", "test" or the names of test sets


def read_rows(recipe: Recipe) -> Splits:
    """Read the rows of all data of a recipe, and raise the faults of all of them together."""
    data = recipe.data
    return _each({one.name: partial(read, one.source, data, one.split, recipe.seed, one.key) for one in splits(data)})


def fit_rows(recipe: Recipe, task: Task, found: Splits, console: Console) -> tuple[Rows, Rows | None]:
    """Return the training and validation rows that the model can read; skipped bad rows are printed.

    Test rows are checked, too, so that their faults are found before training, and are not returned.
    """
    config = fit_config(recipe, task)
    if recipe.parallel.tensor > 1 and (faults := list(split_faults(config, recipe.parallel.tensor))):
        raise ConfigError(fault.under("model") for fault in faults)
    _check_capacity(recipe, config)
    media = open_media(task, config, recipe.data.augment)

    def fit(one: NamedSplit) -> Rows:
        rows = task.filter_rows(
            readable(found[one.name], media), config, recipe.batches if one.split == "train" else None
        )
        return check_bad_rows(rows, recipe.data, one.key)

    fitting = _each({one.name: partial(fit, one) for one in splits(recipe.data) if one.name in found})
    for split, rows in fitting.items():
        if rows.bad:
            first = "; ".join(str(bad) for bad in rows.bad[:3])
            console.print(f"{split}: {len(rows.bad)} bad rows skipped: {first}", markup=False, soft_wrap=True)
        if split != "train" and (count := common_inputs(rows, fitting["train"], columns(recipe.task))):
            what = f"the inputs of {count:,} of {len(rows):,} rows occur in training, too, which makes metrics too good"
            console.print(f"{split}: {what}; `group` keeps equal rows together", markup=False, soft_wrap=True)
    return fitting["train"], fitting.get("valid")


def _each(work: dict[str, Callable[[], Rows]]) -> Splits:
    """Call a function for each split, and raise the faults of all of them as one `ConfigError`."""
    done, faults = Splits(), list[Fault]()
    for split, make in work.items():
        try:
            done[split] = make()
        except ConfigError as error:
            faults += [fault for fault in error.faults if fault not in faults]  # two splits may read one file
    if faults:
        raise ConfigError(faults)
    return done


def _check_capacity(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse a model or a batch that does not fit into the memory of the device."""
    limit = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    whole = recipe.parallel.shard == "none" and recipe.parallel.tensor == 1
    check_model(config, "model", training=recipe.train.optimizer if whole else None, limit=limit)
    if isinstance(batches := recipe.batches, Crops | Ordered):
        tokens = batches.rows * batches.length
        what = f"= {batches.rows}: {tokens:,} tokens in a batch"
        # ids of 8 bytes, and at least one vector of the model in half precision
        if faults := list(exceeding(tokens * (8 + 2 * config.width), what, limit)):
            raise ConfigError(fault.under("batches.rows") for fault in faults)


def make_task(recipe: Recipe, train: Rows, console: Console) -> Task:
    """Return the task with its tokenizers.

    With `train.init_from`, the tokenizers are those of the first run if both recipes name the same kind: its weights
    depend on them.
    """
    first, spec = recipe.train.init_from, _complete_spec(recipe.task, train)
    if first is None:
        return _new_task(recipe, spec, train)
    other, saved = _load_first(first), must_be_file(Path(first) / RECIPE)
    is_run = saved.exists() and not (saved.parent / STATE).exists()  # of a checkpoint, any recipe uses the tokenizer
    before = io.load(Recipe, saved) if is_run else recipe
    same = (before.tokenizer, before.source_tokenizer) == (recipe.tokenizer, recipe.source_tokenizer)
    if same or isinstance(recipe.tokenizer, RunTokenizer):
        console.print(f"tokenizer: that of {first}", markup=False, soft_wrap=True)
        tokenizer = other.task.tokenizer
        if isinstance(spec, Chat) and spec.template is not None:
            tokenizer = with_template(tokenizer, spec.template)
        task = build_task(spec, tokenizer, other.task.source_tokenizer)
    else:
        task = _new_task(recipe, spec, train)
    faults = []
    if _vocabularies(task) != _vocabularies(other.task):
        faults.append("its tokenizer differs: set tokenizer = 'run', the tokenizer of its recipe, or its file")
    faults = faults or config_differences(other.config, fit_config(recipe, task), task.spec)[:MAX_DIFFERENCES]
    if faults:
        raise ConfigError(Fault("train.init_from", f"= '{first}': {what}") for what in faults)
    return task


def _load_first(first: str) -> Run:
    try:
        return load(first)
    except ConfigError as error:
        raise ConfigError(Fault("train.init_from", f"= '{first}': {fault}") for fault in error.faults) from None


def _vocabularies(task: Task) -> list[str]:
    """Return the tokenizers of a task as JSON, without chat templates: weights do not depend on these."""
    both = (task.tokenizer, task.source_tokenizer)
    return [tokenizer.with_chat(None).to_json() for tokenizer in both if tokenizer is not None]


def _complete_spec(spec: AnyTask, train: Rows) -> AnyTask:
    """Return the spec completed from the training rows: names of labels or tags, or mean and deviation of targets."""
    match spec:
        case Classify():
            return with_labels(spec, train.columns["label"])
        case Regress():
            return scaled(spec, train.columns["label"])
        case Tag():
            return with_tags(spec, train.columns["tags"])
        case _:
            return spec


def _new_task(recipe: Recipe, spec: AnyTask, train: Rows) -> Task:
    """Return the task with tokenizers that are trained on the training data or read from a file."""
    both = recipe.model.source, recipe.model.target
    reads_media = any(isinstance(one, Tokens) and one.media is not None for one in both)

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
            trained = train_tokenizer(tokenizer, texts(*columns), recipe.data)
            match spec:
                case SpanCorruption(sentinels=sentinels):
                    return trained.with_sentinels(sentinels)
                case Mixture(parts=parts):
                    return trained.with_special([task_token(part.name) for part in parts])
                case Actions():
                    return trained.with_special(spec.special_tokens)
                case Chat(template=str(template)):
                    return with_template(trained, template)
                case _:
                    return trained
        except ConfigError as error:
            raise ConfigError(fault.under(name) for fault in error.faults) from None

    if recipe.source_tokenizer is None:
        read = (name for name in columns(recipe.task) if name in TEXT_COLUMNS)
        return build_task(spec, make("tokenizer", recipe.tokenizer, *read), None)
    target, source = make("tokenizer", recipe.tokenizer, "target"), recipe.source_tokenizer
    return build_task(spec, target, make("source_tokenizer", source, "source"))


def fit_config(recipe: Recipe, task: Task) -> ModelConfig:
    """Return the recipe's model with the vocabularies and special ids of the tokenizers, and the number of labels."""
    model, target, source = recipe.model, task.tokenizer, task.source_tokenizer or task.tokenizer
    faults = []
    changes: dict[str, object] = {}
    for name, tokenizer in (("source", source), ("target", target)):
        spec = getattr(model, name)
        if spec is None:
            continue
        if not isinstance(spec, Tokens):
            faults.append(Fault(f"model.{name}", f"reads {spec.kind}: recipes train on text, so it must be tokens"))
            continue
        if spec.vocab is not None and spec.vocab < tokenizer.size:
            faults.append(Fault(f"model.{name}.vocab", f"= {spec.vocab}: the tokenizer has {tokenizer.size} ids"))
        changes[name] = spec.model_copy(update={"vocab": spec.vocab or tokenizer.size})
    if isinstance(task.spec, Classify | Tag) and isinstance(model.head, Classifier | TokenLabels):
        names, size = task.spec.labels, model.head.labels
        if size == "auto":
            changes["head"] = model.head.model_copy(update={"labels": len(names)})
        elif len(names) != size:
            shown = ", ".join([shorten(name, MAX_WORD) for name in names[:MAX_LABELS]])
            shown += f", and {len(names) - MAX_LABELS} more" if len(names) > MAX_LABELS else ""
            faults.append(Fault("model.head.labels", f"= {size}: the task has {len(names)} labels: {shown}"))
    if isinstance(task.spec, Tag) and not task.spec.spans and recipe.train.best == "span_f1":
        what = "the labels mark no spans (O, B-x and I-x): set 'accuracy' or 'loss'"
        faults.append(Fault("train.best", f"= 'span_f1': {what}"))
    if faults:
        raise ConfigError(faults)
    start = task.spec.start if isinstance(task.spec, Seq2Seq | SpanCorruption) else None
    start = target.bos if start is None else start
    stops = tuple(task.stops) if isinstance(task, Conversing) else ()
    changes["special"] = Special(pad=target.pad, bos=target.bos, eos=target.eos, start=start, stops=stops)
    return scaled_model(model.model_copy(update=changes), recipe.train.scale)

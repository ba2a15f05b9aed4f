"""From a recipe to built objects: data read, tokenizer trained or loaded, model made, checkpoint found."""

import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from anyformer.config import Classifier, ConfigError, Fault, ModelConfig, Special, TokenLabels, Tokens, io
from anyformer.config.spec import MAX_WORD, shorten
from anyformer.data.fingerprint import fingerprint
from anyformer.data.loader import CropLoader, Cursor, Loader
from anyformer.data.readers import Rows, check_bad_rows, read
from anyformer.data.synthetic import Split
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.inspection.capacity import check_model, exceeding
from anyformer.nn.model import Transformer
from anyformer.recipe import (
    AnyTask,
    AnyTokenizer,
    Classify,
    Crops,
    DataTokenizer,
    Embed,
    Mixture,
    Ordered,
    Recipe,
    Regress,
    RunTokenizer,
    Seq2Seq,
    SpanCorruption,
    Tag,
    columns,
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
    sweep,
)
from anyformer.tasks.base import Task
from anyformer.tasks.build import build_task
from anyformer.tasks.classify import with_labels
from anyformer.tasks.mixture import task_token
from anyformer.tasks.regress import scaled
from anyformer.tasks.tag import with_tags
from anyformer.training.checkpoint import TrainState, read_state
from anyformer.training.compiler import options
from anyformer.training.finetune import differing, freeze, inherit, pace
from anyformer.training.loop import Job, compiles
from anyformer.training.optimisers import build_optimizer
from anyformer.training.parallel import ALONE, Ranks, shard
from anyformer.training.resume import changed_data, find_checkpoint
from anyformer.training.snapshots import drop_snapshots
from anyformer.transforms.fp8 import SIZE_MULTIPLE, is_supported, learn_in_fp8

MAX_LABELS = 10  # in a message


def prepare(
    recipe: Recipe,
    out: Path,
    resume: bool,
    console: Console,
    ranks: Ranks = ALONE,
    *,
    allow_changed_data: bool = False,
) -> Job:
    """Build everything that a loop needs, in `out`. Data that changed since a checkpoint is refused unless allowed."""
    memory = recipe.model.decoder.memory if recipe.model.decoder else 0
    if memory and ranks.size > 1:
        what = f"= {memory}: every row has a past of its own, which one process keeps; train with one"
        raise ConfigError([Fault("model.decoder.memory", what)])
    if isinstance(recipe.task, Embed) and ranks.size > 1:
        what = "= 'embed': a pair learns from all others of its batch, which one process reads; train with one"
        raise ConfigError([Fault("task.kind", what)])
    checkpoint, damaged = ranks.first(lambda: find_checkpoint(recipe, out, resume))
    changed = ranks.first(lambda: changed_data(recipe, checkpoint, allow_changed_data, console))
    splits = ranks.each(lambda: read_rows(recipe))
    data = ranks.first(lambda: fingerprint(recipe.data))

    def get_task() -> Task:
        return make_task(recipe, splits["train"], console) if checkpoint is None else load_task(checkpoint)

    task = ranks.first(get_task)
    train, valid = ranks.each(lambda: fit_rows(recipe, task, splits, console))
    splits.clear()  # the rows that were read: those that fit are kept

    def enter() -> None:
        out.mkdir(parents=True, exist_ok=True)
        sweep(out)
        sweep(out / "state")
        for path, error in damaged.items():
            aside = path.with_name(f"damaged-{path.name}-{secrets.token_hex(4)}")
            path.rename(aside)  # its step will be saved again
            for fault in error.faults:
                console.print(f"passed over: {fault}; the checkpoint is now {aside.name}", markup=False, soft_wrap=True)
        if checkpoint is None:
            drop_snapshots(out, after=-1)  # of a run that ended before its first checkpoint
            io.save(recipe, out / RECIPE)

    job = build(recipe, out, task, train, valid, console, checkpoint, ranks)
    job.data = data
    ranks.first(enter)  # after all that may be refused: a refused training leaves no folder
    if checkpoint is None:
        return job
    job.state, scaler_state, differing = read_state(checkpoint, job.model, job.optimizer, ranks)
    if scaler_state:
        job.scaler.load_state_dict(scaler_state)
    if any(key.startswith("data.train.") for key in changed) and not isinstance(job.loader, CropLoader):
        job.state.place, job.state.past = Cursor(job.state.place.epoch + 1, 0), None  # this epoch is of other rows
    console.print(f"going on from step {job.state.step}", markup=False)
    if differing:
        console.print(f"bits may differ from an uninterrupted run: {'; '.join(differing)}", markup=False)
    return job


def build(
    recipe: Recipe,
    out: Path,
    task: Task,
    train: Rows,
    valid: Rows | None,
    console: Console,
    checkpoint: Path | None = None,
    ranks: Ranks = ALONE,
) -> Job:
    """Model (with the weights of a checkpoint), optimiser and loader at the first step; writes nothing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = choose_precision(recipe.train.precision, device)

    def make() -> tuple[Transformer, Loader]:
        torch.manual_seed(recipe.seed)
        config = fit_config(recipe, task)
        with torch.device(device):
            model = Transformer(config)
        if precision == "fp8":
            _convert(model, console)
        new = list[str]()
        if checkpoint is not None:
            weights = read_tensors(checkpoint / "model.safetensors")
            check_weights(checkpoint, model, weights)
            model.load_state_dict(weights)
        elif recipe.train.init_from is not None:
            first = recipe.train.init_from
            if new := [name for name in inherit(model, task.spec, load(first)) if ".lora." not in name]:
                console.print(f"new, beside the weights of {first}: {', '.join(new)}", markup=False, soft_wrap=True)
        freeze(model, recipe.train.freeze, new)
        return model, task.loader(train, recipe.batches, recipe.seed, model)

    model, loader = ranks.each(make)
    if ranks.size > 1 and recipe.parallel.shard == "full":
        shard(model, device, compiles(recipe, device), options(model.config, precision == "fp8"))
    optimizer = build_optimizer(
        recipe.train.optimizer, model, lambda name: pace(name, model.config, recipe.train.layer_decay)
    )
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    state = TrainState()
    return Job(recipe, out, device, precision, task, model, optimizer, loader, valid, state, scaler, console, ranks)


def _convert(model: Transformer, console: Console) -> None:
    """Multiply the weights of the blocks in fp8. Print how many layers stay in bf16; refuse fp8 if all of them do."""
    stacks = nn.ModuleList(stack for stack in (model.encoder, model.decoder) if stack is not None)
    converted, left = learn_in_fp8(stacks)
    reason = f"{len(left)} with a size that is not a multiple of {SIZE_MULTIPLE}"
    if not converted:
        there = f": there are {reason}" if left else ""
        what = f"= 'fp8': no linear layer of the blocks can be converted{there}; set 'bf16'"
        raise ConfigError([Fault("train.precision", what)])
    if left:
        text = f"fp8: {len(converted)} linear layers of the blocks; in bf16 remain {reason}"
        console.print(text, markup=False, soft_wrap=True)


Splits = dict[Split, Rows]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


def read_rows(recipe: Recipe) -> Splits:
    """Read the rows of all data of a recipe, and raise the faults of all of them together."""
    data = recipe.data
    sources = {split: getattr(data, split) for split in SPLITS}
    there = {split: source for split, source in sources.items() if source is not None}
    return _each({split: partial(read, source, data, split, recipe.seed) for split, source in there.items()})


def fit_rows(recipe: Recipe, task: Task, splits: Splits, console: Console) -> tuple[Rows, Rows | None]:
    """Return the training and validation rows that the model can read; bad rows that are skipped get a line.

    The test rows are checked alike, so that `evaluate` finds no fault in them, and are not kept.
    """
    config = fit_config(recipe, task)
    _check_capacity(recipe, config)

    def fit(split: Split) -> Rows:
        rows = task.filter_rows(splits[split], config, recipe.batches if split == "train" else None)
        return check_bad_rows(rows, recipe.data, split)

    fitting = _each({split: partial(fit, split) for split in splits})
    for split, rows in fitting.items():
        if rows.bad:
            first = "; ".join(str(bad) for bad in rows.bad[:3])
            console.print(f"{split}: {len(rows.bad)} bad rows skipped: {first}", markup=False, soft_wrap=True)
    return fitting["train"], fitting.get("valid")


def _each(work: dict[Split, Callable[[], Rows]]) -> Splits:
    """Call a function for each split, and raise the faults of all of them as one `ConfigError`."""
    found, faults = Splits(), list[Fault]()
    for split, make in work.items():
        try:
            found[split] = make()
        except ConfigError as error:
            faults += [fault for fault in error.faults if fault not in faults]  # two splits may be of one file
    if faults:
        raise ConfigError(faults)
    return found


def _check_capacity(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse a model or a batch that does not fit into the memory of the device."""
    limit = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    check_model(config, "model", training=recipe.parallel.shard == "none", limit=limit)
    if isinstance(batches := recipe.batches, Crops | Ordered):
        tokens = batches.rows * batches.length
        what = f"= {batches.rows}: {tokens:,} tokens in a batch"
        # ids of 8 bytes, and at least one vector of the model in half precision
        if faults := list(exceeding(tokens * (8 + 2 * config.width), what, limit)):
            raise ConfigError(fault.under("batches.rows") for fault in faults)


def make_task(recipe: Recipe, train: Rows, console: Console) -> Task:
    """The task with its tokenizers. A run that another begins from lends its own, if both recipes ask for the same
    kind: its weights mean nothing with any others."""
    first, spec = recipe.train.init_from, _learnt(recipe.task, train)
    if first is None:
        return _own_task(recipe, spec, train)
    other, kept = _begun(first), must_be_file(Path(first) / RECIPE)
    of_run = kept.exists() and not (kept.parent / STATE).exists()  # a checkpoint lends its tokenizer to any recipe
    was = io.load(Recipe, kept) if of_run else recipe
    same = (was.tokenizer, was.source_tokenizer) == (recipe.tokenizer, recipe.source_tokenizer)
    if same or isinstance(recipe.tokenizer, RunTokenizer):
        console.print(f"tokenizer: that of {first}", markup=False, soft_wrap=True)
        task = build_task(spec, other.task.tokenizer, other.task.source_tokenizer)
    else:
        task = _own_task(recipe, spec, train)
    found = []
    if _vocabularies(task) != _vocabularies(other.task):
        found.append("its tokenizer differs from ours: ask for the same one as its recipe, or for its file")
    found = found or differing(other.config, fit_config(recipe, task), task.spec)[:10]
    if found:
        raise ConfigError(Fault("train.init_from", f"= '{first}': {what}") for what in found)
    return task


def _begun(first: str) -> Run:
    try:
        return load(first)
    except ConfigError as error:
        raise ConfigError(Fault("train.init_from", f"= '{first}': {fault}") for fault in error.faults) from None


def _vocabularies(task: Task) -> list[str]:
    return [tokenizer.to_json() for tokenizer in (task.tokenizer, task.source_tokenizer) if tokenizer is not None]


def _learnt(spec: AnyTask, train: Rows) -> AnyTask:
    """The task with what its training rows say: the names of labels, the range of numbers."""
    match spec:
        case Classify():
            return with_labels(spec, train.columns["label"])
        case Regress():
            return scaled(spec, train.columns["label"])
        case Tag():
            return with_tags(spec, train.columns["tags"])
        case _:
            return spec


def _own_task(recipe: Recipe, spec: AnyTask, train: Rows) -> Task:
    """The task with its tokenizers, trained on the training data where they are not files."""

    def texts(*names: str) -> Iterator[str]:
        for column in names:
            texts = train.columns[column]
            yield from (words.replace("\n", " ") for words in texts) if column == "words" else texts

    def made(name: str, wanted: AnyTokenizer, *columns: str) -> TextTokenizer:
        assert not isinstance(wanted, RunTokenizer)
        if isinstance(wanted, DataTokenizer):
            assert train.stream is not None
            return train.stream.tokenizer()
        try:
            found = train_tokenizer(wanted, texts(*columns), recipe.data)
            match spec:
                case SpanCorruption(sentinels=sentinels):
                    return found.with_sentinels(sentinels)
                case Mixture(parts=parts):
                    return found.with_special([task_token(part.name) for part in parts])
                case _:
                    return found
        except ConfigError as error:
            raise ConfigError(fault.under(name) for fault in error.faults) from None

    if recipe.source_tokenizer is None:
        read = (name for name in columns(recipe.task) if name not in ("label", "tags"))
        return build_task(spec, made("tokenizer", recipe.tokenizer, *read), None)
    target, source = made("tokenizer", recipe.tokenizer, "target"), recipe.source_tokenizer
    return build_task(spec, target, made("source_tokenizer", source, "source"))


def fit_config(recipe: Recipe, task: Task) -> ModelConfig:
    """The recipe's model with the vocabularies and special ids of the tokenizers."""
    model, target, source = recipe.model, task.tokenizer, task.source_tokenizer or task.tokenizer
    found = []
    changes: dict[str, object] = {}
    for name, tokenizer in (("source", source), ("target", target)):
        spec = getattr(model, name)
        if spec is None:
            continue
        if not isinstance(spec, Tokens):
            found.append(Fault(f"model.{name}", f"reads {spec.kind}: recipes train on text, so it must be tokens"))
            continue
        if spec.vocab is not None and spec.vocab < tokenizer.size:
            found.append(Fault(f"model.{name}.vocab", f"= {spec.vocab}: the tokenizer has {tokenizer.size} ids"))
        changes[name] = spec.model_copy(update={"vocab": spec.vocab or tokenizer.size})
    if isinstance(task.spec, Classify | Tag) and isinstance(model.head, Classifier | TokenLabels):
        names, size = task.spec.labels, model.head.labels
        if len(names) != size:
            shown = ", ".join([shorten(name, MAX_WORD) for name in names[:MAX_LABELS]])
            shown += f", and {len(names) - MAX_LABELS} more" if len(names) > MAX_LABELS else ""
            found.append(Fault("model.head.labels", f"= {size}: the task has {len(names)} labels: {shown}"))
    if isinstance(task.spec, Tag) and not task.spec.spans and recipe.train.best == "span_f1":
        what = "the labels are of no spans, which have O, B-x and I-x: accuracy tells how good a model is"
        found.append(Fault("train.best", f"= 'span_f1': {what}"))
    if found:
        raise ConfigError(found)
    asked = task.spec.start if isinstance(task.spec, Seq2Seq | SpanCorruption) else None
    start = target.bos if asked is None else asked
    changes["special"] = Special(pad=target.pad, bos=target.bos, eos=target.eos, start=start)
    return model.model_copy(update=changes)


def choose_precision(wanted: str, device: torch.device) -> str:
    """bf16 where the hardware is made for it; on a CPU without such units it is hundreds of times slower."""
    if wanted == "fp8" and not is_supported(device):
        what = "needs a GPU of compute capability 8.9 or later (Ada, Hopper, Blackwell)"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
        raise ConfigError([Fault("train.precision", f"= 'fp8': {what}, and this is {name}: 'auto' takes what it has")])
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "fp32"

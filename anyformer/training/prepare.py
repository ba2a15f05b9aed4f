"""Preparation of a training run: read the data, train or load the tokenizer, build the model, find the checkpoint."""

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from anyformer.config import ConfigError, Fault, ModelConfig, io
from anyformer.data.loader import CropLoader, Cursor, Loader
from anyformer.data.readers import Rows, check_bad_rows, common_inputs, read
from anyformer.kernels.private import start_hashing_triton
from anyformer.nn.inspection.memory import check_model, exceeding
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.fp8 import SIZE_MULTIPLE, learn_in_fp8
from anyformer.nn.transforms.quantise import round_base
from anyformer.nn.transforms.rounding import Bits
from anyformer.recipe import NamedSplit, Recipe, TextBatches, splits
from anyformer.recipe.recipe import tensor_faults
from anyformer.runs.run import (
    RECIPE,
    check_weights,
    load,
    load_task,
    read_tensors,
    remove_leftovers,
)
from anyformer.tasks.base import BuiltTask, open_media, readable, rows_have_media
from anyformer.training.checkpoint import TrainState, read_state
from anyformer.training.distillation import load_frozen
from anyformer.training.finetune import copy_weights, describe_new, freeze
from anyformer.training.job import Job
from anyformer.training.machine import (
    advise_if_busy,
    choose_compile,
    choose_device,
    choose_precision,
    compile_options,
    compiler_fault,
    threads,
)
from anyformer.training.make_task import fit_config, make_task
from anyformer.training.optimizers import training_optimizer
from anyformer.training.parallel import SINGLE, Ranks, divide_model
from anyformer.training.resume import changed_data, find_checkpoint, fingerprints
from anyformer.training.saving import drop_snapshots
from anyformer.training.width_transfer import hidden_matrices, scale_weights


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
    if (why := recipe.task.one_process) and ranks.size > 1:
        raise ConfigError([Fault("task.kind", f"= '{recipe.task.kind}': {why}; train without torchrun")])
    checkpoint, damaged = ranks.on_first(lambda: find_checkpoint(recipe, out, resume))
    changed = ranks.on_first(lambda: changed_data(recipe, checkpoint, allow_changed_data, console))
    read_splits = ranks.on_each(lambda: read_rows(recipe))
    data = ranks.on_first(lambda: fingerprints(recipe))

    def get_task() -> BuiltTask:
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
    advise_if_busy(job.device, job.threads, console)
    ranks.on_first(prepare_folder)  # after all checks: a refused training leaves no folder
    if checkpoint is None:
        return job
    with threads(job.threads):
        job.state, scaler_state, changes = read_state(checkpoint, job.model, job.optimizer, ranks)
    job.state.progress = _progress(recipe, checkpoint, job.state)
    if scaler_state:
        job.scaler.load_state_dict(scaler_state)
    if any(key.startswith("data.train.") for key in changed) and not isinstance(job.loader, CropLoader):
        next_epoch = Cursor(job.state.cursor.epoch + 1, 0)  # the rest of this epoch would be other rows
        job.state.cursor, job.state.segment_memory = next_epoch, None
    console.print(f"resuming from step {job.state.step}", markup=False)
    if changes:
        console.print(f"bits may differ from an uninterrupted run: {'; '.join(changes)}", markup=False)
    return job


def _progress(recipe: Recipe, checkpoint: Path, state: TrainState) -> float:
    """Return the place of a checkpoint in the schedule of a recipe, which may be longer than that of the checkpoint."""
    if recipe.train.minutes is None:
        return float(state.step)
    before = io.load(Recipe, checkpoint / RECIPE).train.minutes
    return 0.0 if before is None else state.progress * before / recipe.train.minutes


def build(
    recipe: Recipe,
    out: Path,
    task: BuiltTask,
    train: Rows,
    valid: Rows | None,
    console: Console,
    checkpoint: Path | None = None,
    ranks: Ranks = SINGLE,
) -> Job:
    """Build model (with the weights of a checkpoint), optimiser and loader at the first step; nothing is written."""
    device = torch.device(choose_device().value)
    precision = choose_precision(recipe.train.precision, device).value

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
            check_weights(checkpoint, model.state_dict(), weights)
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
    compile = "off" if recipe.parallel.context > 1 else recipe.train.compile  # the exchange of keys is not compiled
    shapes = loader.shapes if device.type == "cuda" else 1  # on a CPU nothing depends on them
    compiled = choose_compile(compile, device, shapes, compiler_fault()).value == "on"
    if compiled:
        start_hashing_triton()
    options = compile_options(model.config, precision == "fp8") if compiled else None
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
        frozen=ranks.on_each(lambda: load_frozen(recipe, task, train, model.config, device)),
    )


Splits = dict[str, Rows]  # "train", "valid", "test" or the names of test sets


def read_rows(recipe: Recipe) -> Splits:
    """Read the rows of all data of a recipe, and raise the faults of all of them together."""
    data = recipe.data
    return _each({one.name: partial(read, one.source, data, one.split, recipe.seed, one.key) for one in splits(data)})


def fit_rows(recipe: Recipe, task: BuiltTask, found: Splits, console: Console) -> tuple[Rows, Rows | None]:
    """Return the training and validation rows that the model can read; skipped bad rows are printed.

    Test rows are checked, too, so that their faults are found before training, and are not returned.
    """
    config = fit_config(recipe, task)
    if recipe.parallel.tensor > 1 and (faults := list(tensor_faults(config, recipe.parallel.tensor))):
        raise ConfigError(fault.under("model") for fault in faults)
    _check_capacity(recipe, config)
    media = open_media(task, config, recipe.data.augment)
    if media is not None:
        media.required = rows_have_media(task, found["train"])

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
        if rows.cut:
            what = f"the beginnings alone of {rows.cut:,} of {len(rows):,} rows are read, which exceed task.max_length"
            console.print(f"{split}: {what}", markup=False, soft_wrap=True)
        if split != "train" and (count := common_inputs(rows, fitting["train"], recipe.task.columns)):
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
    if isinstance(batches := recipe.batches, TextBatches):
        tokens = batches.rows * batches.length
        what = f"= {batches.rows}: {tokens:,} tokens in a batch"
        # ids of 8 bytes, and at least one vector of the model in half precision
        if faults := list(exceeding(tokens * (8 + 2 * config.width), what, limit)):
            raise ConfigError(fault.under("batches.rows") for fault in faults)


# -- weights in other formats -----------------------------------------------------------------------------------------


def convert_to_fp8(model: Transformer, console: Console) -> None:
    """Multiply the weights of the blocks in fp8. Print how many layers stay in bf16; refuse fp8 if all of them do."""
    stacks = nn.ModuleList(stack for stack in (model.encoder, model.decoder) if stack is not None)
    converted, left = learn_in_fp8(stacks)
    reason = f"{len(left)} with a size that is not a multiple of {SIZE_MULTIPLE}"
    if not converted:
        counts = f": there are {reason}" if left else ""
        what = f"= 'fp8': no linear layer of the blocks can be converted{counts}; set 'bf16'"
        raise ConfigError([Fault("train.precision", what)])
    if left:
        text = f"fp8: {len(converted)} linear layers of the blocks; in bf16 remain {reason}"
        console.print(text, markup=False, soft_wrap=True)


def round_frozen(model: Transformer, bits: Bits) -> None:
    """Round the frozen weights of the blocks; refuse weights that are not finite."""
    try:
        round_base(model, bits)
    except ValueError as error:
        raise ConfigError([Fault("train.base_bits", f"= {bits}: {error}")]) from None

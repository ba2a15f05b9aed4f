"""From a recipe to built objects: data read, tokenizer trained or loaded, model made, checkpoint found."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from anyformer.config import ConfigError, Fault, ModelConfig, Special, io
from anyformer.data.sources import Rows, read
from anyformer.data.synthetic import Split
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Recipe, Tokenizer
from anyformer.run import build_task, checkpoints, leftovers, load, load_task, read_tensors, sweep
from anyformer.tasks.base import Task
from anyformer.training.loop import Job
from anyformer.training.optim import build_optimizer
from anyformer.training.state import TrainState, examine, read_state

RECIPE = "recipe.toml"


def prepare(recipe: Recipe, out: Path, resume: bool, console: Console) -> Job:
    """Builds everything that a loop needs, in `out`."""
    checkpoint, damaged = _find(recipe, out, resume)
    train, valid = _rows(recipe, "train", console), _rows(recipe, "valid", console)
    assert train is not None
    out.mkdir(parents=True, exist_ok=True)
    sweep(out)
    sweep(out / "state")
    for path, error in damaged.items():
        aside = path.with_name(f"damaged-{path.name}-{secrets.token_hex(4)}")
        path.rename(aside)  # its step will be saved again
        for fault in error.faults:
            console.print(f"passed over: {fault}; the checkpoint is now {aside.name}", markup=False, soft_wrap=True)
    if checkpoint is None:
        task = _task(recipe, train)
        io.save(recipe, out / RECIPE)
    else:
        task = load_task(checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(recipe.seed)
    config = fit_config(recipe, task)
    with torch.device(device):
        model = Transformer(config)
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.recompute = recipe.train.checkpoint_activations
    if checkpoint is None and recipe.train.init_from is not None:
        _init_from(model, recipe.train.init_from)
    optimizer = build_optimizer(recipe.train.optimizer, model)
    precision = choose_precision(recipe.train.precision, device)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    state = TrainState()
    loader = task.loader(train, recipe.batches, recipe.seed, model)
    if checkpoint is not None:
        model.load_state_dict(read_tensors(checkpoint / "model.safetensors"))
        state, scaler_state, differing = read_state(checkpoint, model, optimizer)
        if scaler_state:
            scaler.load_state_dict(scaler_state)
        console.print(f"going on from step {state.step}", markup=False)
        if differing:
            console.print(f"bits may differ from an uninterrupted run: {'; '.join(differing)}", markup=False)
    return Job(recipe, out, device, precision, task, model, optimizer, loader, valid, state, scaler, console)


def _find(recipe: Recipe, out: Path, resume: bool) -> tuple[Path | None, dict[Path, ConfigError]]:
    """The checkpoint to go on from and those that are damaged, or an error where folder and wish do not agree."""
    kept = out / RECIPE
    if not kept.exists() and not checkpoints(out):
        if out.exists() and {*out.iterdir()} - {*leftovers(out)}:
            raise ConfigError([Fault(str(out), "is not empty and holds no run: choose another --out")])
        return None, {}
    if not resume:
        raise ConfigError([Fault(str(out), "holds a run: add --resume to go on, or choose another --out")])
    was = io.load(Recipe, kept)
    if changes := [change for change in io.diff(was, recipe) if change.path not in ("train.steps", "data.root")]:
        lines = [Fault(str(out), f"holds another run: {change}") for change in changes[:10]]
        raise ConfigError(lines)
    good, damaged = examine(out)
    return (good[-1] if good else None), damaged


def _rows(recipe: Recipe, split: Split, console: Console) -> Rows | None:
    source = getattr(recipe.data, split)
    if source is None:
        return None
    rows = read(source, recipe.data, split, recipe.seed)
    if rows.bad:
        first = "; ".join(str(bad) for bad in rows.bad[:3])
        console.print(f"{split}: {len(rows.bad)} bad rows skipped: {first}", markup=False, soft_wrap=True)
    return rows


def _task(recipe: Recipe, train: Rows) -> Task:
    """The task with its tokenizers, trained on the training data where they are not files."""

    def texts(*columns: str) -> Iterator[str]:
        for column in columns:
            yield from train.columns[column]

    def made(spec: Tokenizer, *columns: str) -> TextTokenizer:
        return train_tokenizer(spec, texts(*columns))

    if recipe.task.kind == "lm":
        return build_task(recipe.task, made(recipe.tokenizer, "text"), None)
    if recipe.source_tokenizer is None:
        return build_task(recipe.task, made(recipe.tokenizer, "source", "target"), None)
    return build_task(recipe.task, made(recipe.tokenizer, "target"), made(recipe.source_tokenizer, "source"))


def fit_config(recipe: Recipe, task: Task) -> ModelConfig:
    """The recipe's model with the vocabularies and special ids of the tokenizers."""
    model, target, source = recipe.model, task.tokenizer, task.source_tokenizer or task.tokenizer
    found = []
    changes: dict[str, object] = {}
    for name, tokenizer in (("source", source), ("target", target)):
        spec = getattr(model, name)
        if spec is None:
            continue
        if spec.vocab is not None and spec.vocab < tokenizer.size:
            found.append(Fault(f"model.{name}.vocab", f"= {spec.vocab}: the tokenizer has {tokenizer.size} ids"))
        changes[name] = spec.model_copy(update={"vocab": spec.vocab or tokenizer.size})
    if found:
        raise ConfigError(found)
    changes["special"] = Special(pad=target.pad, bos=target.bos, eos=target.eos, start=target.bos)
    return model.model_copy(update=changes)


def _init_from(model: Transformer, folder: str) -> None:
    """The weights of another run, which must have the same shape of model."""
    other = load(folder)
    if changes := [c for c in io.diff(other.config, model.config) if "dropout" not in c.path]:
        raise ConfigError([Fault("train.init_from", f"= '{folder}': its model differs: {c}") for c in changes[:10]])
    model.load_state_dict(other.model.state_dict())


def choose_precision(wanted: str, device: torch.device) -> str:
    """bf16 where the hardware is made for it; on a CPU without such units it is hundreds of times slower."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "fp32"

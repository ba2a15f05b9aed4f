"""The state of a training run, and checkpoints: folders `state/step-N` from which training resumes.

A checkpoint is written atomically. Weights, optimiser, averages and random generators are safetensors, the rest is
JSON. It is also a run folder, so it can be loaded and evaluated by itself.
"""

import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from anyformer.attention.cache.segment_memory import Past
from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.data.fingerprint import Fingerprints
from anyformer.data.loader import Cursor
from anyformer.runs.run import REQUIRED, STATE, checkpoints, read_json, read_tensors, remove, verify, write_tensors
from anyformer.training.parallel import Ranks, full_tensor, shard_like
from anyformer.training.ranks.tensor import in_model_order, in_split_order

START = Cursor()


@dataclass
class TrainState:
    """Progress of a training run, apart from weights and optimiser, which keep their own state."""

    step: int = 0
    progress: float = 0.0  # in the schedule, in steps: `step`, or the place of the step by time (see `pace.py`)
    cursor: Cursor = START  # in the data
    tokens: int = 0
    best: float | None = None  # the lowest validation loss, or the negative of the best value of another metric
    best_step: int = 0
    stale: int = 0  # evaluations since then
    bad_in_a_row: int = 0
    bad_in_all: int = 0
    ema: dict[str, Tensor] = field(default_factory=dict)
    segment_memory: Past | None = None  # of the last batch, for models that have one

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the tensors. The cursor is stored as `place`."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        del values["ema"], values["segment_memory"]
        return {"place" if name == "cursor" else name: value for name, value in values.items()}


def environment(model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """Return the facts on which the exact bits of a run depend."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "processes": ranks.size,
        "shard": "full" if isinstance(model, FSDPModule) and ranks.has_shards else "none",
        "tensor": ranks.tensor.size,
        "context": ranks.context.size,
    }


def environment_changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return why the bits of a resumed run may differ."""
    then = {"tensor": 1, "context": 1, **then}  # which earlier versions did not store
    return [f"{name} was {then.get(name)}, is {value}" for name, value in now.items() if then.get(name) != value]


def _states() -> Any:
    """Return torch's module for states of divided models, imported when the first checkpoint needs it."""
    from torch.distributed.checkpoint import state_dict

    return state_dict


def _full() -> Any:
    """Return the options of a state by name, which fits any number of processes."""
    return _states().StateDictOptions(full_state_dict=True, cpu_offload=True)


def gather_state(state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors that training resumes from, except the weights. All processes call it; the first has them all.

    The random generators are those of the first process: with several, each process reseeds its own at every step.
    """
    tensors = {f"ema.{name}": x for name, x in gather_ema(state, model).items()}
    gathered: Any = _states().get_optimizer_state_dict(model, optimizer, options=_full())
    for name, values in gathered.get("state", {}).items():
        own = {key: in_model_order(model, name, torch.as_tensor(x)) for key, x in values.items()}
        tensors |= {f"optimizer.{key}.{name}": x for key, x in own.items()}
    if (memory := state.segment_memory) is not None:
        tensors |= {"past.positions": memory.positions, "past.segments": memory.segments}
        tensors |= {f"past.layers.{i}": layer for i, layer in enumerate(memory.layers)}
    tensors["generator.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["generator.cuda"] = torch.cuda.get_rng_state()
    return tensors


def write_state(
    folder: Path,
    state: TrainState,
    tensors: dict[str, Tensor],
    now: dict[str, Any],
    scaler: dict[str, Any],
    data: Fingerprints,
) -> None:
    """Write the files of a checkpoint that only a resumed training reads: all but the weights."""
    write_tensors(folder / "state.safetensors", tensors)
    facts = {"state": state.to_json(), "here": now, "scaler": scaler, "data": dict(data)}
    (folder / "state.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def read_fingerprints(folder: Path) -> Fingerprints | None:
    """Return the fingerprints of the data that a checkpoint was trained on; None for one that has none."""
    data = read_json(folder / "state.json").get("data")
    if data is not None and not (isinstance(data, dict) and all(isinstance(x, str) for x in data.values())):
        raise ConfigError([Fault(str(folder / "state.json"), "data must be an object of fingerprints")])
    return data


def read_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """Restore the optimiser and the random generators from a checkpoint.

    Return the state of training, that of the loss scaler, and what differs in the environment.
    """
    facts = read_json(folder / "state.json")
    state = _read_facts(folder, facts)
    tensors = read_tensors(folder / "state.safetensors")
    try:
        state.ema = _restore(tensors, model, optimizer)
        state.segment_memory = _read_segment_memory(tensors, next(model.parameters()).device)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        why = visible(str(error)).partition("\n")[0]
        raise ConfigError([Fault(str(folder / STATE), f"does not fit the model and its optimiser: {why}")]) from None
    return state, facts["scaler"], environment_changes(facts["here"], environment(model, ranks))


def _read_facts(folder: Path, facts: dict[str, Any]) -> TrainState:
    """Return the state that state.json holds, without tensors."""
    path = folder / "state.json"
    stored: dict[str, Any] = {}
    if all(isinstance(facts.get(name), dict) for name in ("state", "here", "scaler")):
        stored = facts["state"]
    cursor, best = stored.get("place"), stored.get("best")
    progress: Any = stored.get("progress", stored.get("step"))  # earlier versions did not store it
    counts = {name: value for name, value in stored.items() if name not in ("place", "best", "progress")}
    if (
        not {"step", "place"} <= stored.keys() <= TrainState().to_json().keys()
        or not isinstance(cursor, list)
        or len(cursor) != len(START)
        or not all(type(n) is int and n >= 0 for n in (*counts.values(), *cursor))
        or not (best is None or type(best) in (int, float))
        or type(progress) not in (int, float)
    ):
        raise ConfigError([Fault(str(path), "is not the state of a training")])
    if checkpoint_path(Path(), stored["step"]).name != folder.name:
        raise ConfigError([Fault(str(path), f"is of step {stored['step']}: the folder was renamed")])
    return TrainState(**counts, best=best, progress=progress, cursor=Cursor(*cursor))


def _restore(tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Load the optimiser's state and the random generators. Return the moving average of the weights."""
    saved: dict[str, dict[str, Tensor]] = {}
    ema: dict[str, Tensor] = {}
    parameters = dict(model.named_parameters())
    for name, x in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            key, _, parameter = rest.partition(".")
            saved.setdefault(parameter, {})[key] = x
        elif kind == "ema":
            ema[rest] = x
    wrong = [name for name, x in ema.items() if name not in parameters or x.shape != parameters[name].shape]
    states = ((name, x) for name, values in saved.items() for x in values.values())
    wrong += [name for name, x in states if name not in parameters or not _is_state_of(x, parameters[name])]
    if wrong := wrong or sorted(parameters.keys() - ema.keys() if ema else ()):
        raise ValueError(f"{wrong[0]} is missing or has another shape")
    ema = {name: shard_like(in_split_order(model, name, x), parameters[name]) for name, x in ema.items()}
    saved = {n: {key: in_split_order(model, n, x) for key, x in values.items()} for n, values in saved.items()}
    now = _states().get_optimizer_state_dict(model, optimizer)
    if saved or now["state"]:  # else it is an optimiser without a state
        now["state"] = saved
        _states().set_optimizer_state_dict(model, optimizer, now, options=_full())
    torch.set_rng_state(tensors["generator.cpu"])
    if torch.cuda.is_available() and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"])
    return ema


def _is_state_of(x: Tensor, parameter: Tensor) -> bool:
    """Return whether a state has the shape of its weight; a step is a scalar, and factors have sides of 1."""
    return x.dim() == 0 or (
        x.dim() == parameter.dim()
        and all(size in (1, whole) for size, whole in zip(x.shape, parameter.shape, strict=True))
    )


def _read_segment_memory(tensors: dict[str, Tensor], device: torch.device) -> Past | None:
    parts = {name: x.to(device) for name, x in tensors.items() if name.startswith("past.")}
    if not parts:
        return None
    positions, segments = parts.pop("past.positions"), parts.pop("past.segments")
    return Past(positions, segments, tuple(parts[f"past.layers.{i}"] for i in range(len(parts))))


# -- the checkpoints of a run ------------------------------------------------------------------------------------------


def checkpoint_path(out: Path, step: int) -> Path:
    return out / "state" / f"step-{step:09d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint or snapshot."""
    return int(path.name.removeprefix("step-"))


def verify_checkpoints(out: Path) -> tuple[list[Path], dict[Path, ConfigError]]:
    """Return the complete checkpoints, oldest first, and the faults of the others."""
    good: list[Path] = []
    damaged: dict[Path, ConfigError] = {}
    for path in checkpoints(out):
        try:
            if missing := {*REQUIRED, STATE, "state.json"} - verify(path):
                raise ConfigError([Fault(str(path / name), "is not in manifest.json") for name in sorted(missing)])
            good.append(path)
        except ConfigError as error:
            damaged[path] = error
    return good, damaged


def regular_checkpoints(out: Path, every: int | None, last: int) -> list[Path]:
    """Return the checkpoints that an uninterrupted run would also have: those of `save_every` and of the last step."""
    due = [(path, step_of(path)) for path in checkpoints(out)]
    return [path for path, step in due if step == last or (every and step % every == 0)]


def prune(out: Path, keep: int, also: Iterable[Path]) -> None:
    """Remove all but the newest `keep` checkpoints and those in `also`."""
    keeping = {*checkpoints(out)[-keep:], *also}
    for path in checkpoints(out):
        if path not in keeping:
            remove(path)


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights on the CPU. Of a divided model all processes call it, and the first has them all."""
    state: Any = _states().get_model_state_dict(model, options=_full())
    return {name: in_model_order(model, name, x) for name, x in state.items()}


def gather_ema(state: TrainState, model: nn.Module) -> dict[str, Tensor]:
    """Return the moving average of the weights, if there is one. All processes call it, and each has all."""
    return {name: in_model_order(model, name, full_tensor(x)) for name, x in state.ema.items()}

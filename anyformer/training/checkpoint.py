"""All that resumes, in one object, and its way to disk and back.

A checkpoint is a folder `state/step-N` that is whole or not there: weights, optimiser, averages and generators as
safetensors, the rest as JSON. It is also a run folder, so it can be loaded and evaluated by itself.
"""

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from anyformer.cache.segment_memory import Past
from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.data.fingerprint import Fingerprints
from anyformer.data.loader import Cursor
from anyformer.run import REQUIRED, STATE, checkpoints, read_json, read_tensors, remove, verify, write_tensors
from anyformer.training.parallel import Ranks, as_held, whole

START = Cursor()
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)  # by name, so that it fits any number of processes


@dataclass
class TrainState:
    """Where training stands. Weights and optimiser stay in their modules; the rest is here."""

    step: int = 0
    place: Cursor = START
    tokens: int = 0
    best: float | None = None  # the lowest that validation gave: its loss, or another metric with a minus
    best_step: int = 0
    stale: int = 0  # evaluations since then
    bad_in_a_row: int = 0
    bad_in_all: int = 0
    ema: dict[str, Tensor] = field(default_factory=dict)
    past: Past | None = None  # what the next batch goes on from, where the model has a memory

    def to_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self).items() if name not in ("ema", "past")}
        return {**facts, "place": list(self.place)}


def here(model: nn.Module, ranks: Ranks) -> dict[str, Any]:
    """What must be equal for the same bits."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "processes": ranks.size,
        "shard": "full" if isinstance(model, FSDPModule) else "none",
    }


def differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Why a resumed run may not give the same bits."""
    return [f"{name} was {then.get(name)}, is {value}" for name, value in now.items() if then.get(name) != value]


def gather(state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that resume beside the weights, whole; every process gives its part, the first has them in the end.

    The generators are the first process's. Of several processes each makes its own at every step.
    """
    tensors = {f"ema.{name}": whole(x) for name, x in state.ema.items()}
    kept: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    for name, values in kept.get("state", {}).items():
        tensors |= {f"optimizer.{key}.{name}": torch.as_tensor(x) for key, x in values.items()}
    if state.past is not None:
        tensors |= {"past.positions": state.past.positions, "past.segments": state.past.segments}
        tensors |= {f"past.layers.{i}": layer for i, layer in enumerate(state.past.layers)}
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
    """Write the part of a checkpoint that only a resumed training reads; the weights are in a file beside it."""
    write_tensors(folder / "state.safetensors", tensors)
    facts = {"state": state.to_json(), "here": now, "scaler": scaler, "data": dict(data)}
    (folder / "state.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def read_fingerprints(folder: Path) -> Fingerprints | None:
    """Return the fingerprints of the data that a checkpoint was trained on; None for one that has none."""
    found = read_json(folder / "state.json").get("data")
    if found is not None and not (isinstance(found, dict) and all(isinstance(x, str) for x in found.values())):
        raise ConfigError([Fault(str(folder / "state.json"), "data must be an object of fingerprints")])
    return found


def read_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """The state of a checkpoint put back into the optimiser and the generators; the scaler's; what differs here."""
    facts = read_json(folder / "state.json")
    known = _read_facts(folder, facts)
    tensors = read_tensors(folder / "state.safetensors")
    try:
        known.ema = _put_back(tensors, model, optimizer)
        known.past = _read_past(tensors, next(model.parameters()).device)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError, AttributeError) as error:
        why = visible(str(error)).partition("\n")[0]
        raise ConfigError([Fault(str(folder / STATE), f"does not fit the model and its optimiser: {why}")]) from None
    return known, facts["scaler"], differences(facts["here"], here(model, ranks))


def _read_facts(folder: Path, facts: dict[str, Any]) -> TrainState:
    """Return the state that state.json holds, without tensors."""
    path = folder / "state.json"
    found: dict[str, Any] = {}
    if all(isinstance(facts.get(name), dict) for name in ("state", "here", "scaler")):
        found = facts["state"]
    place, best = found.get("place"), found.get("best")
    counts = [value for name, value in found.items() if name not in ("place", "best")]
    if (
        not {"step", "place"} <= found.keys() <= TrainState().to_json().keys()
        or not isinstance(place, list)
        or len(place) != len(START)
        or not all(type(n) is int and n >= 0 for n in (*counts, *place))
        or not (best is None or type(best) in (int, float))
    ):
        raise ConfigError([Fault(str(path), "is not the state of a training")])
    if checkpoint_path(Path(), found["step"]).name != folder.name:
        raise ConfigError([Fault(str(path), f"is of step {found['step']}: the folder was renamed")])
    return TrainState(**{**found, "place": Cursor(*found["place"])})


def _put_back(tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
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
    both = [*ema.items(), *((name, x) for name, values in saved.items() for x in values.values() if x.dim())]
    wrong = [name for name, x in both if name not in parameters or x.shape != parameters[name].shape]
    if wrong := wrong or sorted(parameters.keys() - ema.keys() if ema else ()):
        raise ValueError(f"{wrong[0]} is missing or has another shape")
    ema = {name: as_held(x, parameters[name]) for name, x in ema.items()}
    merged: Any = {"state": saved, "param_groups": get_optimizer_state_dict(model, optimizer)["param_groups"]}
    set_optimizer_state_dict(model, optimizer, merged, options=FULL)
    torch.set_rng_state(tensors["generator.cpu"])
    if torch.cuda.is_available() and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"])
    return ema


def _read_past(tensors: dict[str, Tensor], device: torch.device) -> Past | None:
    there = {name: x.to(device) for name, x in tensors.items() if name.startswith("past.")}
    if not there:
        return None
    positions, segments = there.pop("past.positions"), there.pop("past.segments")
    return Past(positions, segments, tuple(there[f"past.layers.{i}"] for i in range(len(there))))


# -- which checkpoints there are -----------------------------------------------------------------------------------


def checkpoint_path(out: Path, step: int) -> Path:
    return out / "state" / f"step-{step:09d}"


def examine(out: Path) -> tuple[list[Path], dict[Path, ConfigError]]:
    """The checkpoints that are whole, oldest first, and what is wrong with the others."""
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


def planned(out: Path, every: int | None, last: int) -> list[Path]:
    """The checkpoints that an uninterrupted run has as well: those of `save_every`, and that of the last step."""
    steps = {path: int(path.name.removeprefix("step-")) for path in checkpoints(out)}
    return [path for path, step in steps.items() if step == last or (every and step % every == 0)]


def prune(out: Path, keep: int, also: Iterable[Path]) -> None:
    """Leaves the newest `keep` checkpoints and some others."""
    kept = {*checkpoints(out)[-keep:], *also}
    for path in checkpoints(out):
        if path not in kept:
            remove(path)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights on the CPU, whole; where processes share them out, every one gives its part to the first."""
    state: Any = get_model_state_dict(model, options=FULL)
    return dict(state)

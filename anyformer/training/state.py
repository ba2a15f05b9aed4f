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

from anyformer.config import ConfigError
from anyformer.data.loader import Place
from anyformer.run import checkpoints, read_tensors, remove, verify, write_tensors

START = Place()
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass
class TrainState:
    """Where training stands. Weights and optimiser stay in their modules; the rest is here."""

    step: int = 0
    place: Place = START
    tokens: int = 0
    best: float | None = None  # the lowest validation loss
    best_step: int = 0
    stale: int = 0  # evaluations since then
    bad_in_a_row: int = 0
    bad_in_all: int = 0
    ema: dict[str, Tensor] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in asdict(self).items() if name != "ema"}
        return {**facts, "place": list(self.place)}


def here() -> dict[str, Any]:
    """What must be equal for the same bits."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
    }


def differences(then: dict[str, Any]) -> list[str]:
    """Why a resumed run may not give the same bits."""
    now = here()
    return [f"{name} was {then.get(name)}, is {value}" for name, value in now.items() if then.get(name) != value]


def write_state(
    folder: Path, state: TrainState, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: dict[str, Any]
) -> None:
    """The resumable part of a checkpoint; the weights are beside it."""
    tensors = {f"ema.{name}": x for name, x in state.ema.items()}
    kept: dict[str, dict[str, Any]] = _optimizer_state(model, optimizer)["state"]
    for name, values in kept.items():
        tensors |= {f"optimizer.{key}.{name}": torch.as_tensor(x) for key, x in values.items()}
    tensors["generator.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["generator.cuda"] = torch.cuda.get_rng_state()
    write_tensors(folder / "state.safetensors", tensors)
    facts = {"state": state.to_json(), "here": here(), "scaler": scaler}
    (folder / "state.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def read_state(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[TrainState, dict[str, Any], list[str]]:
    """The state of a checkpoint put back into the optimiser and the generators; the scaler's; what differs here."""
    facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    tensors = read_tensors(folder / "state.safetensors")
    saved: dict[str, dict[str, Tensor]] = {}
    ema: dict[str, Tensor] = {}
    device = next(model.parameters()).device
    for name, x in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            key, _, parameter = rest.partition(".")
            saved.setdefault(parameter, {})[key] = x
        elif kind == "ema":
            ema[rest] = x.to(device)
    whole: Any = {"state": saved, "param_groups": _optimizer_state(model, optimizer)["param_groups"]}
    set_optimizer_state_dict(model, optimizer, whole, options=FULL)
    torch.set_rng_state(tensors["generator.cpu"])
    if torch.cuda.is_available() and "generator.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["generator.cuda"])
    state = TrainState(**{**facts["state"], "place": Place(*facts["state"]["place"])}, ema=ema)
    return state, facts["scaler"], differences(facts["here"])


# -- which checkpoints there are -----------------------------------------------------------------------------------


def checkpoint_path(out: Path, step: int) -> Path:
    return out / "state" / f"step-{step:09d}"


def examine(out: Path) -> tuple[list[Path], dict[Path, ConfigError]]:
    """The checkpoints that are whole, oldest first, and what is wrong with the others."""
    good: list[Path] = []
    damaged: dict[Path, ConfigError] = {}
    for path in checkpoints(out):
        try:
            verify(path)
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
    """All weights on the CPU, whole, whatever the processes share out."""
    state: Any = get_model_state_dict(model, options=FULL)
    return dict(state)


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """By names of parameters, so that it fits any number of processes."""
    return get_optimizer_state_dict(model, optimizer, options=FULL)

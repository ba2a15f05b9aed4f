"""The law of tensor parallelism: two processes that share a model compute what one does.

python -m anyformer.testing.split FOLDER RANK      one of them
"""

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from anyformer.config import ConfigError, ModelConfig, io
from anyformer.kernels.conventions import Note
from anyformer.nn.model import Transformer
from anyformer.recipe.recipe import tensor_faults
from anyformer.testing.subject import close, random_inputs
from anyformer.training.ranks.tensor import in_model_order, split_model, sum_whole_gradients

CONFIGS, RESULTS, TIMEOUT = "configs.json", "results-{}.json", 600  # seconds
Outcome = tuple[bool | None, str]


def shared_by_two(configs: Sequence[ModelConfig]) -> list[Outcome]:
    """Return whether two processes that share the model of each config compute what one does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [io.dumps(config, "json") for config in configs]
        (folder / CONFIGS).write_text(json.dumps(texts), encoding="utf-8")
        command = [sys.executable, "-m", "anyformer.testing.split", name]
        ranks = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(2)]
        try:
            errors = [rank.communicate(timeout=TIMEOUT)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            return [(False, "\n".join(errors).strip().rpartition("\n")[2])] * len(configs)
        read = [json.loads((folder / RESULTS.format(i)).read_text(encoding="utf-8")) for i in range(2)]
        return [
            next((tuple(each) for each in both if each[0] is False), tuple(both[0])) for both in zip(*read, strict=True)
        ]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    texts = json.loads((folder / CONFIGS).read_text(encoding="utf-8"))
    found = [_outcome(text, mesh) for text in texts]
    (folder / RESULTS.format(rank)).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _outcome(text: str, mesh: DeviceMesh) -> Outcome:
    try:
        config = io.loads(ModelConfig, text, "json")
    except ConfigError:
        return None, "processes know parts of files and packages alone"
    if faults := list(tensor_faults(config, 2)):
        return None, f"it is refused: {faults[0]}"
    try:
        whole = _compare(config, mesh)
    except AssertionError as error:
        return False, str(error)
    except Exception as error:  # whatever the code of the user raises
        return False, f"{type(error).__name__}: {error}".partition("\n")[0]
    return True, "each process computes all of it" if whole else ""


def _compare(config: ModelConfig, mesh: DeviceMesh) -> bool:
    """Compare a model with its halves: outputs and gradients. Return whether each process computes all of the part."""
    torch.manual_seed(0)
    one = Transformer(config).double()
    both = deepcopy(one)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", Note)
        split_model(both, mesh)
    ids, gradients = random_inputs(config, 0), list[dict[str, Tensor]]()
    outs = [model(ids) for model in (one, both)]
    for model, out in zip((one, both), outs, strict=True):
        out.square().sum().backward()
        sum_whole_gradients(model)
        gradients.append(
            {name: _whole(model, name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
        )
    close(outs[1].detach(), outs[0].detach(), "two processes compute something else than one")
    for name, grad in gradients[0].items():
        close(gradients[1][name], grad, f"two processes compute another gradient of {name}")
    return bool(told)


def _whole(model: Transformer, name: str, x: Tensor) -> Tensor:
    return in_model_order(model, name, x.full_tensor() if isinstance(x, DTensor) else x)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

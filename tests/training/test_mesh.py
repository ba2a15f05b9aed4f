"""The arrangement of processes: what each reads and holds follows from its rank."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from anyformer.config import ConfigError
from anyformer.recipe import Processes
from anyformer.training.parallel import Ranks, join
from anyformer.training.ranks.mesh import build_mesh
from tests.training.two_processes import ends, spawn


def specs() -> Iterator[Processes]:
    for shard, context, tensor in product(("none", "full"), (1, 2, 4), (1, 2, 4)):
        if context * tensor <= 4:
            yield Processes(shard=shard, context=context, tensor=tensor)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with join(agreed=()) as ranks:
        found = []
        for spec in specs():
            own = ranks.arranged(spec)
            axes = own.data, own.context, own.tensor
            groups = [
                sorted(dist.get_process_group_ranks(axis.group or dist.group.WORLD)) for axis in (*axes, own.shares)
            ]
            mean = own.reduce(torch.tensor(float(ranks.rank), requires_grad=True)) / own.shares.size
            found.append({"at": [axis.rank for axis in axes], "groups": groups, "mean": float(mean)})
        (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def test_ranks_are_numbered_by_tensor_then_context_then_data(tmp_path: Path) -> None:
    codes, _, complaints = ends(spawn(tmp_path, main, tmp_path, count=4))
    assert codes == [0] * 4, "\n".join(complaints)
    by_rank = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for i, spec in enumerate(specs()):
        own = [found[i] for found in by_rank]
        size = 4 // (spec.context * spec.tensor)
        assert [one["at"] for one in own] == [
            list(at) for at in product(*map(range, (size, spec.context, spec.tensor)))
        ]
        for rank, one in enumerate(own):
            data, context, tensor, shares = one["groups"]
            if (spec.context, spec.tensor) != (1, 1):
                assert [len(group) for group in (data, context, tensor)] == [size, spec.context, spec.tensor]
            assert shares == [r for r in range(4) if r % spec.tensor == rank % spec.tensor]
            assert one["mean"] == sum(shares) / len(shares)


def test_a_number_of_processes_that_does_not_divide_is_refused() -> None:
    assert Ranks().arranged(Processes(shard="full")).mesh is None
    with pytest.raises(ConfigError, match=r"parallel\.tensor = 2: there is 1 process, .* torchrun --nproc-per-node 2"):
        build_mesh(Processes(tensor=2), 0, 1, "cpu")
    both = r"parallel\.context = 2: with context = 2 and tensor = 3 there are 4 processes, and it takes 6 or a multiple"
    with pytest.raises(ConfigError, match=both):
        build_mesh(Processes(context=2, tensor=3), 0, 4, "cpu")

"""Measure cells on a Ray cluster: on many machines, on fractions of GPUs, with retries if a worker dies."""

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anyformer import __version__
from anyformer.config import ConfigError, Fault
from anyformer.generation.ray_cluster import get_result, prepare_worker, ray_cluster
from anyformer.lab.cells import Cell, CellEngine, CellResult, Measure, Notify, in_words, terminable, timed


@dataclass(frozen=True)
class RayEngine(CellEngine):
    """Tasks of a Ray cluster. Results come back through Ray: the workers need no access to the folder of results."""

    jobs: int | None = None  # measurements in parallel at most; None: as many as the cluster has room for
    address: str | None = None  # of a running cluster; None: one on this machine
    cpus: int = 1  # cores of each measurement
    gpus: float = 0.0  # GPUs of each measurement: a fraction lets several share one
    retries: int = 3  # of a measurement whose worker died

    def run(self, measure: Measure, cells: Sequence[Cell], notify: Notify) -> Iterator[CellResult]:
        with ray_cluster(self.address, (self.jobs or 1) * self.cpus) as ray, terminable():
            self._check(ray)
            options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": self.retries}
            task = ray.remote(**options)(_measure)
            waiting, running = list(cells), dict[Any, Cell]()
            while waiting or running:
                slots = self._slots(ray)
                while waiting and len(running) < (self.jobs or 2 * slots):  # twice: those that wait let a cluster grow
                    cell = waiting.pop(0)
                    running[task.remote(measure, cell, os.getcwd(), self.cpus, __version__)] = cell
                notify(None, list(running.values())[:slots])
                (ready,), _ = ray.wait(list(running), num_returns=1)
                place = in_words(running.pop(ready))
                result: CellResult = get_result(ray, ready, place, "results", self.retries + 1)
                notify(result, list(running.values())[:slots])
                yield result

    def _slots(self, ray: Any) -> int:
        """Return how many measurements the cluster has room for now, at least one."""
        there = ray.cluster_resources()
        slots = there.get("CPU", 0.0) / self.cpus
        return max(1, int(min(slots, there.get("GPU", 0.0) / self.gpus) if self.gpus else slots))

    def _check(self, ray: Any) -> None:
        """Raise if a cluster of this machine can run no measurement: Ray would wait for ever. Others may grow: warn."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for option, needs, kind in (("--cpus", self.cpus, "CPU"), ("--gpus", self.gpus, "GPU")):
            most = max(node.get(kind, 0.0) for node in nodes)
            if needs > most and self.address is None:
                raise ConfigError([Fault(option, f"= {needs:g}: this machine has {most:g} {kind}s")])
            if needs > most:
                warnings.warn(f"no machine of the cluster has {needs:g} {kind}s yet: waiting for one", stacklevel=2)
            if kind == "GPU" and most and not needs:
                warnings.warn("the cluster has GPUs, but no cell gets one: add --gpus 1, or a fraction", stacklevel=2)


def _measure(measure: Measure, cell: Cell, folder: str, threads: int, version: str) -> CellResult:
    """Measure a cell in a worker."""
    prepare_worker(folder, threads, version)
    return timed(measure, cell)

"""Shards on the workers of a Ray cluster (extra `ray`). Workers read the run's folder; texts are sent by Ray."""

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from anyformer import __version__
from anyformer.config import ConfigError, Fault
from anyformer.generation.batch.predictor import Predicted, Predictor
from anyformer.generation.batch.shards import ShardText, predict_shard
from anyformer.generation.ray_cluster import get_result, prepare_worker, ray_cluster

RETRIES = 3  # of a shard whose worker died
SHARDS_PER_WORKER = 2  # one is predicted while the next one waits, so that no worker does


@dataclass(frozen=True)
class RayWorkers:
    """Workers that each load the run once."""

    predictor: Predictor
    jobs: int | None = None  # number of workers; None: as many as the cluster has room for
    address: str | None = None  # of a running cluster; None: one on this machine
    gpus: float = 0.0  # GPUs of each worker: a fraction lets several share one

    def predict(self, shards: Iterable[ShardText]) -> Iterator[tuple[int, Predicted]]:
        waiting: Iterator[tuple[int, ShardText]] = enumerate(shards)
        if (first := next(waiting, None)) is None:
            return
        waiting = itertools.chain([first], waiting)
        with ray_cluster(self.address, self.jobs or 1) as ray:
            options = {"num_cpus": 1, "num_gpus": self.gpus, "max_restarts": RETRIES, "max_task_retries": RETRIES}
            make = ray.remote(**options)(_Worker)
            actors = [make.remote(self.predictor, os.getcwd(), __version__) for _ in range(self._count(ray))]
            running: dict[Any, tuple[int, Any]] = {}
            free = actors * SHARDS_PER_WORKER
            while True:
                while free and (following := next(waiting, None)) is not None:
                    actor, (i, shard) = free.pop(0), following
                    running[actor.predict.remote(shard)] = i, actor
                if not running:
                    return
                (ready,), _ = ray.wait(list(running), num_returns=1)
                i, actor = running.pop(ready)
                free.append(actor)
                yield i, get_result(ray, ready, "--engine = ray", "shards", RETRIES + 1)

    def _count(self, ray: Any) -> int:
        there = ray.cluster_resources()
        room = there.get("GPU", 0.0) / self.gpus if self.gpus else there.get("CPU", 1.0)
        if self.gpus and room < 1 and self.address is None:
            raise ConfigError([Fault("--gpus", f"= {self.gpus:g}: this machine has {there.get('GPU', 0.0):g} GPUs")])
        return self.jobs or max(1, int(room))


class _Worker:
    """Predicts shards in a process of the cluster."""

    def __init__(self, predictor: Predictor, folder: str, version: str):
        prepare_worker(folder, 1, version)
        self._predictor = predictor

    def predict(self, shard: ShardText) -> Predicted:
        return predict_shard(self._predictor, shard)

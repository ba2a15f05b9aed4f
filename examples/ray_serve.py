"""Replicas of a server behind one address, on the machines of a Ray cluster.

python examples/ray_serve.py runs/sort --replicas 2

Each replica loads the run and has an engine of its own; Ray Serve starts them, restarts one that fails, and sends each
request to one of the less busy. The endpoints are those of `anyformer serve`. It needs the extra `serve` and
`pip install "ray[serve]"`.
"""

import argparse
from pathlib import Path
from typing import Any

from anyformer.generation.api import ray_cluster


def make_application(run: Path, replicas: int = 1, gpus: float = 0) -> Any:
    """Return an application of Ray Serve. Every machine must have the run at this path."""
    from ray import serve

    folder = run.resolve()

    def build() -> Any:  # called in each replica
        import anyformer as af
        from anyformer.generation.http.app import make_app
        from anyformer.generation.http.service import Service

        return make_app(Service(af.Engine(af.load(folder))))

    ingress: Any = serve.ingress(build)()
    deployment = serve.deployment(
        ingress,
        name=folder.name,
        num_replicas=replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        max_ongoing_requests=256,  # the engine batches them
    )
    return deployment.bind()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--address", help="HOST:PORT of a cluster; by default one is started on this machine")
    options = parser.parse_args()
    with ray_cluster(options.address, cpus=options.replicas + 2):  # one more for each of the two processes of Ray Serve
        from ray import serve

        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        try:
            serve.run(make_application(options.run, options.replicas, options.gpus), blocking=True)
        finally:
            serve.shutdown()


if __name__ == "__main__":
    main()

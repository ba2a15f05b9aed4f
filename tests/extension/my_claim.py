"""A claim of a user's own, as docs/extending.md shows it; its cells are small."""

from typing import Literal

from anyformer.lab.api import Experiment, More, decide, summary, trial
from anyformer.lab.figures import bars, panels
from anyformer.training.api import read_recipe

POSITIONS = ("rotary", "none")
SMALL = ["model.width=8", "model.decoder.depth=1", "data.train.count=200", "data.valid.count=20", "batches.tokens=64"]


class Ordered(Experiment):
    """Positions of a decoder that sorts."""

    kind: Literal["ordered"] = "ordered"

    def cells(self, size):
        steps, seeds = (20, 2) if size == "quick" else (400, 5)
        return [{"position": p, "steps": steps, "seed": seed} for p in POSITIONS for seed in range(seeds)]

    def measure(self, cell):
        changes = [f"model.decoder.position={cell['position']}", f"train.steps={cell['steps']}", f"seed={cell['seed']}"]
        return trial(read_recipe("sort", [*SMALL, *changes, "train.schedule.warmup=2"]))

    def judge(self, results):
        losses = _losses(results)
        return decide([More("loss, none - rotary", losses["none"], losses["rotary"])])

    def table(self, results):
        return [("position", "loss"), *((name, str(summary(some))) for name, some in _losses(results).items())]

    def draw(self, results):
        figure, (axis,) = panels()
        bars(axis, _losses(results))
        axis.set(xlabel="validation loss, nats per token")
        return figure


def _losses(results):
    return {name: [r["loss"] for r in results if r["position"] == name] for name in POSITIONS}

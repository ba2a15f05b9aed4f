"""A run with snapshots whose weights differ, as a finished training leaves it."""

from functools import partial
from pathlib import Path

from anyformer.runs.run import write_folder, write_model
from tests.explore import made

STEPS = (0, 4, 9)
LAST = 12


def filmed(home: Path, name: str = "lm", ended: bool = True) -> Path:
    """Write a run `film` with snapshots and, if it has ended, a last checkpoint with the weights of the result."""
    run, folder = made.made(name), home / "film"

    def write(path: Path, step: int) -> None:
        weights = {key: weight * (0.4 + step / 5) for key, weight in run.model.state_dict().items()}
        write_folder(path, partial(write_model, weights=weights, config=run.config, spec=run.spec, task=run.task))

    if ended:
        write(folder, LAST)
        write(folder / "state" / f"step-{LAST:09}", LAST)
    for step in STEPS:
        write(folder / "snapshots" / f"step-{step:09}", step)
    (folder / "recipe.toml").touch()
    (folder / "metrics.jsonl").write_text('{"step": 4, "loss": 3.0}\n{"step": 12, "loss": 2.5}\n')
    return folder

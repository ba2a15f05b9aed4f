"""View `live`: metrics, snapshots and checkpoints of a run, also while it is being trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from anyformer.config import ConfigError
from anyformer.config.spec import Count
from anyformer.explore.requests import RunRequest
from anyformer.explore.view import SavedText, View
from anyformer.runs.run import MANIFEST, checkpoints, read_json, snapshots, verify
from anyformer.training.checkpoint import step_of
from anyformer.training.log import read_metrics


class LiveRequest(RunRequest):
    """A request for the metrics of a training, from row `since` on."""

    since: Count = 0


class LiveView(View):
    """The metrics of a training."""

    kind: Literal["live"] = "live"
    request = LiveRequest
    group, place, key = "runs", 2, "0"

    def respond(self, workspace: Any, request: LiveRequest) -> dict[str, Any]:
        return rows_since(workspace.opened(request.run).folder, request.since)

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield {"since": 0}


def is_training(folder: Path) -> bool:
    """Return whether training has started and not finished: the folder has a recipe and no manifest."""
    return (folder / "recipe.toml").exists() and not (folder / MANIFEST).exists()


def rows_since(folder: Path, since: int) -> dict[str, Any]:
    """Return the metrics from row `since` on (complete lines only), their number, and whether training continues."""
    rows = read_metrics(folder)
    return {"rows": rows[since:], "count": len(rows), "checkpoints": list(by_step(folder)), "live": is_training(folder)}


def by_step(folder: Path) -> dict[int, Path]:
    """Return the snapshots and checkpoints of a run by their steps, in order."""
    paths = {step_of(path): path for path in (*snapshots(folder), *checkpoints(folder))}
    return dict(sorted(paths.items()))


def result_step(folder: Path) -> int | None:
    """Return the step whose weights are the result of a finished training; None for an average, or if it is unknown.

    The result may be that of the best step. Weights are compared by the checksums of their files.
    """
    own = _weights_checksum(folder)
    steps = [step for step, path in by_step(folder).items() if own and _weights_checksum(path) == own]
    return steps[-1] if steps else None


def _weights_checksum(folder: Path) -> str | None:
    try:
        return read_json(folder / MANIFEST).get("files", {}).get("model.safetensors")
    except ConfigError:  # there is none, or it is damaged
        return None


def newest(folder: Path) -> Path | None:
    """Return the newest snapshot or checkpoint that passes its checksums."""
    for path in reversed(by_step(folder).values()):
        try:
            verify(path)
        except ConfigError:
            continue
        return path
    return None

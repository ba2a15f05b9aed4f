"""Log of a training run: a progress bar on a terminal, lines elsewhere, metrics.jsonl, loggers and a loss curve."""

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anyformer.config import ConfigError, Fault
from anyformer.recipe import Logger, is_lower_better
from anyformer.runs.atomic_folder import must_be_file, writing

SPEED_SECONDS = 10  # time over which speed is measured
SECONDS_BETWEEN_LINES = 5  # where there is no terminal
CLEAR_GAIN = 0.02  # relative improvement of a metric in the last quarter of training


class Log:
    """Context that writes metrics.jsonl and shows progress."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        start: int,
        console: Console,
        every: int,
        at_peak: float | None = None,
        place: float | None = None,
        loggers: Sequence[Logger] = (),
    ):
        """`at_peak`: tokens per second at an MFU of 1, if it is known. `place`: of step `start` in the schedule."""
        self.folder, self.path = folder, folder / "metrics.jsonl"
        self.steps, self.first, self.console, self.every, self.at_peak = steps, start, console, every, at_peak
        self.loggers, self.opened = list(loggers), dict[str, Any]()
        self.shown = time.perf_counter()
        place = start if place is None else place
        self.recent = deque([(self.shown, place, 0)])  # time, place in the schedule, and tokens so far
        self.tokens, self.evaluation_seconds = 0, 0.0
        self.bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=SPEED_SECONDS,
        )
        self.task = self.bar.add_task("", total=steps, note="")
        self.bar.update(self.task, completed=place)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        for logger in list(self.loggers):
            if (to := self.opened.get(logger.kind)) is not None:
                with self._dropping(logger):
                    logger.close(to)

    @contextmanager
    def _dropping(self, logger: Logger) -> Iterator[None]:
        """Drop a logger that raises an error: no run is lost for it."""
        try:
            yield
        except Exception as error:
            self.loggers.remove(logger)
            what = f"failed, and gets no further lines: {type(error).__name__}: {error}"
            self.print(f"train.loggers: '{logger.kind}' {what}")

    def drop_after(self, step: int) -> None:
        """Remove the lines of steps that a resumed run repeats."""
        if self.path.exists():
            text = "".join(f"{json.dumps(row)}\n" for row in read_metrics(self.folder) if row["step"] <= step)
            temporary = self.path.with_name(".tmp-metrics.jsonl")
            with writing(self.path):
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self.path)

    def write(self, step: int, **values: Any) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for logger in list(self.loggers):
            with self._dropping(logger):
                if logger.kind not in self.opened:  # not before the first line: an import would delay the first step
                    self.opened[logger.kind] = logger.open(self.folder / logger.kind, self.first)
                if (to := self.opened[logger.kind]) is not None:
                    logger.write(to, step, values)

    def step(
        self,
        step: int,
        loss: float,
        lr: float,
        norm: float,
        tokens: int,
        reward: float | None = None,
        place: float | None = None,
    ) -> None:
        """Log a step: on the bar, and every `every` steps in metrics.jsonl. `place`: in the schedule, if not `step`."""
        now, place = time.perf_counter(), step if place is None else place
        self.tokens += tokens
        self.recent.append((now, place, self.tokens))
        while len(self.recent) > 2 and now - self.recent[1][0] > SPEED_SECONDS:
            self.recent.popleft()
        since, first, before = self.recent[0]
        rate = (self.tokens - before) / (now - since)
        share = None if self.at_peak is None else rate / self.at_peak
        speed = f"{rate:,.0f} tokens/s" + ("" if share is None else f", {share:.1%} of the peak")
        shown = f"loss {loss:.3f}" + ("" if reward is None else f"  reward {reward:.3f}")
        self.bar.update(self.task, completed=place, note=f"{shown}  {speed}")
        if step % self.every == 0 or place == self.steps:
            more = {} if share is None else {"peak_share": round(share, 4)}
            more |= {} if reward is None else {"reward": reward}
            self.write(step, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=round(rate), **more)
        if not self.console.is_terminal and (now - self.shown > SECONDS_BETWEEN_LINES or place == self.steps):
            self.shown = now
            left = (self.steps - place) * (now - since) / (place - first)
            self.print(f"{self._name(step, place)}  {shown}  {speed}  {left:.0f} s left")

    @contextmanager
    def evaluating(self, step: int, place: float | None = None) -> Iterator[None]:
        """Show that an evaluation runs, as a line if it is the last one or takes long, and leave its time out."""
        began, place = time.perf_counter(), step if place is None else place
        self.bar.update(self.task, note="evaluating …")
        long = self.evaluation_seconds > SECONDS_BETWEEN_LINES
        if not self.console.is_terminal and (long or place == self.steps):
            self.print(f"{self._name(step, place)}  evaluating …")
        yield
        now = time.perf_counter()
        self.evaluation_seconds = now - began
        self.recent = deque([(now, place, self.tokens)])

    def _name(self, step: int, place: float) -> str:
        """Return the step and the last one, or its share of the time."""
        return f"step {step}/{self.steps}" if place == step else f"step {step}  {place / self.steps:.0%}"

    def evaluation(self, step: int, name: str, values: dict[str, float]) -> None:
        self.write(step, **{f"{name}_{key}": value for key, value in values.items()})
        self.print(f"step {step}  {name}: " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))

    def print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class SilentLog(Log):
    """Log that writes nothing, for all processes but the first."""

    def __init__(self) -> None:
        super().__init__(Path(), 0, 0, Console(quiet=True, force_terminal=False), 1)

    def drop_after(self, step: int) -> None:
        pass

    def write(self, step: int, **values: Any) -> None:
        pass


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl. An incomplete last line is left out; others must be valid."""
    path = must_be_file(folder / "metrics.jsonl")
    try:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    except OSError as error:
        raise ConfigError([Fault(str(path), f"cannot be read: {error.strerror}")]) from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line.decode("utf-8"))
            if type(row["step"]) is not int:
                raise TypeError
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            what = "is not a line of metrics: correct or delete it"
            raise ConfigError([Fault(f"{path}:{number}", what)]) from None
        rows.append(row)
    return rows


def is_improving(folder: Path, metric: str) -> bool:
    """Return whether a finished run would gain from more steps: its validation metric improved clearly to the end."""
    points = [(row["step"], row[key]) for row in read_metrics(folder) if (key := f"valid_{metric}") in row]
    values = [-value if is_lower_better(metric) else value for _, value in points]
    earlier = [value for (step, _), value in zip(points, values, strict=True) if step <= 0.75 * points[-1][0]]
    if not earlier or values[-1] < max(values):
        return False
    return values[-1] - max(earlier) > CLEAR_GAIN * abs(max(earlier))


def draw_curve(folder: Path) -> Path | None:
    """Draw loss.png from metrics.jsonl; return None if matplotlib is not installed."""
    try:
        from anyformer.nn.inspection.plot import pyplot

        plt = pyplot()
    except ImportError:
        return None
    rows = read_metrics(folder)
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in (("loss", "training", "-"), ("valid_loss", "validation", "o-")):
        points = [
            (row["step"], row[key]) for row in rows if isinstance(row.get(key), float)
        ]  # not that of a skipped step
        if points:
            axis.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axis.set(xlabel="step", ylabel="loss per token")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(folder / "loss.png", dpi=110)
    plt.close(figure)
    return folder / "loss.png"

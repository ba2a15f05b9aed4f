"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, metrics.jsonl, a loss curve.

Where the package tensorboard is installed, the same numbers go into the run's folder `tensorboard`.
"""

import json
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anyformer.atomic_folder import must_be_file, writing
from anyformer.config import ConfigError, Fault

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

WINDOW = 50  # steps over which speed is measured


class Log:
    """Writes metrics.jsonl and shows progress. Used as a context."""

    def __init__(
        self, folder: Path, steps: int, start: int, console: Console, every: int, at_peak: float | None = None
    ):
        """`at_peak`: tokens a second that would use all of the hardware, where that is known."""
        self.folder, self.path = folder, folder / "metrics.jsonl"
        self.steps, self.first, self.console, self.every, self.at_peak = steps, start, console, every, at_peak
        self.began = self.shown = time.perf_counter()
        self.recent: deque[tuple[float, int]] = deque([(self.began, 0)], maxlen=WINDOW)  # when, and tokens till then
        self.tokens = 0
        self.board: SummaryWriter | None = None
        self.bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("", total=steps, completed=start, note="")

    def __enter__(self) -> Self:
        self.board = open_board(self.folder / "tensorboard", self.first)
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        if self.board is not None:
            self.board.close()

    def forget_after(self, step: int) -> None:
        """Remove the lines of steps that a resumed run repeats."""
        if self.path.exists():
            kept = "".join(f"{json.dumps(row)}\n" for row in read_metrics(self.folder) if row["step"] <= step)
            temporary = self.path.with_name(".tmp-metrics.jsonl")
            with writing(self.path):
                temporary.write_text(kept, encoding="utf-8")
                temporary.replace(self.path)

    def write(self, step: int, **values: Any) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, float | int):
                    self.board.add_scalar(name, value, step)

    def step(self, step: int, loss: float, lr: float, norm: float, tokens: int) -> None:
        """After each step."""
        now = time.perf_counter()
        self.tokens += tokens
        since, before = self.recent[0]
        self.recent.append((now, self.tokens))
        rate = (self.tokens - before) / (now - since)
        share = None if self.at_peak is None else rate / self.at_peak
        speed = f"{rate:,.0f} tokens/s" + ("" if share is None else f", {share:.1%} of the peak")
        self.bar.update(self.task, completed=step, note=f"loss {loss:.3f}  {speed}")
        if step % self.every == 0 or step == self.steps:
            known = {} if share is None else {"peak_share": round(share, 4)}
            self.write(step, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=round(rate), **known)
        if not self.console.is_terminal and (now - self.shown > 5 or step == self.steps):
            self.shown = now
            left = (self.steps - step) * (now - self.began) / max(1, step - self.first)
            self.say(f"step {step}/{self.steps}  loss {loss:.3f}  {speed}  {left:.0f} s left")

    def evaluation(self, step: int, name: str, values: dict[str, float]) -> None:
        self.write(step, **{f"{name}_{key}": value for key, value in values.items()})
        self.say(f"step {step}  {name}: " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))
        self.recent = deque([(time.perf_counter(), self.tokens)], maxlen=WINDOW)  # its time is not training's

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Mute(Log):
    """The log of a process that neither writes nor speaks: of several, the first does."""

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def forget_after(self, step: int) -> None:
        pass

    def write(self, step: int, **values: Any) -> None:
        pass

    def step(self, step: int, loss: float, lr: float, norm: float, tokens: int) -> None:
        pass

    def evaluation(self, step: int, name: str, values: dict[str, float]) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def open_board(folder: Path, step: int) -> "SummaryWriter | None":
    """TensorBoard's file, where it is installed; what an earlier try wrote after `step` is hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # here: it takes a while
    except ImportError:
        return None
    with writing(folder):
        return SummaryWriter(str(folder), purge_step=step + 1)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl. A last line that was cut short is left out; others must be right."""
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


def draw_curve(folder: Path) -> Path | None:
    """loss.png from metrics.jsonl, where matplotlib is there."""
    try:
        from anyformer.inspection.plot import pyplot

        plt = pyplot()
    except ImportError:
        return None
    rows = read_metrics(folder)
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for key, label, style in (("loss", "training", "-"), ("valid_loss", "validation", "o-")):
        points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), float)]  # not of a bad step
        if points:
            axis.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axis.set(xlabel="step", ylabel="loss per token")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(folder / "loss.png", dpi=110)
    plt.close(figure)
    return folder / "loss.png"

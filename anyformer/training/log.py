"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, metrics.jsonl, a loss curve, a card."""

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from anyformer.run import writing


class Log:
    """Writes metrics.jsonl and shows progress. Used as a context."""

    def __init__(self, folder: Path, steps: int, start: int, console: Console, every: int):
        self.path, self.steps, self.console, self.every = folder / "metrics.jsonl", steps, console, every
        self.began, self.first, self.shown = time.perf_counter(), start, time.perf_counter()
        self.tokens = 0
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
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def forget_after(self, step: int) -> None:
        """Drops lines of steps that a resumed run does again."""
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            temporary = self.path.with_name(".tmp-metrics.jsonl")
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.replace(self.path)

    def write(self, step: int, **values: Any) -> None:
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def step(self, step: int, loss: float, lr: float, norm: float, tokens: int) -> None:
        """After each step."""
        self.tokens += tokens
        passed = time.perf_counter() - self.began
        rate = self.tokens / passed
        self.bar.update(self.task, completed=step, note=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
        if step % self.every == 0 or step == self.steps:
            self.write(step, loss=loss, lr=lr, grad_norm=norm, tokens_per_second=round(rate))
        if not self.console.is_terminal and (time.perf_counter() - self.shown > 5 or step == self.steps):
            self.shown = time.perf_counter()
            left = (self.steps - step) * passed / max(1, step - self.first)
            self.say(f"step {step}/{self.steps}  loss {loss:.3f}  {rate:,.0f} tokens/s  {left:.0f} s left")

    def evaluation(self, step: int, name: str, values: dict[str, float]) -> None:
        self.write(step, **{f"{name}_{key}": value for key, value in values.items()})
        self.say(f"step {step}  {name}: " + "  ".join(f"{key} {value:.4g}" for key, value in values.items()))

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def draw_curve(folder: Path) -> Path | None:
    """loss.png from metrics.jsonl, where matplotlib is there."""
    try:
        from anyformer.inspection.plot import pyplot

        plt = pyplot()
    except ImportError:
        return None
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
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

"""Table and figure of forecasts for several numbers of GPUs. Imports no torch."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Fault
from anyformer.kernels.gpu_table import GPU
from anyformer.nn.inspection.count import BYTES, FLOPS, count, human
from anyformer.training.forecast.estimate import Forecast, NoSplit, best_split
from anyformer.training.forecast.workload import Workload

COMPUTE, COMMUNICATION, IDEAL = "#0072b2", "#d55e00", "#777777"  # apart for all kinds of colour vision


@dataclass(frozen=True)
class Forecasts:
    """Forecasts of one training run, for each number of GPUs."""

    work: Workload
    name: str  # of the GPU
    gpu: GPU
    tokens: float
    rate: float | None  # price of an hour of one GPU
    rows: tuple[Forecast | NoSplit, ...]

    @classmethod
    def of(
        cls, work: Workload, name: str, gpu: GPU, counts: Sequence[int], tokens: float, rate: float | None = None
    ) -> "Forecasts":
        """Search for the best split for each number of GPUs."""
        return cls(work, name, gpu, tokens, rate, tuple(best_split(work, gpu, n) for n in counts))

    @property
    def found(self) -> list[Forecast]:
        return [row for row in self.rows if isinstance(row, Forecast)]

    def to_dict(self) -> dict[str, Any]:
        rows = [asdict(row) if isinstance(row, NoSplit) else self._row(row) for row in self.rows]
        return {"gpu": self.name, "tokens": self.tokens, "step_tokens": self.work.step_tokens, "rows": rows}

    def _row(self, row: Forecast) -> dict[str, Any]:
        price = {} if self.rate is None else {"price": row.price(self.tokens, self.rate)}
        return {
            "gpus": row.split.gpus,
            **asdict(row),
            "seconds": row.seconds,
            "days": row.days(self.tokens),
            **price,
            "settings": settings(row, self.work),
        }

    def __str__(self) -> str:
        return "\n".join([*self._heading(), "", *self._table(), *self._advice()])

    def _heading(self) -> list[str]:
        work, gpu = self.work, self.gpu
        length = f"{work.source_length:,} + {work.length:,}" if work.source_length else f"{work.length:,}"
        each = f"{work.rows:,} rows of {length} tokens a step"
        how = f"{work.precision}, {'compiled' if work.compiled else 'eager'}"
        links = (
            f"{gpu.link / 1e9:,.0f} GB/s to {gpu.node - 1} others in a node, {gpu.network * 8e-9:,.0f} Gbit/s between"
        )
        peak = human(gpu.flops[work.precision], 1000, FLOPS)
        return [
            f"model  {work.config.shape}, {count(work.config).parameters:,} parameters; {each}; {how}",
            f"run    {human(self.tokens, 1000, FLOPS)} tokens in {self.tokens / work.step_tokens:,.0f} steps",
            f"GPU    {self.name}: {gpu.memory / 1e9:.0f} GB, {peak}FLOP/s, {gpu.bandwidth / 1e12:.2f} TB/s; {links}",
        ]

    def _table(self) -> list[str]:
        names = ["GPUs", "split", "rows", "memory", "compute", "comm.", "step", "tokens/s", "MFU", "days"]
        names += [] if self.rate is None else ["price"]
        cells = [names]
        cells += [[f"{row.gpus:,}", row.reason] if isinstance(row, NoSplit) else self._cells(row) for row in self.rows]
        widths = [max(len(line[i]) for line in cells if len(line) > max(i, 2)) for i in range(len(names))]
        form = [f"{{:{'<' if i == 1 else '>'}{width}}}" for i, width in enumerate(widths)]
        return ["  ".join(form[: len(line)]).format(*line).rstrip() for line in cells]

    def _cells(self, row: Forecast) -> list[str]:
        split = row.split
        rows = f"{split.rows}" + (f" × {split.accumulate}" if split.accumulate > 1 else "")
        days = row.days(self.tokens)
        return [
            f"{split.gpus:,}",
            f"{split}{', recomputed' if split.recompute else ''}",
            rows,
            human(row.memory, 1024, BYTES),
            *map(_seconds, (row.compute, row.communication, row.seconds)),
            f"{row.tokens_per_second:,.0f}",
            f"{row.mfu:.0%}",
            f"{days:.{0 if days >= 100 else 1}f}" if days >= 1 else f"{days:.2g}",
            *([] if self.rate is None else [f"{row.price(self.tokens, self.rate):,.0f}"]),
        ]

    def _advice(self) -> list[str]:
        if not self.found:
            return []
        last = self.found[-1]
        return ["", f"settings for {last.split.gpus:,} GPUs: {' '.join(settings(last, self.work))}"]

    def draw(self, path: Path) -> None:
        """Draw speed, parts of a step and memory by the number of GPUs: a .png, .svg or .pdf."""
        if not self.found:
            raise ConfigError([Fault("--out", "no number of GPUs fits, so there is nothing to draw")])
        try:
            import matplotlib
        except ImportError:
            raise ConfigError([Fault("--out", "figures need matplotlib: pip install 'anyformer[plot]'")]) from None
        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
        try:
            self._draw_panels(*axes)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=130)
        finally:
            pyplot.close(figure)

    def _draw_panels(self, speed: Any, parts: Any, memory: Any) -> None:
        gpus = [row.split.gpus for row in self.found]
        days = [row.days(self.tokens) for row in self.found]
        speed.loglog(gpus, days, "o-", color=COMPUTE, label="forecast")
        speed.loglog(gpus, [days[0] * gpus[0] / n for n in gpus], "--", color=IDEAL, label="linear scaling")
        speed.set(title=f"Days for {human(self.tokens, 1000, FLOPS)} tokens", xlabel="GPUs", ylabel="days")
        speed.legend(frameon=False)
        speed.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        speed.yaxis.set_major_formatter(lambda x, _: f"{x:g}")
        for axis in (speed.xaxis, speed.yaxis):
            axis.set_minor_formatter(lambda *_: "")
        at, names = range(len(gpus)), [f"{n:,}" for n in gpus]
        compute = [100 * row.compute / row.seconds for row in self.found]
        parts.bar(at, compute, color=COMPUTE, label="compute")
        rest = [100 - share for share in compute]
        parts.bar(at, rest, bottom=compute, color=COMMUNICATION, label="communication")
        parts.plot(at, [100 * row.mfu for row in self.found], "o-", color="black", label="MFU")
        parts.set(title="Parts of a step", xlabel="GPUs", ylabel="%", ylim=(0, 118), yticks=range(0, 101, 20))
        parts.legend(frameon=False, loc="upper center", ncols=3, fontsize="small", columnspacing=1)
        memory.bar(at, [row.memory / 2**30 for row in self.found], color=COMPUTE)
        memory.axhline(self.gpu.memory / 2**30, color=IDEAL, linestyle="--")
        for i, row in enumerate(self.found):
            style = {"ha": "center", "va": "bottom", "color": "white", "size": 7, "rotation": 90}
            memory.annotate(str(row.split), (i, 0), (0, 4), textcoords="offset points", **style)
        memory.set(title=f"Memory of each GPU ({self.name})", xlabel="GPUs", ylabel="GiB")
        for axis in (parts, memory):
            axis.set_xticks(at, names, rotation=45 if len(gpus) > 6 else 0)
        for axis in (speed, parts, memory):
            axis.spines[["top", "right"]].set_visible(False)


def settings(row: Forecast, work: Workload) -> list[str]:
    """Return the changes of a recipe that make a split. Its batches are those of all GPUs."""
    split = row.split
    rows = work.rows // split.accumulate
    return [
        f"batches.rows={rows}" if work.batched_by == "rows" else f"batches.tokens={rows * work.row_tokens}",
        *([f"train.accumulate={split.accumulate}"] if split.accumulate > 1 else []),
        *(["train.checkpoint_activations=true"] if split.recompute else []),
        *(["parallel.shard=full"] if split.sharded else []),
        *(f"parallel.{name}={n}" for name in ("context", "tensor") if (n := getattr(split, name)) > 1),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"

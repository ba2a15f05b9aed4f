"""A comparison as tables of text, as one HTML page, and as a figure."""

import base64
import html
import io as streams
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from anyformer.config.spec import shorten
from anyformer.lab.comparison.bootstrap import SAMPLES, MetricDifference
from anyformer.lab.comparison.compare import Comparison
from anyformer.lab.figures import label_ends, panels, style
from anyformer.nn.inspection.plot import pyplot

MAX_SETTING = 60  # characters of a value in a table
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
:root { color-scheme: light dark }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { padding: .25rem .75rem; text-align: left; border-bottom: 1px solid #8884; vertical-align: top }
img { max-width: 100% }
"""


def describe(difference: MetricDifference) -> str:
    """Return a difference with its interval and p value."""
    text = f"{difference.value:+.4g} ({difference.low:+.4g} to {difference.high:+.4g}), p = {difference.p:.3f}"
    return text if difference.significant else f"{text}: undecided"


def metric_rows(found: Comparison) -> list[tuple[str, ...]]:
    """Return a line for each metric and run."""
    lines: list[tuple[str, ...]] = []
    for name, values in found.metrics.items():
        better = "higher is better" if found.higher_is_better[name] else "lower is better"
        gaps = ["baseline", *map(describe, found.differences[name])]
        for i, (run, value, gap) in enumerate(zip(found.names, values, gaps, strict=True)):
            lines.append((f"{name} ({better})" if i == 0 else "", run, f"{value:.4g}", gap))
    return lines


def verdicts(found: Comparison) -> list[str]:
    """Return a sentence for each further run and metric."""
    lines = []
    for name, differences in found.differences.items():
        for run, one in zip(found.names[1:], differences, strict=True):
            if not one.significant:
                lines.append(f"{name}: {run} and {found.names[0]} do not differ significantly (p = {one.p:.3f})")
                continue
            better = (one.value > 0) == found.higher_is_better[name]
            lines.append(f"{name}: {run} is {'better' if better else 'worse'} than {found.names[0]} (p = {one.p:.3f})")
    return lines


def text(found: Comparison, width: int | None = None) -> str:
    """Return the comparison as tables for a terminal."""
    out = streams.StringIO()
    console = Console(file=out, width=width or 120, highlight=False)
    if found.settings:
        _print(console, "settings that differ", ("setting", *found.names), _cut(found.settings))
    else:
        console.print("settings: all are the same")
    _print(console, "cost", ("", *found.names), ((name, *each) for name, each in found.cost.items()))
    title = f"metrics on {found.rows:,} rows" + (f", {found.left_out:,} left out" if found.left_out else "")
    _print(console, title, ("metric", "run", "value", "difference to the first (95 % interval)"), metric_rows(found))
    for one in found.examples:
        console.print(f"\n{one.text}\n  target: {one.target}", markup=False)
        for run, prediction in zip(found.names, one.predictions, strict=True):
            console.print(f"  {run}: {prediction}", markup=False)
    console.print()
    for line in verdicts(found):
        console.print(line, markup=False)
    return out.getvalue()


def _cut(settings: Mapping[str, Sequence[str]]) -> Iterable[tuple[str, ...]]:
    return ((name, *(shorten(value, MAX_SETTING) for value in each)) for name, each in settings.items())


def _print(console: Console, title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console.print(table)


def figure(found: Comparison) -> bytes:
    """Return a PNG with learning curves, and differences with their intervals."""
    bars = [
        (f"{name}\n{run}", one)
        for name, each in found.differences.items()
        for run, one in zip(found.names[1:], each, strict=True)
    ]
    drawn, axes = panels(2 if found.curves else 1, height=max(3.2, 0.6 * len(bars) + 1.2))
    if found.curves:
        for n, (name, curve) in enumerate(found.curves.items()):
            axes[0].plot(*zip(*curve, strict=True), label=name, **style(n))
        axes[0].set(xlabel="step", ylabel="validation loss", title="learning curves")
        label_ends(axes[0])
    axis = axes[-1]
    for y, (_, one) in enumerate(bars):
        scale = max(abs(one.low), abs(one.high), 1e-12)
        axis.plot([one.low / scale, one.high / scale], [y, y], color="#0072B2", linewidth=3)
        axis.plot(one.value / scale, y, "o", color="#000000")
        axis.annotate(
            f"{one.value:+.3g}", (one.value / scale, y), xytext=(0, 7), textcoords="offset points", ha="center"
        )
    axis.axvline(0, color="#6E6E6E", linewidth=1)
    axis.set(title=f"difference to {found.names[0]}, 95 % interval", xlim=(-1.15, 1.15), ylim=(len(bars) - 0.5, -0.7))
    axis.set_yticks(range(len(bars)), [name for name, _ in bars])
    axis.set_xticks([-1, 0, 1], ["lower", "0", "higher"])
    out = streams.BytesIO()
    drawn.savefig(out, format="png", dpi=150)
    pyplot().close(drawn)
    return out.getvalue()


def page(found: Comparison) -> str:
    """Return the comparison as one HTML page that loads nothing."""
    picture = base64.b64encode(figure(found)).decode("ascii")
    alt = "Learning curves of the runs, and differences of their metrics with intervals"
    title = html.escape(" · ".join(found.names))
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>',
        f"<h1>{title}</h1>",
        "".join(f"<p>{html.escape(line)}</p>" for line in verdicts(found)),
        f'<img alt="{alt}" src="data:image/png;base64,{picture}">',
        f"<h2>Metrics on {found.rows:,} rows</h2>",
        f"<p>{found.left_out:,} rows were left out. Intervals: paired bootstrap over rows, {SAMPLES:,} samples.</p>",
        _table(("metric", "run", "value", "difference to the first"), metric_rows(found)),
        "<h2>Settings that differ</h2>",
        _table(("setting", *found.names), ((name, *each) for name, each in found.settings.items())),
        "<h2>Cost</h2>",
        _table(("", *found.names), ((name, *each) for name, each in found.cost.items())),
    ]
    if found.examples:
        rows = ((one.text, one.target, *one.predictions) for one in found.examples)
        parts += ["<h2>Rows on which they differ</h2>", _table(("text", "target", *found.names), rows)]
    return "\n".join([*parts, "</html>\n"])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["<table><tr>", *(f"<th>{html.escape(name)}</th>" for name in head), "</tr>"]
    for row in rows:
        lines += ["<tr>", *(f"<td>{html.escape(cell)}</td>" for cell in row), "</tr>"]
    return "".join([*lines, "</table>"])

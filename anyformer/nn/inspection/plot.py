"""Figures by matplotlib (the `plot` extra): one function for each result of this folder."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unicodedata import east_asian_width

from torch import Tensor

from anyformer.nn.inspection.attribution import Attribution
from anyformer.nn.inspection.head_patterns import HeadStatistics
from anyformer.nn.inspection.score_terms import Curve

# Fonts with Korean and Chinese characters, in order of preference.
CJK_FONTS = (
    "Noto Sans CJK KR",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans KR",
    "Source Han Sans",
    "Apple SD Gothic Neo",
    "AppleGothic",
    "Malgun Gothic",
    "Microsoft YaHei",
    "NanumGothic",
    "UnDotum",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "Unifont",
    "Arial Unicode MS",
)

PAGE_INCHES = 8.0  # width of a row of heads
MAX_INCHES, MAX_LABELS = 30.0, 80  # size of a figure, and labels along an axis


def pyplot() -> Any:
    """Return matplotlib's pyplot with a backend that needs no display; if missing, the error says how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("figures need matplotlib: pip install 'anyformer[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def _drawing(path: str | Path, width: float, height: float, rows: int = 1, columns: int = 1) -> Iterator[Any]:
    """Yield the axes [rows, columns] of a figure (size in inches), and write it to a .png, .svg or .pdf at the end."""
    plt = pyplot()
    from matplotlib import font_manager

    installed = {font.name for font in font_manager.fontManager.ttflist}
    family = ["DejaVu Sans", *(name for name in CJK_FONTS if name in installed)]
    # text in an .svg stays text: the viewer chooses a font that has the characters
    with plt.rc_context({"font.family": family, "svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # such characters are drawn as boxes
        figure, axes = plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained")
        try:
            yield axes
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=130)
        finally:
            plt.close(figure)


def plot_map(weights: Tensor, rows: list[str], columns: list[str], path: str | Path, title: str = "") -> Path:
    """Draw the map of one head [t, s], several heads [h, t, s], or several layers [layers, h, t, s].

    Rows are queries, columns are keys.
    """
    panels = weights[(None,) * (4 - weights.dim())].detach().cpu().float()
    layers, heads = panels.shape[:2]
    least, each = (2.4, 0.2) if layers == 1 else (1.6, 0.12)
    down, across = layers, heads
    if layers == 1:  # the heads of one layer, in rows of a page's width
        down = -(-heads // max(1, int(PAGE_INCHES / max(least, each * len(columns)))))
        across = -(-heads // down)
    size = max(least, min(each * len(columns), MAX_INCHES / across))
    tall = max(least, min(each * len(rows), MAX_INCHES / down))
    with _drawing(path, size * across + 0.8, tall * down + 0.6, down, across) as axes:
        for axis in axes.flat[layers * heads :]:
            axis.set_axis_off()
        for layer, head in ((i, j) for i in range(layers) for j in range(heads)):
            axis = axes.flat[layer * heads + head]
            image = axis.imshow(panels[layer, head].numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
            _ticks(axis, rows, columns, 8 if layers == 1 else 5)
            name = f"head {head}" if layers == 1 else f"layer {layer}, head {head}"
            axis.set_title(name if layers * heads > 1 else "", fontsize=9)
            axis.set_xlabel("key" if layer * heads + head >= (down - 1) * across else "")
        axes[0][0].set_ylabel("query")
        axes[0][0].figure.suptitle(title, parse_math=False)
        axes[0][0].figure.colorbar(image, ax=axes.ravel().tolist(), label="weight")
    return Path(path)


def plot_head_scores(scores: Mapping[str, Tensor], path: str | Path, title: str = "") -> Path:
    """Draw the tables of `head_scores`: red where the measure grows without the head, blue where it falls."""
    with _drawing(path, 3.2 * len(scores) + 0.8, 3.2, 1, len(scores)) as axes:
        most = max(float(table.nan_to_num().abs().max()) for table in scores.values()) or 1.0
        for axis, (kind, table) in zip(axes[0], scores.items(), strict=True):
            image = axis.imshow(table.cpu().float().numpy(), vmin=-most, vmax=most, cmap="RdBu_r", aspect="auto")
            _ticks(axis, list(map(str, range(len(table)))), list(map(str, range(table.shape[1]))), 8)
            axis.set_title(kind, fontsize=9)
            axis.set_xlabel("head")
        axes[0][0].set_ylabel("layer")
        axes[0][0].figure.suptitle(title, parse_math=False)
        axes[0][0].figure.colorbar(image, ax=axes.ravel().tolist(), label="change without the head")
    return Path(path)


def plot_lens(
    logits: Tensor, tokens: list[str], vocabulary: Sequence[str], path: str | Path, row: int | None = None
) -> Path:
    """Draw the top-1 token after each layer, and its probability, from the result of `logit_lens`.

    logits: [1 + layers, b, t, v], of which `row` (0 if not given) is drawn, or those of one text, [1 + layers, t, v].
    """
    if logits.dim() not in (3, 4) or (logits.dim() == 3 and row is not None):
        expected = "[1 + layers, b, t, v], or without b and `row`"
        raise ValueError(f"logits have shape {list(logits.shape)}, expected {expected}, as logit_lens returns them")
    logits = logits if logits.dim() == 3 else logits[:, _row(row or 0, logits.shape[1])]
    _check_tokens("tokens", tokens, logits.shape[1])
    best, which = logits.detach().cpu().float().softmax(dim=-1).max(dim=-1)  # [1 + layers, t]
    layers, length = best.shape
    with _drawing(path, min(0.7 * length, MAX_INCHES) + 2, min(0.4 * layers, MAX_INCHES) + 1.4) as axes:
        axis = axes[0][0]
        image = axis.imshow(best.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower")
        for layer, at in ((i, j) for i in range(layers) for j in range(length)):
            colour = "black" if best[layer, at] > 0.6 else "white"
            best_id = int(which[layer, at])
            label = vocabulary[best_id] if best_id < len(vocabulary) else str(best_id)  # a model may have more ids
            axis.text(at, layer, label, ha="center", va="center", color=colour, fontsize=7, parse_math=False)
        _ticks(axis, ["embeddings", *(f"layer {i}" for i in range(layers - 1))], tokens, 8)
        axis.figure.colorbar(image, ax=axis, label="probability")
    return Path(path)


def plot_statistics(statistics: HeadStatistics, path: str | Path, title: str = "") -> Path:
    """Draw the name of each head, coloured by the entropy of its weights."""
    names, spread = statistics.names(), statistics.spread.cpu().float()
    with _drawing(path, 1.1 * spread.shape[1] + 2, 0.5 * len(spread) + 1.2) as axes:
        axis = axes[0][0]
        image = axis.imshow(spread.numpy(), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for layer, head in ((i, j) for i in range(len(names)) for j in range(len(names[i]))):
            colour = "black" if float(spread[layer, head]) > 0.6 else "white"
            axis.text(head, layer, names[layer][head], ha="center", va="center", color=colour, fontsize=7)
        _ticks(axis, list(map(str, range(len(names)))), list(map(str, range(spread.shape[1]))), 8)
        axis.set(xlabel="head", ylabel="layer")
        axis.set_title(title, fontsize=9, parse_math=False)
        axis.figure.colorbar(image, ax=axis, label="entropy / maximum entropy")
    return Path(path)


def plot_terms(terms: Mapping[str, Tensor], path: str | Path, head: int = 0, row: int = 0) -> Path:
    """Draw the terms [b, h, t, s] of the scores of one head and one text, on one scale."""
    shown = {name: term[row, head].detach().cpu().float() for name, term in terms.items()}
    most = max(float(term.abs().max()) for term in shown.values()) or 1.0
    with _drawing(path, 2.6 * len(shown) + 0.8, 3.0, 1, len(shown)) as axes:
        for axis, (name, term) in zip(axes[0], shown.items(), strict=True):
            image = axis.imshow(term.numpy(), vmin=-most, vmax=most, cmap="RdBu_r", aspect="auto")
            axis.set_title(name, fontsize=9)
            axis.set_xlabel("key")
        axes[0][0].set_ylabel("query")
        axes[0][0].figure.colorbar(image, ax=axes.ravel().tolist(), label="score")
    return Path(path)


def plot_curves(curves: Mapping[str, Curve], path: str | Path) -> Path:
    """Draw the curves of `position_curves`: a panel for each distinct layer, a line for each distinct head."""
    panels: list[tuple[str, Curve]] = []
    for name, curve in curves.items():
        if not any(curve.kind == other.kind and _same(curve.values, other.values) for _, other in panels):
            panels.append((name, curve))
    with _drawing(path, 4.0 * max(1, len(panels)), 3.0, 1, max(1, len(panels))) as axes:
        for axis, (name, curve) in zip(axes[0], panels, strict=False):
            alike = _same(curve.values, curve.values[:1].expand_as(curve.values))
            for head, values in enumerate(curve.values[:1] if alike else curve.values):
                label = "all heads" if alike else f"head {head}"
                axis.plot(curve.distances.cpu().tolist(), values.cpu().float().tolist(), label=label, linewidth=1)
            axis.set(title=name, xlabel="query − key", ylabel=curve.kind)
            if alike or len(curve.values) <= 16:
                axis.legend(fontsize=6)
    return Path(path)


def plot_attribution(attribution: Attribution, tokens: Mapping[str, list[str]], path: str | Path, row: int = 0) -> Path:
    """Draw each token's part in a measure as a bar, one panel per stack; negative parts point down."""
    if missing := [side for side in attribution.tokens if side not in tokens]:
        stacks = ", ".join(attribution.tokens)
        raise ValueError(f"tokens has no {missing[0]!r}: give the labels of every stack, {stacks}")
    for side, parts in attribution.tokens.items():
        _check_tokens(f"tokens[{side!r}]", tokens[side], parts.shape[1])
    longest = max(len(tokens[side]) for side in attribution.tokens)
    width = max(4.0, min(0.45 * longest, MAX_INCHES))
    with _drawing(path, width, 2.2 * len(attribution.tokens), len(attribution.tokens), 1) as axes:
        for axis, (side, parts) in zip(axes[:, 0], attribution.tokens.items(), strict=True):
            values = parts[_row(row, len(parts))].cpu().float().tolist()
            axis.bar(range(len(values)), values, color=["tab:red" if value > 0 else "tab:blue" for value in values])
            _tick(axis.set_xticks, tokens[side], 8, may_rotate=True)
            axis.axhline(0, color="black", linewidth=0.5)
            axis.set_ylabel(side)
    return Path(path)


def plot_growth(grown: Mapping[str, Sequence[int]] | Sequence[int], path: str | Path) -> Path:
    """Draw the bytes of a KV cache by tokens read, as `cache_growth` returns them, or of several by name."""
    lines = grown if isinstance(grown, Mapping) else {"": grown}
    with _drawing(path, 4.5, 3.2) as axes:
        for name, sizes in lines.items():
            axes[0][0].plot(range(1, len(sizes) + 1), [size / 1024 for size in sizes], label=name)
        axes[0][0].set(xlabel="tokens", ylabel="KiB")
        axes[0][0].set_ylim(bottom=0)
        if any(lines):
            axes[0][0].legend(fontsize=8)
    return Path(path)


def _ticks(axis: Any, rows: list[str], columns: list[str], size: int) -> None:
    _tick(axis.set_xticks, columns, size, may_rotate=True)
    _tick(axis.set_yticks, rows, size)


def _tick(put: Callable[..., Any], labels: list[str], size: int, *, may_rotate: bool = False) -> None:
    """Label an axis with tokens, without math mode (a $ stays a $), vertical where they would overlap."""
    every, upright = -(-len(labels) // MAX_LABELS), may_rotate and max(map(_columns, labels), default=0) > 3
    put(
        range(0, len(labels), every or 1), labels[:: every or 1], fontsize=size, rotation=90 * upright, parse_math=False
    )


def _columns(label: str) -> int:
    """Return the width of a text in columns of a terminal: Korean and Chinese characters take two."""
    return sum(2 if east_asian_width(c) in "WF" else 1 for c in label)


def _row(row: int, rows: int) -> int:
    if not 0 <= row < rows:
        raise ValueError(f"row = {row}: must be from 0 to {rows - 1}")
    return row


def _check_tokens(name: str, labels: Sequence[str], count: int) -> None:
    if isinstance(labels, str) or len(labels) != count:
        raise ValueError(f"{name} has {len(labels)} labels, expected {count}")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())

"""Figures: scaled dot products, heads, masks, sparse patterns, graphs, long sequences."""

from typing import Any

import torch
from torch import Tensor

from anyformer.attention.layout import Layout, make_layout, sees
from anyformer.config import Causal, Full, Pattern
from figures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, SKY, figure

LIGHT = {BLUE: "#cce3f0", ORANGE: "#faecc8", GREEN: "#ccebe3", PURPLE: "#f5e4ed", RED: "#f7dfcc", SKY: "#ddf0fb"}


def box(axis: Any, x: float, y: float, text: str, colour: str, size: tuple[float, float] = (1.6, 0.6)) -> None:
    """Draw a rounded box with text, centred at (x, y)."""
    from matplotlib.patches import FancyBboxPatch

    width, height = size
    style: dict[str, Any] = {
        "boxstyle": "round,pad=0,rounding_size=0.08",
        "edgecolor": colour,
        "facecolor": LIGHT.get(colour, "white"),
    }
    axis.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, linewidth=1.4, zorder=2, **style))
    axis.text(x, y, text, ha="center", va="center", fontsize=9.5, zorder=3)


def arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], colour: str = BLACK, text: str = "") -> None:
    """Draw an arrow, with text beside its middle."""
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", end, start, arrowprops=style, zorder=1)
    if text:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        patch = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axis.text(*middle, text, ha="center", va="center", fontsize=9.5, color=colour, bbox=patch)


def blank(axis: Any, width: float, height: float) -> None:
    """Prepare an axis for a diagram: no ticks, equal units."""
    axis.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    axis.axis("off")


def grid(axis: Any, seen: Tensor, title: str, colour: str = BLUE, lines: bool = True) -> None:
    """Draw a mask: rows are queries, coloured where they see a key."""
    from matplotlib.colors import ListedColormap

    axis.imshow(seen.float(), cmap=ListedColormap(["#f2f2f2", colour]), vmin=0, vmax=1)
    rows, columns = seen.shape
    if lines:
        axis.set_xticks([column - 0.5 for column in range(1, columns)], minor=True)
        axis.set_yticks([row - 0.5 for row in range(1, rows)], minor=True)
        axis.grid(which="minor", color="white", linewidth=1, alpha=1)
    axis.grid(which="major", visible=False)
    axis.tick_params(which="both", length=0)
    axis.set(title=title, xlabel="key", ylabel="query")


@figure("concepts/scaled-dot-product")
def scaled_dot_product(plt: Any) -> Any:
    """Scores of random queries and keys with and without the factor, and softmax of them."""
    generator = torch.Generator().manual_seed(0)
    widths = [2**n for n in range(1, 10)]
    keys, queries = 16, 2000
    spread: tuple[list[Tensor], list[Tensor]] = ([], [])
    derivative: tuple[list[Tensor], list[Tensor]] = ([], [])
    first = None
    for width in widths:
        q = torch.randn(queries, 1, width, generator=generator)
        k = torch.randn(queries, keys, width, generator=generator)
        dots = (q @ k.mT)[:, 0]
        both = (dots / width**0.5, dots)
        for side, scores in enumerate(both):
            p = scores.softmax(-1).amax(-1)
            spread[side].append(scores.std())
            derivative[side].append((p * (1 - p)).median())
        if width == 64:
            first = [scores.softmax(-1).sort(-1, descending=True).values.mean(0) for scores in both]
    assert first is not None
    drawing, axes = plt.subplots(1, 3, figsize=(8, 3.1), layout="constrained")
    looks = ((BLUE, "o", "with 1/√k"), (RED, "s", "without"))
    for side, (colour, marker, label) in enumerate(looks):
        axes[0].plot(widths, spread[side], color=colour, marker=marker, markersize=4, label=label)
        axes[1].plot(range(1, keys + 1), first[side], color=colour, marker=marker, markersize=4)
        axes[2].plot(widths, derivative[side], color=colour, marker=marker, markersize=4)
    axes[0].set(
        title="spread of scores", xlabel="head width k", ylabel="standard deviation", xscale="log", yscale="log"
    )
    axes[1].set(title="softmax, k = 64", xlabel="key, by rank", ylabel="weight", ylim=(0, 1))
    axes[2].set(title="derivative of softmax", xlabel="head width k", ylabel="p (1 − p) of the top key", xscale="log")
    axes[2].set_ylim(0)
    for axis in (axes[0], axes[2]):
        axis.set_xticks(widths[::2], widths[::2])
        axis.minorticks_off()
    axes[0].legend(loc="upper left")
    return drawing


@figure("concepts/three-attentions")
def three_attentions(plt: Any) -> Any:
    """Sources of queries, keys and values in an encoder–decoder."""
    drawing, axis = plt.subplots(figsize=(8, 4.7), layout="constrained")
    blank(axis, 12.4, 7.2)
    encoder, decoder, size = 2.4, 9.8, (4.2, 0.7)
    for x, y, text, colour in (
        (encoder, 0.5, "source tokens [s, d]", BLACK),
        (encoder, 2.3, "self-attention: scores [s, s]", BLUE),
        (encoder, 3.4, "feed-forward", ORANGE),
        (encoder, 4.5, "encoder output E [s, d]", BLACK),
        (decoder, 0.5, "target tokens [t, d]", BLACK),
        (decoder, 2.3, "masked self-attention: scores [t, t]", BLUE),
        (decoder, 4.5, "cross-attention: scores [t, s]", GREEN),
        (decoder, 5.6, "feed-forward", ORANGE),
        (decoder, 6.7, "next-token logits [t, v]", BLACK),
    ):
        box(axis, x, y, text, colour, size)
    for x in (encoder, decoder):
        for shift, name in ((-1.3, "q"), (0.0, "k"), (1.3, "v")):
            arrow(axis, (x + shift, 0.85), (x + shift, 1.95), BLUE, name)
    for x, start, end in ((encoder, 2.65, 3.05), (encoder, 3.75, 4.15), (decoder, 4.85, 5.25), (decoder, 5.95, 6.35)):
        arrow(axis, (x, start), (x, end))
    arrow(axis, (decoder, 2.65), (decoder, 4.15), RED, "q")
    for y, name in ((4.65, "k"), (4.35, "v")):
        arrow(axis, (4.5, y), (7.7, y), GREEN)
        axis.text(
            6.1,
            y,
            name,
            ha="center",
            va="center",
            fontsize=9.5,
            color=GREEN,
            bbox={"fc": "white", "ec": "none", "pad": 0.5},
        )
    for x, y, text in ((encoder, 5.3, "encoder"), (6.6, 6.7, "decoder")):
        axis.text(x, y, text, ha="center", va="center", fontsize=12, weight="bold")
    return drawing


@figure("concepts/multi-head")
def multi_head(plt: Any) -> Any:
    """Slices against projections, and the shapes from the embedding to the output."""
    drawing, (top, bottom) = plt.subplots(2, 1, figsize=(8, 4.3), height_ratios=(4.6, 3.6), layout="constrained")
    blank(top, 16, 4.6)
    blank(bottom, 16, 3.6)
    features, heads = 8, (BLUE, GREEN)
    for left, title in ((0.4, "not this: slices of the embedding"), (8.6, "this: projections of the whole embedding")):
        top.text(left + 3.5, 4.3, title, ha="center", va="center", weight="bold", fontsize=10.5)
        whole = left > 5
        for i in range(features):
            colour = "#dddddd" if whole else LIGHT[heads[i // 4]]
            top.add_patch(plt.Rectangle((left + i * 0.875, 2.9), 0.8, 0.8, facecolor=colour, edgecolor=BLACK))
        for head, colour in enumerate(heads):
            centre = left + 1.7 + 3.5 * head
            box(top, centre, 0.5, f"head {head + 1}: q, k, v", colour, (3.0, 0.8))
            for i in range(features):
                if whole or i // 4 == head:
                    x = left + i * 0.875 + 0.4
                    top.plot([x, centre], [2.9, 0.9], color=colour, linewidth=1, alpha=0.8)
    steps = (
        ("X\n[T, d]", BLACK, 0.95, 1.5),
        ("Q, K, V\n[h, T, k] each", BLUE, 4.0, 2.3),
        ("weights\n[h, T, T]", BLUE, 7.2, 1.7),
        ("heads\n[h, T, k]", GREEN, 9.95, 1.5),
        ("concatenated\n[T, h·k]", GREEN, 12.35, 2.1),
        ("Y\n[T, d]", BLACK, 15.15, 1.3),
    )
    for text, colour, x, width in steps:
        box(bottom, x, 0.9, text, colour, (width, 1.3))
    for (_, _, x, width), (_, _, to, after), name in zip(
        steps, steps[1:], ("W_Q, W_K, W_V", "softmax", "· V", "", "W_O"), strict=False
    ):
        start, end = x + width / 2, to - after / 2
        arrow(bottom, (start, 0.9), (end, 0.9))
        bottom.text((start + end) / 2, 1.85, name, ha="center", va="center", fontsize=9.5)
    bottom.text(8, 3.0, "the shapes of h heads of width k", ha="center", va="center", weight="bold", fontsize=10.5)
    return drawing


@figure("concepts/grouped-query")
def grouped_query(plt: Any) -> Any:
    """Which key/value head serves each query head, and the KV cache of each choice."""
    from anyformer import count, presets

    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.7), width_ratios=(1, 1.1), layout="constrained")
    blank(left, 8.6, 7.4)
    for groups, y, name, colour in ((8, 5.3, "MHA", RED), (2, 2.8, "GQA", BLUE), (1, 0.3, "MQA", GREEN)):
        left.text(0, y + 0.6, name, va="center", fontsize=10.5, weight="bold", color=colour)
        for head in range(8):
            x, group = 1.9 + 0.85 * head, head * groups // 8
            to = 1.9 + 0.85 * ((group + 0.5) * 8 / groups - 0.5)
            left.plot([x, to], [y + 1.2, y], color=colour, linewidth=1.2, zorder=1)
            left.scatter([x], [y + 1.2], s=60, facecolor="white", edgecolor=colour, zorder=2)
            left.scatter([to], [y], s=60, color=colour, zorder=2)
    left.text(4.9, 7.1, "8 query heads (○), their keys and values (●)", ha="center", va="center", fontsize=9.5)
    lengths = [2**n for n in range(9, 18)]
    widths = {"latent, 512 + 64": (PURPLE, ":", 32 * (512 + 64))}
    for kv_heads, name, colour, line in (
        (32, "MHA, 32", RED, "-"),
        (8, "GQA, 8", BLUE, "--"),
        (1, "MQA, 1", GREEN, "-."),
    ):
        cached = count(presets.llama(kv_heads=kv_heads), length=1024, bytes_per_value=1).cache_bytes // 1024
        widths[name] = (colour, line, cached)
    for name in ("MHA, 32", "GQA, 8", "latent, 512 + 64", "MQA, 1"):
        colour, line, cached = widths[name]
        right.plot(lengths, [2 * cached * n / 2**30 for n in lengths], color=colour, linestyle=line, label=name)
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="KV cache of one text, GiB", title="key/value heads")
    right.set_xticks(lengths[::2], [f"{n // 1024} k" if n >= 1024 else str(n) for n in lengths[::2]])
    right.minorticks_off()
    right.legend(loc="upper left")
    return drawing


@figure("concepts/masks")
def masks(plt: Any) -> Any:
    """Padding, causal, prefix and packed masks, as `sees` defines them."""
    device = torch.device("cpu")
    layouts: dict[str, tuple[Pattern, Layout]] = {
        "padding": (Full(), make_layout(1, 8, device, segments=torch.tensor([[0] * 6 + [-1] * 2]))),
        "causal": (Causal(), make_layout(1, 8, device)),
        "prefix of 3": (Causal(), make_layout(1, 8, device, marks=torch.tensor([[1] * 3 + [0] * 5]))),
        "packed, 3 + 5": (Causal(), make_layout(1, 8, device, segments=torch.tensor([[0] * 3 + [1] * 5]))),
    }
    drawing, axes = plt.subplots(1, 4, figsize=(8, 2.6), layout="constrained")
    for axis, (title, (pattern, layout)) in zip(axes, layouts.items(), strict=True):
        grid(axis, sees(pattern, layout, layout)[0], title)
        axis.set_xticks(range(0, 8, 2), range(1, 9, 2))
        axis.set_yticks(range(0, 8, 2), range(1, 9, 2))
        if axis is not axes[0]:
            axis.set_ylabel("")
    return drawing


@figure("concepts/sparse-patterns")
def sparse_patterns(plt: Any) -> Any:
    """Masks of sparse patterns, and the number of pairs by length."""
    from anyformer.config import BigBird, BlockLocal, Dilated, Window

    patterns: dict[str, Pattern] = {
        "window": Window(before=4, after=4),
        "window, 2 globals": Window(before=4, after=4, globals=2),
        "dilated by 3": Dilated(before=4, after=4, step=3),
        "blocks of 8": BlockLocal(size=8),
        "BigBird": BigBird(block=4, randoms=1),
        "BigBird, decoder": BigBird(block=4, randoms=1, ahead=False),
    }
    drawing = plt.figure(figsize=(8, 4.6), layout="constrained")
    layout = make_layout(1, 48, torch.device("cpu"))
    spaces = drawing.add_gridspec(2, 5)
    for i, (title, pattern) in enumerate(patterns.items()):
        axis = drawing.add_subplot(spaces[i // 3, i % 3])
        grid(axis, sees(pattern, layout, layout)[0], title, lines=False)
        axis.set(xticks=[], yticks=[])
    lengths = [2**n for n in range(9, 17)]
    curves = (
        ("full", RED, "-", [n * n for n in lengths]),
        ("window of 512", BLUE, "--", [512 * n - 512 * 511 // 2 for n in lengths]),
        ("BigBird", GREEN, "-.", [_bigbird_pairs(n) for n in lengths]),
    )
    axis = drawing.add_subplot(spaces[:, 3:])
    for name, colour, line, pairs in curves:
        axis.plot(lengths, pairs, color=colour, linestyle=line, label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="pairs of query and key", title="cost")
    axis.set_xticks(lengths[1::2], [f"{n // 1024} k" for n in lengths[1::2]])
    axis.minorticks_off()
    axis.legend(loc="upper left")
    return drawing


def _bigbird_pairs(length: int) -> int:
    """Return the pairs that BigBird reads: its blocks of 64 tokens are either read as a whole or not at all."""
    from anyformer.config import BigBird

    layout = make_layout(1, length // 64, torch.device("cpu"))
    return int(sees(BigBird(block=1), layout, layout).sum()) * 64**2


@figure("concepts/graph")
def graph(plt: Any) -> Any:
    """Graphs of five nodes and their adjacency matrices."""
    nodes = torch.arange(5)
    reads = {
        "complete: full attention": torch.ones(5, 5, dtype=torch.bool),
        "to later nodes: causal": torch.ones(5, 5, dtype=torch.bool).tril(),
        "ring": ((nodes[:, None] - nodes) % 5 <= 1) | ((nodes - nodes[:, None]) % 5 <= 1),
    }
    drawing, axes = plt.subplots(2, 3, figsize=(8, 5.2), height_ratios=(1.35, 1), layout="constrained")
    angles = torch.pi / 2 - nodes * 2 * torch.pi / 5
    places = [(float(angle.cos()), float(angle.sin())) for angle in angles]
    for (upper, lower), (title, seen), colour in zip(axes.T, reads.items(), (BLUE, RED, GREEN), strict=True):
        upper.set(xlim=(-1.75, 1.75), ylim=(-1.6, 2.3), aspect="equal")
        upper.text(0, 2.05, title, ha="center", va="center", fontsize=11)
        upper.axis("off")
        for i, j in seen.nonzero().tolist():
            style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.1, "shrinkA": 10, "shrinkB": 10}
            if i != j:
                both = bool(seen[j, i])
                style["connectionstyle"] = "arc3,rad=0.13" if both else "arc3,rad=0"
                upper.annotate("", places[i], places[j], arrowprops=style)
            else:
                x, y = places[i]
                loop = plt.Circle((1.3 * x, 1.3 * y), 0.22, fill=False, edgecolor=colour, linewidth=1.1)
                upper.add_patch(loop)
        for node, (x, y) in enumerate(places):
            upper.scatter([x], [y], s=230, facecolor="white", edgecolor=colour, linewidth=1.4, zorder=3)
            upper.text(x, y, str(node + 1), ha="center", va="center", fontsize=10, zorder=4)
        grid(lower, seen, "", colour)
        lower.set_xticks(range(5), range(1, 6))
        lower.set_yticks(range(5), range(1, 6))
    return drawing


@figure("concepts/long-sequences")
def long_sequences(plt: Any) -> Any:
    """Vectors by layer of a Funnel encoder, and the mask of Transformer-XL."""
    from anyformer.config import Pooling

    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), width_ratios=(1.15, 1), layout="constrained")
    levels = Pooling(stages=(2, 2, 2), tail=1).levels
    colours = (BLUE, SKY, GREEN)
    for layer, level in enumerate(levels, 1):
        length = 512 // 2**level
        left.bar(layer, length, color=colours[level], width=0.7)
        left.text(layer, length + 8, str(length), ha="center", fontsize=9.5)
    left.set(title="Funnel, factor 2", xlabel="layer", ylabel="vectors that a layer reads", ylim=(0, 570))
    left.set_xticks(range(1, 8), [*map(str, range(1, 7)), "7 (tail)"])
    left.grid(axis="x", visible=False)
    index = torch.arange(12)
    query, key = index[:, None], index
    own = (query // 4 == key // 4) & (key <= query)
    memory = query // 4 == key // 4 + 1
    grid(right, own, "Transformer-XL", BLUE)
    for q, k in memory.nonzero().tolist():
        right.add_patch(plt.Rectangle((k - 0.46, q - 0.46), 0.92, 0.92, color=ORANGE))
    right.set_xticks(range(0, 12, 2), range(1, 13, 2))
    right.set_yticks(range(0, 12, 2), range(1, 13, 2))
    for name, colour in (("own segment", BLUE), ("memory", ORANGE)):
        right.scatter([], [], marker="s", s=60, color=colour, label=name)
    right.legend(loc="upper right")
    return drawing

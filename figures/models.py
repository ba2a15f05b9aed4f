"""Figures: shapes, embeddings, tokenizers, costs."""

import json
from typing import Any

from matplotlib.patches import Rectangle

from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import BPE, Bytes, Characters, Words
from anyformer.recipe.tokenizer import Tokenizer
from figures.diagram import arrow, blank, box
from figures.style import BLUE, GREEN, ORANGE, PURPLE, RED, figure


def _stack(axis: Any, x: float, width: float, parts: list[tuple[str, str]], base: float) -> list[float]:
    """Draw boxes one above the other, with a frame around the parts of a block; return the height of each centre."""
    heights, edges, y = [], [], base
    framed = [i for i, (name, _) in enumerate(parts) if "attention" in name or "forward" in name]
    for i, (name, colour) in enumerate(parts):
        tall = 0.95 if "\n" in name else 0.62
        if i:
            arrow(axis, (x + width / 2, y - 0.3), (x + width / 2, y))
        box(axis, (x, y), (width, tall), name, colour, fontsize=9)
        heights.append(y + tall / 2)
        edges.append((y, y + tall))
        y += tall + 0.3
    low, high = edges[framed[0]][0] - 0.15, edges[framed[-1]][1] + 0.15
    frame = Rectangle((x - 0.15, low), width + 0.3, high - low, fill=False, linestyle=":", edgecolor="#444444")
    axis.add_patch(frame)
    axis.text(x + width + 0.2, (low + high) / 2, "× N", fontsize=9, va="center")
    return heights


def _grid(axis: Any, corner: tuple[float, float], visible: list[list[bool]], colour: str, cell: float = 0.34) -> None:
    """Draw a matrix of cells, filled where a query sees a key."""
    for i, row in enumerate(visible):
        for j, sees in enumerate(row):
            at = corner[0] + j * cell, corner[1] + (len(visible) - 1 - i) * cell
            face = colour if sees else "white"
            axis.add_patch(Rectangle(at, cell, cell, facecolor=face, edgecolor="#888888", linewidth=0.8))


FULL, CAUSAL = [[True] * 4 for _ in range(4)], [[j <= i for j in range(4)] for i in range(4)]


@figure("concepts/three-shapes")
def three_shapes(plt: Any) -> Any:
    """The three architectures, and what a token sees in each."""
    drawing, axis = plt.subplots(figsize=(8, 5.6), layout="constrained")
    blank(axis, 16, 10.9)
    own, causal = ("self-attention", BLUE), ("causal\nself-attention", GREEN)
    feed, head, embed = ("feed-forward", PURPLE), ("head", RED), ("embedding", ORANGE)
    titles = (1.75, "encoder only"), (6.15, "decoder only"), (12.3, "encoder–decoder")
    for x, title in titles:
        axis.text(x, 10.6, title, ha="center", fontsize=11, weight="bold")
    shift = 3.4
    axis.add_artist(plt.Line2D([0, 16], [shift - 0.15, shift - 0.15], color="#bbbbbb", linewidth=1))

    def stack(x: float, parts: list[tuple[str, str]], read: str, written: str | None, base: float = 0.9) -> list[float]:
        inner = axis.inset_axes([0, shift, 16, 10.9 - shift], transform=axis.transData)
        blank(inner, 16, 10.9 - shift)
        heights = _stack(inner, x, 2.7, parts, base)
        inner.text(x + 1.35, base - 0.55, read, ha="center", va="center", fontsize=9)
        arrow(inner, (x + 1.35, base - 0.35), (x + 1.35, base))
        if written:
            top = heights[-1] + 0.31
            arrow(inner, (x + 1.35, top), (x + 1.35, top + 0.4))
            inner.text(x + 1.35, top + 0.65, written, ha="center", va="center", fontsize=9)
        return [height + shift for height in heights]

    stack(0.4, [embed, own, feed, head], "text", "label, tags or vector")
    stack(4.8, [embed, causal, feed, head], "text so far", "next token")
    left = stack(9.0, [embed, own, feed], "source", None)
    cross = ("cross-attention", BLUE)
    right = stack(12.6, [embed, causal, cross, feed, head], "target so far", "next token", base=1.4)
    x = 10.35
    axis.plot([x, x, 12.15], [left[2] + 0.31, right[2], right[2]], color="#444444", linewidth=1.2)
    arrow(axis, (12.1, right[2]), (12.6, right[2]))
    axis.text(10.1, right[2] + 0.1, "keys, values", fontsize=9, va="bottom")

    for corner, visible, colour, name in (
        ((1.05, 0.9), FULL, BLUE, "all tokens"),
        ((5.45, 0.9), CAUSAL, GREEN, "itself and earlier"),
        ((9.65, 0.9), FULL, BLUE, "source to source"),
        ((12.2, 0.9), CAUSAL, GREEN, "target to\ntarget"),
        ((14.4, 0.9), FULL, BLUE, "target to\nsource"),
    ):
        _grid(axis, corner, visible, colour)
        axis.text(corner[0] + 0.68, 0.72, name, ha="center", va="top", fontsize=9)
    axis.text(0, 2.75, "sees", fontsize=10, va="center", weight="bold")
    return drawing


@figure("concepts/bert-and-gpt")
def bert_and_gpt(plt: Any) -> Any:
    """Which tokens each position sees in a masked and in a causal language model, and what it predicts."""
    words = ["the", "cat", "sat", "on", "the", "mat"]
    masked = [*words[:1], "<mask>", *words[2:]]
    drawing, axes = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
    rows = (
        (axes[0], "BERT: masked language model", masked, ["", "cat", "", "", "", ""], BLUE, lambda i, j: True),
        (axes[1], "GPT: causal language model", words, [*words[1:], ""], GREEN, lambda i, j: j <= i),
    )
    for axis, title, reads, targets, colour, sees in rows:
        axis.set(xlim=(-1.9, 8.7), ylim=(6.6, -2.7), aspect="equal")
        axis.set_axis_off()
        axis.text(3.2, -2.3, title, ha="center", va="center", fontsize=11)
        for i, (read, target) in enumerate(zip(reads, targets, strict=True)):
            axis.text(-0.25, i + 0.5, read, ha="right", va="center", fontsize=9.5)
            axis.text(i + 0.5, -0.2, read, ha="left", va="bottom", fontsize=9, rotation=60)
            for j in range(6):
                strong = 1.0 if target else 0.25
                face = colour if sees(i, j) else "white"
                cell = Rectangle((j, i), 1, 1, facecolor=face, alpha=strong if sees(i, j) else 1, edgecolor="white")
                axis.add_patch(cell)
                axis.add_patch(Rectangle((j, i), 1, 1, fill=False, edgecolor="#888888", linewidth=0.8))
            if target:
                arrow(axis, (6.1, i + 0.5), (7.0, i + 0.5), RED)
                axis.text(7.15, i + 0.5, target, va="center", fontsize=9.5, color=RED, weight="bold")
        axis.text(3, 6.3, "keys: tokens that are seen", ha="center", va="center", fontsize=9)
    return drawing


SENTENCE = {  # the first sentence of the Universal Declaration of Human Rights
    "English": "All human beings are born free and equal in dignity and rights.",
    "Korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "Chinese": "人人生而自由，在尊严和权利上一律平等。",
}


@figure("concepts/tokenizers")
def tokenizers(plt: Any) -> Any:
    """Merges of one word, and the length of one sentence in three languages under four tokenizers."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", width_ratios=(1, 1.15))
    bpe = train_tokenizer(BPE(size=300), ["banana", "bandana", "band", "bands", "ban"])
    merges = [tuple(pair) for pair in json.loads(bpe.to_json())["model"]["merges"]]
    blank(left, 9.6, 7)
    pieces = list("bananas")
    stages = [("letters", pieces)]
    for pair in merges:
        before, pieces = pieces, _merge(pieces, pair)
        if pieces != before:
            stages.append(("".join(pair), pieces))
    for row, (name, some) in enumerate(stages):
        y, x = 5.6 - 1.55 * row, 2.4
        left.text(2.1, y + 0.45, f"merge {name}" if row else name, ha="right", va="center", fontsize=9.5)
        for piece in some:
            box(left, (x + 0.06, y), (len(piece) - 0.12, 0.9), piece, GREEN if len(piece) > 1 else BLUE)
            x += len(piece)
    kinds: dict[str, Tokenizer] = {
        "words": Words(), "characters": Characters(), "letters": Characters(decompose=True), "bytes": Bytes(),
    }  # fmt: skip
    for i, ((name, spec), colour) in enumerate(zip(kinds.items(), (RED, BLUE, GREEN, ORANGE), strict=True)):
        lengths = [len(train_tokenizer(spec, [text]).encode(text)) for text in SENTENCE.values()]
        bars = right.bar([x + 0.2 * (i - 1.5) for x in range(3)], lengths, width=0.18, color=colour, label=name)
        right.bar_label(bars, fontsize=9, padding=1)
    right.set_xticks(range(3), SENTENCE)
    right.set(ylabel="tokens of one sentence", ylim=(0, 135), yticks=[0, 20, 40, 60, 80, 100])
    right.grid(visible=False, axis="x")
    right.legend(ncols=2, loc="upper right")
    return drawing


def _merge(pieces: list[str], pair: tuple[str, ...]) -> list[str]:
    """Return pieces with every occurrence of a pair, from the left, made one."""
    out: list[str] = []
    for piece in pieces:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out

"""Figures: targets, loss, schedules, fine-tuning."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import anyformer as af
from anyformer.config import LoRA, NoHead
from anyformer.data.batch_plan import GradualPlan, plan_packed, plan_padded
from anyformer.kernels.cross_entropy import token_loss
from anyformer.recipe import WSD, Constant, Cosine, InverseSqrt, LinearDecay
from figures.diagram import arrow, blank, box
from figures.style import BLUE, COLOURS, GREEN, ORANGE, RED, figure


@figure("concepts/cross-entropy")
def cross_entropy(plt: Any) -> Any:
    """Targets with and without smoothing, and the loss against the probability of the right token."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.3), layout="constrained")
    tokens, model = ["the", "a", "cat", "sat", "on"], torch.tensor([0.08, 0.07, 0.70, 0.10, 0.05])
    smoothed = torch.full((5,), 0.02)
    smoothed[2] += 0.9
    rows = ("one-hot target", torch.eye(5)[2], BLUE), ("smoothed, α = 0.1", smoothed, RED), ("model", model, ORANGE)
    for i, (name, values, colour) in enumerate(rows):
        left.bar(torch.arange(5) + 0.27 * (i - 1), values, width=0.25, color=colour, label=name)
    left.set(title="the target is “cat”", ylabel="probability", ylim=(0, 1.5), yticks=[0, 0.5, 1])
    left.set_xticks(range(5), tokens)
    left.legend(loc="upper left", ncols=1)
    p = torch.linspace(0.01, 0.999, 400, dtype=torch.float64)
    logits = torch.cat([p[:, None], ((1 - p) / 4)[:, None].expand(-1, 4)], dim=1).log()
    zero = torch.zeros(1, 1, dtype=torch.long)
    for smoothing, colour, dash in ((0.0, BLUE, "-"), (0.1, RED, "--")):
        loss = torch.stack([token_loss(row[None, None], zero, smoothing) for row in logits])
        right.plot(p, loss, color=colour, linestyle=dash, label=f"label smoothing {smoothing:g}")
        if smoothing:
            best = int(loss.argmin())
            right.plot(p[best], loss[best], "o", color=colour)
            right.annotate(f"minimum at p = {p[best]:.2f}", (p[best], loss[best]), (0.4, 1.7), color=colour,
                           arrowprops={"arrowstyle": "->", "color": colour})  # fmt: skip
    right.set(title="loss of one token", xlabel="probability of the right token", ylabel="loss (nats)", ylim=(0, 4.7))
    right.legend()
    return drawing


@figure("concepts/shifted-targets")
def shifted_targets(plt: Any) -> Any:
    """A translation in training, where the decoder reads the shifted target, and in decoding, where it reads itself."""
    source, target = ["the", "cat", "sleeps", "<eos>"], ["die", "Katze", "schläft", "<eos>"]
    drawing, axes = plt.subplots(2, 1, figsize=(8, 5.6), layout="constrained")
    for axis, training in zip(axes, (True, False), strict=True):
        blank(axis, 16, 5.2)
        name = "training: all positions in one pass" if training else "decoding: one pass for each token"
        axis.text(0, 5, name, fontsize=11, va="top", weight="bold")
        box(axis, (0.2, 1.7), (5.4, 1.0), "encoder", BLUE)
        box(axis, (7.6, 1.7), (7.4, 1.0), "", GREEN)
        axis.text(7.8, 2.2, "decoder", va="center", fontsize=9.5)
        arrow(axis, (5.6, 2.2), (7.6, 2.2))
        axis.text(6.6, 2.45, "keys,\nvalues", ha="center", fontsize=9)
        for i, word in enumerate(source):
            box(axis, (0.2 + 1.4 * i, 0.2), (1.2, 0.8), word, BLUE, fontsize=9)
            arrow(axis, (0.8 + 1.4 * i, 1.0), (0.8 + 1.4 * i, 1.7))
        read = ["<bos>", *target[:-1]]
        for i, (before, after) in enumerate(zip(read, target, strict=True)):
            x = 7.6 + 1.95 * i
            given = training or i == 0
            box(axis, (x, 0.2), (1.55, 0.8), before, ORANGE if given else GREEN, fontsize=9)
            box(axis, (x, 3.3), (1.55, 0.8), after, ORANGE if training else GREEN, fontsize=9)
            arrow(axis, (x + 0.78, 1.0), (x + 0.78, 1.7))
            arrow(axis, (x + 0.78, 2.7), (x + 0.78, 3.3))
            if not training and i < 3:
                arrow(axis, (x + 1.55, 3.5), (x + 2.2, 1.0), RED, connectionstyle="arc3,rad=-0.15", linestyle="--")
        axis.text(15.5, 3.7, "targets" if training else "output", rotation=90, va="center", ha="center", fontsize=9)
        axis.text(15.5, 0.6, "input", rotation=90, va="center", ha="center", fontsize=9)
    return drawing


SCHEDULES = {
    "constant": Constant(warmup=100),
    "linear": LinearDecay(warmup=100),
    "cosine, floor 0.1": Cosine(warmup=100),
    "inverse square root": InverseSqrt(warmup=100),
    "WSD, decay 0.2": WSD(warmup=100, decay=0.2),
}


@figure("concepts/warm-up")
def warm_up(plt: Any) -> Any:
    """Every schedule, and the gradient of each layer at initialisation with both placements of the norm."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", width_ratios=(1.25, 1))
    steps = range(1, 1001)
    for (name, schedule), colour in zip(SCHEDULES.items(), COLOURS, strict=False):
        left.plot(steps, [schedule.at(step, 1000) for step in steps], color=colour, label=name)
    left.set(title="schedules with 100 steps of warm-up", xlabel="step", ylabel="learning rate / peak", ylim=(0, 1.75))
    left.set_yticks([0, 0.5, 1])
    left.legend(ncols=2, loc="upper center", fontsize=9)
    for placement, colour, marker in (("pre", BLUE, "o"), ("post", RED, "s")):
        right.plot(range(1, 13), _gradient_norms(placement), color=colour, marker=marker, label=f"{placement}-norm")
    right.set(title="at initialisation", xlabel="layer", ylabel="gradient norm / that of layer 1", ylim=(0, None))
    right.legend()
    return drawing


def _gradient_norms(placement: str) -> list[float]:
    """Return the gradient norm of each layer at initialisation, relative to the first: means of the lab's runs."""
    path = Path(__file__).parent.parent / "docs" / "lab" / "results" / "quick" / "warmup.jsonl"
    cells = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [cell["found"]["gradients"] for cell in cells if cell["cell"]["placement"] == placement]
    return [sum(row[i] / row[0] for row in rows) / len(rows) for i in range(len(rows[0]))]


@figure("concepts/batches")
def batches(plt: Any) -> Any:
    """Rows of 24 texts: as read, in buckets, and packed; padding in grey."""
    lengths = np.random.default_rng(4).integers(2, 21, 24)
    sizes = np.stack([lengths, np.zeros_like(lengths)], axis=1)
    as_read = [[(i,) for i in range(start, start + 4)] for start in range(0, 24, 4)]
    limit = 4 * int(lengths.max())
    buckets = GradualPlan(plan_padded(sizes, limit, 50, seed=0, epoch=0)).plan()
    packed = GradualPlan(plan_packed(sizes, 32 * 4, 32, seed=0, epoch=0)).plan()
    drawing, axes = plt.subplots(1, 3, figsize=(8, 4.4), layout="constrained", sharey=True)
    for axis, plan, name in zip(axes, (as_read, buckets, packed), ("as read", "buckets", "packed"), strict=True):
        y, slots = 0.0, 0
        for batch in plan:
            totals = [sum(int(lengths[i]) for i in row) for row in batch]
            width = 32 if name == "packed" else max(totals)
            slots += width * len(batch)
            for row in batch:
                axis.barh(y, width, color="#cccccc", height=0.8)
                x = 0
                for i in row:
                    axis.barh(y, lengths[i], left=x, color=COLOURS[i % 6], height=0.8, edgecolor="white")
                    x += int(lengths[i])
                y += 1
            y += 0.8
        axis.set(title=f"{name}: padding {1 - lengths.sum() / slots:.0%}", xlabel="tokens", xlim=(0, 33), yticks=[])
        axis.grid(visible=False)
    axes[0].invert_yaxis()
    axes[0].set_ylabel("rows; a gap separates batches")
    return drawing


@figure("concepts/lora")
def lora(plt: Any) -> Any:
    """The two narrow matrices, the trained share by rank, and bytes for a weight of the body."""
    drawing, axes = plt.subplots(1, 3, figsize=(8, 3.3), layout="constrained", width_ratios=(1, 1, 1.25))
    left, middle, right = axes
    blank(left, 10, 10)
    left.set_aspect("equal")
    box(left, (0.2, 3.2), (3.6, 3.6), "W\nfrozen", BLUE)
    left.text(4.35, 5, "+", fontsize=14, ha="center", va="center")
    box(left, (4.9, 3.2), (0.9, 3.6), "B", RED)
    box(left, (6.1, 5.9), (3.6, 0.9), "A", RED)
    left.text(6.1, 4.7, "trained:\nr (m + n) weights", fontsize=9.5, va="center", color=RED)
    left.text(5.35, 2.7, "r", ha="center", va="center", style="italic")
    left.text(2.0, 2.7, "n", ha="center", va="center", style="italic")
    left.text(7.9, 7.3, "n", ha="center", va="center", style="italic")
    ranks = (1, 2, 4, 8, 16, 32, 64)
    config = af.presets.bert(head=NoHead())
    tables = [af.count(config.model_copy(update={"adapter": LoRA(rank=rank)})) for rank in ranks]
    middle.plot(ranks, [100 * table.trained / table.parameters for table in tables], "o-", color=BLUE)
    middle.set(title="BERT base", xlabel="rank r", ylabel="trained parameters (%)", xscale="log", yscale="log")
    middle.set_xticks(ranks, map(str, ranks))
    middle.set_yticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    middle.minorticks_off()
    names = ["all\ntrained", "LoRA", "QLoRA\n8 bits", "QLoRA\n4 bits"]
    parts = {"weight": [4, 4, 8.5 / 8, 4.5 / 8], "gradient": [4, 0, 0, 0], "AdamW": [8, 0, 0, 0]}
    bottom = np.zeros(4)
    for (name, values), colour in zip(parts.items(), (BLUE, ORANGE, GREEN), strict=True):
        right.bar(names, values, bottom=bottom, color=colour, label=name)
        bottom += values
    for i, total in enumerate(bottom):
        right.text(i, total + 0.3, f"{total:.2g}", ha="center")
    right.set(ylabel="bytes for a weight of the body", ylim=(0, 18.5))
    right.grid(visible=False, axis="x")
    right.legend()
    return drawing


@figure("concepts/pretraining")
def pretraining(plt: Any) -> Any:
    """From text to a task, and results measured from scratch and from pre-trained weights."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained", width_ratios=(1.5, 1))
    blank(left, 12, 8)
    columns = (0.1, "pre-training", "text, no labels\n(millions of words)", "LM head"), (
        6.5, "fine-tuning", "texts with labels\n(thousands)", "new head"
    )  # fmt: skip
    for x, title, data, head in columns:
        left.text(x + 2.2, 7.6, title, ha="center", va="center", weight="bold", fontsize=10.5)
        box(left, (x, 0.4), (4.4, 1.3), data, ORANGE)
        box(left, (x, 2.8), (4.4, 1.6), "body", BLUE)
        box(left, (x, 5.5), (4.4, 1.0), head, RED if x > 1 else GREEN)
        arrow(left, (x + 2.2, 1.7), (x + 2.2, 2.8))
        arrow(left, (x + 2.2, 4.4), (x + 2.2, 5.5))
    arrow(left, (4.5, 3.6), (6.5, 3.6), BLUE, linewidth=2.2)
    left.text(5.5, 4.0, "weights", ha="center", va="bottom", fontsize=9.5, color=BLUE)
    tasks = ["tags\n(EWT)", "sentiment\n(SST-2)"]
    for i, (name, values, colour) in enumerate(
        (("from scratch", (92.5, 80.2), ORANGE), ("pre-trained", (95.2, 87.7), BLUE))
    ):
        errors = [round(100 - value, 1) for value in values]
        bars = right.bar([x + 0.36 * (i - 0.5) for x in range(2)], errors, width=0.34, color=colour, label=name)
        right.bar_label(bars, padding=2)
    right.set_xticks(range(2), tasks)
    right.set(ylabel="error (%): 100 − accuracy", ylim=(0, 27), yticks=[0, 5, 10, 15, 20])
    right.grid(visible=False, axis="x")
    right.legend(loc="upper left")
    return drawing

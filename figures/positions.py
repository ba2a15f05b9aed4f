"""Figures: position schemes."""

import json
from typing import Any

import torch
from torch import Tensor

from anyformer import presets
from anyformer.attention.attend import attend
from anyformer.attention.lowered import Dense
from anyformer.attention.scores import Scoring
from anyformer.config import (
    Alibi,
    Disentangled,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Rotary,
    Sinusoidal,
    T5Bias,
    YarnScaling,
)
from anyformer.config.overrides import override
from anyformer.nn.model import Transformer
from figures.style import BLUE, COLOURS, DIVERGING, FOLDER, GREEN, RED, figure


def heatmap(drawing: Any, axis: Any, values: Tensor, title: str, label: str = "") -> None:
    """Draw signed values, symmetric about 0, with a colour bar if it has a label."""
    most = float(values.abs().max())
    image = axis.imshow(values, cmap=DIVERGING, vmin=-most, vmax=most, aspect="auto", interpolation="nearest")
    axis.grid(visible=False)
    axis.set(title=title)
    if label:
        drawing.colorbar(image, ax=axis, label=label)


@figure("concepts/no-positions")
def no_positions(plt: Any) -> Any:
    """An encoder without positions reads two orders of the same tokens; a causal head counts."""
    torch.manual_seed(0)
    config = presets.bert(depth=2, width=12, heads=2, vocab=20)
    model = Transformer(
        override(config, ["encoder.position=none", "head=none", "source.types=0", "init.std=0.3"])
    ).eval()
    drawing, axes = plt.subplots(1, 3, figsize=(8, 3.1), width_ratios=(1, 1.25, 1.6), layout="constrained")
    for axis, order, label in zip(axes, ((5, 6, 7, 8), (8, 6, 5, 7)), ("", "output"), strict=False):
        with torch.no_grad():
            x = model(torch.tensor([order]))[0]  # [t, d]
        heatmap(drawing, axis, x.T, "tokens " + " ".join("ABCD"[token - 5] for token in order), label)
        axis.set_xticks(range(4), ["ABCD"[token - 5] for token in order])
        axis.set(xlabel="token", ylabel="feature" if axis is axes[0] else "", yticks=[])
    v = torch.zeros(1, 1, 16, 1)
    v[0, 0, 0, 0] = 1
    for causal, colour, marker in ((True, BLUE, "o"), (False, RED, "s")):
        out = attend(0 * v, 0 * v, v, Dense(causal=causal), Scoring(1.0)).flatten()
        label = "causal: 1/p" if causal else "full: 1/16"
        axes[2].plot(range(1, 17), out, color=colour, marker=marker, markersize=4, label=label)
    axes[2].set(title="a head that averages", xlabel="position p", ylabel="output", ylim=(0, 1.05))
    axes[2].legend()
    return drawing


@figure("concepts/sinusoidal")
def sinusoidal(plt: Any) -> Any:
    """The table, some of its waves, and the dot product of two positions by distance."""
    width, length = 64, 128
    table = Sinusoidal().embed(torch.zeros(1, length, width), torch.arange(length)[None], {})[0]
    drawing = plt.figure(figsize=(8, 6), layout="constrained")
    spaces = drawing.add_gridspec(2, 2, height_ratios=(1.1, 1))
    upper, left, right = (drawing.add_subplot(space) for space in (spaces[0, :], spaces[1, 0], spaces[1, 1]))
    heatmap(drawing, upper, table, "PE(p, feature), d = 64", "value")
    upper.set(xlabel="feature: sine and cosine of each frequency, fast to slow", ylabel="position p")
    waves = ((0, BLUE, "-"), (8, RED, "--"), (16, GREEN, "-."), (32, COLOURS[3], ":"))
    for feature, colour, line in waves:
        wavelength = 2 * torch.pi * 10000 ** (feature / width)
        label = f"feature {feature}: wavelength {wavelength:,.0f}"
        left.plot(range(length), table[:, feature], color=colour, linestyle=line, label=label)
    left.set(xlabel="position p", ylabel="value", title="sines", ylim=(-1.1, 1.1), xlim=(0, 64))
    drawing.legend(loc="outside lower center", ncols=2)
    dots = table @ table[length // 2] / (width / 2)
    right.plot(torch.arange(length) - length // 2, dots, color=BLUE)
    right.set(xlabel="distance Δ", ylabel="PE(p) · PE(p + Δ) / (d / 2)", title="similarity")
    return drawing


def lab_losses() -> dict[str, dict[int, float]]:
    """Return the mean loss by length of each scheme, measured by the lab's experiment `extrapolation` on a CPU."""
    found: dict[str, dict[int, list[float]]] = {}
    path = FOLDER.parent / "lab" / "results" / "cpu" / "extrapolation.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for length, loss in row["found"]["losses"].items():
            found.setdefault(row["cell"]["scheme"], {}).setdefault(int(length), []).append(loss)
    return {scheme: {n: sum(x) / len(x) for n, x in rows.items()} for scheme, rows in found.items()}


def losses_axis(axis: Any, schemes: dict[str, tuple[str, str]]) -> None:
    """Draw the lab's loss by length of some schemes, by colour and marker."""
    found = lab_losses()
    for scheme, (colour, marker) in schemes.items():
        axis.plot(found[scheme].keys(), found[scheme].values(), color=colour, marker=marker, label=scheme)
    axis.axvline(128, color="black", linestyle=":", linewidth=1.2)
    axis.set(
        xscale="log",
        xlabel="tokens (dotted: trained length)",
        ylabel="loss, nats",
        title="loss by length",
        ylim=(0.8, 3.6),
    )
    axis.set_xticks(list(found["alibi"]), list(found["alibi"]))
    axis.minorticks_off()
    axis.legend(loc="center right")


@figure("concepts/learned-positions")
def learned_positions(plt: Any) -> Any:
    """Which rows of the table receive a gradient, and the lab's loss by length."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Transformer(presets.gpt2(depth=1, width=32, heads=2, vocab=50, length=64, dropout=0.0))
    ids = torch.randint(50, (256, 48), generator=generator)
    ends = torch.randint(8, 49, (256, 1), generator=generator)
    segments = torch.where(torch.arange(48) < ends, 0, -1)
    logits = model(ids, segments=segments)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    (loss * (segments[:, 1:] == 0)).sum().backward()
    table = model.get_parameter("decoder.embedder.tables.positions")
    assert table.grad is not None
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.3), layout="constrained")
    left.plot(table.grad.norm(dim=1), color=BLUE)
    left.axvspan(48, 63, color="#dddddd")
    left.text(
        55.5, float(table.grad.norm(dim=1).max()) * 0.5, "no text\nis longer", ha="center", va="center", fontsize=9.5
    )
    left.set(xlabel="position p", ylabel="gradient norm of row p", title="training of the table", ylim=(0, None))
    losses_axis(right, {"learned": (RED, "s"), "sinusoidal": (BLUE, "o"), "alibi": (GREEN, "^")})
    return drawing


@figure("concepts/t5-bias")
def t5_bias(plt: Any) -> Any:
    """Buckets by distance, and the bias of three made-up heads."""
    scheme = T5Bias()
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    distances = torch.arange(-160, 161)
    past = distances[distances >= 0]
    left.plot(past, scheme.bucket(past, causal=True), color=BLUE, drawstyle="steps-post", label="causal")
    both = scheme.bucket(distances, causal=False)
    left.plot(distances, both, color=RED, linestyle="--", drawstyle="steps-post", label="both directions")
    left.set(xlabel="distance, query − key", ylabel="bucket", title="32 buckets, up to distance 128")
    left.legend(loc="lower left")
    bucket = scheme.bucket(past, causal=True).float() / 31
    heads = (
        ("reads near", 2 - 6 * bucket, BLUE, "-"),
        ("reads far", -3 + 5 * bucket**2, RED, "--"),
        ("reads 3 to 8 back", 2 - 40 * (bucket - 0.17).square().clamp(max=0.12), GREEN, "-."),
    )
    for name, bias, colour, line in heads:
        right.plot(past, bias, color=colour, linestyle=line, drawstyle="steps-post", label=name)
    right.set(xlabel="distance, query − key", ylabel="bias added to the score", title="three heads", ylim=(-4.5, 4.9))
    right.legend(loc="upper right")
    return drawing


@figure("concepts/disentangled")
def disentangled(plt: Any) -> Any:
    """Rows of the table by distance, and one term of the scores of two queries."""
    scheme = Disentangled(max_distance=512)
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    distances = torch.arange(-700, 701)
    rows = (scheme.bucket(distances) + scheme.buckets).clamp(0, 2 * scheme.buckets - 1)
    left.plot(distances, rows, color=BLUE, drawstyle="steps-post")
    left.set(xlabel="distance, query − key", ylabel="row of the table", title="256 buckets, up to distance 512")
    torch.manual_seed(0)
    small = Disentangled(buckets=8, max_distance=32)
    wave = torch.randn(16, 8).cumsum(dim=0) / 4  # neighbouring rows are alike, as after training
    near = torch.arange(-24, 25)
    keys = wave[(small.bucket(near) + small.buckets).clamp(0, 15)]
    for name, query, colour, line in (("one query", 0, BLUE, "-"), ("another", 1, RED, "--")):
        term = keys @ torch.randn(8, generator=torch.Generator().manual_seed(query)) / 24**0.5
        right.plot(near, term, color=colour, linestyle=line, drawstyle="steps-mid", label=name)
    right.set(xlabel="distance, query − key", ylabel="term of the score", title="content to position")
    right.legend(loc="best")
    return drawing


@figure("concepts/alibi")
def alibi(plt: Any) -> Any:
    """Bias by distance of eight heads, and the bias matrix of the first."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), width_ratios=(1.25, 1), layout="constrained")
    distances = torch.arange(0, 33)
    bias = Alibi().bias(distances[None], torch.zeros(1, 1, dtype=torch.long), heads=8, causal=True, tables={})
    assert bias is not None
    colours = plt.get_cmap("viridis")(torch.linspace(0, 0.9, 8).numpy())
    for head in range(8):
        left.plot(distances, bias[0, head, :, 0], color=colours[head], label=f"head {head + 1}: 1/{2 ** (head + 1)}")
    left.set(xlabel="distance, query − key", ylabel="bias added to the score", title="slopes of 8 heads")
    left.legend(loc="lower left", fontsize=9, labelspacing=0.25)
    at = torch.arange(8)[None]
    matrix = Alibi().bias(at, at, heads=8, causal=True, tables={})
    assert matrix is not None
    shown = matrix[0, 0].masked_fill(torch.ones(8, 8).triu(1).bool(), torch.nan)
    right.imshow(shown, cmap="Blues_r", vmin=-5, vmax=0)
    for q, k in torch.ones(8, 8).tril().nonzero().tolist():
        value = float(shown[q, k]) + 0.0
        right.text(k, q, f"{value:g}", ha="center", va="center", fontsize=9, color="white" if value < -2 else "black")
    right.grid(visible=False)
    right.set_xticks(range(8), range(1, 9))
    right.set_yticks(range(8), range(1, 9))
    right.set(title="head 1: slope 1/2", xlabel="key", ylabel="query")
    return drawing


def frequencies(scheme: Rotary, width: int) -> Tensor:
    """Return the angle of each pair at position 1."""
    rotation = scheme.prepare(torch.ones(1, 1, dtype=torch.long), width)
    return torch.atan2(-rotation.sin, rotation.cos).flatten()[: width // 2]


@figure("concepts/rotary")
def rotary(plt: Any) -> Any:
    """A rotated pair, the block-diagonal matrix, the score by distance, and the scalings."""
    drawing, ((pair, blocks), (curve, scaled)) = plt.subplots(2, 2, figsize=(8, 6.6), layout="constrained")
    colours = plt.get_cmap("viridis")(torch.linspace(0, 0.85, 6).numpy())
    for position in range(6):
        angle = torch.tensor(0.4 * position)
        x, y = float(angle.cos()), float(angle.sin())
        pair.annotate(
            "", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colours[position], "linewidth": 1.8}
        )
        pair.text(
            1.13 * x, 1.13 * y, f"p = {position}", ha="center", va="center", fontsize=9.5, color=colours[position]
        )
    pair.set(xlim=(-0.85, 1.35), ylim=(-0.6, 1.4), aspect="equal", title="a pair (x₁, x₂), θ = 0.4", xlabel="x₁")
    angles = 5 * frequencies(Rotary(), 8)
    matrix = torch.block_diag(*(torch.tensor([[a.cos(), -a.sin()], [a.sin(), a.cos()]]) for a in angles))
    heatmap(drawing, blocks, matrix, "R₅, pairs side by side, k = 8", "value")
    blocks.set(aspect="equal", xticks=[], yticks=[])
    for row, column in matrix.nonzero().tolist():
        value = float(matrix[row, column])
        shade = "white" if abs(value) > 0.6 else "black"
        blocks.text(
            column, row, f"{value:.2f}".replace("-0.00", "0.00"), ha="center", va="center", fontsize=9, color=shade
        )
    distances = torch.arange(0, 257)
    for fraction, colour, line in ((1.0, BLUE, "-"), (0.25, RED, "--")):
        rotated = Rotary(fraction=fraction).rotated(64)
        waves = (distances[:, None] * frequencies(Rotary(fraction=fraction), 64)[: rotated // 2]).cos().sum(1)
        score = (2 * waves + 64 - rotated) / 64
        label = "all features" if fraction == 1 else "a quarter rotated"
        curve.plot(distances, score, color=colour, linestyle=line, label=label)
    curve.set(title="equal query and key, k = 64", xlabel="distance Δ", ylabel="score / score at Δ = 0", ylim=(0, 1.05))
    curve.legend(loc="lower left")
    scalings = (
        (LinearScaling(factor=8.0), RED, ":"),
        (NTKScaling(factor=8.0), GREEN, "-."),
        (YarnScaling(factor=8.0, original_length=4096), BLUE, "-"),
        (Llama3Scaling(factor=8.0, original_length=4096), COLOURS[4], "--"),
    )
    trained = frequencies(Rotary(), 128)
    for scaling, colour, line in scalings:
        ratio = frequencies(Rotary(scaling=scaling), 128) / trained
        scaled.plot(range(64), ratio, color=colour, linestyle=line, label=scaling.kind)
    scaled.set(title="scalings, factor 8", xlabel="pair, fast to slow", ylabel="frequency / trained frequency")
    scaled.set_ylim(0, 1.05)
    scaled.legend(loc="upper right")
    return drawing

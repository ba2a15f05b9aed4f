"""Figures: gates, value residuals, skips across layers and further tokens."""

from typing import Any

import torch
from torch.nn import functional as F

from anyformer.config import io
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from anyformer.presets import llama
from figures.style import BLUE, COLOURS, GREEN, ORANGE, RED, figure


@figure("concepts/attention-gate")
def attention_gate(plt: Any) -> Any:
    """The gate and a head times it; heads of a random model with and without gates."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    z = torch.linspace(-6, 6, 200)
    left.plot(z, torch.sigmoid(z), color=BLUE, label="gate σ(z)")
    left.plot(z, 4 * torch.sigmoid(z), color=RED, label="head output 4 σ(z)")
    left.set(xlabel="z = x W", title="a gate")
    left.legend()
    torch.manual_seed(0)
    config = io.override(llama(depth=1, width=64, heads=8, vocab=97), ["decoder.blocks.*.mixer.gate=head"])
    model = Transformer(config).eval()
    torch.nn.init.normal_(model.decoder.blocks[0]["mixer"].inner.gate.weight, std=0.3)
    with torch.no_grad():
        _, seen = run_with_taps(model, ["decoder.0.mixer.heads", "decoder.0.mixer.gate"], torch.arange(20)[None])
    heads = seen["decoder.0.mixer.heads"][0, :, -1].norm(dim=-1)
    gates = seen["decoder.0.mixer.gate"][0, :, -1, 0]
    place = torch.arange(8)
    right.bar(place - 0.2, heads, width=0.4, color=ORANGE, label="without gates")
    right.bar(place + 0.2, heads * gates, width=0.4, color=BLUE, label="times the gate")
    right.set(xlabel="head", ylabel="norm of the output", title="one token, eight heads", xticks=range(8))
    right.set_ylim(top=1.35 * heads.max().item())
    right.legend(ncols=2, loc="upper center")
    return drawing


@figure("concepts/value-residual")
def value_residual(plt: Any) -> Any:
    """Similarity of the values of each layer to those of the first."""
    drawing, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
    depth = 8
    base = llama(depth=depth, width=128, heads=4, vocab=97)
    mixed = io.override(base, ["decoder.blocks.*.mixer.value_residual=true"])
    for (a, b), colour in zip(((1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.25, 0.75)), COLOURS, strict=False):
        torch.manual_seed(0)
        model = Transformer(mixed).eval()
        for block in model.decoder.blocks:
            block["mixer"].inner.value_mix.data = torch.tensor([a, b])
        with torch.no_grad():
            first = next(iter(model.decoder.blocks))["mixer"].inner
            first.value_mix.data = torch.tensor([1.0, 0.0])  # its values are those that the others mix in
            _, seen = run_with_taps(model, ["decoder.*.mixer.v"], torch.arange(64)[None])
        values = [seen[f"decoder.{i}.mixer.v"] for i in range(depth)]
        similar = [F.cosine_similarity(values[0], x, dim=-1).mean().item() for x in values]
        name = "without" if b == 0 else f"a = {a}, b = {b}"
        axis.plot(range(1, depth + 1), similar, marker="o", color=colour, label=name)
    axis.set(xlabel="layer", ylabel="similarity to the first layer's values", ylim=(-0.1, 1.05))
    axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.16), frameon=False)
    return drawing


@figure("concepts/skip-connections")
def skip_connections(plt: Any) -> Any:
    """U-net skips and embedding skips of six layers."""
    drawing, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axis.axis("off")
    axis.set(xlim=(-0.7, 6.8), ylim=(-2.1, 2.3))
    box = {"boxstyle": "round,pad=0.5", "facecolor": "white", "edgecolor": "black"}
    axis.text(0, 0, "embedding", ha="center", va="center", bbox=box)
    for layer in range(1, 7):
        axis.text(layer, 0, f"layer {layer}", ha="center", va="center", bbox=box)
        axis.annotate(
            "", (layer - 0.32, 0), (layer - (0.54 if layer == 1 else 0.66), 0), arrowprops={"arrowstyle": "->"}
        )
        bent = {"arrowstyle": "->", "color": GREEN, "connectionstyle": "arc3,rad=0.3"}
        axis.annotate("", (layer - 0.1, -0.28), (0, -0.28), arrowprops=bent)
    for early in (1, 2, 3):
        bent = {"arrowstyle": "->", "color": RED, "connectionstyle": "arc3,rad=-0.45", "linewidth": 1.8}
        axis.annotate("", (6.9 - early, 0.28), (early + 0.1, 0.28), arrowprops=bent)
    axis.text(3.5, 2.05, "U-net skips: + c y", color=RED, ha="center")
    axis.text(3.5, -2.0, "embedding skips: a x + b x₀", color=GREEN, ha="center")
    return drawing


@figure("concepts/multi-token")
def multi_token(plt: Any) -> Any:
    """Tokens per call by the share of accepted drafts."""
    drawing, axis = plt.subplots(figsize=(8, 3.4), layout="constrained")
    share = torch.linspace(0, 1, 101)
    for drafts, colour in zip((1, 2, 3), COLOURS, strict=False):
        tokens = torch.stack([share**i for i in range(drafts + 1)]).sum(0)
        axis.plot(share, tokens, color=colour, label=f"{drafts} drafted token{'s' if drafts > 1 else ''}")
    axis.set(xlabel="probability that a drafted token is accepted", ylabel="tokens per call")
    axis.legend()
    return drawing

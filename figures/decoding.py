"""Figures: KV cache, sampling, beam search."""

from typing import Any

import torch
from matplotlib.patches import Rectangle

import anyformer as af
from anyformer.config import ModelConfig
from anyformer.config.overrides import override
from anyformer.generation.filters import MinP, TopK, TopP
from anyformer.generation.logit_processors import History, Temperature
from figures.diagram import arrow, blank, box
from figures.style import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, figure


@figure("concepts/kv-cache")
def kv_cache(plt: Any) -> Any:
    """Tokens that are computed at each step, and bytes of the cache against length."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
    for step in range(8):
        for token in range(step + 1):
            new = token == step
            for x, face in ((0, RED if new else SKY), (10, RED)):
                cell = Rectangle((x + token, 7 - step), 1, 1, facecolor=face, edgecolor="white", linewidth=1.5)
                left.add_patch(cell)
    left.set(xlim=(-1.6, 18.3), ylim=(-2.6, 9.2), aspect="equal")
    left.set_axis_off()
    left.text(4, 8.5, "with a KV cache", ha="center")
    left.text(14, 8.5, "without", ha="center")
    left.text(-0.9, 4, "step", rotation=90, va="center")
    for x in (0, 10):
        left.text(x + 4, -0.7, "token", ha="center", va="center")
    for x, colour, name in ((0.5, RED, "computed"), (9.5, SKY, "read from the cache")):
        left.add_patch(Rectangle((x, -2.3), 0.9, 0.9, facecolor=colour))
        left.text(x + 1.3, -1.85, name, va="center", fontsize=9.5)
    config = af.presets.gpt2(length=8192)
    lengths = range(512, 8193, 512)
    pattern = "decoder.blocks.*.mixer.pattern={kind='window', before=1023, after=0}"
    kinds = {
        "12 key/value heads": (config, "static", BLUE, "-"),
        "the same, int8": (config, "int8", GREEN, "--"),
        "2 key/value heads": (af.presets.gpt2(length=8192, kv_heads=2), "static", PURPLE, "-."),
        "window of 1,024 (ring)": (override(config, [pattern]), "auto", ORANGE, ":"),
    }
    for name, (model, kind, colour, dash) in kinds.items():
        right.plot(lengths, [_cache_mib(model, n, kind) for n in lengths], dash, color=colour, label=name)
    right.set(xlabel="tokens", ylabel="KV cache of one text (MiB, fp32)", ylim=(0, 830), xlim=(0, None))
    right.legend(loc="upper left")
    return drawing


def _cache_mib(config: ModelConfig, slots: int, kind: Any) -> float:
    """Return the size of keys and values that a cache allocates, in MiB."""
    with torch.device("meta"):
        cache = af.Transformer(config).new_cache(1, slots, kind=kind)
    return sum(x.nbytes for layer in cache.layers for x in layer.own()) / 2**20


@figure("concepts/sampling")
def sampling(plt: Any) -> Any:
    """One distribution under every rule; removed tokens are grey."""
    p = torch.tensor([0.34, 0.22, 0.14, 0.10, 0.07, 0.05, 0.035, 0.02, 0.015, 0.01])
    rules = (
        ("the model itself", None), ("temperature 0.5", Temperature(0.5)), ("temperature 1.5", Temperature(1.5)),
        ("top-k 3", TopK(value=3)), ("top-p 0.8", TopP(value=0.8)), ("min-p 0.2", MinP(value=0.2)),
    )  # fmt: skip
    history = History(*(torch.zeros(1, 0, dtype=torch.long),) * 3)
    drawing, axes = plt.subplots(2, 3, figsize=(8, 4.4), sharex=True, sharey=True, layout="constrained")
    for axis, (name, rule) in zip(axes.flat, rules, strict=True):
        found = p if rule is None else rule(history, p.log()[None]).softmax(-1)[0]
        axis.bar(range(1, 11), found, color=BLUE)
        axis.bar(range(1, 11), p, facecolor="none", edgecolor="#555555", linewidth=0.9)
        removed = [i + 1 for i in range(10) if found[i] == 0]
        axis.bar(removed, p[[i - 1 for i in removed]], color="#cccccc", edgecolor="#555555", linewidth=0.9)
        axis.set(title=name, xticks=range(1, 11))
    for axis in axes[1]:
        axis.set_xlabel("token, by probability")
    for axis in axes[:, 0]:
        axis.set_ylabel("probability")
    return drawing


@figure("concepts/beam-search")
def beam_search(plt: Any) -> Any:
    """The tree of the worked example: kept and dropped edges, and the score of each answer."""
    drawing, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    blank(axis, 16, 8.4)
    size = (1.7, 0.75)
    nodes = {
        "<bos>": (0.1, 3.6), "I": (4.0, 5.5), "yes": (4.0, 1.6), "am": (8.0, 6.9), "was": (8.0, 5.5),
        "<eos>": (8.0, 4.1), "<eos> ": (8.0, 2.4), "sir": (8.0, 0.8),
    }  # fmt: skip
    kept = {("<bos>", "I"), ("<bos>", "yes"), ("I", "am"), ("yes", "<eos> ")}
    edges = {
        ("<bos>", "I"): 0.6, ("<bos>", "yes"): 0.4, ("I", "am"): 0.4, ("I", "was"): 0.35, ("I", "<eos>"): 0.25,
        ("yes", "<eos> "): 0.7, ("yes", "sir"): 0.3,
    }  # fmt: skip
    for (a, b), p in edges.items():
        start, end = (nodes[a][0] + size[0], nodes[a][1] + 0.37), (nodes[b][0], nodes[b][1] + 0.37)
        keep = (a, b) in kept
        colour = GREEN if keep else "#999999"
        arrow(axis, start, end, colour, linewidth=2.2 if keep else 1.2, linestyle="-" if keep else "--")
        middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axis.text(*middle, f"{p:g}", ha="center", va="center", fontsize=9.5, backgroundcolor="white")
    for name, at in nodes.items():
        box(axis, at, size, name.strip(), BLUE)
    answers = {
        "am": ("I am", 0.24, 3), "was": ("I was", 0.21, 3), "<eos>": ("I", 0.15, 2), "<eos> ": ("yes", 0.28, 2),
        "sir": ("yes sir", 0.12, 3),
    }  # fmt: skip
    for node, (text, p, n) in answers.items():
        y = nodes[node][1] + 0.37
        logarithm = float(torch.tensor(p).log())
        axis.text(10.1, y, text, va="center", fontsize=10, weight="bold" if text in ("yes", "I am") else "normal")
        axis.text(
            12.6, y, f"{logarithm:.2f}", va="center", ha="center", fontsize=10, color=RED if text == "yes" else "k"
        )
        score = f"{logarithm / n:.3f}"
        axis.text(15.0, y, score, va="center", ha="center", fontsize=10, color=RED if text == "I am" else "k")
    axis.text(10.1, 8.1, "answer", fontsize=9.5, va="center")
    axis.text(12.6, 8.1, "log p", fontsize=9.5, va="center", ha="center")
    axis.text(15.0, 8.1, "log p / n", fontsize=9.5, va="center", ha="center")
    return drawing


@figure("concepts/speculative")
def speculative(plt: Any) -> Any:
    """How the kept and the redrawn part of a draft add up to the model's distribution; tokens per call."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained", width_ratios=(1.2, 1))
    both, x = torch.minimum(p, q), torch.arange(3)
    left.bar(x - 0.2, both, 0.36, color=GREEN, label="kept: min(p, q)")
    left.bar(x - 0.2, q - both, 0.36, bottom=both, color="#cccccc", hatch="//", edgecolor="white", label="rejected")
    left.bar(x + 0.2, both, 0.36, color=GREEN)
    left.bar(x + 0.2, p - both, 0.36, bottom=both, color=ORANGE, label="drawn after a rejection")
    for i in range(3):
        left.text(i - 0.2, q[i] + 0.015, "q", ha="center", style="italic")
        left.text(i + 0.2, p[i] + 0.015, "p", ha="center", style="italic")
    left.set(ylabel="probability", ylim=(0, 1.12), yticks=[0, 0.2, 0.4, 0.6, 0.8])
    left.set_xticks(x, ["token 0", "token 1", "token 2"])
    left.legend(loc="upper right")
    a = torch.linspace(0, 0.999, 200)
    for ahead, colour, dash in ((2, BLUE, "-"), (4, RED, "--"), (8, PURPLE, "-.")):
        right.plot(a, (1 - a ** (ahead + 1)) / (1 - a), dash, color=colour, label=f"{ahead} drafted tokens")
    right.set(xlabel="probability that a token is kept", ylabel="expected tokens per call", ylim=(0, 9.2), xlim=(0, 1))
    right.legend(loc="upper left")
    return drawing


@figure("concepts/scoring")
def scoring(plt: Any) -> Any:
    """Surprisal of tokens, and sliding windows over a long text."""
    drawing, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    texts = {"I was": ([0.6, 0.35, 1.0], ["I", "was", "<eos>"]), "yes": ([0.4, 0.7], ["yes", "<eos>"])}
    x, ticks, names = 0, [], []
    for (text, (p, tokens)), colour in zip(texts.items(), (BLUE, RED), strict=True):
        surprisal = -torch.tensor(p).log()
        at = [x + i for i in range(len(p))]
        left.bar(at, surprisal, color=colour)
        mean = float(surprisal.mean())
        left.plot([at[0] - 0.45, at[-1] + 0.45], [mean, mean], "--", color="k")
        what = f"“{text}”\nlog p = {-float(surprisal.sum()):.2f}\nperplexity {float(surprisal.mean().exp()):.2f}"
        left.text(sum(at) / len(at), 1.2, what, ha="center", va="bottom", fontsize=9.5, color=colour)
        ticks += at
        names += tokens
        x += len(p) + 1
    left.set_xticks(ticks, names)
    left.set(ylabel="surprisal (nats); dashed: mean", ylim=(0, 1.75), yticks=[0, 0.5, 1])
    for row, start in enumerate((0, 3, 6)):
        for token in range(start, start + 6):
            scored = row == 0 or token >= start + 3
            cell = Rectangle((token, 2.4 - 1.2 * row), 1, 0.8, facecolor=GREEN if scored else SKY, edgecolor="white")
            right.add_patch(cell)
        right.text(-0.3, 2.8 - 1.2 * row, f"window {row + 1}", ha="right", va="center", fontsize=9.5)
    right.set(xlim=(-4, 12.2), ylim=(-1.7, 4.2))
    right.set_axis_off()
    right.text(6, 3.7, "text of 12 tokens, window 6, stride 3", ha="center", va="center", fontsize=9.5)
    for left_edge, colour, name in ((-1.5, GREEN, "scored"), (4.0, SKY, "context only")):
        right.add_patch(Rectangle((left_edge, -1.3), 0.8, 0.6, facecolor=colour))
        right.text(left_edge + 1.1, -1.0, name, va="center", fontsize=9.5)
    return drawing

"""`docs/benchmarks.md` and its figures from the results: `python -m benchmarks.report`."""

import json
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from anyformer.inspection.plot import pyplot
from anyformer.lab.compare import markdown
from anyformer.lab.figures import panels, save
from benchmarks.growth import foretold
from benchmarks.sheet import RESULTS

DOCS = Path(__file__).parent.parent / "docs"
ABOUT = {
    "h200": "One NVIDIA H200 (`python -m benchmarks.gpu`)",
    "cpu": "Two CPU cores (`make bench`)",
}
WORK = {
    "train_gpt2": "training, GPT-2",
    "train_gpt2_fp8": "the same in fp8, against bf16",
    "train_wide_fp8": "training, GPT-2 of 8 layers and width 2,048, in fp8, against bf16",
    "train_base": "training, Transformer-base",
    "train_bert": "training, BERT, masked LM",
    "train_multi30k": "training, Transformer-base on Multi30k",
    "idle_shakespeare": "share of a step without a kernel, `shakespeare-gpu`",
    "idle_multi30k": "share of a step without a kernel, `multi30k-en-de`",
    "bigbird_16k": "BigBird-base, one sequence of 16,384 tokens, forward and backward",
    "window_64k": "a causal window of 1,024 at 65,536 tokens, beside full causal attention",
    "decode_1b_b1": "decoding, Llama 1B, one row",
    "decode_1b_b1_int8": "the same with weights of 8 bits, against bf16",
    "decode_1b_b64": "decoding, Llama 1B, 64 rows",
    "decode_base_b64_greedy": "decoding, Transformer-base, 64 rows",
    "decode_base_b64_beam4": "the same with 4 beams",
    "memory": "the most memory of a training step, beside what was foretold (the case that is furthest off)",
    "train_ragged": "training, pairs of unequal length",
    "decode_gpt2": "decoding, GPT-2 124M, one row",
    "decode_gpt2_int4": "the same with weights of 4 bits",
    "decode_base_beam4": "decoding, Transformer-base, 16 rows, 4 beams",
    "decode_base_beam4_int8": "the same with weights of 8 bits, against fp32",
    "decode_base_beam4_int4": "the same with weights of 4 bits, against fp32",
    "decode_base_ctranslate2": "the same in fp32, against an engine for CPUs",
    "decode_base_ctranslate2_int8": "the same with weights of 8 bits on both sides",
    "start_predict": "`anyformer predict` on a small run, from the command to the answer",
}
GROWTH = "growth"
MEMORY = {
    "h200": (
        "most allocated",
        "in bf16, each shape of a block compiled once, the rest not",
        "`training_memory`",
        "No step took less than about 10 ms, however small: likely the host, which starts the kernels of what is not "
        "compiled one by one (not profiled). Larger ones use more of the machine than the base does, and of the "
        "attention that is counted a causal kernel skips half. Measured before the loss held one part of its "
        "logits at a time, and before norms kept half as many bytes, which is foretold: less is allocated now.",
    ),
    "cpu": (
        "kept for the backward pass",
        "fp32, one thread",
        "`count`",
        "Times leave their lines where products are too small to fill the machine.",
    ),
}
INTRODUCTION = """# Beside its peers

The same work on the same machine in the same run: medians after warm-up, of random weights and tokens. Made by
`python -m benchmarks.report` from `benchmarks/results`, which have the spread.

All ways to train a model, or to decode, begin with the same weights. The loss that each has before the first step,
without dropout, is beside its time: where they differ by more than 1e-4 (on a GPU, in bf16, 1e-2) the work was not the
same, and the row says so. Of decoding there is the share of ids that both say, too: in bf16, with random weights, two
logits that are nearly equal change places sooner or later, and whatever follows is another text. The share of a row of
training is what the products that a step asks for (`count`, three times; attention between all tokens, also where a
causal kernel skips half) take of the speed of a large one; of a row of decoding, the bytes of all weights, which each
step reads, of the speed of a large copy. [Where the rest goes](speed.md).
"""


def page() -> str:
    parts = [INTRODUCTION]
    for name, title in ABOUT.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(_section(name, title, json.loads(path.read_text(encoding="utf-8"))))
    return "\n".join(parts)


def _section(name: str, title: str, rows: dict[str, Any]) -> str:
    machine, growth = rows.pop("machine"), rows.pop(GROWTH, None)
    table = [("work", "key", "ours", "the best peer", "", "times", "GiB", "first loss", "same ids", "share")]
    fp8 = {key: row["curves"] for key, row in rows.items() if "curves" in row}
    for key, row in ((key, rows[key]) for key in WORK if key in rows):
        peer = "" if row["peer"] is None else f"{row['peer']:,.4g}" if row["peer"] < 1000 else f"{row['peer']:,.0f}"
        ours = f"{row['ours']:,.4g}" if row["ours"] < 1000 else f"{row['ours']:,.0f}"
        times = "" if row["peer"] is None else f"{row['ours'] / row['peer']:.2f}"
        first, share, beside = row.get("first", {}), row.get("share", {}), row.get("peer_name") or ""
        same = f"{first['ours']:.4f}, {first[beside]:.4f}" if beside in first else ""
        ids = f"{row['same'][beside]:.0%}" if beside in row.get("same", {}) else ""
        most = [row.get("memory", {}).get(way) for way in ("ours", beside)]
        room = ", ".join(f"{n / 2**30:.1f}" for n in most if n)
        same = f"{same}: DIFFERENT WORK" if row.get("agree") is False else same
        used = f"{share['ours']:.0%} of a {'copy' if key.startswith('decode') else 'product'}" if share else ""
        table.append((WORK[key], f"`{key}`", f"{ours} {row['unit']}", peer, beside, times, room, same, ids, used))
    product, copy = machine["product_flops"] / 1e12, machine["copy_bytes"] / 1e9
    remarks = "".join(f"- `{key}`: {row['remark']}\n" for key, row in rows.items() if "remark" in row)
    return f"""## {title}

{machine["name"]}, torch {machine["torch"]}, Python {machine["python"]}; a large product {product:,.3g} TFLOP/s, a large
copy {copy:,.4g} GB/s.

{markdown(table)}{remarks and f"{chr(10)}{remarks}"}
![times the best peer](figures/benchmarks-{name}.png)
{_fp8(name, fp8) if fp8 else ""}{"" if growth is None else _growth(name, growth)}"""


def _fp8(name: str, curves: dict[str, dict[str, list[float]]]) -> str:
    steps = max(len(curve) for ways in curves.values() for curve in ways.values())
    far = {key: max(abs(a - b) for a, b in zip(*ways.values(), strict=True)) for key, ways in curves.items()}
    apart = ", ".join(f"{most:.2f} apart in `{key}`" for key, most in far.items())
    told = (
        f"The first {steps} steps from the same weights by the same batches, of random words of which half follow from "
        f"the last: losses in fp8 and bf16 are at most {apart}."
    )
    return f"""
### Learning in fp8

{fill(told, 120)}

![loss by step in fp8 and bf16](figures/fp8-{name}.png)
"""


def _growth(name: str, growth: dict[str, Any]) -> str:
    base = ", ".join(f"{axis} {size:,}" for axis, size in growth["base"].items())
    memory, how, source, where = MEMORY[name]
    told = (
        f"`python -m benchmarks.growth`: a decoder of {base}, one of these changed at a time; {how}. "
        "Points are measured, lines foretold: "
        f"time from the FLOPs of `count` at {growth['share']:.0%} of the speed of a large product, "
        f"a share that is fitted at the base (the dotted line); memory ({memory}) from {source} alone. {where}"
    )
    return f"""
### How a training step grows

{fill(told, 120)}

![time and memory by length, batch, width, depth and vocabulary](figures/growth-{name}.png)
"""


def draw(name: str) -> Path:
    rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    there = {key: rows[key] for key in WORK if key in rows and rows[key].get("peer") and key != "memory"}
    ratios = {key: row["ours"] / row["peer"] for key, row in there.items() if row.get("agree") is not False}
    figure, (axis,) = panels(1, width=7)
    axis.barh(list(ratios)[::-1], list(ratios.values())[::-1], color="#BBBBBB", edgecolor="#000000")
    axis.axvline(1, color="#000000", linewidth=0.8)
    axis.set(xlabel="speed in times that of the best peer", ylabel="work", xlim=(0, None))
    return save(figure, DOCS / "figures" / f"benchmarks-{name}.png")


def draw_fp8(name: str, curves: dict[str, dict[str, list[float]]]) -> Path:
    figure, axes = panels(len(curves))
    styles = (("#0072B2", "-", "fp8"), ("#000000", ":", "bf16"))
    for axis, (key, ways) in zip(axes, curves.items(), strict=True):
        for curve, (color, style, label) in zip(ways.values(), styles, strict=True):
            axis.plot(range(1, len(curve) + 1), curve, color=color, linestyle=style, linewidth=2, label=label)
        axis.set(xlabel="step", ylabel="loss", title=key)
        axis.legend()
    return save(figure, DOCS / "figures" / f"fp8-{name}.png")


def draw_growth(name: str, growth: dict[str, Any]) -> Path:
    """Points as they were measured, lines as foretold, and by which power of the size both grow from end to end."""
    plt, axes = pyplot(), foretold(growth, name != "cpu")
    form = {"figsize": (3 * len(axes), 6.4), "layout": "constrained", "squeeze": False}
    figure, grid = plt.subplots(2, len(axes), sharey="row", **form)
    kinds = (("seconds", 1e-3, "milliseconds of a step"), ("bytes", 2**20, f"MiB, {MEMORY[name][0]}"))
    for row, (kind, unit, label) in zip(grid, kinds, strict=True):
        for axis, (size, points) in zip(row, axes.items(), strict=True):
            xs = [point["size"] for point in points]
            found, due = ([point[by] / unit for point in points] for by in (kind, f"due_{kind}"))
            axis.loglog(xs, due, color="#0072B2", linestyle="--", label=f"foretold, power {power(xs, due):.2f}")
            axis.loglog(xs, found, "o", color="#000000", label=f"measured, power {power(xs, found):.2f}")
            axis.axvline(growth["base"][size], color="#999999", linewidth=0.8, linestyle=":")
            axis.set_xticks(xs, [f"{x}" if x < 1024 else f"{x // 1024}k" for x in xs])
            axis.minorticks_off()
            axis.set(xlabel=size)
            axis.grid(alpha=0.25, linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(loc="upper left", framealpha=1, edgecolor="none", borderpad=0.2, fontsize=9)
            axis.margins(y=0.25)
        row[0].set_ylabel(label)
    return save(figure, DOCS / "figures" / f"growth-{name}.png")


def power(xs: list[float], ys: list[float]) -> float:
    """p of the y = c xᵖ that fits best."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


if __name__ == "__main__":
    (DOCS / "benchmarks.md").write_text(page(), encoding="utf-8")
    for found in RESULTS.glob("*.json"):
        draw(found.stem)
        stored = json.loads(found.read_text(encoding="utf-8"))
        if GROWTH in stored:
            draw_growth(found.stem, stored[GROWTH])
        if curves := {key: row["curves"] for key, row in stored.items() if "curves" in row}:
            draw_fp8(found.stem, curves)

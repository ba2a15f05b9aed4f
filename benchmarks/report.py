"""`docs/benchmarks.md` and its figures from the results: `python -m benchmarks.report`."""

import json
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from anyformer.inspection.plot import pyplot
from anyformer.lab.compare import markdown
from anyformer.lab.figures import panels, save
from benchmarks.growth import predicted
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
    "idle_shakespeare": "fraction of a training step with no kernel running, `shakespeare-gpu`",
    "idle_multi30k": "fraction of a training step with no kernel running, `multi30k-en-de`",
    "bigbird_16k": "BigBird-base, one sequence of 16,384 tokens, forward and backward",
    "window_64k": "causal window of 1,024 at 65,536 tokens, against full causal attention",
    "decode_1b_b1": "decoding, Llama 1B, one row",
    "decode_1b_b1_int8": "the same with 8-bit weights, against bf16",
    "decode_1b_b64": "decoding, Llama 1B, 64 rows",
    "decode_base_b64_greedy": "decoding, Transformer-base, 64 rows",
    "decode_base_b64_beam4": "the same with 4 beams",
    "memory": "peak memory of a training step, measured over predicted (worst case)",
    "train_ragged": "training, pairs of unequal length",
    "decode_gpt2": "decoding, GPT-2 124M, one row",
    "decode_gpt2_int4": "the same with 4-bit weights",
    "decode_base_beam4": "decoding, Transformer-base, 16 rows, 4 beams",
    "decode_base_beam4_int8": "the same with 8-bit weights",
    "decode_base_beam4_int4": "the same with 4-bit weights",
    "decode_base_ctranslate2": "the same in fp32, against CTranslate2",
    "decode_base_ctranslate2_int8": "the same with 8-bit weights on both sides",
    "start_predict": "`anyformer predict` on a small run, from start to output",
}
GROWTH = "growth"
MEMORY = {
    "h200": (
        "peak allocated",
        "bf16, blocks compiled, the rest eager",
        "`training_memory`",
        "No step took less than about 10 ms: small steps are probably launch-bound (not profiled). Larger steps have a "
        "higher MFU than the base, and a causal kernel skips half of the attention that is counted. These points "
        "predate two memory savings (loss in chunks, norms that save two bytes per value), which the prediction has.",
    ),
    "cpu": (
        "saved for the backward pass",
        "fp32, one thread",
        "`count`",
        "Small matmuls do not fill the machine, so their times lie above the line.",
    ),
}
INTRODUCTION = """# Benchmarks against peers

Each row is measured on one machine in one run: medians after warm-up, with random weights and tokens. This page is
written by `python -m benchmarks.report` from `benchmarks/results`, which also hold the spread.

- Compiled: on the GPU, our training and decoding, all training peers except BigBird, and the Llama of
  `transformers` (static cache, which it compiles itself). Decoding Transformer-base in `transformers` is eager. On the
  CPU training is eager on both sides, GPT-2 decoding too (but for the 4-bit row); our beam search is compiled, that of
  `transformers` is eager.
- *First loss*: all implementations of a row start from the same weights; their losses before the first step, without
  dropout, must agree within 1e-4 (on a GPU in bf16, 1e-2), otherwise the row is marked. BigBird and Multi30k have no
  such check: BigBird's random links differ, and Multi30k compares packed with padded batches.
- *Same ids*: the fraction of decoded tokens that agree. In bf16 with random weights, near ties between logits break
  differently sooner or later, and the texts differ from there on.
- *Utilisation*: for training, MFU = 3 × forward FLOPs (`count`; attention counted in full, also where a causal kernel
  skips half) ÷ time ÷ the measured peak of a large matmul. For decoding, memory bandwidth utilisation = bytes of all
  weights ÷ time of a step ÷ the measured bandwidth of a large copy. [Where the rest of the time goes](speed.md).
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
    table = [("work", "key", "ours", "best peer", "", "speedup", "GiB", "first loss", "same ids", "utilisation")]
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
        used = f"{share['ours']:.0%} {'of bandwidth' if key.startswith('decode') else 'MFU'}" if share else ""
        table.append((WORK[key], f"`{key}`", f"{ours} {row['unit']}", peer, beside, times, room, same, ids, used))
    product, copy = machine["product_flops"] / 1e12, machine["copy_bytes"] / 1e9
    remarks = "".join(f"- `{key}`: {row['remark']}\n" for key, row in rows.items() if "remark" in row)
    return f"""## {title}

{machine["name"]}, torch {machine["torch"]}, Python {machine["python"]}; measured matmul peak {product:,.3g} TFLOP/s,
measured copy bandwidth {copy:,.4g} GB/s.

{markdown(table)}{remarks and f"{chr(10)}{remarks}"}
![speed relative to the best peer](figures/benchmarks-{name}.png)
{_fp8(name, fp8) if fp8 else ""}{"" if growth is None else _growth(name, growth)}"""


def _fp8(name: str, curves: dict[str, dict[str, list[float]]]) -> str:
    steps = max(len(curve) for ways in curves.values() for curve in ways.values())
    far = {key: max(abs(a - b) for a, b in zip(*ways.values(), strict=True)) for key, ways in curves.items()}
    apart = ", ".join(f"{most:.2f} apart in `{key}`" for key, most in far.items())
    told = (
        f"The first {steps} steps from the same weights on the same batches of random tokens, half of which are "
        f"determined by the previous one. Losses in fp8 and bf16 are at most {apart}."
    )
    return f"""
### Training in fp8

{fill(told, 120)}

![loss by step in fp8 and bf16](figures/fp8-{name}.png)
"""


def _growth(name: str, growth: dict[str, Any]) -> str:
    base = ", ".join(f"{axis} {size:,}" for axis, size in growth["base"].items())
    memory, how, source, where = MEMORY[name]
    told = (
        f"`python -m benchmarks.growth`: a decoder of {base}, one of these changed at a time; {how}. "
        "Points are measured, lines are predicted: "
        f"time from the FLOPs of `count` at {growth['share']:.0%} MFU, "
        f"fitted at the base (the dotted line); memory ({memory}) from {source} alone. {where}"
    )
    return f"""
### How a training step scales

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
    axis.set(xlabel="speed relative to the best peer", ylabel="benchmark", xlim=(0, None))
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
    """Draw measured points, predicted lines, and the exponent of their growth with the size."""
    plt, axes = pyplot(), predicted(growth, name != "cpu")
    form = {"figsize": (3 * len(axes), 6.4), "layout": "constrained", "squeeze": False}
    figure, grid = plt.subplots(2, len(axes), sharey="row", **form)
    kinds = (("seconds", 1e-3, "milliseconds per step"), ("bytes", 2**20, f"MiB, {MEMORY[name][0]}"))
    for row, (kind, unit, label) in zip(grid, kinds, strict=True):
        for axis, (size, points) in zip(row, axes.items(), strict=True):
            xs = [point["size"] for point in points]
            found, due = ([point[by] / unit for point in points] for by in (kind, f"due_{kind}"))
            axis.loglog(xs, due, color="#0072B2", linestyle="--", label=f"predicted, power {power(xs, due):.2f}")
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
    """Return the exponent p of the best fit y = c xᵖ."""
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

"""`docs/benchmarks.md` and its figures from the results: `python -m benchmarks.report`."""

import json
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from anyformer.lab.compare import markdown
from anyformer.lab.figures import FILL, GREY, legend, lines, log_ticks, panels, save
from benchmarks.growth import predicted
from benchmarks.rows import ROWS, checks, ours_alone, peers, single, speeds
from benchmarks.sheet import RESULTS

DOCS = Path(__file__).parent.parent / "docs"
ABOUT = {
    "h200": "One NVIDIA H200 (`python -m benchmarks.gpu`)",
    "cpu": "Two CPU cores (`make bench`)",
}
PEERS = {
    "h200": ("transformers", "nanoGPT", "gpt-fast"),
    "cpu": ("transformers", "ctranslate2"),
}  # packages whose version is recorded
ALT = {
    "h200": "Our speed relative to the fastest peer on an H200: 1.09 in training GPT-2 to 12.5 in greedy decoding",
    "cpu": "Our speed relative to each peer on two CPU cores: 1.00 to 2.18, but below 1 beside CTranslate2 int8",
}
LABELS = {  # in the figure
    "train_gpt2": "training GPT-2",
    "train_base": "training Transformer",
    "train_bert": "training BERT",
    "train_multi30k": "training, unequal lengths",
    "train_ragged": "training, unequal lengths",
    "bigbird_16k": "BigBird, 16,384 tokens",
    "decode_1b_b1": "decoding Llama, batch 1",
    "decode_1b_b64": "decoding Llama, batch 64",
    "prefill_8k": "reading 8,192 tokens, Llama",
    "decode_base_b64_greedy": "decoding Transformer, greedy",
    "decode_base_b64_beam4": "decoding Transformer, 4 beams",
    "decode_gpt2": "decoding GPT-2, batch 1",
    "decode_base_beam4": "decoding Transformer, 4 beams",
    "decode_base_ctranslate2": "the same, fp32",
    "decode_base_ctranslate2_int8": "the same, int8",
    "decode_base_ctranslate2_int4": "the same, int4 beside int8",
    "decode_base_greedy": "decoding Transformer, greedy",
    "decode_base_greedy_int8": "the same, int8",
    "decode_base_greedy_int4": "the same, int4 beside int8",
}
FP8 = {"train_gpt2_fp8": "GPT-2 124M", "train_wide_fp8": "8 layers, width 2,048"}  # titles of the panels
SLOWER = "#E8C39C"
GROWTH = "growth"
GROWTH_ALT = "Measured and predicted time and memory of a training step by length, batch, width, depth and vocabulary"
MEMORY = {
    "h200": (
        "peak allocated",
        "bf16, blocks compiled, the rest eager",
        "`training_memory`",
        "No step took less than about 8 ms: small steps are probably launch-bound (not profiled). Steps that are "
        "longer, wider or of more rows or words have a higher MFU than the base, and a causal kernel skips half of the "
        "attention that is counted. The prediction is of a model that is compiled as a whole: here the peak is up to "
        "8 % above it.",
    ),
    "cpu": (
        "saved for the backward pass",
        "fp32, one thread",
        "`count`",
        "Small matmuls do not fill the machine, so their times lie above the line.",
    ),
}
INTRODUCTION = """# Benchmarks

Both sides of a row are measured on one machine in one run: medians after warm-up, with random weights and tokens. This
page is written by `python -m benchmarks.report` from `benchmarks/results`. Comparisons with other libraries and
comparisons of ours with ours are in separate tables; a peer that is faster is in bold.

- *Runs*: the lowest and the highest value of all timed runs, of ours, then of the peer.
- *The peer* is the fastest library that ran, with what it does differently. "Compiled" is `torch.compile`; "eager" is
  not. A row of ours compiled beside an eager peer does not say how fast that peer would be if compiled.
- *First loss*: both sides start from the same weights; their losses before the first step, without dropout, must agree
  within 1e-4 (on a GPU in bf16, 1e-2), otherwise the row is marked. A row without it has no such check: BigBird's
  random links and weights differ, and rows of pairs compare ways to batch.
- *Same ids*: the fraction of decoded tokens that agree. In fp32 on the CPU it is 100 %. In bf16 with random weights
  near ties between logits may break differently, and the texts differ from there on: the Llama rows agree on 2 and 6 %
  of the tokens in bf16, and on 99 to 100 % in fp32 on the same GPU (`decode_1b_fp32`).
- nanoGPT and gpt-fast are their public model files with our weights, compiled; versions are the beginning of the
  SHA-256 of the file. On the H200 all rows but the start times are of one day, the two sides of each row of one run:
  `train_gpt2`, `train_base`, `train_bert`, `train_multi30k`, `bigbird_16k`, idle times, `memory` and the speeds of a
  large matmul and copy of one, growth of another, all others of a third. The start times are of an earlier day.
  `start_shakespeare` finds the bytecode that Python stores at a first start. The CPU is a Xeon with AVX-512 VNNI;
  [the log](log.md) has figures of an Arm CPU.
- *Utilisation*: for training, MFU = 3 × forward FLOPs (`count`; attention counted in full, also where a causal kernel
  skips half) ÷ time ÷ the peak of a large matmul, measured in the same run (701 TFLOP/s for `train_gpt2_fp8`,
  `train_wide_fp8`, `train_experts` and `prefill_8k`). For decoding, memory bandwidth utilisation = bytes of all
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
    machine, growth, known = rows["machine"], rows.get(GROWTH), ROWS[name]
    product, copy = machine["product_flops"] / 1e12, machine["copy_bytes"] / 1e9
    curves = {key: row["curves"] for key, row in rows.items() if "curves" in row}
    versions = ", ".join(f"{package} {machine.get(package, '(version not recorded)')}" for package in PEERS[name])
    told = f"""{machine["name"]}, {machine["threads"]} CPU threads, torch {machine["torch"]}, {versions}, Python \
{machine["python"]}; measured matmul peak {product:,.3g} TFLOP/s, measured copy bandwidth {copy:,.4g} GB/s."""
    more = (_fp8(name, curves) if curves else "") + (_growth(name, growth) if growth else "")
    if name == "h200":
        more += _new_user(json.loads((RESULTS / "new_user.json").read_text(encoding="utf-8")))
    return f"""## {title}

{fill(told, 120)}

### Against other libraries

{markdown(peers(rows, known))}
![{ALT[name]}](figures/benchmarks-{name}.png)

{markdown(checks(rows, known))}
### Ours against ours

{markdown(ours_alone(rows, known))}
### Without a comparison

{markdown(single(rows, known))}{more}"""


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

![Training loss by step in fp8 and in bf16 for two models: the curves lie on each other](figures/fp8-{name}.png)
"""


NEW_USER = """Six sets by `anyformer new`, `train` and `evaluate`, without any other setting than `--minutes`
(`python -m benchmarks.new_user`). Results are those of the test rows.
*Alone*: warm steps with nothing beside them, of which kernels take the milliseconds in brackets: none waits for the
CPU, so that steps of few tokens are limited by the number of their kernels. *Before* are tokens/s of the recipes that
`new` wrote until then, in the middle of trainings side by side."""


def _new_user(found: dict[str, Any]) -> str:
    beside = f", {found['beside']} trainings side by side on one GPU" if found["beside"] > 1 else ""
    table: list[tuple[str, ...]] = [("data", "seconds", "steps", "tokens/s", "result", "alone, tokens/s", "before")]
    for name, row in found["rows"].items():
        alone = ""
        if one := row.get("alone"):
            busy = f": {one['ms']} ms ({one['busy']}), {one['kernels']} kernels" if "ms" in one else ""
            alone = f"{one['tokens_per_second']:,}{busy}"
        told = ", ".join(f"{key} {value:.4g}" for key, value in row["metrics"].items())
        numbers = [f"{row[key]:,}" if key in row else "" for key in ("seconds", "steps", "tokens_per_second")]
        table.append((name, *numbers, told, alone, f"{row['before']:,}" if "before" in row else ""))
    return f"""
### What a new user gets

{NEW_USER}

`--minutes {found["minutes"]:g}`{beside}:

{markdown(table)}"""


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

![{GROWTH_ALT}](figures/growth-{name}.png)
"""


def draw(name: str, rows: dict[str, Any]) -> Path:
    """Draw the speed relative to the peer, on a logarithmic axis; a peer that is faster in another colour."""
    known = {key: row for key, row in ROWS[name].items() if row.kind == "peer" and key in rows}
    figure, (axis,) = panels(1, height=1 + 0.42 * len(known))
    for number, key in enumerate(known):
        ours, peer, _ = speeds(key, rows)
        axis.barh(number, ours / peer - 1, left=1, color=FILL if ours > peer else SLOWER, height=0.65)
        axis.annotate(f" {ours / peer:.2f}× ", (max(ours / peer, 1), number), va="center")
    axis.axvline(1, color="#000000", linewidth=1)
    labels = [f"{LABELS[key]}, {speeds(key, rows)[2].split(',')[0]} ({row.peer.split()[0].strip(';,')})"
              for key, row in known.items()]  # fmt: skip
    axis.set_yticks(range(len(known)), [label.replace("(its)", "(C++)") for label in labels])
    axis.set_ylim(len(known) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="our speed relative to the peer (logarithmic)", xlim=(0.4, 40 if name == "h200" else 3))
    log_ticks(
        axis, [n for n in (0.5, 1, 1.5, 2, 5, 10, 20) if n != (1.5 if name == "h200" else 5) and n < axis.get_xlim()[1]]
    )
    return save(figure, DOCS / "figures" / f"benchmarks-{name}.png")


def draw_fp8(name: str, curves: dict[str, dict[str, list[float]]]) -> Path:
    figure, axes = panels(len(curves))
    for axis, (key, ways) in zip(axes, curves.items(), strict=True):
        named = dict(zip(("fp8", "bf16"), ways.values(), strict=True))
        lines(axis, {way: {step: [loss] for step, loss in enumerate(curve, 1)} for way, curve in named.items()}, False)
        axis.set(xlabel="step", ylabel="training loss, nats", title=FP8[key])
    legend(figure, axes[0])
    return save(figure, DOCS / "figures" / f"fp8-{name}.png")


def draw_growth(name: str, growth: dict[str, Any]) -> Path:
    """Draw measured points, predicted lines, and the exponent of their growth with the size: a row for each size."""
    sizes = predicted(growth, name != "cpu")
    figure, axes = panels(2 * len(sizes), height=2.3)
    kinds = (
        ("seconds", 1e-3, "step, ms"),
        ("bytes", *((2**30, "memory, GiB") if name != "cpu" else (2**20, "memory, MiB"))),
    )
    for number, (size, points) in enumerate(sizes.items()):
        xs = [point["size"] for point in points]
        for axis, (kind, unit, label) in zip(axes[2 * number :], kinds, strict=False):
            found, due = ([point[by] / unit for point in points] for by in (kind, f"due_{kind}"))
            axis.plot(xs, due, color="#0072B2", linestyle="--", label="predicted")
            axis.plot(xs, found, "o", color="#000000", label="measured")
            axis.axvline(growth["base"][size], color=GREY, linewidth=0.8, linestyle=":", label="base")
            axis.set_title(f"exponent: measured {power(xs, found):.2f}, predicted {power(xs, due):.2f}", fontsize=10)
            axis.set(xlabel="vocabulary" if size == "vocab" else size, ylabel=label)
            log_ticks(axis, xs)
    for column, (kind, unit, _) in enumerate(kinds):
        values = [point[by] / unit for some in sizes.values() for point in some for by in (kind, f"due_{kind}")]
        for axis in axes[column::2]:
            log_ticks(axis, [0.1, 1, 10, 100, 1000], across=False)
            axis.set_ylim(min(values) / 1.5, max(values) * 1.5)
    legend(figure, axes[0])
    return save(figure, DOCS / "figures" / f"growth-{name}.png")


def power(xs: list[float], ys: list[float]) -> float:
    """Return the exponent p of the best fit y = c xᵖ."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


if __name__ == "__main__":
    (DOCS / "benchmarks.md").write_text(page(), encoding="utf-8")
    for name in ABOUT:
        stored = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        draw(name, stored)
        if GROWTH in stored:
            draw_growth(name, stored[GROWTH])
        if curves := {key: row["curves"] for key, row in stored.items() if "curves" in row}:
            draw_fp8(name, curves)

"""The rows of the benchmark page: for each key the work, its conditions, and what both sides are."""

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["peer", "ours", "alone"]  # against another library, against ourselves, or without a comparison


@dataclass(frozen=True)
class Row:
    """One line of a table. `ours` and `peer` say how each side runs; `kind` says in which table the row is.

    DATA in the conditions is replaced by the data of the run.
    """

    work: str
    conditions: str = ""
    ours: str = ""
    peer: str = ""
    kind: Kind = "peer"


GRAPH = "compiled, CUDA graph"
BF16 = "bf16 autocast, AdamW"
BASE = "Transformer-base (6 + 6 layers, width 512)"
LLAMA = "Llama of 1.2 B parameters (16 layers, width 2,048)"

ROWS: dict[str, dict[str, Row]] = {
    "h200": {
        "train_gpt2": Row("training, GPT-2 124M", f"64 × 1,024 tokens, {BF16}, no dropout", GRAPH, "compiled"),
        "train_base": Row(f"training, {BASE}", f"512 × (64 + 64) tokens, {BF16}, dropout 0.1", GRAPH, "compiled"),
        "train_bert": Row(
            "training, BERT-base, masked LM", f"128 × 512 tokens, {BF16}, dropout 0.1 (none in attention)", GRAPH,
            "compiled; its head at masked tokens only",
        ),
        "train_multi30k": Row(
            f"training, {BASE}, pairs of unequal length",
            f"DATA, batches of 16,384 tokens, {BF16}",
            f"{GRAPH}; packed rows", "compiled; the same number of pairs in random order, padded to the longest",
        ),
        "bigbird_16k": Row(
            "forward and backward, BigBird-base", "1 × 16,384 tokens, bf16 weights, dropout 0.1, no optimiser step",
            "compiled, FlexAttention", "eager; other random weights and links",
        ),
        "decode_1b_b1": Row(
            f"decoding, {LLAMA}", "batch 1, prompt 8, 256 new tokens, bf16, greedy", "compiled, static cache",
            "compiled by itself, static cache",
        ),
        "decode_1b_b64": Row(
            "the same, 64 rows", "batch 64, prompt 8, 256 new tokens, bf16, greedy", "compiled, static cache",
            "compiled by itself, static cache",
        ),
        "decode_base_b64_greedy": Row(
            f"decoding, {BASE}", "batch 64, source 32, 64 new tokens, bf16, greedy", "compiled, static cache",
            "eager, its default cache",
        ),
        "decode_base_b64_beam4": Row(
            "the same with 4 beams", "batch 64, source 32, 64 new tokens, bf16", "compiled, static cache",
            "eager, its default cache",
        ),
        "train_gpt2_fp8": Row(
            "training, GPT-2 124M in fp8", "64 × 1,024 tokens, AdamW", "fp8, compiled", "bf16, compiled", "ours"
        ),
        "train_wide_fp8": Row(
            "training, GPT-2 of 8 layers and width 2,048 in fp8", "16 × 1,024 tokens, AdamW", "fp8, compiled",
            "bf16, compiled", "ours",
        ),
        "decode_1b_b1_int8": Row(
            f"decoding, {LLAMA}, 8-bit weights", "batch 1, prompt 8, 256 new tokens, greedy", "int8 weights, compiled",
            "bf16, compiled", "ours",
        ),
        "decode_1b_b1_int4": Row(
            f"decoding, {LLAMA}, 4-bit weights", "batch 1, prompt 8, 256 new tokens, greedy",
            "int4 weights in groups of 32, head int8, compiled", "bf16, compiled", "ours",
        ),
        "prefill_8k": Row(
            f"reading a prompt of 8,192 tokens, {LLAMA}", "batch 1, bf16, with the first token",
            "CUDA graph of eager kernels", "eager, its default cache",
        ),
        "train_experts": Row(
            "training, GPT-2 with 8 experts of half the width, of which 2 read each token",
            f"64 × 1,024 tokens, {BF16}, no dropout", GRAPH, "dense GPT-2 124M with the same active weights", "ours",
        ),
        "window_64k": Row(
            "attention alone, forward and backward, causal window of 1,024",
            "1 × 65,536 tokens, 12 heads of 64, bf16", "window of 1,024, FlexAttention",
            "other work: all earlier tokens", "ours",
        ),
        "decode_1b_fp32": Row(
            f"greedy ids, {LLAMA}", "agreement with transformers, fp32, both eager, the lower of 1 and 64 rows",
            kind="alone",
        ),
        "idle_shakespeare": Row("training step of `shakespeare-gpu`", "time with no kernel running", kind="alone"),
        "idle_multi30k": Row("training step of `multi30k-en-de`", "time with no kernel running", kind="alone"),
        "start_shakespeare": Row(
            "`anyformer train shakespeare-gpu`", "from the start of the process to the first loss, with stored code",
            kind="alone",
        ),
        "start_shakespeare_cold": Row("the same", "without stored code", kind="alone"),
        "memory": Row("peak memory of a training step", "measured ÷ predicted, worst of 9 cases", kind="alone"),
    },
    "cpu": {
        "train_gpt2": Row(
            "training, GPT-2 of 4 layers and width 256", "8 × 128 tokens, fp32, AdamW, no dropout", "eager", "eager"
        ),
        "train_base": Row(
            "training, encoder–decoder of 3 + 3 layers and width 256",
            "32 × (32 + 32) tokens, fp32, AdamW, dropout 0.1", "eager", "eager",
        ),
        "train_bert": Row(
            "training, BERT of 4 layers and width 256, masked LM",
            "8 × 128 tokens, fp32, AdamW, dropout 0.1 (none in attention)", "eager",
            "eager; its head at masked tokens only",
        ),
        "train_ragged": Row(
            "training, encoder–decoder of 3 + 3 layers and width 256, pairs of unequal length",
            "synthetic captions, about 1,024 tokens per batch, fp32", "eager; batches sorted by length",
            "eager; the same number of pairs in random order, padded to the longest",
        ),
        "decode_gpt2": Row(
            "decoding, GPT-2 124M", "batch 1, prompt 16, 48 new tokens, fp32, greedy", "eager", "eager"
        ),
        "decode_base_beam4": Row(
            f"decoding, {BASE}, 4 beams", "batch 16, source 32, 32 new tokens, fp32", "compiled", "eager"
        ),
        "decode_base_ctranslate2": Row(
            "the same, against CTranslate2", "batch 16, source 32, 32 new tokens, fp32", "compiled",
            "its own engine (C++), fp32",
        ),
        "decode_base_ctranslate2_int8": Row(
            "the same with 8-bit weights on both sides", "batch 16, source 32, 32 new tokens", "int8 weights, compiled",
            "its own engine (C++), int8",
        ),
        "decode_base_ctranslate2_int4": Row(
            "the same, ours with weights of 4 bits", "batch 16, source 32, 32 new tokens",
            "int4 weights, compiled", "its own engine (C++), int8",
        ),
        "decode_base_greedy": Row(
            f"decoding, {BASE}, greedy", "batch 16, source 32, 32 new tokens, fp32", "compiled",
            "its own engine (C++), fp32",
        ),
        "decode_base_greedy_int8": Row(
            "the same with 8-bit weights on both sides", "batch 16, source 32, 32 new tokens",
            "int8 weights, compiled", "its own engine (C++), int8",
        ),
        "decode_base_greedy_int4": Row(
            "the same, ours with weights of 4 bits", "batch 16, source 32, 32 new tokens",
            "int4 weights, compiled", "its own engine (C++), int8",
        ),
        "decode_gpt2_int4": Row(
            "decoding, GPT-2 124M, 4-bit weights", "batch 1, prompt 16, 48 new tokens, greedy",
            "int4 weights, compiled", "fp32, compiled", "ours",
        ),
        "decode_base_beam4_int8": Row(
            f"decoding, {BASE}, 4 beams, 8-bit weights", "batch 16, source 32, 32 new tokens",
            "int8 weights, compiled", "fp32, compiled", "ours",
        ),
        "decode_base_beam4_int4": Row(
            f"decoding, {BASE}, 4 beams, 4-bit weights", "batch 16, source 32, 32 new tokens",
            "int4 weights, compiled", "fp32, compiled", "ours",
        ),
        "threads_sort_quiet": Row(
            "training step of the recipe `sort`, 0.4 GFLOP", "as the machine was", "one thread, as chosen",
            "two threads", "ours",
        ),
        "threads_sort_busy": Row(
            "the same", "beside one more busy process", "one thread, as chosen", "two threads", "ours"
        ),
        "threads_shakespeare_quiet": Row(
            "training step of the recipe `shakespeare`, 4 GFLOP", "as the machine was", "one thread",
            "two threads, as chosen", "ours",
        ),
        "threads_shakespeare_busy": Row(
            "the same", "beside one more busy process", "one thread", "two threads, as chosen", "ours"
        ),
        "start_predict": Row("`anyformer predict` on a small run", "from the command to its output", kind="alone"),
    },
}  # fmt: skip


def speeds(key: str, rows: dict[str, Any]) -> tuple[float, float, str]:
    """Return our speed, that of the other side, and the name of the other side."""
    row = rows[key]
    return row["ours"], row["peer"], row["peer_name"]


def number(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def peers(rows: dict[str, Any], known: dict[str, Row]) -> list[tuple[str, ...]]:
    """Return the table of comparisons with other libraries."""
    table: list[tuple[str, ...]] = [
        ("work", "conditions", "ours is", "the peer", "ours", "peer", "speed-up", "other peers")
    ]
    for key, row in known.items():
        if row.kind == "peer" and key in rows:
            ours, peer, name = speeds(key, rows)
            others = rows[key].get("rates", {})
            rest = ", ".join(
                f"{other} {number(rate)}" for other, rate in others.items() if other != name and "ours" not in other
            )
            rest = "" if any("CTranslate2" in other for other in others) else rest  # rows of their own
            speed = f"{ours / peer:.2f}" if ours >= peer else f"**{ours / peer:.2f}: the peer is faster**"
            both = f"{number(ours)} {rows[key]['unit']}", number(peer)
            table.append(
                (
                    f"{row.work} (`{key}`)",
                    row.conditions.replace("DATA", rows[key].get("data", "")),
                    row.ours,
                    f"{name.split(',')[0]}: {row.peer}",
                    *both,
                    speed,
                    rest,
                )
            )
    return table


def ranges(row: dict[str, Any], *names: str) -> str:
    """Return the range of the runs of each side."""
    if "seconds_spread" in row:
        spread = {name: [1e3 * took for took in some] for name, some in row["seconds_spread"].items()}
        unit = " ms"
    else:
        spread, unit = row.get("spread", {}), ""
    return ", ".join(
        f"{number(low)} to {number(high)}{unit}" for low, high in (spread[n] for n in names if n in spread)
    )


def checks(rows: dict[str, Any], known: dict[str, Row]) -> list[tuple[str, ...]]:
    """Return the table of what was measured beside the speed."""
    table: list[tuple[str, ...]] = [
        ("key", "runs, ours and peer", "GiB, ours and peer", "first loss, ours and peer", "same ids", "utilisation")
    ]
    for key in (key for key, row in known.items() if row.kind != "alone" and key in rows):
        row, name = rows[key], rows[key].get("peer_name") or ""
        first, share = row.get("first", {}), row.get("share", {})
        loss = f"{first['ours']:.4f}, {first[name]:.4f}" if name in first else ""
        loss = f"{loss}: DIFFERENT WORK" if row.get("agree") is False else loss
        ids = f"{row['same'][name]:.1%}" if name in row.get("same", {}) else ""
        if both := row.get("fp32_ids"):
            ids = "with ours in fp32: ours {:.1%}, peer {:.1%}".format(*both)
        memory = ", ".join(f"{n / 2**30:.1f}" for n in (row.get("memory", {}).get(way) for way in ("ours", name)) if n)
        used = f"{share['ours']:.0%} {'of bandwidth' if key.startswith('decode') else 'MFU'}" if share else ""
        runs = ranges(row, "ours", name)
        if any((runs, memory, loss, ids, used)):
            table.append((f"`{key}`", runs, memory, loss, ids, used))
    return table


def ours_alone(rows: dict[str, Any], known: dict[str, Row]) -> list[tuple[str, ...]]:
    """Return the table of comparisons of ours with ours."""
    table: list[tuple[str, ...]] = [("work", "conditions", "one side", "the other", "one", "other", "ratio")]
    for key, row in known.items():
        if row.kind == "ours" and key in rows:
            ours, peer, name = speeds(key, rows)
            unit, other = rows[key]["unit"], row.peer if name.startswith("ours") else f"{name}; {row.peer}"
            values = f"{number(ours)} {unit}", number(peer)
            if took := rows[key].get("seconds"):
                values = f"{1e3 * took['ours']:.2f} ms", f"{1e3 * took[name]:.2f} ms"
            together = rows[key].get("together")
            conditions = row.conditions + (f"; {together} runs timed as one" if together else "")
            table.append((f"{row.work} (`{key}`)", conditions, row.ours, other, *values, f"{ours / peer:.2f}"))
    return table


def single(rows: dict[str, Any], known: dict[str, Row]) -> list[tuple[str, ...]]:
    """Return the table of measurements without a comparison."""
    table: list[tuple[str, ...]] = [("what", "measure", "value")]
    for key, row in known.items():
        if row.kind == "alone" and key in rows:
            value = f"{number(rows[key]['ours'])} {rows[key]['unit']}"
            if spread := rows[key].get("spread"):
                value += " ({} to {})".format(*map(number, spread))
            table.append((f"{row.work} (`{key}`)", row.conditions, value))
    return table

"""The table of one GPU: `python -m benchmarks.gpu [KEY...]`; results go to `benchmarks/results/<machine>.json`."""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from anyformer import presets
from benchmarks import captions, decoding, fp8, idle, long, memory as peak_memory, ragged, start, training
from benchmarks.plan import profiled
from benchmarks.sheet import DEVICE, RESULTS, Sheet, clear, clock
from benchmarks.side_by_side import alone, join, side_by_side

Row = Callable[[Sheet, bool], None]


def train_gpt2(sheet: Sheet, tiny: bool) -> None:
    work, ways = training.gpt2(*(2, 64, 2, 512, 64, 2) if tiny else (12, 768, 12, 50304, 1024, 64))
    sheet.measure("train_gpt2", work, "tokens/s", ways)


def train_experts(sheet: Sheet, tiny: bool) -> None:
    work, ways = training.experts(*(2, 64, 2, 512, 64, 2, (4, 2)) if tiny else (12, 768, 12, 50304, 1024, 64, (8, 2)))
    sheet.measure("train_experts", work, "tokens/s", ways, against="ours, dense")


def _fp8(sheet: Sheet, key: str, depth: int, width: int, heads: int, vocab: int, length: int, rows: int) -> None:
    config = presets.gpt2(depth=depth, width=width, heads=heads, vocab=vocab, length=length, dropout=0.0)
    data, found = fp8.batches(30, vocab, rows, length), {}
    for name, eight in fp8.WAYS.items():
        clear()
        steps = fp8.learn(config, eight, data)
        found[name] = list(itertools.islice(steps, fp8.COMPILING))
        with alone():
            found[name] += steps
    some = data[0, :, :-1]
    flops = training.flops(config, (some,), some)
    sheet.put(key, **fp8.row(found, some.numel(), flops, sheet.rows["machine"]["product_flops"]))


def train_gpt2_fp8(sheet: Sheet, tiny: bool) -> None:
    _fp8(sheet, "train_gpt2_fp8", *(2, 64, 2, 512, 64, 2) if tiny else (12, 768, 12, 50304, 1024, 64))


def train_wide_fp8(sheet: Sheet, tiny: bool) -> None:
    _fp8(sheet, "train_wide_fp8", *(2, 128, 2, 512, 64, 2) if tiny else (8, 2048, 16, 50304, 1024, 16))


def train_base(sheet: Sheet, tiny: bool) -> None:
    work, ways = training.base(*(2, 64, 2, 128, 512, 16, 4) if tiny else (6, 512, 8, 2048, 32768, 64, 512))
    sheet.measure("train_base", work, "tokens/s", ways)


def train_bert(sheet: Sheet, tiny: bool) -> None:
    work, ways = training.bert(*(2, 64, 2, 512, 32, 2) if tiny else (12, 768, 12, 30592, 512, 128))
    sheet.measure("train_bert", work, "tokens/s", ways)


def train_multi30k(sheet: Sheet, tiny: bool) -> None:
    sizes, tokens = (captions.TINY, 512) if tiny else (captions.SIZES, 16384)
    few = {"warm": 2, "rounds": 2, "each": 2} if tiny else {"warm": 8, "rounds": 7, "each": 10}
    with tempfile.TemporaryDirectory() as folder:
        given = sizes, tokens, Path(folder)
        ways = {"ours": partial(captions.ours, *given), "torch.nn": partial(captions.torch_nn, *given)}
        data = "Multi30k" if captions.has_multi30k() else "synthetic captions"
        ragged.compare(sheet, "train_multi30k", ways, data, **few)


def _idle(sheet: Sheet, key: str, recipe: str) -> None:
    if DEVICE != "cuda":
        return
    found = idle.idle(recipe)
    facts = asdict(found) | {"memory": {"ours": found.memory}}
    sheet.put(key, 100 * found.share, None, "% idle", note=str(found), **facts)


def idle_shakespeare(sheet: Sheet, tiny: bool) -> None:
    _idle(sheet, "idle_shakespeare", "shakespeare-gpu")


def idle_multi30k(sheet: Sheet, tiny: bool) -> None:
    _idle(sheet, "idle_multi30k", "multi30k-en-de")


def start_shakespeare(sheet: Sheet, tiny: bool) -> None:
    """Seconds to the first step of fresh processes: a row that is measured by its name alone."""
    with alone():
        found = start.start("shakespeare-gpu", ("batches.rows=2", "model.decoder.depth=1") if tiny else ())
    sheet.put("start_shakespeare_cold", found.cold.first_step, None, "s", stages=found.cold._asdict())
    best, *_, last = sorted(found.warm, key=lambda one: one.first_step)
    spread = [best.first_step, last.first_step]
    sheet.put("start_shakespeare", best.first_step, None, "s", spread=spread, stages=best._asdict())


def bigbird_16k(sheet: Sheet, tiny: bool) -> None:
    work, ways = long.bigbird(*(2, 64, 2, 1024) if tiny else (12, 768, 12, 16384))
    sheet.measure("bigbird_16k", work, "tokens/s", ways, warm=3, rounds=7)


def window_64k(sheet: Sheet, tiny: bool) -> None:
    """Speed of a causal window relative to full causal attention."""
    ways = long.window(*(2, 16, 512, 64) if tiny else (12, 64, 65536, 1024))
    times = {name: clock(way, warm=3, rounds=10)[0] for name, way in ways.items()}
    seconds = {name: time.median for name, time in times.items()}
    ranges = {name: [time.low, time.high] for name, time in times.items()}
    sheet.put("window_64k", seconds["cuDNN, causal"] / seconds["ours"], 1.0, "times", peer_name="cuDNN, causal",
              seconds=seconds, seconds_spread=ranges, together=long.TOGETHER)  # fmt: skip


def memory(sheet: Sheet, tiny: bool) -> None:
    """Peak memory of a training step over its prediction: the worst case."""
    cases = peak_memory.CASES[3:4] if tiny else peak_memory.CASES
    found = {str(case): peak_memory.compare(case, tiny) for case in cases}
    ratios = {name: peak / told for name, (told, peak) in found.items()}
    worst = max(ratios, key=lambda name: abs(ratios[name] - 1))
    sheet.put("memory", ratios[worst], 1.0, "times", peer_name="predicted", note=worst, ratios=ratios, bytes=found)


def decode_1b_b1(sheet: Sheet, tiny: bool) -> None:
    work, ways = decoding.llama(*(2, 64, 4, 2, 128, 512, 1, 8, 16) if tiny else (*BILLION, 1, 8, 256))
    sheet.measure("decode_1b_b1", work, "tokens/s", ways, warm=2, rounds=5)
    share = sheet.rows["decode_1b_b1"]["share"]
    for bits in (8, 4):
        both, used = (f"ours, {bits} bits", "ours"), {"ours": share[f"ours, {bits} bits"]}
        sheet.compare(f"decode_1b_b1_int{bits}", "decode_1b_b1", *both, "ours in bf16", share=used)


def prefill_8k(sheet: Sheet, tiny: bool) -> None:
    work, ways = decoding.prefill(*(2, 64, 4, 2, 128, 512, 64) if tiny else (*BILLION, 8192))
    sheet.measure("prefill_8k", work, "tokens/s", ways, warm=3, rounds=9)
    run = ways["ours"].make()
    for _ in range(3):  # the second call captures a graph, which the later ones replay
        run()
    with alone():
        found = profiled(run)
    sheet.keep("prefill_8k", sheet.rows["prefill_8k"] | found)
    for name, (calls, seconds) in found.get("kernels", {}).items():
        print(f"  {1e3 * seconds:8.2f} ms  {calls:4} calls  {name}", flush=True)


def decode_1b_b64(sheet: Sheet, tiny: bool) -> None:
    work, ways = decoding.llama(*(2, 64, 4, 2, 128, 512, 4, 8, 16) if tiny else (*BILLION, 64, 8, 256))
    for bits in (8, 4):
        del ways[f"ours, {bits} bits"]
    sheet.measure("decode_1b_b64", work, "tokens/s", ways, warm=2, rounds=5)


def decode_1b_fp32(sheet: Sheet, tiny: bool) -> None:
    """Greedy ids of both sides in fp32, where near ties of logits do not break by rounding to bf16."""
    torch.set_float32_matmul_precision("highest")
    sizes = (2, 64, 4, 2, 128, 512) if tiny else BILLION
    found = {rows: decoding.llama_ids_in_fp32(*sizes, rows, 8, 16 if tiny else 256) for rows in (1, 64)}
    torch.set_float32_matmul_precision("high")
    note = ", ".join(f"{rows} rows {share:.4f}" for rows, share in found.items())
    sheet.put("decode_1b_fp32", 100 * min(found.values()), None, "% same ids", note=note, same=found)


def decode_base_b64_greedy(sheet: Sheet, tiny: bool) -> None:
    work, ways = decoding.base(*(2, 64, 2, 128, 512, 4, 8, 16) if tiny else (6, 512, 8, 2048, 32768, 64, 32, 64), 1)
    sheet.measure("decode_base_b64_greedy", work, "tokens/s", ways, warm=2, rounds=7)


def decode_base_b64_beam4(sheet: Sheet, tiny: bool) -> None:
    work, ways = decoding.base(*(2, 64, 2, 128, 512, 4, 8, 16) if tiny else (6, 512, 8, 2048, 32768, 64, 32, 64), 4)
    sheet.measure("decode_base_b64_beam4", work, "tokens/s", ways, warm=2, rounds=7)


BILLION = (16, 2048, 32, 8, 8192, 128256)  # layers, width, heads, of them for keys, feed-forward, vocabulary
LANES = (  # rows of a lane run one after the other, so that large ones fit into memory together
    (train_base,),
    (train_bert, idle_shakespeare),
    (train_gpt2, train_gpt2_fp8, train_wide_fp8),
    (train_multi30k, idle_multi30k, train_experts),
    (bigbird_16k, memory),
    (decode_1b_b1, decode_1b_b64, prefill_8k, decode_1b_fp32),
    (decode_base_b64_greedy, decode_base_b64_beam4, window_64k),
)
ROWS: dict[str, Row] = {row.__name__: row for lane in (*LANES, (start_shakespeare,)) for row in lane}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", choices=[[], *ROWS], help="rows; without any all, prepared side by side")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that all of it runs")
    parser.add_argument("--out", type=Path, help="the file for the numbers")
    args = parser.parse_args()
    name = torch.cuda.get_device_name().split()[-1].lower() if DEVICE == "cuda" else "tiny"
    out = args.out or RESULTS / f"{name}.json"
    if not args.keys:
        options = ["--out", str(out), *["--tiny"] * args.tiny]
        lanes = [["-m", "benchmarks.gpu", *(row.__name__ for row in lane), *options] for lane in LANES]
        Sheet(out)  # the machine by itself, once
        sys.exit(0 if side_by_side(lanes) else 1)
    join()
    torch.set_float32_matmul_precision("high")
    sheet = Sheet(out)
    for key in args.keys:
        ROWS[key](sheet, args.tiny)


if __name__ == "__main__":
    main()

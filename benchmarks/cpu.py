"""The table of a CPU: `python -m benchmarks.cpu` (`make bench`); results go to `benchmarks/results/cpu.json`."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks import decoding, ragged, threads, training
from benchmarks.sheet import RESULTS, Sheet

Row = Callable[[Sheet], None]


def train_gpt2(sheet: Sheet) -> None:
    work, ways = training.gpt2(depth=4, width=256, heads=4, vocab=8192, length=128, rows=8)
    sheet.measure("train_gpt2", work, "tokens/s", ways)


def train_base(sheet: Sheet) -> None:
    work, ways = training.base(depth=3, width=256, heads=4, ff=1024, vocab=8192, length=32, rows=32)
    sheet.measure("train_base", work, "tokens/s", ways)


def train_bert(sheet: Sheet) -> None:
    work, ways = training.bert(depth=4, width=256, heads=4, vocab=8192, length=128, rows=8)
    sheet.measure("train_bert", work, "tokens/s", ways)


def train_ragged(sheet: Sheet) -> None:
    sizes = {"width": 256, "depth": 3, "tokens": 1024}
    ways = {"ours": partial(ragged.ours, **sizes), "torch.nn": partial(ragged.torch_nn, **sizes)}
    ragged.compare(sheet, "train_ragged", ways, "synthetic captions")


def decode_gpt2(sheet: Sheet) -> None:
    work, ways = decoding.gpt2(depth=12, width=768, heads=12, vocab=50257, rows=1, prompt=16, new=48)
    sheet.measure("decode_gpt2", work, "tokens/s", ways, rounds=3, warm=1)
    both = "ours, 4 bits, compiled", "ours, compiled"
    sheet.compare("decode_gpt2_int4", "decode_gpt2", *both, "ours in fp32, both compiled")


def decode_base(sheet: Sheet) -> None:
    sizes = {"depth": 6, "width": 512, "heads": 8, "ff": 2048, "vocab": 32768}
    work, ways = decoding.base(**sizes, rows=16, source=32, new=32, beams=4)
    sheet.measure("decode_base_beam4", work, "tokens/s", ways, rounds=3, warm=1, against="transformers")
    pairs = {
        "decode_base_beam4_int8": ("ours, 8 bits", "ours"),
        "decode_base_beam4_int4": ("ours, 4 bits", "ours"),
        "decode_base_ctranslate2": ("ours", "CTranslate2"),
        "decode_base_ctranslate2_int8": ("ours, 8 bits", "CTranslate2 int8"),
        "decode_base_ctranslate2_int4": ("ours, 4 bits", "CTranslate2 int8"),
    }
    put_pairs(sheet, "decode_base_beam4", pairs)


def decode_base_greedy(sheet: Sheet) -> None:
    """Measure the same with one beam; without transformers, which is slower than both."""
    sizes = {"depth": 6, "width": 512, "heads": 8, "ff": 2048, "vocab": 32768}
    work, ways = decoding.base(**sizes, rows=16, source=32, new=32, beams=1)
    del ways["transformers"]
    sheet.measure("decode_base_greedy", work, "tokens/s", ways, rounds=3, warm=1, against="CTranslate2")
    pairs = {
        "decode_base_greedy_int8": ("ours, 8 bits", "CTranslate2 int8"),
        "decode_base_greedy_int4": ("ours, 4 bits", "CTranslate2 int8"),
    }
    put_pairs(sheet, "decode_base_greedy", pairs)


def put_pairs(sheet: Sheet, key: str, pairs: dict[str, tuple[str, str]]) -> None:
    """Store comparisons of two implementations of one row, and how many ids each shares with ours in fp32."""
    row = sheet.rows[key]
    shared = {"ours": 1.0, **row["same"]}
    for pair, (mine, peer) in pairs.items():
        if peer in row["rates"]:
            name, ids = "ours in fp32" if peer == "ours" else peer, [shared[mine], shared[peer]]
            sheet.compare(pair, key, mine, peer, name, fp32_ids=ids)


def start(sheet: Sheet) -> None:
    """From the command to the answer, of a small run."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        small = ["train.steps=2", "data.train.count=200", "data.valid.count=10"]
        command = [sys.executable, "-m", "anyformer"]
        subprocess.run([*command, "train", "sort", *small, "--out", run], check=True, capture_output=True)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([*command, "predict", run], input=b"3 1 2\n", check=True, capture_output=True)
            times.append(time.perf_counter() - began)
    sheet.put("start_predict", median(times), None, "s", spread=[min(times), max(times)])


ROWS: dict[str, Row] = {
    row.__name__: row
    for row in (train_gpt2, train_base, train_bert, train_ragged, decode_gpt2, decode_base, decode_base_greedy, start)
} | {"threads": threads.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", choices=[[], *ROWS])
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json", help="the file for the numbers")
    args = parser.parse_args()
    sheet = Sheet(args.out)
    for key in args.keys or ROWS:
        ROWS[key](sheet)


if __name__ == "__main__":
    main()

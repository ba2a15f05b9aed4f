"""Memory of preparing and training on a large corpus: `python benchmarks/corpus.py --out /big/disk`.

Writes a made-up corpus of 2 GB (words by Zipf's law, the same each time), makes token shards of it, trains a small
language model on them, and prints the time and peak memory of each step: each process by itself, and all
of them at once, as /proc says it ten times a second. The folder is removed.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

WORDS = 200_000
RECIPE = """
task = "lm"
tokenizer = "data"
data.train = {{ kind = "shards", path = "{shards}", stop = 0.9999 }}
data.valid = {{ kind = "shards", path = "{shards}", start = 0.9999 }}
batches = {{ kind = "crops", rows = 8, length = 128 }}

[model]
width = 128
target = {{}}
decoder = {{ depth = 2, position = "rotary", blocks = {{ mixer = {{ heads = 4 }}, feedforward = "plain" }} }}
head = "lm"

[train]
steps = 50
optimizer = {{ kind = "adamw", lr = 1e-3 }}
"""


def write_corpus(path: Path, size: int, seed: int = 0) -> None:
    """Lines of 5 to 60 words of a made-up language, in which the n-th word comes up 1/n times as often as the first."""
    chance = np.random.Generator(np.random.PCG64(seed))
    syllables = np.array([a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ai", "er")], dtype=object)
    drawn = syllables[chance.integers(0, len(syllables), size=(WORDS, 4))]
    words = np.array(["".join(row[:n]) for row, n in zip(drawn, chance.integers(1, 5, size=WORDS), strict=True)])
    words = words.astype(object)
    odds = np.cumsum(1 / np.arange(1, WORDS + 1))
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            drawn = words[np.searchsorted(odds, chance.random(1_000_000) * odds[-1])]
            ends = np.cumsum(chance.integers(5, 61, size=40_000))
            ends = ends[ends < len(drawn)]
            drawn[ends] = [f"{word}\n" for word in drawn[ends]]
            file.write(" ".join(drawn).replace("\n ", "\n") + "\n")


def measured(*command: str | Path) -> None:
    """Run a command; print its time and memory."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "anyformer", *map(str, command)])
    most, together = dict[int, int](), 0
    while process.poll() is None:
        found = {pid: resident(pid) for pid in family(process.pid)}
        together = max(together, sum(found.values()))
        most |= {pid: max(size, most.get(pid, 0)) for pid, size in found.items()}
        time.sleep(0.1)
    each = ", ".join(f"{size / 2**20:.0f}" for size in most.values())
    print(f"anyformer {command[0]}: {time.perf_counter() - began:.0f} s, exit code {process.returncode}")
    print(f"  resident MiB at most: {together / 2**20:.0f} together; each process {each}", flush=True)


def family(pid: int) -> list[int]:
    """A process, its children and theirs."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [pid, *(one for child in text.split() for one in family(int(child)))]


def resident(pid: int) -> int:
    """Bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS")), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size", type=float, default=2e9, help="bytes")
    parser.add_argument("--workers", default="1")
    parser.add_argument("--tokenizer", default='{kind="bpe", size=8000}')
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="corpus-", dir=given.out))
    try:
        began = time.perf_counter()
        write_corpus(folder / "corpus.txt", int(given.size))
        size = (folder / "corpus.txt").stat().st_size
        print(f"{size / 1e9:.2f} GB of text in {time.perf_counter() - began:.0f} s", flush=True)
        shards = folder / "shards"
        options = ["--out", shards, "--tokenizer", given.tokenizer, "--workers", given.workers]
        measured("data", "prepare", folder / "corpus.txt", *options)
        (folder / "lm.toml").write_text(RECIPE.format(shards=shards))
        measured("train", folder / "lm.toml", "--out", folder / "run")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

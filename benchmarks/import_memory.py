"""Peak memory of importing a sharded checkpoint: `python benchmarks/import_memory.py --out /big/disk`.

Writes random weights in the shape of Llama-2-7B (13.5 GB in shards of at most 2 GB), imports them in a process of its
own, and prints the peak memory of that process and the size of the weights. Twice the weights are on disk at the
end, in a folder that is removed.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, models
from torch import Tensor

from anyformer import presets
from anyformer.config import ModelConfig
from anyformer.interop import weight_files as files
from anyformer.interop.families import FAMILIES

IMPORT = """
import sys, re, pathlib
def told(field):
    status = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) * 1024
from anyformer.interop import import_model
tiny, tiny_out, source, out = sys.argv[1:]
import_model(tiny, tiny_out)  # libraries that the first import loads do not count
before = told("VmRSS")
import_model(source, out)
print(before, told("VmHWM"))
"""


class Taken(NamedTuple):
    """Bytes."""

    weights: int
    before: int  # of a process that has imported a tiny model
    peak: int

    @property
    def share(self) -> float:
        """The most that the import took, by the weights."""
        return (self.peak - self.before) / self.weights


def write_checkpoint(folder: Path, config: ModelConfig, dtype: torch.dtype, shard: int) -> int:
    """Write a folder of random weights in files of bounded size; return the total bytes."""
    family = FAMILIES["llama"]
    rules = family.tensor_rules(config)
    sizes = {name: shape for rule in rules for name, shape in zip(rule.theirs, rule.shapes, strict=True)}
    shards: list[files.Shapes] = [{}]
    room = shard
    for name, shape in sizes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = shard
        shards[-1][name] = (dtype, shape)
        room -= size
    places = {}
    for i, shapes in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        files.write(folder / file, shapes, _random(shapes))
        places |= dict.fromkeys(shapes, file)
    files.write_json(folder / files.INDEX, {"weight_map": places})
    files.write_json(folder / "config.json", family.fields(config))
    vocab = {f"t{i}": i for i in range(config.vocab)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(folder / "tokenizer.json"))
    return sum(math.prod(shape) for shape in sizes.values()) * dtype.itemsize


def _random(shapes: files.Shapes) -> Iterator[tuple[str, Tensor]]:
    for name, (dtype, shape) in shapes.items():
        yield name, (torch.rand(shape[-1]) - 0.5).to(dtype).expand(shape).contiguous()


def measure(folder: Path, out: Path, weights: int) -> Taken:
    tiny = folder.with_name("tiny")
    tiny.mkdir()
    write_checkpoint(tiny, presets.llama(depth=1, width=8, heads=2, vocab=9), torch.float16, 1_000_000)
    arguments = [tiny, folder.with_name("tiny-run"), folder, out]
    done = subprocess.run([sys.executable, "-c", IMPORT, *arguments], capture_output=True, text=True, check=True)
    before, peak = map(int, done.stdout.split())
    return Taken(weights, before, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk with room")
    parser.add_argument("--depth", type=int, default=32, help="layers; 32 of them are 7B")
    parser.add_argument("--shard", type=int, default=2_000_000_000, help="bytes of a file")
    args = parser.parse_args()
    config = presets.llama(depth=args.depth)
    with tempfile.TemporaryDirectory(dir=args.out) as work:
        source = Path(work) / "public"
        source.mkdir()
        weights = write_checkpoint(source, config, torch.float16, args.shard)
        start = time.monotonic()
        taken = measure(source, Path(work) / "run", weights)
        seconds = time.monotonic() - start
    line = {"parameters": weights // 2, "weights": weights, "peak": taken.peak, "share": round(taken.share, 3)}
    print(json.dumps(line | {"seconds": round(seconds)}))


if __name__ == "__main__":
    main()

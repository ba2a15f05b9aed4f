"""Timing of implementations, and the results file: one key for each row of a table."""

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import Bytes, LanguageModel
from anyformer.tasks.base import BuiltTask
from benchmarks import peer_files
from benchmarks.side_by_side import alone, in_turns, locked

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULTS = Path(__file__).parent / "results"
CLOSE = 1e-2 if DEVICE == "cuda" else 1e-4  # of losses that ought to be one number, in bf16 and in fp32


def token_task() -> BuiltTask:
    """Return a task whose loss a head computes; its tokenizer is not used."""
    return LanguageModel().build(train_tokenizer(Bytes(), []))


@dataclass(frozen=True)
class Time:
    """Seconds of one run: the median, the smallest and the largest; the most memory, in bytes; and the seconds until
    the first run has ended: to build a model, and to compile it."""

    median: float
    low: float
    high: float
    memory: int
    start: float


@dataclass(frozen=True)
class Way:
    """One implementation of a benchmark: `make` builds everything and returns the function that is timed.

    `first` is the loss before anything is learnt and without dropout: one number for all ways that begin with the same
    weights. `flops` are the matmul FLOPs of the task, however an implementation does it; `reads` are the bytes that
    must be read where memory bandwidth is the limit. `each` runs are timed as one, with nothing between them.
    """

    name: str
    make: Callable[[], Callable[[], Any]]
    first: Callable[[], float] | None = None
    flops: float | None = None
    reads: float | None = None
    each: int = 1


def clock(way: Way, warm: int = 5, rounds: int = 15) -> tuple[Time, Any]:
    """Return the time of an implementation and its last result; free everything it allocated."""
    clear()
    begun = Begun(way)
    with alone():
        for number in range(min(1 - warm, 0), rounds):
            begun.go(counts=number >= 0)
    found = begun.time(), begun.last
    del begun
    clear()
    return found


class Begun:
    """An implementation after its first run."""

    def __init__(self, way: Way):
        began = time.perf_counter()
        self.run, self.each = way.make(), way.each
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.run()
        finish()
        self.start, self.times, self.last = time.perf_counter() - began, list[float](), None

    def go(self, counts: bool) -> None:
        finish()
        began = time.perf_counter()
        for _ in range(self.each):
            last = self.run()
        finish()
        if counts:
            self.times.append((time.perf_counter() - began) / self.each)
            self.last = last.detach().cpu() if isinstance(last, torch.Tensor) else last

    def time(self) -> Time:
        memory = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
        return Time(statistics.median(self.times), min(self.times), max(self.times), memory, self.start)


def by_turns(ways: Mapping[str, Way], warm: int, rounds: int) -> dict[str, tuple[Time, Any] | Exception]:
    """The times of all ways: one after the other on a GPU, which has no room for all; else in turns, so that whatever
    else the machine does is in all of them. An error is that of a way that cannot run here."""
    found: dict[str, tuple[Time, Any] | Exception] = {}
    begun: dict[str, Begun] = {}
    for name, way in ways.items():
        try:
            if DEVICE == "cuda":
                found[name] = clock(way, warm, rounds)
            else:
                begun[name] = Begun(way)
        except Exception as error:
            found[name] = error
    for number in range(min(1 - warm, 0), rounds):
        for one in begun.values():
            one.go(counts=number >= 0)
    return found | {name: (one.time(), one.last) for name, one in begun.items()}


def firsts(ways: Mapping[str, Way]) -> dict[str, float | Exception]:
    """Return the first loss of each implementation that has one."""
    found: dict[str, float | Exception] = {}
    for name, way in ways.items():
        if way.first is not None:
            clear()
            try:
                found[name] = way.first()
            except Exception as error:
                found[name] = error
    return found


def agree(first: Mapping[str, float]) -> bool | None:
    """Return whether all losses equal that of `ours`; None if there is no other."""
    if len(first) < 2:
        return None
    return all(abs(loss - first["ours"]) <= CLOSE * abs(first["ours"]) for loss in first.values())


def same(ids: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the fraction of ids on which each implementation agrees with ours."""
    return {name: float((some == ids["ours"]).float().mean()) for name, some in ids.items() if name != "ours"}


def clear() -> None:
    gc.collect()
    torch.compiler.reset()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def finish() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Sheet:
    """The rows of a machine, each written as soon as it is there."""

    def __init__(self, path: Path):
        self.path = path
        if not (in_turns() and "machine" in self.rows):  # measured by the process that started these
            self.keep("machine", machine())

    @property
    def rows(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def put(self, key: str, ours: float, peer: float | None, unit: str, **beside: Any) -> None:
        self.keep(key, {"ours": ours, "peer": peer, "unit": unit, **beside})
        ratio = "" if not peer else f"  {ours / peer:5.2f} times the peer's {peer:,.1f}"
        print(f"{key:<24} {ours:>14,.1f} {unit}{ratio}  {beside.get('note', '')}", flush=True)

    def keep(self, key: str, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with locked():
            rows = self.rows | {key: row}
            self.path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def compare(self, key: str, measured: str, mine: str, other: str, name: str, **beside: Any) -> None:
        """Store two ways of the row `measured` as another row; `name` is that of the second way there."""
        row = self.rows[measured]
        rates, spread = row["rates"], {"ours": row["spread"][mine], name: row["spread"][other]}
        self.put(key, rates[mine], rates[other], row["unit"], peer_name=name, spread=spread, **beside)

    def measure(
        self,
        key: str,
        work: float,
        unit: str,
        ways: Mapping[str, Way],
        *,
        warm: int = 5,
        rounds: int = 15,
        against: str | None = None,
        **beside: Any,
    ) -> dict[str, float]:
        """Work per second by each way; `ours` is held `against` one of the others, or the fastest of them."""
        rates, spread, memory, start, last, share = {}, {}, {}, {}, {}, {}
        told = firsts(ways)
        first = {name: loss for name, loss in told.items() if not isinstance(loss, Exception)}
        failed = {name: loss for name, loss in told.items() if isinstance(loss, Exception)}
        able = {name: way for name, way in ways.items() if name not in failed}
        for name, found in (failed | by_turns(able, warm, rounds)).items():
            if isinstance(found, Exception):  # report a peer that cannot run here, and continue with the others
                if name == "ours":
                    raise found
                print(f"{key}: {name} cannot run here: {found!s:.200}", flush=True)
                first.pop(name, None)
                continue
            way, (took, last[name]) = ways[name], found
            rates[name] = work / took.median
            spread[name] = [work / took.high, work / took.low]
            memory[name], start[name] = took.memory, took.start
            if way.flops is not None:
                share[name] = way.flops / took.median / self.rows["machine"]["product_flops"]
            elif way.reads is not None:
                share[name] = way.reads / took.median / self.rows["machine"]["copy_bytes"]
        peers = {name: rate for name, rate in rates.items() if not name.startswith("ours")}
        best = against if against in rates else max(peers, key=lambda name: peers[name], default=None)
        alike = agree(first)
        if alike is False:
            told = ", ".join(f"{name} {loss:.6g}" for name, loss in first.items())
            print(f"{key}: THE LOSSES DISAGREE, so the times are not comparable: {told}", flush=True)
        losses = {name: float(x) for name, x in last.items() if isinstance(x, torch.Tensor) and x.numel() == 1}
        ids = {name: x for name, x in last.items() if isinstance(x, torch.Tensor) and x.dtype == torch.int64}
        self.put(
            key,
            rates["ours"],
            None if best is None else rates[best],
            unit,
            peer_name=best,
            rates=rates,
            spread=spread,
            memory=memory,
            losses=losses,
            first=first,
            agree=alike,
            same=same(ids),
            start=start,
            share=share,
            **beside,
        )
        return rates


def machine() -> dict[str, Any]:
    """Return the machine, its versions and two measured limits: matmul peak and copy bandwidth."""
    import anyformer

    name = torch.cuda.get_device_name() if DEVICE == "cuda" else f"{platform.machine()} CPU"
    size, dtype = (8192, torch.bfloat16) if DEVICE == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    product, _ = clock(Way("product", lambda: lambda: a @ b), rounds=10)
    x = torch.empty(2**32 if DEVICE == "cuda" else 2**28, device=DEVICE, dtype=torch.uint8)
    y = torch.empty_like(x)
    copy, _ = clock(Way("copy", lambda: lambda: y.copy_(x)), rounds=7)
    return {
        "name": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "anyformer": anyformer.__version__,
        **{package: version(package) for package in ("transformers", "ctranslate2") if find_spec(package)},
        **peer_files.versions(),
        "product_flops": 2 * size**3 / product.median,
        "copy_bytes": 2 * x.nbytes / copy.median,
    }

"""Load with faults: `python -m tests.serve.http.torture --minutes 30`.

32 clients send requests of all kinds; 10 % close their connection early, 5 % are malformed. There may be no 5xx, the
same greedy request must always have the same answer, no page or row may be in use at the end, and memory may grow by
less than 3 % after the first tenth of the time.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.serve.http.process import started, written

NAMES = ("chat", "bytes", "lm", "pair", "embed", "classify", "tag", "mlm")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
PAGES = 512  # so few that all of them are soon in use: the system provides their memory when they are first written
MALFORMED = (b"", b"{", b"[1]", b'{"prompt": 1}', b'{"model": "lm", "prompt": "a", "nothing": 1}', b"\xff" * 100)


def body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a random request: its path and its body."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 8)))
    greedy = {"temperature": 0, "max_tokens": draw.randint(1, 24), "stream": draw.random() < 0.5}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"model": "bytes", "prompt": text, **greedy}),
        ("/v1/completions", {"model": "lm", "prompt": [text[:16], "the"], "n": 2, "seed": 1, **greedy}),
        ("/v1/completions", {"model": "pair", "prompt": text, **greedy}),
        ("/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": text}], **greedy}),
        (
            "/v1/completions",
            {
                "model": "bytes",
                "prompt": text,
                "temperature": 0,
                "structured_outputs": {"regex": f"[a-d]{{1,{draw.randint(2, 9)}}}"},
            },
        ),
        ("/v1/translate", {"model": "pair", "input": text, "beams": draw.randint(1, 4)}),
        ("/v1/embeddings", {"model": "embed", "input": [text, "fox"]}),
        ("/v1/classify", {"model": "classify", "input": text}),
        ("/v1/tag", {"model": "tag", "input": text}),
        ("/v1/fill-mask", {"model": "mlm", "input": f"{text} <mask>"}),
    ]
    return draw.choice(kinds)


class Load:
    """Clients until a time, and what they saw."""

    def __init__(self, address: str, until: float):
        self.address, self.until = address, until
        self.statuses: Counter[str] = Counter()
        self.known: dict[str, str] = {}  # answers by request
        self.faults: list[str] = []

    async def client(self, number: int) -> None:
        draw = random.Random(number)
        async with httpx.AsyncClient(base_url=self.address, timeout=120) as client:
            while time.monotonic() < self.until and not self.faults:
                path, fields = body(draw)
                chance = draw.random()
                if chance < 0.05:
                    found = await client.post(path, content=draw.choice(MALFORMED))
                    self._count(found, path, expected=400)
                elif chance < 0.15:
                    with suppress(httpx.HTTPError, TimeoutError):
                        await asyncio.wait_for(client.post(path, json=fields), draw.random() * 0.2)
                    self.statuses["cancelled"] += 1
                else:
                    found = await client.post(path, json=fields)
                    self._count(found, path, expected=200)
                    if found.status_code == 200:
                        self._compare(path, fields, found.text)

    def _count(self, found: httpx.Response, path: str, expected: int) -> None:
        self.statuses[str(found.status_code)] += 1
        if found.status_code not in (expected, 429) or "x-request-id" not in found.headers:
            self.faults.append(f"{path}: {found.status_code} {found.text[:500]}")

    def _compare(self, path: str, fields: dict[str, Any], text: str) -> None:
        """The same request has the same answer, whatever runs beside it."""
        answer = answer_of(text)
        key = json.dumps([path, {name: value for name, value in fields.items() if name != "stream"}])
        if self.known.setdefault(key, answer) != answer:
            self.faults.append(f"{key}: {self.known[key]!r}, then {answer!r}")


def answer_of(text: str) -> str:
    """Return the texts of a response, streamed or not."""
    if not text.startswith("data: "):
        found = json.loads(text)
        if "choices" not in found:
            return re.sub(r"-?\d+\.\d+(e-?\d+)?", "", json.dumps(found.get("data", "")))  # batches round differently
        return json.dumps([one.get("text", one.get("message", {}).get("content")) for one in found["choices"]])
    texts: dict[int, str] = {}
    for line in text.split("\n\n"):
        if line and line != "data: [DONE]":
            for one in json.loads(line.removeprefix("data: "))["choices"]:
                piece = one.get("text", one.get("delta", {}).get("content")) or ""
                texts[one["index"]] = texts.get(one["index"], "") + piece
    return json.dumps([texts[i] for i in sorted(texts)])


def memory(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1]) * 1024


async def torture(minutes: float, clients: int = 32) -> dict[str, Any]:
    """Run the load; return statuses and memory growth. Raise `AssertionError` on any fault."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started(*written(Path(folder), NAMES), "--pages", str(PAGES)) as (process, address),
    ):
        begin = time.monotonic()
        load = Load(address, begin + 60 * minutes)
        running = asyncio.gather(*(load.client(i) for i in range(clients)))
        await asyncio.sleep(6 * minutes)
        first = memory(process.pid)
        while not running.done():
            await asyncio.wait([running], timeout=30)
            print(
                f"{time.monotonic() - begin:6.0f} s  {dict(load.statuses)}  {memory(process.pid) >> 20} MiB", flush=True
            )
        await running
        assert not load.faults, load.faults[0]
        growth = memory(process.pid) / first - 1
        await asyncio.sleep(1)
        metrics = httpx.get(f"{address}/metrics").text
        used = re.findall(
            r"^anyformer:(?:num_requests_\w+|kv_cache_usage_perc|http_\w+_running)\S* (\S+)$", metrics, re.M
        )
        assert used, metrics
        assert not any(float(value) for value in used), metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert growth < 0.03, f"memory grew by {growth:.1%}"
    return {"statuses": dict(load.statuses), "growth": growth, "requests": sum(load.statuses.values())}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=32)
    given = parser.parse_args()
    print(asyncio.run(torture(given.minutes, given.clients)))

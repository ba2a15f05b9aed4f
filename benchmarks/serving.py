"""Serving speed: many clients of one engine, beside answering requests one at a time, and beside peers.

python -m benchmarks.serving --device cuda --rows llama,base,minilm --json FILE    on a GPU, bf16
python -m benchmarks.serving --rows cpu                                            on a CPU, fp32
python -m benchmarks.serving --tiny                                                all rows at sizes of a smoke test

llama   a Llama of 1.2 B parameters, 256 requests at once, prompts and outputs of 100 to 1,024 tokens drawn uniformly;
        time to the first token with 32 clients that send their next request after an answer; continuous batching of
        `transformers` beside it, with 32 of the prompts and outputs of 100 to 256 tokens (`serving_peer.py`)
base    Transformer-base, greedy, sources and answers of 32 tokens, 32 texts per request
minilm  an encoder of the size of MiniLM-L6, texts of 32 tokens, 64 texts per request; over HTTP also, in base64
cpu     Transformer-base, 16 clients, beside `generate` of one request at a time and CTranslate2

Weights are random, and no answer ends before its length.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import anyformer as af
from anyformer import presets
from anyformer.config import Embedder, ModelConfig
from anyformer.data.tokenizer import train_tokenizer
from anyformer.generation.engine.interface import Limits, Token
from anyformer.generation.request import Request
from anyformer.recipe import Bytes, Embed
from anyformer.runs.run import Run
from anyformer.tasks.embed import EmbedTask
from benchmarks import serving_peer

Results = dict[str, float]


def build(config: ModelConfig, device: str) -> af.Transformer:
    torch.manual_seed(0)
    with torch.device(device):
        model = af.Transformer(config)
    return model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()


async def answer(engine: af.Engine, request: Request) -> tuple[float, float, int]:
    """Return the seconds to the first token and to the last, and the number of tokens."""
    begin, first, count = time.perf_counter(), 0.0, 0
    async for event in engine.submit(request):
        if isinstance(event, Token):
            count += 1
            first = first or time.perf_counter() - begin
    return first, time.perf_counter() - begin, count


async def clients(count: int, work: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """Let `count` clients do the work, each one thing after the other."""
    left, results = iter(work), []

    async def client() -> None:
        results.extend([await one() for one in left])

    await asyncio.gather(*(client() for _ in range(count)))
    return results


def since_start() -> float:
    """Return the seconds since this process was started (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def draw(count: int, low: int, high: int, vocab: int, seed: int = 0) -> list[Request]:
    """Requests with prompts and outputs of uniform length, the same in every run.

    Each measurement has a seed of its own: a prompt that was read before would be reused.
    """
    rng = random.Random(seed)
    return [
        Request(
            torch.tensor([[rng.randrange(5, vocab) for _ in range(rng.randint(low, high))]]),
            max_new_tokens=rng.randint(low, high),
        )
        for _ in range(count)
    ]


# -- rows -------------------------------------------------------------------------------------------------------------


async def llama(device: str, tiny: bool) -> Results:
    sizes = {"depth": 16, "width": 2048, "heads": 32, "kv_heads": 8, "ff": 8192, "vocab": 128256}
    if tiny:
        sizes = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "ff": 128, "vocab": 512}
    config = presets.llama(**sizes).model_copy(update={"tie": "output"})
    low, high, count = (4, 16, 12) if tiny else (100, 1024, 256)
    out = Results(llama_start_imports_s=since_start())
    model = build(config, device)
    if device == "cuda":
        torch.cuda.synchronize()
    out["llama_start_weights_s"] = since_start()
    warm, requests, timed = (draw(count, low, high, sizes["vocab"], seed) for seed in (1, 0, 2))
    limits = {} if tiny else {"page_size": 64, "prefill_tokens": 8192, "chunk": 1024}
    limits |= {"max_rows": 8 if tiny else 256, "max_prompt": high, "max_new_tokens": high}
    for name, reproducible in (("llama", False), ("llama_reproducible", True)):
        async with af.Engine(model, Limits(**limits, reproducible=reproducible)) as engine:
            first, whole, _ = await answer(engine, warm[0])
            if not reproducible:
                out["llama_start_s"] = since_start()
                out["llama_start_first_token_s"] = out["llama_start_s"] - whole + first
            out |= {f"{name}_{key}": value for key, value in (await _load(engine, warm, requests, timed)).items()}
    few = draw(4, 4, 8, sizes["vocab"], 3) if tiny else draw(32, 100, 256, sizes["vocab"], 3)
    few = [replace(short, ids=long.ids) for short, long in zip(few, requests, strict=False)]
    async with af.Engine(model, Limits(**limits, reuse=False)) as engine:
        await asyncio.gather(*(answer(engine, one) for one in few))
        begin = time.perf_counter()
        done = await asyncio.gather(*(answer(engine, one) for one in few))
        out[f"llama_{len(few)}_tokens_per_s"] = sum(tokens for *_, tokens in done) / (time.perf_counter() - begin)
    if tiny:
        return out
    del model, engine  # the other program needs memory
    if device == "cuda":
        torch.cuda.empty_cache()
    print(json.dumps(out), flush=True)
    from anyformer.interop.families import FAMILIES  # here: the start is measured without it

    return out | serving_peer.measure(FAMILIES["llama"].fields(config), few, device)


async def _load(engine: af.Engine, warm: list[Request], requests: list[Request], timed: list[Request]) -> Results:
    """Return the speed with all requests at once, and the times to the first token with 32 clients."""
    await asyncio.gather(*(answer(engine, one) for one in warm))  # captures graphs of all shapes
    begin = time.perf_counter()
    done = await asyncio.gather(*(answer(engine, one) for one in requests))
    speed = sum(tokens for *_, tokens in done) / (time.perf_counter() - begin)
    served = await clients(32, [lambda one=one: answer(engine, one) for one in timed[: 4 * 32]])  # type: ignore[misc]
    firsts = [first for first, *_ in served]
    return {"tokens_per_s": speed, "ttft_p50_s": quantile(firsts, 0.5), "ttft_p99_s": quantile(firsts, 0.99)}


def translator(device: str, tiny: bool) -> tuple[af.Transformer, int]:
    vocab = 200 if tiny else 32000
    sizes: dict[str, Any] = {"depth": 2, "width": 64, "heads": 4, "ff": 128} if tiny else {}
    config = presets.vaswani(**sizes, vocab=vocab, dropout=0.0)
    config = config.model_copy(update={"special": config.special.model_copy(update={"start": 1})})
    return build(config, device), vocab


async def base(device: str, tiny: bool) -> Results:
    model, vocab = translator(device, tiny)
    texts, rounds = (4, 2) if tiny else (32, 24)
    requests = draw(texts * rounds, 32, 32, vocab)
    limits = Limits(max_rows=8 if tiny else 256, page_size=32, prefill_tokens=8192)
    async with af.Engine(model, limits) as engine:

        async def one(part: int) -> None:
            await asyncio.gather(*(engine.complete(g) for g in requests[part * texts : (part + 1) * texts]))

        work = [lambda part=part: one(part) for part in range(rounds)]  # type: ignore[misc]
        await clients(8, work)
        begin = time.perf_counter()
        await clients(8, work)
        return {"base_sentences_per_s": len(requests) / (time.perf_counter() - begin)}


async def minilm(device: str, tiny: bool) -> Results:
    sizes = (
        {"depth": 2, "width": 32, "heads": 4, "ff": 64} if tiny else {"depth": 6, "width": 384, "heads": 12, "ff": 1536}
    )
    tokenizer = train_tokenizer(Bytes(), [])
    config = presets.bert(**sizes, vocab=max(tokenizer.size, 300 if tiny else 30522), head=Embedder())
    spec = Embed()
    run = Run(build(config, device), EmbedTask(spec, tokenizer), spec, Path("minilm"))
    rng, per, rounds = random.Random(0), 64, 2 if tiny else 200
    batches = [["".join(rng.choices("abcdefgh ", k=30)).strip() or "a" for _ in range(per)] for _ in range(rounds)]
    async with af.Engine(run, Limits(encode_tokens=16384)) as engine:
        work = [lambda texts=texts: engine.encode("embed", texts) for texts in batches]  # type: ignore[misc]
        await clients(8, work)
        begin = time.perf_counter()
        await clients(8, work)
        out = {"minilm_texts_per_s": per * rounds / (time.perf_counter() - begin)}
    if find_spec("uvicorn"):
        bodies = [json.dumps({"input": texts, "encoding_format": "base64"}) for texts in batches]
        engine = af.Engine(run, Limits(encode_tokens=16384))
        out["minilm_http_texts_per_s"] = per * rounds / await asyncio.to_thread(_http, engine, "/v1/embeddings", bodies)
    return out


def _http(engine: af.Engine, path: str, bodies: list[str]) -> float:
    """Return the seconds in which 8 clients in another process get answers to all bodies over HTTP."""
    import uvicorn

    from anyformer.generation.http.app import make_app
    from anyformer.generation.http.server import bind
    from anyformer.generation.http.service import Service

    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(make_app(Service(engine)), log_level="warning", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("\n".join(bodies))
        file.flush()
        port = str(listening.getsockname()[1])
        command = [sys.executable, "-m", "benchmarks.http_client", port, path, file.name, "8"]
        seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    server.should_exit = True
    thread.join()
    return seconds


async def cpu(device: str, tiny: bool) -> Results:
    model, vocab = translator(device, tiny)
    requests = [Request(g.ids, 32) for g in draw(8 if tiny else 48, 8, 32, vocab)]
    out = Results()
    async with af.Engine(model) as engine:
        work = [lambda one=one: answer(engine, one) for one in requests]  # type: ignore[misc]
        await clients(16, work[:16])
        begin = time.perf_counter()
        await clients(16, work)
        out["cpu_engine_sentences_per_s"] = len(requests) / (time.perf_counter() - begin)
    begin = time.perf_counter()
    for one in requests[:16]:
        af.generate(model, one.ids, max_new_tokens=32)
    out["cpu_one_at_a_time_sentences_per_s"] = min(16, len(requests)) / (time.perf_counter() - begin)
    out["cpu_ratio"] = out["cpu_engine_sentences_per_s"] / out["cpu_one_at_a_time_sentences_per_s"]
    if find_spec("ctranslate2") and not tiny:
        out["cpu_ctranslate2_sentences_per_s"] = _ctranslate(model, requests)
    return out


def _ctranslate(model: af.Transformer, requests: list[Request]) -> float:
    """Return the sentences per second of CTranslate2's asynchronous translator, with the same weights."""
    import ctranslate2

    from benchmarks.ctranslate import described

    with tempfile.TemporaryDirectory() as folder:
        described(model).save(folder)
        engine = ctranslate2.Translator(folder, intra_threads=torch.get_num_threads(), max_queued_batches=-1)
    lengths = {"min_decoding_length": 32, "max_decoding_length": 32}
    names = [list(map(str, one.ids[0].tolist())) for one in requests]
    begin = time.perf_counter()
    for found in engine.translate_batch(names, beam_size=1, max_batch_size=16, asynchronous=True, **lengths):
        found.result()
    return len(requests) / (time.perf_counter() - begin)


ROWS = {"llama": llama, "base": base, "minilm": minilm, "cpu": cpu}


def main(given: list[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", default="", help="names, separated by commas; by default all that fit the device")
    parser.add_argument("--tiny", action="store_true", help="sizes of a smoke test")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(given)
    default = "llama,base,minilm" if options.device == "cuda" else "llama,base,minilm,cpu" if options.tiny else "cpu"
    out = Results()
    for name in (options.rows or default).split(","):
        found = asyncio.run(ROWS[name](options.device, options.tiny))
        for key, value in found.items():
            print(f"{key:40} {value:12,.3f}", flush=True)
        out |= found
        if options.json:
            options.json.write_text(json.dumps(out, indent=2))
    return out


if __name__ == "__main__":
    main()

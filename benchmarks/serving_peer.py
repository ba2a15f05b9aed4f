"""Continuous batching of `transformers`, in a process of its own with a time limit.

python -m benchmarks.serving_peer --device cuda --job FILE     prints JSON lines {"tokens", "seconds", "all"}

`measure` starts it and returns the last line that it printed within the limit, so that a figure comes out even if not
all answers are finished. The model has the same shape as ours, with random weights of its own, in bf16 on a GPU. Its
attention is torch's SDPA over gathered pages. `auto_switch_to_flash` is off: it looks for kernels on the model hub, and
without a network it tries for minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from anyformer.generation.request import Request

LIMIT = 120  # seconds for the start of the process, a first pass and a timed one
PAGE = 256


def measure(config: dict[str, Any], requests: list[Request], device: str, limit: float = LIMIT) -> dict[str, float]:
    """Return tokens per second of the newest pass, and the share of its tokens that were generated in time."""
    job = {"config": config, "requests": [(one.ids[0].tolist(), one.max_new_tokens) for one in requests]}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "benchmarks.serving_peer", "--device", device, "--job", f"{folder}/job.json"]
        with open(f"{folder}/out", "w+") as out, open(f"{folder}/errors", "w+") as errors:
            try:
                subprocess.run(command, env=environment, stdout=out, stderr=errors, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                print(f"transformers did not finish in {limit:g} s: its figure is of the tokens until then", flush=True)
            lines = Path(folder, "out").read_text().splitlines()
            if not lines:
                print(Path(folder, "errors").read_text()[-2000:], file=sys.stderr, flush=True)
                return {}
    last = json.loads(lines[-1])
    return {
        "transformers_tokens_per_s": last["tokens"] / last["seconds"],
        "transformers_share_of_tokens": last["tokens"] / last["all"],
    }


def run(manager: Any, requests: list[tuple[list[int], int]], streams: bool) -> Iterator[dict[str, float]]:
    """Yield the progress of all requests at once; with `streams` token by token, otherwise answer by answer."""
    begin, counts, wanted = time.perf_counter(), dict[str, int](), sum(new for _, new in requests)
    for i, (ids, new) in enumerate(requests):
        manager.add_request(ids, request_id=f"{streams}{i}", max_new_tokens=new, streaming=streams)
    shown = begin
    while sum(counts.values()) < wanted:
        found = manager.get_result(timeout=1)
        now = time.perf_counter()
        if found is not None:
            if found.error:
                raise RuntimeError(found.error)
            counts[found.request_id] = len(found.generated_tokens)
        elif not manager.is_running():
            raise RuntimeError("the manager stopped")
        if sum(counts.values()) == wanted or (counts and now > shown + 1):
            shown = now
            yield {"tokens": sum(counts.values()), "seconds": now - begin, "all": wanted}


def main(given: list[str] | None = None) -> None:
    import torch
    import transformers
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--job", type=Path, required=True, help="JSON: config and requests")
    options = parser.parse_args(given)
    job = json.loads(options.job.read_text())
    config, requests = transformers.LlamaConfig.from_dict(job["config"]), job["requests"]
    with torch.device(options.device):
        torch.set_default_dtype(torch.bfloat16 if options.device == "cuda" else torch.float32)
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    longest = max(len(ids) + new for ids, new in requests)
    sizes = {
        "page_size": PAGE,
        "block_size": PAGE,  # the name of earlier versions
        "num_blocks": len(requests) * (longest // PAGE + 2),
        "max_batch_tokens": max(64, min(4096, sum(len(ids) for ids, _ in requests))),
        "max_requests_per_batch": len(requests),
        "max_blocks_per_request": 0,
        "use_cuda_graph": False,
        "auto_switch_to_flash": False,
        "allow_block_sharing": False,
    }
    known = {field.name for field in fields(ContinuousBatchingConfig)}
    if "page_size" in known:
        del sizes["block_size"]
    batching = ContinuousBatchingConfig(**{name: value for name, value in sizes.items() if name in known})
    generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=longest)
    try:
        model.set_attn_implementation("sdpa")
        manager = model.init_continuous_batching(generation, continuous_batching_config=batching)
    except ValueError:  # earlier versions
        model.set_attn_implementation("paged|sdpa")
        manager = model.init_continuous_batching(generation, continuous_batching_config=batching)
    manager.start()
    for streams in (True, False):  # the first pass warms up, and gives the speed of a second one that does not finish
        for progress in run(manager, requests, streams):
            if streams or progress["tokens"] == progress["all"]:
                print(json.dumps(progress), flush=True)
    manager.stop(block=True)


if __name__ == "__main__":
    main()

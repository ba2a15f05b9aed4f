"""How long a decoded token takes, beside `transformers` with its static cache: `python benchmarks/decode.py`.

Both decode the same number of tokens greedily, from random weights of the same shape, by turns in one process. The
time of a token is what the longer of two generations takes more than the shorter, by the tokens that it has more:
prompts, graphs and set-up cancel out. Medians of several rounds, with the smallest and largest.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
import transformers
from torch import Tensor

from anyformer import presets
from anyformer.config import ModelConfig
from anyformer.decoding.decode import generate
from anyformer.nn.model import Transformer


@dataclass(frozen=True)
class Case:
    """The same model twice."""

    name: str
    ours: Callable[[], ModelConfig]
    theirs: Callable[[], Any]


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config())


LLAMA = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
         "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 4096}  # fmt: skip
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}  # fmt: skip


def llama(sizes: dict[str, int]) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def our_llama(sizes: dict[str, int]) -> ModelConfig:
    return presets.llama(
        vocab=sizes["vocab_size"],
        width=sizes["hidden_size"],
        ff=sizes["intermediate_size"],
        depth=sizes["num_hidden_layers"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_key_value_heads"],
    )


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0))


CASES = {
    case.name: case
    for case in (
        Case("llama-260k", lambda: our_llama(TINY), lambda: llama(TINY)),
        Case("gpt2-124m", presets.gpt2, gpt2),
        Case("t5-small", presets.t5, t5),
        Case("llama-1.1b", lambda: our_llama(LLAMA), lambda: llama(LLAMA)),
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[*CASES], choices=[*CASES])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", nargs=2, type=int, default=[32, 128], help="new tokens, fewer and more")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="*", default=["ours", "ours, compiled", "static", "dynamic"])
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--out", help="a file for the numbers, JSON")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, {args.dtype}")
    rows = []
    for name in args.cases:
        case, dtype = CASES[name], getattr(torch, args.dtype)
        ours = Transformer(case.ours()).to(device, dtype).eval()
        theirs = case.theirs().to(device, dtype).eval()
        for batch in args.batch:
            ids = torch.randint(5, 500, (batch, args.prompt), device=device)
            ways = {way: run(way, ours, theirs, ids) for way in args.ways}
            found = measure(ways, tuple(args.tokens), args.rounds, device)
            rows.append({"case": name, "batch": batch, "ms": found})
            shown = "   ".join(f"{way} {mid:.3f} [{low:.3f} {high:.3f}]" for way, (mid, low, high) in found.items())
            print(f"{name:<12} batch {batch:<3} ms a token: {shown}", flush=True)
        del ours, theirs
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"where": where, "torch": torch.__version__, "rows": rows}, file, indent=1)


def run(way: str, ours: Transformer, theirs: Any, ids: Tensor) -> Callable[[int], Any]:
    """A function that decodes so many tokens."""
    match way:
        case "ours" | "ours, compiled":
            return lambda n: generate(ours, ids, max_new_tokens=n, compile=way != "ours")
        case "static" | "dynamic":
            kind = {"cache_implementation": "static"} if way == "static" else {}
            mask = torch.ones_like(ids)
            options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **kind}
            return lambda n: theirs.generate(ids, max_new_tokens=n, min_new_tokens=n, **options)
        case _:
            raise ValueError(f"no such way: {way}")


def measure(
    ways: dict[str, Callable[[int], Any]], tokens: tuple[int, int], rounds: int, device: str
) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of one more token: the median, the smallest and the largest."""
    few, many = tokens
    for way, decode in list(ways.items()):  # compilers, allocators
        try:
            for _ in range(2):
                decode(few)
                decode(many)
        except Exception as error:
            print(f"{way} cannot run here: {error!s:.300}", flush=True)
            del ways[way]
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, decode in ways.items():
            took = [clock(decode, n, device) for n in (few, many)]
            found[way].append(1e3 * (took[1] - took[0]) / (many - few))
    return {way: (statistics.median(each), min(each), max(each)) for way, each in found.items()}


def clock(decode: Callable[[int], Any], tokens: int, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    decode(tokens)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

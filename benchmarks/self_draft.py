"""Greedy decoding with and without drafts by the model's own layers: `python -m benchmarks.self_draft RUN [--compile]`.

The run is one trained with `model.head.multi_token`, such as

    anyformer train shakespeare-gpu 'model.head.multi_token={tokens=3, weight=0.3}' --out runs/multi-token

Both ways return the same ids. A time is the best of some rounds, after one that is not timed. On a CPU it is the CPU
time of one thread, which other processes hardly change.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import anyformer as af
from anyformer.config import LM
from anyformer.generation.generate import generate
from anyformer.generation.speculative import speculate
from anyformer.generation.strategy import OwnHead

NEW_TOKENS, ROUNDS = 500, 5


def seconds(run: Callable[[], object]) -> float:
    """Return the shortest time of some rounds."""
    clock, found = time.perf_counter if torch.cuda.is_available() else time.process_time, []
    for _ in range(ROUNDS + 1):
        start = clock()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(clock() - start)
    return min(found[1:])


def main(folder: str, text: str = "ROMEO:", new: int = NEW_TOKENS, compile: bool = False) -> None:
    """Print tokens per second, calls of the model and the speed-up, for each number of draft tokens."""
    torch.set_num_threads(1)
    run = af.load(folder)
    head, device = run.config.head, next(run.model.parameters()).device
    assert isinstance(head, LM)
    assert head.multi_token, f"{folder} was trained without model.head.multi_token"
    ids = torch.tensor([run.tokenizer.encode(text)], device=device)
    expected: Tensor = generate(run.model, ids, max_new_tokens=new, compile=compile)
    plain = seconds(lambda: generate(run.model, ids, max_new_tokens=new, compile=compile))
    print(f"{device.type}, {new} new tokens, one row, {'compiled' if compile else 'not compiled'}")
    print(f"greedy             {new / plain:>9,.0f} tokens/s  {new} calls")
    for ahead in range(1, head.multi_token.tokens + 1):
        drafted = partial(speculate, run.model, ids, draft=OwnHead(), ahead=ahead, max_new_tokens=new, compile=compile)
        found, took = drafted(), seconds(drafted)
        same = "same ids" if torch.equal(found.ids, expected) else "OTHER IDS"
        kept = float(found.accepted.sum() / found.drafted.sum().clamp(min=1))
        print(
            f"drafts of {ahead} token{'s' if ahead > 1 else ' '} {new / took:>9,.0f} tokens/s  {found.calls} calls  "
            f"{plain / took:.2f} times  {kept:.0%} accepted  {same}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("text", nargs="?", default="ROMEO:")
    parser.add_argument("--compile", action="store_true", help="compile the steps of both ways")
    args = parser.parse_args()
    main(args.run, args.text, compile=args.compile)

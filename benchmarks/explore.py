"""How soon the page answers for a long text: `python benchmarks/explore.py [--tokens 512 --threads 1 --times 5]`.

A model of GPT-2's shape (12 layers, 12 heads, 768 wide, `--vocab` logits) with weights by chance, on bytes. `first` is
the first view: the text, the outline of the path and its first step, in seconds of CPU time of a text that was not
read before. `pass` is the first view that needs the model's activations; the other rows are the additional cost of
each view.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from anyformer import presets
from anyformer.data.tokenizer import train_tokenizer
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.nn.model import Transformer
from anyformer.recipe import Bytes, LanguageModel
from anyformer.run import Run
from anyformer.tasks.build import build_task


def opened(vocab: int) -> Workspace:
    tokenizer, spec = train_tokenizer(Bytes(), []), LanguageModel()
    model = Transformer(presets.gpt2(vocab=max(vocab, tokenizer.size))).eval()
    run = Run(model, build_task(spec, tokenizer, None), spec, Path("gpt2"))
    return Workspace({"gpt2": OpenRun("gpt2", run, run.folder)})


def timed(times: int, do: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> tuple[float, int]:
    """The median of the seconds, the first left out, and the size of the answer as JSON."""
    found = []
    for _ in range(times + 1):
        began = clock()
        size = len(json.dumps(do()))
        found.append(clock() - began)
    return median(found[1:]), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tokens", 512), ("threads", 1), ("times", 5), ("vocab", 50257)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    workspace = opened(asked.vocab)
    text = {"run": "gpt2", "text": ("the quick brown fox jumps over the lazy dog. " * 99)[: asked.tokens]}
    layer = {**text, "kind": "decoder", "layer": 5}
    views = {
        "heads": layer,
        "model": {**text, "kind": "decoder"},
        "matrix": {**layer, "head": 3},
        "neuron": {**layer, "head": 3, "query": asked.tokens - 1, "key": 0},
        "next": text,
        "path": text,
        "tokens": {**text, "stage": "decoder.tokens"},
        "softmax": {**text, "stage": "decoder.softmax", "layer": 5, "head": 3},
        "follow": {**text, "level": "parts"},
        "block": text,
        "cache": text,
    }

    def first() -> object:
        workspace.traces.clear()
        parts = {"read": text, "path": text, "stage": {**text, "stage": "decoder.tokens", "at": -1}}
        return [workspace.answer(view, request) for view, request in parts.items()]

    def anew() -> object:
        workspace.traces.clear()
        return workspace.answer("heads", layer)

    print(f"{asked.tokens} tokens, {asked.threads} thread(s), medians of {asked.times}")
    for name, do, clock in (("first", first, time.process_time), ("pass", anew, time.process_time)):
        seconds, size = timed(asked.times, do, clock)
        print(f"{name:<7} {seconds:7.3f} s  {size / 1024:8.0f} KiB  (CPU time)")
    for name, request in views.items():
        view = "stage" if "stage" in request else name
        seconds, size = timed(asked.times, lambda view=view, request=request: workspace.answer(view, request))
        print(f"{name:<7} {seconds:7.3f} s  {size / 1024:8.0f} KiB")
    (kept,) = workspace.traces.values()
    print(f"kept of the text: {kept.nbytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()

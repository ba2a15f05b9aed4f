"""How soon the page answers for a long text: `python benchmarks/explore.py [--tokens 512 --threads 1 --times 5]`.

A model of GPT-2's shape (12 layers, 12 heads, 768 wide, `--vocab` logits) with weights by chance, on bytes. `first` is
the first view: the text, the outline of the path and its first step, in seconds of CPU time of a text that was not
read before; also of a classifier of BERT's shape, and of an encoder-decoder of the same size with a given answer.
`pass` is the first view that needs the model's activations, `answer` the label of the classifier; the other rows are
the additional cost of each view.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from anyformer import presets
from anyformer.config import Classifier, ModelConfig
from anyformer.data.tokenizer import train_tokenizer
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask, Bytes, Classify, LanguageModel, Seq2Seq
from anyformer.runs.run import Run


def opened(name: str, vocab: int) -> Workspace:
    tokenizer = train_tokenizer(Bytes(), [])
    shapes: dict[str, tuple[AnyTask, ModelConfig]] = {
        "gpt2": (LanguageModel(), presets.gpt2(vocab=max(vocab, tokenizer.size))),
        "bert": (Classify(labels=("no", "yes")), presets.bert(vocab=tokenizer.size, head=Classifier(labels=2))),
        "bart": (Seq2Seq(), presets.bart(depth=12, vocab=tokenizer.size)),
    }
    spec, config = shapes[name]
    run = Run(Transformer(config).eval(), spec.build(tokenizer), spec, Path(name))
    return Workspace({name: OpenRun(name, run, run.folder)})


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
    workspace, letters = opened("gpt2", asked.vocab), "the quick brown fox jumps over the lazy dog. " * 99
    text = {"run": "gpt2", "text": letters[: asked.tokens]}
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

    def first(workspace: Workspace, text: dict[str, str], side: str) -> object:
        workspace.traces.clear()
        parts = {"read": text, "path": text, "stage": {**text, "stage": f"{side}.tokens", "at": -1}}
        return [workspace.answer(view, request) for view, request in parts.items()]

    def answered(workspace: Workspace, text: dict[str, str]) -> object:
        workspace.traces.clear()
        return workspace.answer("answer", text)

    def anew() -> object:
        workspace.traces.clear()
        return workspace.answer("heads", layer)

    print(f"{asked.tokens} tokens, {asked.threads} thread(s), medians of {asked.times}")

    def in_cpu_time(name: str, do: Callable[[], object], of: str) -> None:
        seconds, size = timed(asked.times, do, time.process_time)
        print(f"{name:<7} {seconds:7.3f} s  {size / 1024:8.0f} KiB  (CPU time, {of})")

    for of in ("bert", "bart"):
        other, request = opened(of, asked.vocab), {"run": of, "text": letters[: asked.tokens - 2]}
        request |= {"target": letters[: asked.tokens - 2]} if of == "bart" else {}
        in_cpu_time("first", lambda other=other, request=request: first(other, request, "encoder"), of)
        if of == "bert":
            in_cpu_time("answer", lambda other=other, request=request: answered(other, request), of)
    in_cpu_time("first", lambda: first(workspace, text, "decoder"), "gpt2")
    in_cpu_time("pass", anew, "gpt2")
    for name, request in views.items():
        view = "stage" if "stage" in request else name
        seconds, size = timed(asked.times, lambda view=view, request=request: workspace.answer(view, request))
        print(f"{name:<7} {seconds:7.3f} s  {size / 1024:8.0f} KiB")
    (kept,) = workspace.traces.values()
    print(f"kept of the text: {kept.nbytes / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()

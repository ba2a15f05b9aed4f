"""GPT-2 learns in fp8 and in bf16 from the same weights by the same batches: what a step takes, and its loss."""

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer.config import ModelConfig
from anyformer.nn.heads import LossTarget
from anyformer.nn.transforms.fp8 import learn_in_fp8
from anyformer.training.machine import compile_options
from anyformer.training.objective import Objective
from benchmarks.sheet import DEVICE, agree, finish, token_task
from benchmarks.training import begun

RATE, WARM_UP, COMPILING = 3e-4, 10, 5  # steps to the full rate; steps that are not timed
APART = 0.05  # that losses may be at the end, as a share: both have learnt
PEER = "ours in bf16"
WAYS = {"ours": True, PEER: False}  # whether in fp8


class Step(NamedTuple):
    seconds: float
    loss: float
    memory: int  # the most that was allocated so far, in bytes


def batches(count: int, vocab: int, rows: int, length: int) -> Tensor:
    """[count, rows, length + 1]: half of the tokens are determined by the previous one, the others are drawn
    from a Zipf distribution. All batches share these rules, so that the loss falls from batch to batch."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    often = 1 / torch.arange(1, vocab + 1, device=DEVICE)

    def draw(*shape: int) -> Tensor:
        found = torch.searchsorted(often.cumsum(0) / often.sum(), torch.rand(shape, device=DEVICE, generator=generator))
        return found.clamp(max=vocab - 1)

    usual, words = draw(vocab), draw(count * rows, length + 1)
    follows = torch.rand(words.shape, device=DEVICE, generator=generator) < 0.5
    for last, t in itertools.pairwise(range(length + 1)):
        words[:, t] = torch.where(follows[:, t], usual[words[:, last]], words[:, t])
    return words.view(count, rows, length + 1)


def learn(config: ModelConfig, eight: bool, data: Tensor) -> Iterator[Step]:
    """Run one compiled training step per batch."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = begun(config).train()
    assert model.decoder is not None
    if eight:
        learn_in_fp8(model.decoder)
    objective = Objective(model, token_task(), 0.0)
    run = torch.compile(objective, options=compile_options(config, eight)) if DEVICE == "cuda" else objective
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), fused=DEVICE == "cuda")
    for number, ids in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (number + 1) / WARM_UP)
        inputs, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        finish()
        began = time.perf_counter()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = run((inputs,), LossTarget(labels), None)[0] / labels.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        finish()
        took, memory = time.perf_counter() - began, torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
        yield Step(took, float(loss.detach()), memory)


def row(found: Mapping[str, Sequence[Step]], tokens: int, flops: float, product: float) -> dict[str, Any]:
    """Return the row of the table for both precisions; a step has that many tokens and FLOPs."""
    times = {name: [step.seconds for step in steps[COMPILING:]] for name, steps in found.items()}
    rates = {name: tokens / statistics.median(some) for name, some in times.items()}
    first, last = ({name: steps[i].loss for name, steps in found.items()} for i in (0, -1))
    return {
        "ours": rates["ours"],
        "peer": rates[PEER],
        "unit": "tokens/s",
        "peer_name": PEER,
        "rates": rates,
        "spread": {name: [tokens / max(some), tokens / min(some)] for name, some in times.items()},
        "memory": {name: steps[-1].memory for name, steps in found.items()},
        "first": first,
        "agree": agree(first) and abs(last["ours"] - last[PEER]) <= APART * last[PEER],
        "share": {name: rate / tokens * flops / product for name, rate in rates.items()},
        "curves": {name: [step.loss for step in steps] for name, steps in found.items()},
    }

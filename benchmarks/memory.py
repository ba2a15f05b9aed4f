"""The most memory that a training step takes, beside what `training_memory` foretells."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyformer import presets
from anyformer.config import MaskedLM, ModelConfig, io
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.heads import LossTarget
from anyformer.nn.inspection.memory import Precision, training_memory
from anyformer.nn.model import Transformer
from anyformer.training.objective import Objective, labelled_positions
from benchmarks.sheet import DEVICE, token_task


class Case(NamedTuple):
    """One step: of which model, and how it is run."""

    model: str
    precision: Precision = "bf16"
    compiled: bool = False
    recompute: bool = False

    def __str__(self) -> str:
        how = ["compiled"] * self.compiled + ["recomputed"] * self.recompute
        return ", ".join([self.model, self.precision, *how])


def gpt2() -> tuple[ModelConfig, int, int]:
    return presets.gpt2(depth=3, vocab=50304, dropout=0.0), 1024, 16


def base() -> tuple[ModelConfig, int, int]:
    return presets.vaswani(depth=2, vocab=32768), 64, 256


def bert() -> tuple[ModelConfig, int, int]:
    config = presets.bert(depth=3, vocab=30592, head=MaskedLM())
    return io.override(config, ["encoder.blocks.*.mixer.dropout=0"]), 512, 48


def llama() -> tuple[ModelConfig, int, int]:
    return presets.llama(depth=3, width=1024, heads=16, vocab=32000), 1024, 16


def wide() -> tuple[ModelConfig, int, int]:
    return presets.gpt2(depth=4, width=2048, heads=16, vocab=32000, dropout=0.0), 128, 4


MODELS: dict[str, Callable[[], tuple[ModelConfig, int, int]]] = {
    make.__name__: make for make in (gpt2, base, bert, llama, wide)
}
CASES = (
    Case("gpt2"),
    Case("gpt2", "fp32", recompute=True),
    Case("base", "fp32"),
    Case("bert"),
    Case("llama"),
    Case("wide"),
    Case("gpt2", compiled=True),
    Case("base", compiled=True),
    Case("llama", compiled=True),
)


def step_of(case: Case, tiny: bool) -> tuple[Callable[[], None], int]:
    """A training step, and the bytes that it should take at its peak."""
    config, length, batch = MODELS[case.model]()
    length, batch = (length // 16, 2) if tiny else (length, batch)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = Transformer(config).train()
    ids, labels = (torch.randint(2, config.last_input.vocab, (batch, length)) for _ in range(2))
    if isinstance(config.head, MaskedLM):
        labels = torch.where(torch.rand(labels.shape) < 0.15, labels, IGNORE)
    places = labelled_positions(labels, labels.numel())
    at = (labels, None) if places is None else (places[1], places[0])
    asked = LossTarget(at[0].to(DEVICE), 0.0, None if at[1] is None else at[1].to(DEVICE))
    inputs = (ids.to(DEVICE),) * len(config.stacks)
    objective = Objective(model, token_task(), 0.0, case.recompute)

    def ahead() -> Tensor:
        return objective(inputs, asked, None)[0] / labels.numel()

    run = torch.compile(ahead) if case.compiled and DEVICE == "cuda" else ahead
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=case.precision == "bf16" and DEVICE == "cuda"):
            loss = run()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    how: dict[str, Any] = {"precision": case.precision, "compiled": case.compiled, "recompute": case.recompute}
    return step, training_memory(config, length, batch=batch, **how).peak


def compare(case: Case, tiny: bool = False) -> tuple[int, int]:
    """Return the peak bytes of a step, predicted and measured (0 without a GPU)."""
    torch.compiler.reset()
    gc.collect()
    if DEVICE != "cuda":
        step, told = step_of(case, tiny)
        step()
        return told, told
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step, told = step_of(case, tiny)
    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    return told, torch.cuda.max_memory_allocated() - before

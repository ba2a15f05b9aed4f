"""Optimisers: steps against independent references, resuming, skipped steps, accumulation, and the weights of each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anyformer import presets
from anyformer.config import io
from anyformer.nn.model import Transformer
from anyformer.recipe import SGD, Adafactor, AdamW, Muon, Optimizer, Recipe
from anyformer.training.muon import COEFFICIENTS, orthogonalise
from anyformer.training.optimizers import build_optimizer
from anyformer.training.step import TrainingStep
from anyformer.training.width_transfer import hidden_matrices
from tests.training.jobs import assert_equal, parameters
from tests.training.small import PADDED, assert_same_run, make, pairs, run, stop_at, text

OPTIMISERS: dict[str, Optimizer] = {
    "muon": Muon(lr=1e-2, adam_lr=3e-3),
    "adafactor": Adafactor(lr=1e-1, weight_decay=0.1),
    "sgd": SGD(lr=1e-1, weight_decay=0.1),
    "sgd without momentum": SGD(lr=1e-1, momentum=0.0),
}
EXPERTS = (
    'model.decoder.blocks.*.feedforward={kind="experts", count=3, top_k=2, shared=1, expert={kind="gated", width=6}}'
)
GROUPED = ["model.decoder.blocks.*.mixer.kv_heads=1", "model.tie=output"]


def recipe(optimizer: Optimizer, *changes: str, **train: Any) -> Recipe:
    return io.override(pairs("encoder-decoder", PADDED, optimizer=optimizer, **train), changes)


# -- Muon -------------------------------------------------------------------------------------------------------------


def polynomial(matrix: Tensor) -> Tensor:
    """Apply the quintic five times to the singular values of one matrix: what Newton–Schulz does without an SVD."""
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 8, 5), (1, 6, 6), (2, 1, 7)])
def test_an_orthogonal_matrix_has_singular_values_near_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    made = orthogonalise(x, torch.double)
    for ours, matrix in zip(made, x, strict=True):
        torch.testing.assert_close(ours, polynomial(matrix))
    values = torch.linalg.svdvals(made)
    assert (values > 0.3).all()
    assert (values < 1.3).all()
    assert not orthogonalise(torch.zeros(shape), torch.float32).any()


def naive_muon(weight: Tensor, gradients: list[Tensor], spec: Muon, rows: tuple[int, ...]) -> Tensor:
    """Train one weight by the formulae: one expert and one projection at a time, as if each were a weight."""
    if weight.dim() == 3:
        return torch.stack([naive_muon(w, [g[i] for g in gradients], spec, rows) for i, w in enumerate(weight)])
    if len(rows) > 1:
        parts = zip(weight.split(rows), zip(*(g.split(rows) for g in gradients), strict=True), rows, strict=True)
        return torch.cat([naive_muon(w, list(some), spec, (count,)) for w, some, count in parts])
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = spec.momentum * momentum + (1 - spec.momentum) * gradient
        update = polynomial(spec.momentum * momentum + (1 - spec.momentum) * gradient)
        weight = weight - spec.lr * spec.weight_decay * weight - spec.lr * 0.2 * max(weight.shape) ** 0.5 * update
    return weight


def small(**settings: Any) -> Transformer:
    """Four query heads of 2 and two key/value heads, and three experts with gates of 6, width 8."""
    torch.manual_seed(0)
    config = presets.mixtral(depth=2, width=8, heads=4, kv_heads=2, vocab=11)
    experts = {"count": 3, "expert": {"kind": "gated", "width": 6}, "top_k": 2, "kind": "experts", "shared": 1}
    changed = [f"decoder.blocks.*.feedforward={io_value(experts)}", *(f"{k}={v}" for k, v in settings.items())]
    return Transformer(io.override(config, changed)).double()


def io_value(table: dict[str, Any]) -> str:
    pairs = (f"{key} = {io_value(x) if isinstance(x, dict) else repr(x)}" for key, x in table.items())
    return "{" + ", ".join(pairs) + "}"


PROJECTIONS = {"qkv": (8, 4, 4), "gate_up": (6, 6), "inner.up": (6, 6), "out": (8,), "down": (8,)}  # of `small`


def projections(name: str) -> tuple[int, ...] | None:
    """Return the rows of each projection by hand; None: the weight is updated by AdamW."""
    if not name.startswith("decoder.blocks.") or not name.endswith(".weight"):
        return None
    return next((rows for part, rows in PROJECTIONS.items() if name.removesuffix(".weight").endswith(part)), None)


def random_gradients(model: nn.Module, steps: int) -> list[list[Tensor]]:
    chance = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, dtype=p.dtype, generator=chance) for p in model.parameters()] for _ in range(steps)]


def advance(optimizer: torch.optim.Optimizer, model: nn.Module, gradients: list[Tensor]) -> None:
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient.clone()
    optimizer.step()


def test_muon_is_the_naive_step_for_matrices_and_adamw_for_the_rest() -> None:
    model, steps = small(), 3
    spec = Muon(lr=0.1, adam_lr=0.05, weight_decay=0.3, betas=(0.8, 0.9))
    before, gradients = {name: p.detach().clone() for name, p in model.named_parameters()}, random_gradients(small(), 3)
    optimizer = build_optimizer(spec, model)
    for group in optimizer.param_groups:
        group["lr"] = spec.lr * group["lr_scale"]
    for step in gradients:
        advance(optimizer, model, step)
    rest = small()
    reference = build_optimizer(AdamW(lr=0.05, weight_decay=0.3, betas=(0.8, 0.9)), rest)
    for step in gradients:
        advance(reference, rest, step)
    matrices = 0
    for number, ((name, p), other) in enumerate(zip(model.named_parameters(), rest.parameters(), strict=True)):
        if (rows := projections(name)) is None:
            torch.testing.assert_close(p, other, msg=name)
            continue
        expected = naive_muon(before[name], [gradients[i][number] for i in range(steps)], spec, rows)
        torch.testing.assert_close(p.detach(), expected, msg=name)
        matrices += 1
    assert matrices == 2 * 6  # qkv, out, experts up and down, shared gate_up and down
    assert {name for name in before if projections(name)} == hidden_matrices(model).keys()


def test_muon_is_that_of_torch_for_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's iterates in bf16, and has neither projections nor experts."""
    torch.manual_seed(0)
    block = nn.ModuleDict({"up": nn.Linear(6, 4, bias=False)})
    theirs = nn.Parameter(block["up"].weight.detach().clone())
    weight = block["up"].weight
    monkeypatch.setattr("anyformer.training.muon.orthogonalise", lambda x, _: orthogonalise(x, torch.bfloat16))
    spec = Muon(lr=0.1, weight_decay=0.2)
    matrices = {"up.weight": (4,)}
    ours = build_optimizer(spec, block, matrices=matrices)
    public = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        weight.grad = torch.randn(4, 6)
        theirs.grad = weight.grad.clone()
        ours.step()
        public.step()
    torch.testing.assert_close(weight, theirs, rtol=1e-2, atol=1e-2)


# -- all --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_resumed_run_is_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """With gradient accumulation and a moving average of the weights."""
    spec = recipe(OPTIMISERS[name], *GROUPED, EXPERTS, accumulate=2, ema=0.9, save_every=3, steps=8)
    run(spec, tmp_path / "straight")
    assert stop_at(spec, tmp_path / "stopped", 9)  # in step 5
    run(spec, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")


@pytest.mark.parametrize("name", OPTIMISERS)
def test_two_micro_batches_are_one_batch(name: str, tmp_path: Path) -> None:
    """The sum of their gradients is that of both together, whatever the optimiser makes of it."""
    found = []
    for accumulate in (1, 2):
        spec = io.override(text(tmp_path, dropout=0.0, optimizer=OPTIMISERS[name]), ["train.precision=fp32"])
        job = make(spec, tmp_path / str(accumulate))
        batch, _ = job.loader.read(job.state.cursor)
        half = len(batch.ids) // 2
        parts = [batch] if accumulate == 1 else [cut(batch, slice(0, half)), cut(batch, slice(half, None))]
        TrainingStep(job)(parts)
        found.append(parameters(job))
    for key, x in found[0].items():
        torch.testing.assert_close(found[1][key], x, rtol=1e-4, atol=1e-5, msg=key)


def cut(batch: Any, rows: slice) -> Any:
    return batch._replace(**{name: x[rows] for name, x in batch._asdict().items() if isinstance(x, Tensor)})


@pytest.mark.parametrize("name", ["muon", "sgd"])
def test_a_step_that_is_skipped_by_the_kernel_changes_nothing(name: str) -> None:
    """As on a GPU, where the CPU does not read whether a gradient is finite."""
    results = []
    for bad in (None, 0, 1):
        model = small().float()
        optimizer = build_optimizer(OPTIMISERS[name], model)
        for group in optimizer.param_groups:
            group["fused"] = True
        gradients = random_gradients(model, 2)
        for number in range(2 + (bad is not None)):
            if number == bad:
                optimizer.found_inf = torch.tensor(1.0)
                advance(optimizer, model, [torch.full_like(p, torch.nan) for p in model.parameters()])
            else:
                optimizer.found_inf = torch.tensor(0.0)
                advance(optimizer, model, gradients[number - (bad is not None and number > bad)])
        results.append({key: p.detach().clone() for key, p in model.named_parameters()})
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


@pytest.mark.parametrize("name", OPTIMISERS)
def test_norms_and_biases_have_no_weight_decay(name: str) -> None:
    model = small()
    for group in build_optimizer(OPTIMISERS[name], model).param_groups:
        for p in group["params"]:
            assert group["weight_decay"] == (OPTIMISERS[name].weight_decay if p.dim() > 1 else 0.0)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_each_optimiser_learns(name: str, tmp_path: Path) -> None:
    job = make(text(tmp_path, dropout=0.0, optimizer=OPTIMISERS[name]), tmp_path / "run")
    batch, _ = job.loader.read(job.state.cursor)
    take_step = TrainingStep(job)
    losses = [take_step([batch])[1].read()[0] for _ in range(12)]
    assert losses[-1] < losses[0]

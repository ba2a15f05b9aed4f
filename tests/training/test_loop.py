"""The laws of a step: what is summed, what is clipped and what is skipped."""

import math
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import io
from anyformer.data.batch import Batch, Example, collate
from anyformer.data.loader import Cursor
from anyformer.data.prefetch import PrefetchLoader
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import WSD, AdamW, Cosine, InverseSqrt
from anyformer.runs.run import load
from anyformer.tasks.base import call, token_loss
from anyformer.training.checkpoint import checkpoints
from anyformer.training.job import Job
from anyformer.training.log import draw_curve
from anyformer.training.loop import Diverged, fit
from anyformer.training.optimizers import build_optimizer
from tests.strategies import build, close, models, seeds, tokens
from tests.training.jobs import SMOOTH, assert_equal, changed_loss, parameters, set_losses
from tests.training.small import PACKED, Shape, make, metrics, model, pairs

# -- steps that go wrong ----------------------------------------------------------------------------------------------


def nan_loss(at: set[int]) -> AbstractContextManager[None]:
    return changed_loss(lambda number: math.nan if number in at else 1.0)


def set_gradient(job: Job, at: set[int], value: float) -> None:
    count = 0

    def change(gradient: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return torch.full_like(gradient, value) if count in at else gradient

    next(job.model.parameters()).register_hook(change)


@pytest.mark.parametrize("what", ["loss", "nan", "inf"])
def test_a_bad_step_is_skipped_and_counted(tmp_path: Path, what: str) -> None:
    job = make(pairs(steps=5, ema=0.9, save_every=1, keep=5), tmp_path / "run")
    if what != "loss":
        set_gradient(job, {3}, float(what))
    with nan_loss({3} if what == "loss" else set()):
        fit(job)
    assert (job.state.bad_in_all, job.state.bad_in_a_row) == (1, 0)
    before, after = (checkpoints(tmp_path / "run")[n] for n in (1, 2))
    assert_equal(load_file(before / "model.safetensors"), load_file(after / "model.safetensors"))
    one, two = (load_file(path / "state.safetensors") for path in (before, after))
    assert_equal(*({k: x for k, x in state.items() if not k.startswith("generator")} for state in (one, two)))
    assert [row["step"] for row in metrics(tmp_path / "run") if row.get("skipped")] == [3]
    assert all(bool(p.isfinite().all()) for p in job.model.parameters())
    assert draw_curve(tmp_path / "run") is not None  # the bad step is in metrics.jsonl, and not a point of the curve


def test_too_many_bad_steps_in_a_row_stop_the_run(tmp_path: Path) -> None:
    job = make(pairs(steps=12, save_every=4, max_bad_steps=3), tmp_path / "run")
    with nan_loss({3, 5, 6, 7}), pytest.raises(Diverged) as caught:
        fit(job)
    batch, _ = job.loader.read(Cursor(0, 6))
    assert "3 steps in a row" in str(caught.value)
    assert "step 7" in str(caught.value)
    assert ", ".join(map(str, batch.examples[:8])) in str(caught.value)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000000004"]
    assert all(bool(x.isfinite().all()) for x in load(tmp_path / "run").model.state_dict().values())


def test_a_non_finite_validation_loss_is_never_the_best(tmp_path: Path) -> None:
    job = make(pairs(steps=4, evaluate_every=1), tmp_path / "run")
    set_losses(job, [math.nan, 2.0, math.nan, 3.0])
    fit(job)
    assert (job.state.best, job.state.best_step) == (2.0, 2)


# -- what a step is ---------------------------------------------------------------------------------------------------


class Listed:
    """Batches one after the other."""

    def __init__(self, batches: list[Batch]):
        self.batches = batches

    def read(self, place: Cursor) -> tuple[Batch, Cursor]:
        return self.batches[place.batch % len(self.batches)], Cursor(0, place.batch + 1)


@st.composite
def pieces(draw: st.DrawFn, shape: Shape | None = None) -> tuple[Shape, list[Example]]:
    """Examples of a language with ids 4 to 9, of which only some places are asked."""
    chosen: Shape = shape or draw(st.sampled_from(["decoder", "encoder-decoder"]))
    ids = st.integers(4, 9)

    def one() -> Example:
        t = draw(st.integers(1, 9))
        said = draw(st.lists(ids, min_size=t, max_size=t))
        labels = draw(st.lists(st.one_of(ids, ids, st.just(IGNORE)), min_size=t, max_size=t))
        source = draw(st.lists(ids, min_size=1, max_size=9)) if chosen == "encoder-decoder" else None
        return Example(said, [*labels[:-1], 4], source)

    return chosen, [one() for _ in range(draw(st.integers(2, 6)))]


@given(pieces(), st.data())
@settings(max_examples=8)
def test_two_half_batches_are_a_whole_one(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Shape, list[Example]], data: st.DataObject
) -> None:
    """However unevenly the tokens are shared out: a sum over all, never a mean of means."""
    shape, examples = drawn
    cut = data.draw(st.integers(1, len(examples) - 1))
    rows = [(i,) for i in range(len(examples))]
    whole = [collate(rows, examples, 0, 0)]
    halves = [collate(part, examples, 0, 0) for part in (rows[:cut], rows[cut:])]
    done = []
    for batches in (whole, halves):
        out = tmp_path_factory.mktemp("halves") / "run"
        spec = pairs(shape, dropout=0.0, valid=None, steps=3, accumulate=len(batches), optimizer=SMOOTH)
        job = make(spec, out)
        job.loader = Listed(batches)
        fit(job)
        done.append((parameters(job), metrics(out)))
    (one, told), (other, retold) = done
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-4, atol=1e-5)
    for a, b in zip(told, retold, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def gradients(net: Transformer, batch: Batch, packed: bool) -> tuple[Tensor, list[Tensor]]:
    loss = token_loss(call(net, batch, packed), batch.labels)
    found = torch.autograd.grad(loss, list(net.parameters()))
    return loss.detach(), list(found)


@given(pieces(), st.integers(1, 4), seeds)
def test_packed_is_padded(drawn: tuple[Shape, list[Example]], per_row: int, seed: int) -> None:
    shape, examples = drawn
    config = model(shape, dropout=0.0)
    tokens = {"vocab": 10}
    sides = {"target": config.target.model_copy(update=tokens)}
    if config.source is not None:
        sides["source"] = config.source.model_copy(update=tokens)
    net = build(config.model_copy(update=sides), seed).train()
    numbers = list(range(len(examples)))
    rows = [tuple(numbers[at : at + per_row]) for at in range(0, len(numbers), per_row)]
    packed = gradients(net, collate(rows, examples, 0, 0, length=40), packed=True)
    padded = gradients(net, collate([(i,) for i in numbers], examples, 0, 0), packed=False)
    close(packed[0], padded[0], 1e-5)  # the loss is in fp32
    for a, b in zip(packed[1], padded[1], strict=True):
        close(a, b, 1e-5)


@given(seeds, st.floats(0, 0.9), st.lists(st.booleans(), min_size=6, max_size=6))
def test_the_loss_is_cross_entropy_of_what_is_asked(seed: int, smoothing: float, asked: list[bool]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, labels = torch.randn(2, 3, 7, generator=generator), torch.randint(0, 7, (2, 3), generator=generator)
    mask = torch.tensor(asked).view(2, 3)
    found = token_loss(logits, labels.masked_fill(~mask, IGNORE), smoothing)
    wanted = F.cross_entropy(logits[mask], labels[mask], reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(found, wanted)
    spread = torch.full_like(logits, smoothing / 7).scatter_add(
        2, labels[..., None], torch.full((2, 3, 1), 1 - smoothing)
    )
    torch.testing.assert_close(found, -(spread * logits.log_softmax(-1)).sum(-1)[mask].sum())


def test_smoothing_is_trained_with(tmp_path: Path) -> None:
    job = make(pairs(steps=1, dropout=0.0, label_smoothing=0.3, valid=None), tmp_path / "run")
    batch, _ = job.loader.read(Cursor())
    with torch.no_grad():
        wanted = token_loss(call(job.model, batch, packed=False), batch.labels, 0.3) / batch.target_count
    fit(job)
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_a_loss_in_half_precision_is_summed_in_fp32() -> None:
    logits = torch.randn(4, 8, 50).bfloat16()
    labels = torch.randint(0, 50, (4, 8))
    assert token_loss(logits, labels).dtype == torch.float32
    torch.testing.assert_close(token_loss(logits, labels), token_loss(logits.float(), labels))


@pytest.mark.parametrize("schedule", [Cosine(warmup=3), InverseSqrt(warmup=4), WSD(warmup=2, decay=0.5)])
def test_the_rate_at_each_step(tmp_path: Path, schedule: Any) -> None:
    job = make(pairs(steps=8, schedule=schedule, valid=None), tmp_path / "run")
    used: list[float] = []
    job.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    fit(job)
    assert used == [1e-2 * schedule.at(step, 8) for step in range(1, 9)]
    assert [row["lr"] for row in metrics(tmp_path / "run")] == used


@pytest.mark.parametrize("clip", ["none", 0.01, 1e6])
def test_clip(tmp_path: Path, clip: Any) -> None:
    recipe = io.override(pairs(steps=4, valid=None), [f"train.clip={clip}"])
    assert io.loads(type(recipe), io.dumps(recipe)).train.clip == clip
    job = make(recipe, tmp_path / "run")
    used: list[float] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        used.append(float(torch.stack([g.norm() for g in grads if g is not None]).norm()))

    job.optimizer.register_step_pre_hook(look)
    fit(job)
    told = [row["grad_norm"] for row in metrics(tmp_path / "run")]  # before it is clipped
    assert used == pytest.approx([norm if clip == "none" else min(norm, clip) for norm in told], rel=1e-3)


def test_matrices_decay_and_vectors_do_not() -> None:
    net = Transformer(model(dropout=0.0).model_copy(update={"target": model().target.model_copy(update={"vocab": 9})}))
    matrices, vectors = build_optimizer(AdamW(lr=1.0, weight_decay=0.3), net).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.dim() >= 2 for p in matrices["params"])
    assert all(p.dim() == 1 for p in vectors["params"])
    assert sum(p.numel() for p in matrices["params"] + vectors["params"]) == net.num_parameters()


@given(models(), seeds)
def test_recomputed_activations_give_the_same_gradients(config: Any, seed: int) -> None:
    net = build(config, seed).train()
    ids = (tokens(seed, 2, 7), tokens(seed + 1, 2, 5)) if config.shape == "encoder-decoder" else (tokens(seed, 2, 7),)

    def backward(recompute: bool) -> list[Tensor]:
        loss = net(*ids, recompute=recompute).square().sum()
        return list(torch.autograd.grad(loss, list(net.parameters()), allow_unused=True))

    for a, b in zip(backward(False), backward(True), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_recomputed_activations_train_the_same(tmp_path: Path, shape: Shape) -> None:
    """With dropout: a block that runs twice drops the same."""
    plain, again = (make(pairs(shape, steps=3, checkpoint_activations=on), tmp_path / str(on)) for on in (False, True))
    calls = 0

    def counted(*_: Any) -> None:
        nonlocal calls
        calls += again.model.training

    assert again.model.decoder is not None
    again.model.decoder.blocks[0].register_forward_pre_hook(counted)
    torch.manual_seed(1)
    fit(plain)
    torch.manual_seed(1)
    fit(again)
    assert_equal(parameters(plain), parameters(again))
    assert calls == 6


# -- the beginning and the end ----------------------------------------------------------------------------------------


def test_a_process_that_reads_ahead_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = pairs("encoder-decoder", PACKED, steps=12, accumulate=2)
    here = make(recipe, tmp_path / "here")
    fit(here)
    ahead = make(recipe, tmp_path / "ahead")
    monkeypatch.setattr(Job, "reader", property(lambda job: readers.setdefault(id(job), PrefetchLoader(job.loader))))
    readers: dict[int, PrefetchLoader] = {}
    fit(ahead)
    (reader,) = readers.values()
    assert reader._worker is None  # it has ended
    assert_equal(parameters(here), parameters(ahead))
    assert metrics(tmp_path / "here") == metrics(tmp_path / "ahead")


def test_batches_are_read_ahead_of_a_gpu_alone(tmp_path: Path) -> None:
    job = make(pairs(), tmp_path / "run")
    assert job.reader is job.loader if job.device.type == "cpu" else isinstance(job.reader, PrefetchLoader)
    other = replace(job, device=torch.device("cuda"))
    assert isinstance(other.reader, PrefetchLoader)
    assert other.reader.loader is job.loader

"""Statistics of a step with several micro-batches: running means and variances, and the load of a router."""

from pathlib import Path

import pytest
import torch

from anyformer.config import LM, Attention, BatchNorm, Block, Experts, Gated, ModelConfig, SigmoidTopK, Stack, Tokens
from anyformer.data.batch import Batch
from anyformer.nn.aux_outputs import collect
from anyformer.nn.model import Transformer
from anyformer.nn.norm import OverBatch
from anyformer.training.job import Job
from anyformer.training.step import TrainingStep
from tests.training.small import make, pairs
from tests.training.test_aux_outputs import BATCH, changed, experts

VOCAB, WIDTH = 11, 8


def mixture() -> Transformer:
    """A batch norm on the embeddings, whose input no statistic changes, and a router in the block above."""
    torch.manual_seed(0)
    feedforward = Experts(count=4, top_k=1, expert=Gated(width=4), router=SigmoidTopK(rate=0.5))
    stack = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2), feedforward=feedforward, dropout=0.0),))
    tokens = Tokens(vocab=VOCAB, norm=BatchNorm())
    return Transformer(ModelConfig(width=WIDTH, target=tokens, decoder=stack, head=LM())).double().train()


def buffers(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.named_buffers()}


@pytest.mark.parametrize("sizes", [(3, 1), (1, 1), (2, 4, 1)])
def test_micro_batches_give_the_running_statistics_of_the_merged_batch(sizes: tuple[int, ...]) -> None:
    """The sizes differ, and rows have padding; one row is all padding."""
    ids = torch.randint(VOCAB, (sum(sizes), 7), generator=torch.Generator().manual_seed(1))
    segments = torch.where(torch.arange(7) < torch.arange(len(ids))[:, None], 0, -1)
    norms = []
    for parts in ((len(ids),), sizes):
        model = mixture()
        for some, seen in zip(ids.split(list(parts)), segments.split(list(parts)), strict=True):
            model(some, segments=seen)
            collect(model)
        model.commit()
        norms.append(next(module for module in model.modules() if isinstance(module, OverBatch)))
    for name in ("mean", "variance"):
        torch.testing.assert_close(getattr(norms[1], name), getattr(norms[0], name))


def test_a_router_follows_the_load_of_all_micro_batches() -> None:
    """Two batches with the same load as one batch: the bias moves as far; and by their sum where loads differ."""
    ids = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(1))
    found = []
    for parts in ([4], [1, 3]):
        model = mixture()
        model.target.norm.eval()  # otherwise what the router reads depends on the batch
        for some in ids.split(parts):
            model(some)
            collect(model)
        model.commit()
        found.append({name: x for name, x in buffers(model).items() if "router" in name})
    assert found[0]
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())
    assert any(x.any() for x in found[0].values())


def two_batches(job: Job) -> list[Batch]:
    first, place = job.loader.read(job.state.cursor)
    return [first, job.loader.read(place)[0]]


def stepped(folder: Path, way: str, order: int) -> dict[str, torch.Tensor]:
    job = make(changed(pairs(dropout=0.0, accumulate=2), BATCH, experts(0.0, rate=0.5)), folder / f"{way}{order}")
    loss = None if way == "eager" else torch.compile(job.objective, backend="eager")
    TrainingStep(job, loss)(two_batches(job)[::order])
    return buffers(job.model)


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_the_order_of_micro_batches_does_not_matter(tmp_path: Path, way: str) -> None:
    one, other = stepped(tmp_path, way, 1), stepped(tmp_path, way, -1)
    assert one
    for name, x in one.items():
        torch.testing.assert_close(other[name], x, msg=lambda why, name=name: f"{name}: {why}")


def test_a_discarded_step_leaves_no_statistics_for_the_next(tmp_path: Path) -> None:
    """Neither those of its last micro-batch nor those of the ones before."""
    recipe = changed(pairs(dropout=0.0, accumulate=2), BATCH, experts(0.0, rate=0.5))
    found = []
    for bad_first in (False, True):
        job = make(recipe, tmp_path / str(bad_first))
        take_step, batches = TrainingStep(job), two_batches(job)
        if bad_first:
            head = next(job.model.head.parameters())
            kept = head.detach().clone()
            with torch.no_grad():
                head.fill_(torch.nan)
            take_step(batches[::-1])
            with torch.no_grad():
                head.copy_(kept)
        take_step(batches[:1])
        found.append(buffers(job.model))
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


@pytest.mark.parametrize("balance", [0.0, 0.5])
def test_auxiliary_losses_are_per_token(tmp_path: Path, balance: float) -> None:
    """The gradient of a step is that of the mean over all labels of their losses and of the terms of their batches."""
    job = make(changed(pairs(dropout=0.0, accumulate=2, clip="none"), experts(balance)), tmp_path / "run")
    batches = two_batches(job)
    counts = [batch.target_count for batch in batches]
    assert counts[0] != counts[1]
    total = torch.zeros(())
    for batch, count in zip(batches, counts, strict=True):
        loss, auxiliary, _ = job.objective(*job.objective.arguments(job.objective.select_labels(batch), False), None)
        total = total + (loss / count + auxiliary) * count / sum(counts)
    names = [name for name, x in job.model.named_parameters() if x.requires_grad]
    expected = torch.autograd.grad(total, [x for x in job.model.parameters() if x.requires_grad])
    found: dict[str, torch.Tensor] = {}
    job.optimizer.register_step_pre_hook(
        lambda *_: found.update((name, x.grad.clone()) for name, x in job.model.named_parameters())
    )
    TrainingStep(job)(batches)
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(found[name], gradient, msg=lambda why, name=name: f"{name}: {why}")

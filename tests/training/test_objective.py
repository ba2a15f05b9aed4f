"""The objective: heads applied where something is asked alone, and the same loss and gradients as everywhere."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.kernels.conventions import IGNORE
from anyformer.kernels.cross_entropy import token_loss
from anyformer.nn.heads import LossTarget
from anyformer.tasks.base import inputs_of
from anyformer.training.objective import MAX_SPARSE_SHARE, labelled_positions
from anyformer.training.step import compile_objective
from tests.training.small import make, pairs


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 2**16), st.floats(0, 1))
def test_few_places_are_those_that_ask(rows: int, length: int, seed: int, share: float) -> None:
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(9, (rows, length), generator=drawn)
    labels[torch.rand(rows, length, generator=drawn) > share] = IGNORE
    places, wanted = labelled_positions(labels, labels.numel()), labels[labels != IGNORE]
    assert (places is None) == (len(wanted) > MAX_SPARSE_SHARE * labels.numel())
    if places is None:
        return
    at, asked = places
    assert asked.shape == (1, len(at))
    assert torch.equal(asked[asked != IGNORE], wanted)
    assert torch.equal(labels.flatten()[at][: len(wanted)], wanted)


def test_loss_and_gradients_are_those_of_all_places(tmp_path: Path) -> None:
    job = make(pairs(dropout=0.0), tmp_path / "run")
    batch, _ = job.loader.read(job.state.cursor)
    whole = compile_objective(job)
    everywhere = (inputs_of(batch, False), LossTarget(batch.labels))
    some = whole.arguments(whole.select_labels(batch), False)
    assert some[1].labels.numel() < batch.labels.numel()
    logits = job.model(*everywhere[0])
    found = [(token_loss(logits, batch.labels).item(), None)]
    for inputs, target in (some, everywhere):
        loss, _, _ = whole(inputs, target, None)
        job.model.zero_grad()
        loss.backward()
        found.append((loss.item(), [p.grad.clone() for p in job.model.parameters() if p.grad is not None]))
    (plain, _), (one, few_slopes), (other, slopes) = found
    assert one == pytest.approx(plain, rel=1e-5)
    assert other == pytest.approx(plain, rel=1e-5)
    assert slopes
    for a, b in zip(few_slopes, slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

"""A linear layer that is split, in a compiled half-precision step on a GPU: the reference's values and gradients."""

import pytest
import torch

from anyformer.kernels.split_linear import launch, reference
from anyformer.nn.linear import Linear
from anyformer.nn.transforms.substitute import substitute
from tests.kernels.test_split_linear import parts_of
from tests.narrow import begin, same


@pytest.mark.parametrize("outputs", [(768, 768, 768), (256, 64, 64), (128, 128)])
@pytest.mark.parametrize("rows", [5, 300])
def test_values_and_gradients(outputs: tuple[int, ...], rows: int) -> None:
    torch.compiler.reset()
    layer = Linear(96, outputs)
    substitute(layer, "training")
    begin(layer, "cuda")
    run = parts_of(layer)
    same(layer, run, torch.compile(run, fullgraph=True), 2, rows, 96)


@pytest.mark.parametrize(("rows", "widths"), [(65_536, (768, 768, 768)), (1000, (264, 72)), (129, (100, 3, 130))])
def test_side_by_side_with_sums(rows: int, widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for width in widths]
    joined, sums = launch(parts)
    due, due_sums = reference(parts)
    assert torch.equal(joined, due)
    torch.testing.assert_close(sums, due_sums, atol=1e-3, rtol=1e-4)

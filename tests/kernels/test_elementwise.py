"""Tensors whose rows lie at equal distances, which the gate's kernel reads without a copy."""

import torch
from hypothesis import given, strategies as st

from anyformer.kernels.elementwise import can_gate

SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=4)


@given(SIZES, st.data())
def test_rows_that_are_read_by_one_stride(sizes: list[int], data: st.DataObject):
    order = data.draw(st.permutations(range(len(sizes))))
    x = torch.arange(2 * torch.Size(sizes).numel()).view(*sizes[:-1], -1).chunk(2, dim=-1)[1].permute(*order)
    if not can_gate(x, x):
        return
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    distance = x.stride(-2) if x.dim() > 1 else width
    read = torch.as_strided(x, (rows, width), (distance, 1))
    assert torch.equal(read, x.reshape(rows, width))


def test_halves_of_a_projection_and_their_transposes():
    both = torch.zeros(2, 3, 8)
    assert can_gate(*both.chunk(2, dim=-1))
    assert not can_gate(*both.transpose(0, 1).chunk(2, dim=-1))
    assert not can_gate(*both.transpose(1, 2).chunk(2, dim=-1))

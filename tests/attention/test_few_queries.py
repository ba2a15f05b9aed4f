"""Attention of few queries to a cache: who it is chosen for, and by Triton's interpreter (TRITON_INTERPRET=1) that it
says what `eager` says; on a GPU `tests/gpu/test_kernels.py` does."""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from anyformer.attention import lower
from anyformer.attention.attend import attend
from anyformer.attention.layout import Relation, Role, make_layout
from anyformer.attention.lower import Demand, choose
from anyformer.config import Causal, NoPosition
from anyformer.kernels.runtime import Runtime

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
HERE = Runtime("cuda", torch.bfloat16, training=False)
PLAIN = Demand(64, 64)


@pytest.mark.parametrize(
    ("kernel", "role", "queries", "demand", "site"),
    [
        ("decode", "cached", 1, PLAIN, HERE),
        ("decode", "cross", 1, PLAIN, HERE),
        ("sdpa", "self", 1, PLAIN, HERE),
        ("sdpa", "cached", 30, PLAIN, HERE),
        ("sdpa", "cached", 1, PLAIN, HERE._replace(device="cpu")),
        ("sdpa", "cached", 1, PLAIN, HERE._replace(dtype=torch.float32)),
        ("sdpa", "cached", 1, PLAIN._replace(key_width=512), HERE),
        ("eager", "cached", 1, PLAIN._replace(sinks=True), HERE),
    ],
)
def test_the_kernel_that_is_chosen(
    kernel: str, role: Role, queries: int, demand: Demand, site: Runtime, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lower, "HAS_TRITON", True)
    q, k = (make_layout(2, n, torch.device("cpu")) for n in (queries, 50))
    problem = "auto", Causal(), q, k, role, NoPosition(), demand, site
    with torch.no_grad():
        assert choose(*problem).kernel == kernel
    assert choose(*problem).kernel != "decode"  # it has no backward pass


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("kind", ["none", "mask", "shared", "bias"])
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "t", "s", "widths"),
    [
        (2, 4, 2, 1, 100, (16, 16)),
        (1, 4, 4, 1, 40, (64, 64)),
        (2, 3, 3, 1, 300, (24, 40)),
        (3, 8, 1, 3, 200, (24, 40)),
        (2, 40, 1, 2, 70, (32, 16)),
    ],
)
def test_as_eager(rows: int, heads: int, groups: int, t: int, s: int, widths: tuple[int, int], kind: str):
    """One part of the keys or several, more rows than a block, widths that fill none, an empty half of the slots."""
    q, k = random(rows, t, heads, widths[0]).transpose(1, 2), random(rows, groups, s, widths[0])
    v = random(rows, groups, s, widths[1])
    mask = random(1 if kind == "shared" else rows, 1, t, s) > 0.5
    mask[..., s // 2 :] = False
    mask[..., 3] = True
    relation = {
        "none": Relation(),
        "mask": Relation(mask=mask),
        "shared": Relation(mask=mask),
        "bias": Relation(
            bias=random(1, heads, t, s).masked_fill(~mask, -torch.inf),
            alive=torch.arange(rows)[:, None, None, None] > 0,
        ),
    }[kind]
    exact = attend(*(x.double() for x in (q, k, v)), relation, 0.3, backend="eager")
    torch.testing.assert_close(attend(q, k, v, relation._replace(few=True), 0.3).double(), exact, atol=1e-5, rtol=1e-5)

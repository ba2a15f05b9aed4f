"""Attention of few queries to a cache: when it is chosen, and that it equals `eager`.

The kernel runs in Triton's interpreter (TRITON_INTERPRET=1); `tests/gpu/test_kernels.py` runs it on a GPU.
"""

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from anyformer.attention import attend as attend_file
from anyformer.attention.attend import attend, choose
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import Role, make_layout
from anyformer.attention.lowered import FewQueries, densify
from anyformer.attention.scores import Scoring
from anyformer.config import Causal, NoPosition
from anyformer.kernels.runtime import Runtime
from tests.attention.paging import fill_up, to_pages

INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
HERE = Runtime("cuda", torch.bfloat16, training=False)
PLAIN = Requirements(64, 64)


@pytest.mark.parametrize(
    ("kernel", "role", "queries", "needs", "runtime"),
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
    kernel: str, role: Role, queries: int, needs: Requirements, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attend_file, "HAS_TRITON", True)
    q, k = (make_layout(2, n, torch.device("cpu")) for n in (queries, 50))
    problem = "auto", Causal(), q, k, role, NoPosition(), needs, runtime
    with torch.no_grad():
        assert choose(*problem).kernel == kernel
    assert choose(*problem).kernel != "decode"  # it has no backward pass


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("kind", ["none", "mask", "shared", "fully masked", "bias"])
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
    some = mask & (torch.arange(rows) > 0)[:, None, None, None]  # the queries of a row are fully masked
    lowered = {
        "none": FewQueries(),
        "mask": FewQueries(mask=mask),
        "shared": FewQueries(mask=mask),
        "fully masked": FewQueries(mask=some),
        "bias": FewQueries(bias=random(1, heads, t, s).masked_fill(~some, -torch.inf)),
    }[kind]
    eager, scoring = densify(lowered)._replace(kernel="eager"), Scoring(0.3)
    exact = attend(*(x.double() for x in (q, k, v)), eager, scoring)
    torch.testing.assert_close(attend(q, k, v, lowered, scoring).double(), exact, atol=1e-5, rtol=1e-5)
    dice = torch.Generator().manual_seed(s)
    origins = torch.randint(rows, (rows, s), generator=dice)  # the row that holds each key
    places = origins[:, None], torch.arange(groups)[:, None], torch.arange(s)
    exact_shared = attend(*(x.double() for x in (q, k[places], v[places])), eager, scoring)
    shared = attend(q, k, v, lowered._replace(origins=origins), scoring)
    torch.testing.assert_close(shared.double(), exact_shared, atol=1e-5, rtol=1e-5)
    if kind != "none":
        keys, values, pages = to_pages(k, v, 16)
        filled = lowered._replace(
            mask=None if lowered.mask is None else fill_up(lowered.mask, pages, False),
            bias=None if lowered.bias is None else fill_up(lowered.bias, pages, -torch.inf),
            pages=pages,
        )
        torch.testing.assert_close(attend(q, keys, values, filled, scoring).double(), exact, atol=1e-5, rtol=1e-5)

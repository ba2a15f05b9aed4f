"""The loss of a head in one pass, and dropout by a hash, beside the reference."""

import pytest
import torch

from anyformer.kernels.cross_entropy import fused_head_loss, token_loss
from anyformer.kernels.dropout import Dropout


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("n", "d", "v", "bias"), [(300, 64, 1000, True), (64, 32, 50257, False), (17, 16, 40, True)])
def test_loss_and_gradients(n: int, d: int, v: int, bias: bool, smoothing: float) -> None:
    torch.manual_seed(0)
    with torch.device("cuda"):
        x, table = torch.randn(n, d), torch.randn(v, d) * 0.3
        offset = torch.randn(v) if bias else None
        labels = torch.randint(v, (n,)).masked_fill(torch.rand(n) < 0.2, -100)
    found = []
    for way in ("reference", "fused", "compiled"):
        inputs = [None if t is None else t.clone().requires_grad_() for t in (x, table, offset)]
        if way == "reference":
            exact = [None if t is None else t.to(torch.bfloat16).double() for t in inputs]
            logits = torch.nn.functional.linear(*exact)  # type: ignore[arg-type]
            loss = token_loss(logits[None].double(), labels[None], smoothing)
        else:
            run = torch.compile(fused_head_loss) if way == "compiled" else fused_head_loss
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(*inputs, labels, smoothing)
        (loss * 0.37).backward()
        found.append((loss, [t.grad for t in inputs if t is not None]))
    (loss, slopes), *others = found
    for other, theirs in others:
        assert abs(other - loss) / loss.abs() < 2e-3
        for a, b in zip(slopes, theirs, strict=True):
            assert (a - b).norm() / a.norm() < 1e-2


def test_what_is_dropped_has_no_gradient() -> None:
    x = torch.randn(1000, 256, device="cuda", requires_grad=True)
    run = torch.compile(Dropout(0.25).train())
    torch.manual_seed(1)
    out = run(x)
    out.sum().backward()
    assert x.grad is not None
    stays = out != 0
    assert abs(stays.float().mean() - 0.75) < 5e-3
    torch.testing.assert_close(out[stays], (x / 0.75)[stays])
    torch.testing.assert_close(x.grad, stays / 0.75)
    assert not torch.equal(out, run(x))
    torch.manual_seed(1)
    assert torch.equal(out, run(x))

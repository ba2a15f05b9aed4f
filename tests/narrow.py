"""Modules in half precision, compiled, beside the same as they are: values and gradients."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Run = Callable[[Tensor], Tensor]


def begin(module: nn.Module, device: str) -> None:
    torch.manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.2)
    module.to(device).train()


def slopes(module: nn.Module, run: Run, *shape: int) -> list[Tensor]:
    """What comes out, and the gradients of what went in and of the weights."""
    device = next(module.parameters()).device
    torch.manual_seed(1)
    x = torch.randn(shape, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        found = run(x).float()
    torch.manual_seed(2)
    return [found, *torch.autograd.grad(found, [x, *module.parameters()], torch.randn_like(found))]


def same(module: nn.Module, run: Run, compiled: Run, *shape: int, within: float = 1e-2) -> None:
    """To what half precision can tell."""
    for a, b in zip(slopes(module, compiled, *shape), slopes(module, run, *shape), strict=True):
        assert (a - b).norm() < within * b.norm()


def kept(run: Run, *shape: int, device: str) -> float:
    """Bytes that are kept for the gradients, for each number that goes in."""
    sizes, x = list[int](), torch.randn(shape, device=device, requires_grad=True)

    def see(y: Tensor) -> Tensor:
        sizes.append(y.nbytes)
        return y

    hooks = torch.autograd.graph.saved_tensors_hooks(see, lambda y: y)
    with hooks, torch.autocast(device, torch.bfloat16):
        run(x)
    return sum(sizes) / x.numel()

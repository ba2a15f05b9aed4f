"""Linear layers of experts, each applied to its own rows: four kernels with equal results."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.kernels.cuda_graph import is_for_capture

ExpertKernel = Literal["grouped_mm", "loop", "opaque_loop", "gather"]
MAX_GATHERED_ROWS = 64  # each row has its own copy of a matrix


class ExpertRows(NamedTuple):
    """Which expert reads each of r rows, which are sorted by expert."""

    experts: Tensor  # int [r]
    lengths: Tensor  # number of rows of each expert, int [n]


def expert_matmul(x: Tensor, weight: Tensor, rows: ExpertRows, kernel: ExpertKernel | None = None) -> Tensor:
    """Return x W_eᵀ for each row [r, in] of x and its expert e; weights are [n, out, in]."""
    match kernel or _choose_kernel(x, weight):
        case "grouped_mm":
            return F.grouped_mm(x, weight.mT, offs=rows.lengths.cumsum(0).to(torch.int32))
        case "loop":
            return _loop(x, weight, rows.lengths)
        case "opaque_loop":
            return _opaque_loop(x, weight, rows.lengths)
        case "gather":
            return (weight[rows.experts] @ x[..., None])[..., 0]


def _choose_kernel(x: Tensor, weight: Tensor) -> ExpertKernel:
    """Choose the fastest kernel that supports these tensors.

    grouped_mm is for bf16 with rows of whole 16 bytes, on GPUs of compute capability 9 and 10: elsewhere torch runs a
    loop. The loop reads lengths on the CPU. A compiled graph cannot do that, so there the loop is one opaque operator.
    On a GPU it waits for the device, so few rows gather their matrices instead.
    """
    is_gpu = x.device.type == "cuda"
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if is_gpu and x.dtype is torch.bfloat16 and aligned and _groups_on_device(x.device):
        return "grouped_mm"
    if is_gpu and x.shape[0] <= MAX_GATHERED_ROWS and not torch.is_grad_enabled():
        return "gather"
    return "opaque_loop" if torch.compiler.is_compiling() else "loop"


def _groups_on_device(device: torch.device) -> bool:
    """Return whether grouped_mm reads its offsets on the device; the host cannot while a graph is captured."""
    return torch.cuda.get_device_properties(device).major in (9, 10)


def _loop(x: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    """Multiply expert by expert; in a captured step, where the host cannot read lengths, all rows by all experts.

    The operator of a compiled graph decides this whenever it runs.
    """
    if is_for_capture():
        experts = torch.repeat_interleave(lengths, output_size=len(x))
        every = F.linear(x, weight.flatten(0, 1)).unflatten(1, weight.shape[:2])  # [r, n, out]
        return every[torch.arange(len(x), device=x.device), experts]
    pieces = x.split(lengths.tolist())
    return torch.cat([rows @ matrix.mT for rows, matrix in zip(pieces, weight, strict=True)])


_opaque_loop = torch.library.custom_op("anyformer::expert_matmul", _loop, mutates_args=())


@_opaque_loop.register_fake
def _(x: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("anyformer::expert_weight_grad", mutates_args=())
def _weight_grad(grad: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    """Return the gradient of the weights, [n, out, in]."""
    sizes = lengths.tolist()
    return torch.stack([g.mT @ rows for g, rows in zip(grad.split(sizes), x.split(sizes), strict=True)])


@_weight_grad.register_fake
def _(grad: Tensor, x: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(lengths.shape[0], grad.shape[1], x.shape[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, lengths = ctx.saved_tensors
    return _opaque_loop(grad, weight.mT, lengths), _weight_grad(grad, x, lengths), None


_opaque_loop.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

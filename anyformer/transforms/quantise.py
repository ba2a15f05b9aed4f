"""Weights of 8 or 4 bits, for decoding: W ≈ s·q with whole numbers q, and a scale s for each row or group of a row.

    small = quantise(model, bits=4)
    generate(small, ids)

The matrices of the blocks, and that of a head over the vocabulary, are rounded to the nearest, so that no weight moves
by more than s/2. Embeddings, other heads, norms, routers, convolutions and recurrent cells stay as they are.
"""

import copy
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.layout import Layout
from anyformer.kernels.cross_entropy import token_loss
from anyformer.kernels.matmul import MAX_INT8_ROWS, fits_row_kernel, int8_is_faster, int8_linear, one_row_linear
from anyformer.kernels.runtime import Runtime
from anyformer.nn.experts import Runs, SigmoidRouter, SoftmaxRouter, StackedLinear, run_products
from anyformer.nn.heads import LossTarget, VocabularyHead
from anyformer.nn.latent import LatentProjection
from anyformer.nn.linear import Fused, Linear
from anyformer.nn.model import Transformer
from anyformer.transforms.merge import merge

Bits = Literal[8, 4]
Way = Literal["auto", "plain", "kernel"]
LEVELS = {8: 119, 4: 7}  # the largest q; 8 bits end where two times 4 bits do: 16·7 + 7
GROUP = 32
PADDED = 32  # rows are of whole such blocks for the kernel
KERNEL = torch.ops.aten._dyn_quant_matmul_4bit.default


def quantise(model: Transformer, bits: Bits = 8, *, group: int | None = None, way: Way = "auto") -> Transformer:
    """A copy with weights of so many bits, which cannot be trained; the model stays as it is. Adapters are merged.

    With 8 bits a row has one scale; with 4, each `group` of a row has (32 if not given: 32, 64, 128, ... numbers).
    plain: weights are made anew for each product, in the precision of the model: smaller, not faster, but for a single
    row on a GPU, which reads weights of 8 bits as they are. kernel: Arm's for CPUs, on large matrices about 2 (8 bits)
    or 4 times (4 bits) as fast as fp32; it also rounds each token to 8 bits, by about 1 % of its length. auto: the
    kernel where there is one.
    The head has 8 bits in any case: of 4 it would cost a third as much again as those of all blocks do. One that shares
    its table with the input gets a rounded copy of it where that is faster, and else stays as it is.
    Quantise where the model is to run: the kernel's numbers cannot be moved to another device.
    """
    if bits not in LEVELS:
        raise ValueError(f"bits = {bits}: must be 8 or 4")
    if bits == 8 and group is not None:
        raise ValueError("group: with 8 bits a row has one scale; leave it out")
    if group is not None and (group < 32 or group % 32):
        raise ValueError(f"group = {group}: must be a multiple of 32")
    if way == "kernel" and not all(_has_kernel(p) for p in model.parameters()):
        raise ValueError("way = 'kernel': needs an Arm CPU, torch with KleidiAI, and a model in fp32 on it")
    model = merge(model)
    size = (group or GROUP) if bits == 4 else None
    memo: dict[int, object] = {}
    for module, read in _matrices(model):
        rounded = round_off(module.weight.detach(), bits, size)
        if isinstance(module, StackedLinear):
            memo[id(module)] = QuantisedStack(rounded, _own(module.bias), module.parts, module.weight.dtype)
        else:
            parts = module.parts if isinstance(module, Fused) else None
            fast = not read and way != "plain" and _has_kernel(module.weight)
            memo[id(module)] = _product(rounded, _own(module.bias), parts, module.weight.dtype, fast)
    if (table := _table(model)) is not None:
        assert isinstance(model.head, VocabularyHead)
        fast = way != "plain" and _has_kernel(table)
        if fast or model.head.table is not None or (way != "plain" and int8_is_faster(table)):
            product = _product(round_off(table, 8), _own(model.head.bias), None, table.dtype, fast)
            memo[id(model.head)] = QuantisedHead(copy.deepcopy(model.head.transform), product, model.head)
    return copy.deepcopy(model, memo).requires_grad_(False)  # in the place of each matrix comes what the memo has


def nbytes(model: nn.Module) -> int:
    """The memory of parameters and buffers; what is shared counts once."""
    return sum(x.nbytes for x in {x.data_ptr(): x for x in (*model.parameters(), *model.buffers())}.values())


def _matrices(model: Transformer) -> Iterator[tuple[nn.Linear | StackedLinear, bool]]:
    """The matrices of the blocks, and whether others read their weights, too."""
    modules = [module for stack in (model.encoder, model.decoder) if stack is not None for module in stack.modules()]
    routers = {id(m.linear) for m in modules if isinstance(m, (SoftmaxRouter, SigmoidRouter))}
    read = {id(m.up) for m in modules if isinstance(m, LatentProjection)}
    for module in modules:
        if type(module) in (Linear, Fused, StackedLinear) and id(module) not in routers:
            assert isinstance(module, (nn.Linear, StackedLinear))
            yield module, id(module) in read


def _table(model: Transformer) -> Tensor | None:
    """The matrix of a head over the vocabulary, its own or the input's."""
    if not isinstance(model.head, VocabularyHead):
        return None
    table = model.table(model.target or model.source) if model.head.table is None else model.head.table
    assert table is not None
    return table.detach()


def _own(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().clone()


def _has_kernel(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and torch.backends.kleidiai.is_available()


# -- numbers ----------------------------------------------------------------------------------------------------------


class Rounded(NamedTuple):
    """A matrix, or a stack of them, as whole numbers and their scales."""

    q: Tensor  # int8 [..., out, n, g]: n groups of g numbers, the last one filled up with 0
    scale: Tensor  # [..., out, n]: bf16 for groups, as the kernel has it, fp32 for rows
    width: int  # how many of the n·g numbers there are
    bits: Bits

    def expanded(self) -> Tensor:
        """W in fp32, [..., out, in]"""
        return _expanded(self.q, self.scale, self.width)


def round_off(weight: Tensor, bits: Bits, group: int | None = None) -> Rounded:
    """The nearest whole multiples of the scale, which is such that the largest weight of a group has one."""
    width = weight.shape[-1]
    size = group or width
    groups = F.pad(weight.float(), (0, -width % size)).unflatten(-1, (-1, size))
    scale = groups.abs().amax(dim=-1) / LEVELS[bits]
    scale = scale.where(scale > 0, 1.0)  # of zeros
    if group is not None:
        scale = scale.bfloat16()
    q = (groups / scale.float()[..., None]).round().clamp(-LEVELS[bits], LEVELS[bits])
    return Rounded(q.to(torch.int8), scale, width, bits)


def _expanded(q: Tensor, scale: Tensor, width: int) -> Tensor:
    return (q * scale.float()[..., None]).flatten(-2)[..., :width]


def pack(q: Tensor) -> Tensor:
    """Whole numbers from -8 to 7, two to a byte, the first one in its lower half."""
    low, high = (q + 8).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack(nibbles: Tensor) -> Tensor:
    return torch.stack((nibbles & 15, nibbles >> 4), dim=-1).flatten(-2).to(torch.int8) - 8


# -- layers -----------------------------------------------------------------------------------------------------------


class _Stored(nn.Module):
    """Whole numbers and scales, at 8 or 4 bits a number."""

    q: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, rounded: Rounded, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.bits, self.width, self.dtype = rounded.bits, rounded.width, dtype
        self.register_buffer("q", pack(rounded.q) if rounded.bits == 4 else rounded.q)
        self.register_buffer("scale", rounded.scale)
        self.register_buffer("bias", bias)

    @property
    def weight(self) -> Tensor:
        return self.expanded(slice(None))

    def expanded(self, some: slice | int) -> Tensor:
        """The weights of some rows, or of one matrix of a stack."""
        q = self.q[some]
        return _expanded(unpack(q) if self.bits == 4 else q, self.scale[some], self.width).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{list(self.scale.shape[:-1])} x {self.width}, bits={self.bits}, bias={self.bias is not None}"


class QuantisedLinear(_Stored):
    """A linear layer, or with parts several of one input, whose weights are made anew for each product."""

    def __init__(self, rounded: Rounded, bias: Tensor | None, parts: tuple[int, ...] | None, dtype: torch.dtype):
        super().__init__(rounded, bias, dtype)
        self.parts = parts

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        # a row of one scale takes it after the product, which then reads 8 bits; fp16 would not hold what comes before
        if self.bits == 8 and fits_row_kernel(x, q := self.q[:, 0]):
            y = one_row_linear(x, q, self.scale[:, 0], self.bias)
        elif self.bits == 8 and fits_row_kernel(x, q, MAX_INT8_ROWS):
            y = int8_linear(x, q, self.scale[:, 0], self.bias)
        elif self.bits == 8 and Runtime.of(x, training=False).dtype is not torch.float16:
            y = F.linear(x, self.q[:, 0].to(self.dtype))
            y = (y * self.scale[:, 0]).to(y.dtype)
            y = y if self.bias is None else y + self.bias
        else:
            y = F.linear(x, self.weight, self.bias)
        return y if self.parts is None else y.split(self.parts, dim=-1)

    def acting(self, part: int) -> Tensor:
        """The weight of one of the maps."""
        assert self.parts is not None
        start = sum(self.parts[:part])
        return self.expanded(slice(start, start + self.parts[part]))


class QuantisedStack(_Stored):
    """A linear layer for each expert; only those that read something have their weights made."""

    def __init__(self, rounded: Rounded, bias: Tensor | None, parts: tuple[int, ...], dtype: torch.dtype):
        super().__init__(rounded, bias, dtype)
        self.count, self.parts = rounded.q.shape[0], parts

    def forward(self, x: Tensor, runs: Runs) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():  # which cannot look at lengths
            y = run_products(x, self.weight.to(x.dtype), runs)
        else:
            pieces = enumerate(x.split(runs.lengths.tolist()))
            y = torch.cat([rows @ self.expanded(i).to(x.dtype).mT for i, rows in pieces if len(rows)])
        if self.bias is not None:
            y = y + self.bias[runs.experts].to(y.dtype)
        return y.split(self.parts, dim=-1)


class KernelLinear(nn.Module):
    """A linear layer, or several of one input, by the product of 4-bit weights and 8-bit tokens that Arm's CPUs have.

    Weights of 8 bits are two of 4: q = 16 a + b, and a row of the product is the sum of two.
    """

    packed: Tensor

    def __init__(self, rounded: Rounded, bias: Tensor | None, parts: tuple[int, ...] | None):
        super().__init__()
        self.bits, self.parts, self.out, self.width = rounded.bits, parts, rounded.q.shape[0], rounded.width
        self.biased = bias is not None
        q, scale = rounded.q, rounded.scale
        if rounded.bits == 8:
            high = (q + 8).div(16, rounding_mode="floor").to(torch.int8)
            q, scale = torch.cat((high, q - 16 * high)), torch.cat((16 * scale, scale))
            bias = None if bias is None else torch.cat((bias, torch.zeros_like(bias)))
        q = q.flatten(1)
        q = F.pad(q, (0, -q.shape[1] % PADDED))
        self.fill = q.shape[1] - rounded.width
        self.size = (q.shape[1] // scale.shape[1], q.shape[1], q.shape[0])  # of a group, of a row, of the whole
        if scale.shape[1] == 1:
            scale = scale.float()  # as the kernel has it for rows of one group
        packed = torch.ops.aten._dyn_quant_pack_4bit_weight(pack(q), scale.contiguous(), bias, *self.size)
        self.register_buffer("packed", packed)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        # a token at a time the product takes some 50 microseconds: no step here that can be spared
        rows = x.reshape(-1, self.width).float()
        y = KERNEL(F.pad(rows, (0, self.fill)) if self.fill else rows, self.packed, *self.size)
        if self.bits == 8:
            y = y[:, : self.out] + y[:, self.out :]
        y = y.view(*x.shape[:-1], self.out).to(x.dtype)
        return y if self.parts is None else y.split(self.parts, dim=-1)

    def extra_repr(self) -> str:
        return f"{self.out} x {self.width}, bits={self.bits}, bias={self.biased}"


def _product(
    rounded: Rounded, bias: Tensor | None, parts: tuple[int, ...] | None, dtype: torch.dtype, fast: bool
) -> KernelLinear | QuantisedLinear:
    return KernelLinear(rounded, bias, parts) if fast else QuantisedLinear(rounded, bias, parts, dtype)


class QuantisedHead(VocabularyHead):
    """Logits by a rounded table, which has the bias, too."""

    def __init__(self, transform: nn.Module, product: KernelLinear | QuantisedLinear, like: VocabularyHead):
        nn.Module.__init__(self)
        self.transform, self.product, self.scale, self.cap = transform, product, like.scale, like.cap

    def forward(self, x: Tensor, layout: Layout, table: Tensor | None) -> Tensor:
        return self._said(x)

    def loss(self, x: Tensor, table: Tensor | None, asked: LossTarget) -> Tensor:
        x = x if asked.at is None else x.flatten(0, 1)[None, asked.at]
        return token_loss(self._said(x), asked.labels, asked.smoothing)

    def _said(self, x: Tensor) -> Tensor:
        logits = self.product(self.transform(x) * self.scale)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

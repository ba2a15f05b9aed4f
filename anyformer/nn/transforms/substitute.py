"""Faster classes for the plain modules of `nn`: the same parameters and names, equal results, and back.

    substitute(model)              # for its device: done by runs, decoding and serving
    substitute(model, "training")  # for a compiled step in half precision, too: done by training
    restore(model)                 # the plain modules again

`nn` holds the formulae. A class of `TABLE` replaces that of a built module, and computes as it did wherever its kernels
do not fit a call.
"""

from collections import Counter
from itertools import chain
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.kernels.cross_entropy import can_fuse_loss, fused_head_loss
from anyformer.kernels.dropout import Dropout
from anyformer.kernels.elementwise import can_norm, rms_norm, silu_gate
from anyformer.kernels.fused_activation import Act, fused_linear_activation
from anyformer.kernels.matmul import RowFusion, has_row_kernel, is_few_rows, linear, one_row_linear
from anyformer.kernels.narrow_norm import is_narrow_step, narrow_norm
from anyformer.kernels.runtime import HALF, HAS_TRITON, in_compiled_half_step, runs_fused
from anyformer.kernels.split_linear import MAX_PARTS, split_linear
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.block import Sublayer
from anyformer.nn.context import Context
from anyformer.nn.eval_mode import submodules
from anyformer.nn.experts import ExpertMixture
from anyformer.nn.feedforward import GatedFFN, PlainFFN, swiglu
from anyformer.nn.heads import LossTarget, VocabularyHead
from anyformer.nn.linear import Linear, WeightFormat
from anyformer.nn.norm import OverBatch, RootMeanSquare

Use = Literal["cpu", "cuda", "training"]  # on a CPU or a GPU without gradients, or in compiled half-precision training


class FastLayerNorm(nn.LayerNorm):
    """Layer norm that saves bf16 for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and is_narrow_step(x):
            return narrow_norm(x, self.weight, self.bias, self.eps, True)
        return super().forward(x)


class FastRootMeanSquare(RootMeanSquare):
    """The norm by one kernel in evaluation on a GPU; in training it saves bf16 for the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        if self.training and is_narrow_step(x):
            return narrow_norm(x, weight, None, self.eps, False)
        if not (runs_fused(x) and weight.dtype is x.dtype):
            return super().forward(x)
        if not self.cast_first:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        if can_norm(x, weight):
            return rms_norm(x, weight, self.eps)
        return F.rms_norm(x, weight.shape, None, self.eps) * weight


class FusedFormat(WeightFormat):
    """Weight format with kernels that include steps around the matmul."""

    def fuses_activation(self, outputs: int) -> bool:
        """Return whether `activated` supports a layer with that many outputs, in compiled half-precision training."""
        return False

    def activated(self, x: Tensor, weight: Tensor, bias: Tensor, act: Act) -> Tensor:
        """Return act(x Wᵀ + b) by one op."""
        raise NotImplementedError(f"{type(self).__name__} does not fuse activations")

    def has_row_kernel(self, dtype: torch.dtype) -> bool:
        """Return whether `fused_row` supports a row of this data type on a GPU."""
        return False

    def fused_row(self, x: Tensor, bias: Tensor | None, fusion: RowFusion) -> Tensor:
        """Return x Wᵀ + b of one row, with the steps of `fusion`, by one kernel."""
        raise NotImplementedError(f"{type(self).__name__} has no kernel for one row")


class FastLinear(Linear):
    """Linear layer with kernels for few rows; in training, with those that compute gradients together."""

    def forward(self, x: Tensor) -> Tensor:
        if self.format is not None:
            return super().forward(x)
        assert self.weight is not None
        one_row = not x.is_cuda and x.numel() == self.in_features  # which a CPU multiplies as it is
        y = F.linear(x, self.weight, self.bias) if one_row else linear(x, self.weight, self.bias)
        return y if self.lora is None else y + self.lora(x)

    def split(self, x: Tensor, direct: bool = False) -> tuple[Tensor, ...]:
        """Return the outputs of the parts.

        Gradients of an elementwise function of the parts are left to the compiler, which joins them as it computes
        them.
        """
        if direct and self.joins_gradients and in_fused_step(self, x):
            assert self.weight is not None
            assert self.bias is not None
            return split_linear(x, self.weight, self.bias, self.parts)
        return self(x).split(self.parts, dim=-1)

    @property
    def joins_gradients(self) -> bool:
        """True if one op can compute the parts, and their gradients, in compiled half-precision training."""
        plain = self.format is None and self.lora is None and self.weight is not None
        return plain and self.bias is not None and 1 < len(self.parts) <= MAX_PARTS

    @property
    def fuses_activation(self) -> bool:
        """True if one op can compute the layer and an activation, in compiled half-precision training."""
        own = self.format
        fits = own is None or (isinstance(own, FusedFormat) and own.fuses_activation(self.out_features))
        return fits and self.lora is None and self.weight is not None and self.bias is not None

    def has_row_kernel(self, dtype: torch.dtype) -> bool:
        """Return whether `fused_row` supports a row of this data type on a GPU."""
        if self.lora is not None or has_hooks(self):
            return False
        if self.format is not None:
            return isinstance(self.format, FusedFormat) and self.format.has_row_kernel(dtype)
        return self.weight is not None and has_row_kernel(self.weight, dtype)

    def fused_row(self, x: Tensor, fusion: RowFusion) -> Tensor:
        """Return x Wᵀ + b of one row, with the steps of `fusion`, by one kernel."""
        if isinstance(self.format, FusedFormat):
            return self.format.fused_row(x, self.bias, fusion)
        assert self.weight is not None
        return one_row_linear(x, self.weight, None, self.bias, *fusion)


class FastVocabularyHead(VocabularyHead):
    """Head with kernels for few rows; in training on a GPU its loss stores no logits."""

    def loss(self, x: Tensor, table: Tensor | None, target: LossTarget) -> Tensor:
        if self.format is not None or self.cap is not None or not can_fuse_loss(x):
            return super().loss(x, table, target)
        rows, labels = self._hidden(target.rows_of(x)).flatten(0, 1), target.labels.flatten()
        return fused_head_loss(rows, self._weight(table), self.bias, labels, target.smoothing)

    def _logits(self, x: Tensor, table: Tensor | None) -> Tensor:
        if self.format is not None:
            return super()._logits(x, table)
        weight = self._weight(table)
        one_row = not x.is_cuda and x.numel() == x.shape[-1]  # which a CPU multiplies as it is
        logits = F.linear(x, weight, self.bias) if one_row else linear(x, weight, self.bias)
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class FastPlainFFN(PlainFFN):
    """Feed-forward whose first layer and activation are one op in compiled half-precision training."""

    def lift(self, x: Tensor) -> Tensor:
        up, act = self.up, None if self.drops else cast("Act | None", self.activation.fused)
        if act is None or not (isinstance(up, FastLinear) and up.fuses_activation and in_fused_step(up, x)):
            return super().lift(x)
        assert up.weight is not None
        assert up.bias is not None
        if isinstance(up.format, FusedFormat):
            return up.format.activated(x, up.weight, up.bias, act)
        return fused_linear_activation(x, up.weight, up.bias, act)


class FastGatedFFN(GatedFFN):
    """Gated feed-forward whose SwiGLU is one kernel in evaluation on a GPU."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        h = silu_gate(gate, up) if self.act is swiglu else self.act(gate, up)
        return self.down(self.dropout(ctx.tap("hidden", h)))


class FastExpertMixture(ExpertMixture):
    """Experts whose SwiGLU is one kernel in evaluation on a GPU."""

    def activate(self, *parts: Tensor) -> Tensor:
        return silu_gate(*parts) if self.act is swiglu else super().activate(*parts)


class FastSublayer(Sublayer):
    """Sublayer that calls nothing which changes nothing: in evaluation without taps, dropout and absent norms.

    On a GPU the matmuls of one row compute its norm and the residual sum themselves. Nothing but the first may read
    the input then, and the norm may not be computed by an earlier kernel: the matmul loads γ before that has ended.
    """

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        absent = type(self.norm_branch) is nn.Identity and type(self.norm_sum) is nn.Identity
        if self.training or ctx.taps is not None or not (absent and self.residual) or type(self.norm_in) is OverBatch:
            return super().forward(x, ctx)
        if not (x.dtype in HALF and is_few_rows(x) and self._fuses(x.dtype, ctx)):
            return x + self.inner(self.norm_in(x), ctx)
        assert isinstance(self.norm_in, RootMeanSquare)
        norm, inner = RowFusion(self.norm_in.weight, self.norm_in.eps), self.inner
        first, last = self._ends()
        assert isinstance(first, FastLinear)
        assert isinstance(last, FastLinear)
        if isinstance(inner, MultiHeadAttention):
            assert ctx.relation is not None
            q, k, v = inner.shape_heads(first.fused_row(x, norm).split(first.parts, dim=-1), ctx.relation)
            h = inner.read(q, *ctx.append(k, v), ctx).transpose(1, 2).flatten(2)
        else:
            h = first.fused_row(x, norm._replace(gated=True))
        return last.fused_row(h, RowFusion(residual=x))

    def _ends(self) -> tuple[nn.Module, ...]:
        """Return the first and the last layer of an inner module that supports fusion; of others, the module itself."""
        inner = self.inner
        if type(inner) is MultiHeadAttention and inner.gate is None:
            return inner.qkv, inner.out
        if isinstance(inner, GatedFFN) and inner.act is swiglu:
            return inner.gate_up, inner.down
        return (inner,)

    def _fuses(self, dtype: torch.dtype, ctx: Context) -> bool:
        norm = self.norm_in
        return (
            isinstance(norm, RootMeanSquare)
            and not norm.offset
            and norm.weight.dtype is dtype
            and not has_hooks(norm)
            and ctx.memory is None
            and all(isinstance(layer, FastLinear) and layer.has_row_kernel(dtype) for layer in self._ends())
        )


def in_fused_step(layer: nn.Module, x: Tensor) -> bool:
    """Return whether a layer may be fused with the next operation: compiled half-precision training, without hooks."""
    return in_compiled_half_step(x) and layer.training and not has_hooks(layer) and (HAS_TRITON or not x.is_cuda)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks, which only its call runs."""
    forward, backward = module._forward_hooks or module._forward_pre_hooks, module._backward_hooks
    return bool(forward or backward or module._backward_pre_hooks)


class Substitution(NamedTuple):
    """A faster class of a module, where it is used, and what it gains."""

    fast: type[nn.Module]
    uses: tuple[Use, ...]
    gain: str

    @property
    def why_not(self) -> str:
        return f"plain: faster {' and '.join(WHERE[use] for use in self.uses)} only"


WHERE: dict[Use, str] = {"cpu": "on a CPU", "cuda": "on CUDA with Triton", "training": "in compiled half precision"}
TABLE: dict[type[nn.Module], Substitution] = {
    nn.LayerNorm: Substitution(FastLayerNorm, ("training",), "saves bf16 for the backward pass"),
    nn.Dropout: Substitution(Dropout, ("training",), "draws its mask by a hash or by few bits"),
    RootMeanSquare: Substitution(FastRootMeanSquare, ("cuda", "training"), "one kernel; in training it saves bf16"),
    Linear: Substitution(FastLinear, ("cpu", "cuda", "training"), "kernels for few rows, and for joined gradients"),
    VocabularyHead: Substitution(FastVocabularyHead, ("cpu", "cuda"), "kernels for few rows, and for the loss on CUDA"),
    PlainFFN: Substitution(FastPlainFFN, ("training",), "matmul and activation by one op"),
    GatedFFN: Substitution(FastGatedFFN, ("cuda",), "SwiGLU by one kernel"),
    ExpertMixture: Substitution(FastExpertMixture, ("cuda",), "SwiGLU by one kernel"),
    Sublayer: Substitution(FastSublayer, ("cpu", "cuda"), "fewer calls; on CUDA also fewer kernels for one row"),
}


def substitute(model: nn.Module, use: Use | None = None) -> None:
    """Give the modules of a model their faster classes for its device, and for a further `use`."""
    device = next((x.device.type for x in chain(model.parameters(), model.buffers())), "meta")
    for module in submodules(model):
        found = TABLE.get(type(module))
        if found is not None and _is_used(found, device, use):
            module.__class__ = found.fast


def _is_used(found: Substitution, device: str, use: Use | None) -> bool:
    return use in found.uses or (device in found.uses and (HAS_TRITON or device != "cuda"))


def restore(model: nn.Module) -> None:
    """Give the modules of a model the plain classes of `nn` again."""
    plain = {found.fast: cls for cls, found in TABLE.items()}
    for module in submodules(model):
        module.__class__ = plain.get(type(module), type(module))


def explain(device: str, use: Use | None = None) -> dict[str, str]:
    """Return for each plain class whether its faster one is used on a kind of device, and why."""
    return {
        plain.__name__: f"{found.fast.__name__}  ({found.gain})" if _is_used(found, device, use) else found.why_not
        for plain, found in TABLE.items()
    }


def explain_model(model: nn.Module) -> list[str]:
    """Return a line for each class of `TABLE` that a model has, faster or plain."""
    counts = Counter(type(module) for module in submodules(model))
    faster = {f.fast: f"{counts[f.fast]} × {f.fast.__name__}  ({f.gain})" for f in TABLE.values()}
    plain = {cls: f"{counts[cls]} × {cls.__name__}  ({f.why_not})" for cls, f in TABLE.items()}
    return [line for cls, line in (faster | plain).items() if counts[cls]]

"""Sublayers of one row whose matmuls compute the norm, the gate and the residual sum: when, and that nothing changes.

Here the kernels are formulas; `tests/kernels/test_matmul.py` and `tests/gpu/test_matmul.py` compare the kernels.
"""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from anyformer import presets
from anyformer.config import LoRA, ModelConfig
from anyformer.kernels.int4 import interleave
from anyformer.kernels.matmul import RowFusion
from anyformer.nn import linear
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.context import Tap
from anyformer.nn.linear import adapt
from anyformer.nn.model import Transformer
from anyformer.nn.transforms import rounding, substitute
from anyformer.nn.transforms.quantise import quantise
from anyformer.nn.transforms.rounding import unpack_nibbles
from anyformer.training.ranks.split_modules import ColumnLinear, RowLinear
from tests.row_fusion import apart

SIZES: dict[str, Any] = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "ff": 96, "vocab": 50}
IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[RowFusion]:
    """The calls of kernels, which are formulas that support any row and any weight."""
    calls: list[RowFusion] = []

    def one_row(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, *given: Any) -> Tensor:
        calls.append(RowFusion(*given))
        return apart(x, weight if scale is None else weight * scale[:, None], bias, calls[-1])

    def int4(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        calls.append(RowFusion(*given))
        dense = unpack_nibbles(interleave(packed)) * scale.float()[..., None]
        return apart(x, dense.flatten(1), bias, calls[-1])

    for module in (substitute, rounding):
        monkeypatch.setattr(module, "has_row_kernel", lambda weight, dtype: True)
        monkeypatch.setattr(module, "one_row_linear", one_row)
    monkeypatch.setattr(rounding, "has_int4_kernel", lambda packed, width: True)
    monkeypatch.setattr(rounding, "int4_linear", int4)
    monkeypatch.setattr(substitute, "HALF", (torch.float32,))
    monkeypatch.setattr(substitute, "is_few_rows", lambda x: x.numel() == x.shape[-1] and not torch.is_grad_enabled())
    return calls


def built(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config).eval()
    for parameter in model.parameters():  # norms, too
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0.0, 0.2)
    substitute.substitute(model, "cuda")
    return model


def decoded(model: Transformer, ids: Tensor = IDS) -> Tensor:
    """Return the logits of tokens that are read one at a time."""
    cache = model.new_cache(1, 16)
    with torch.no_grad():
        return torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(ids.shape[1])], dim=1)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_decode_step_is_the_same(bits: Literal[8, 4] | None, fused: list[RowFusion]):
    model = built(presets.llama(**SIZES))
    model = model if bits is None else quantise(model, bits, way="plain")
    found = decoded(model)
    assert len(fused) == 4 * SIZES["depth"] * IDS.shape[1]  # qkv, out, gate and up, down
    assert [(x.norm is not None, x.gated, x.residual is not None) for x in fused[:4]] == [
        (True, False, False),
        (False, False, True),
        (True, True, False),
        (False, False, True),
    ]
    fused.clear()
    with torch.no_grad():
        together = model(IDS)  # several rows
    assert not fused
    torch.testing.assert_close(found, together, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("preset", "calls"), [("qwen3", 4), ("mistral", 4), ("gemma", 0), ("gpt2", 0)])
def test_which_families(preset: str, calls: int, fused: list[RowFusion]):
    """RMSNorm before attention and SwiGLU; not a norm that adds 1 to its weight, nor LayerNorm."""
    sizes = SIZES if preset != "gpt2" else {name: SIZES[name] for name in ("depth", "width", "heads", "vocab")}
    model = built(getattr(presets, preset)(**sizes))
    found = decoded(model)
    assert len(fused) == calls * SIZES["depth"] * IDS.shape[1]
    with torch.no_grad():
        torch.testing.assert_close(found, model(IDS), atol=1e-4, rtol=1e-4)


def test_where_a_step_stays_apart(fused: list[RowFusion]):
    model, one = built(presets.llama(**SIZES)), IDS[:, :1]
    model(one)  # gradients
    with torch.no_grad():
        model.train()(one)
        model.eval()(one, taps=Tap(lambda name, x: x))
        assert not fused
        hook = model.decoder.blocks[0]["mixer"].norm_in.register_forward_hook(lambda *_: None)
        model(one)
        assert len(fused) == 6
        hook.remove()
        first = model.decoder.blocks[0]["mixer"].inner
        assert isinstance(first, MultiHeadAttention)
        first.out.register_forward_pre_hook(lambda *_: None)
        fused.clear()
        model(one)
        assert len(fused) == 6
        adapt(model, LoRA(rank=2), ["decoder.blocks.1.feedforward.inner.down"])
        fused.clear()
        model(one)
        assert len(fused) == 4


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_a_layer_that_processes_share_stays_apart(kind: type[linear.Linear]):
    """A kernel of one process would leave out the sum over all of them."""
    layer = linear.Linear(512, 512)
    layer.__class__ = kind
    substitute.substitute(layer, "cuda")
    assert type(layer) is kind

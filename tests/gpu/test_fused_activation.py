"""What a compiled step of half precision does in ways of its own, on a GPU: the reference's values and gradients."""

import pytest
import torch

from anyformer.config import Activation, Gelu, LayerNorm, Norm, Relu, RMSNorm
from anyformer.nn.feedforward import PlainFFN
from anyformer.nn.transforms.substitute import substitute
from tests.narrow import begin, kept, same


@pytest.mark.parametrize("spec", [Relu(), Gelu(approximate="none"), Gelu(approximate="tanh")])
@pytest.mark.parametrize("shape", [(2, 100, 96), (1, 64, 768)])
def test_an_activation_behind_a_product(spec: Activation, shape: tuple[int, ...]) -> None:
    torch.compiler.reset()
    ffn = PlainFFN(shape[-1], 328, spec, bias=True, dropout=0.0)
    substitute(ffn, "training")
    begin(ffn.up, "cuda")
    same(ffn.up, ffn.lift, torch.compile(ffn.lift), *shape)


@pytest.mark.parametrize("spec", [LayerNorm(), LayerNorm(bias=False), RMSNorm(), RMSNorm(offset=1.0)])
def test_norms(spec: Norm) -> None:
    torch.compiler.reset()
    norm = spec.build(768)
    substitute(norm, "training")
    begin(norm, "cuda")
    run = torch.compile(norm)
    same(norm, norm, run, 4, 300, 768)
    assert kept(run, 4, 300, 768, device="cuda") < 2.1

"""The Transformer written from scratch equals anyformer: every piece, both whole models, gradients; and it learns."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import anyformer as af
from examples import from_scratch
from examples.from_scratch import GPT, EncoderDecoder, attention, causal_mask, differences, name_in_anyformer

VOCAB, LENGTH = 29, 12
ROUNDING = 1e-12  # in float64, for numbers of about 1


class Pair:
    """A model from scratch, the library's of the same sizes, and what both read."""

    def __init__(self, whole: bool, depth: int, heads: int, k: int, rows: int, length: int):
        torch.manual_seed(depth + heads + k + rows + length)
        sizes = {"depth": depth, "width": 2 * heads * k, "heads": heads, "vocab": VOCAB}
        self.ids = torch.randint(1, VOCAB, (rows, length)), torch.randint(1, VOCAB, (rows, max(length - 2, 1)))
        if whole:
            self.ours, config = EncoderDecoder(**sizes), af.presets.vaswani(**sizes)
        else:
            self.ours, config = GPT(**sizes, length=LENGTH), af.presets.gpt2(**sizes, length=LENGTH)
            self.ids = self.ids[:1]
        self.theirs = af.Transformer(config).eval()
        for weight in self.theirs.parameters():  # biases and norms differ from 0 and 1, too
            torch.nn.init.normal_(weight, std=0.3)

    def double(self) -> "Pair":
        self.ours.double(), self.theirs.double()
        return self


small = st.integers(1, 3)
pairs = st.builds(Pair, st.booleans(), small, small, small, small, st.integers(1, LENGTH))


@settings(max_examples=8)
@given(pairs)
def test_every_module_equals_the_library(pair: Pair) -> None:
    found = differences(pair.ours.double(), pair.theirs.double(), *pair.ids)
    assert max(found.values()) < ROUNDING, found
    assert {name_in_anyformer(name) for name in pair.ours.state_dict()} == set(pair.theirs.state_dict())
    assert set(found) == {name_in_anyformer(name) for name, module in pair.ours.named_modules() if runs(module)}


def runs(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList)


@settings(max_examples=8)
@given(pairs)
def test_with_the_same_order_of_operations_bits_are_equal(pair: Pair) -> None:
    """Linear layers, norms, softmax and GELU by torch's kernels: all that remains is how the model joins them."""
    pair.theirs.backend = "eager"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_scratch.Linear, "forward", lambda self, x: F.linear(x, self.weight, self.bias))
        norm = lambda self, x: F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)  # noqa: E731
        patch.setattr(from_scratch.LayerNorm, "forward", norm)
        patch.setattr(from_scratch, "softmax", lambda scores: scores.softmax(dim=-1))
        copied = lambda q, k, v, mask: attention(q, k.contiguous(), v.contiguous(), mask)  # noqa: E731
        patch.setattr(from_scratch, "attention", copied)  # a matmul may round a transposed view differently
        for module in pair.ours.modules():
            if getattr(module, "act", None) is from_scratch.gelu:
                module.act = lambda x: F.gelu(x, approximate="tanh")
        found = differences(pair.ours, pair.theirs, *pair.ids)
    assert set(found.values()) == {0.0}, found


@settings(max_examples=8)
@given(pairs)
def test_gradients_equal_the_library(pair: Pair) -> None:
    differences(pair.ours.double(), pair.theirs.double(), *pair.ids)  # copies the weights
    for model in (pair.ours, pair.theirs):
        model(*pair.ids).square().mean().backward()
    theirs = dict(pair.theirs.named_parameters())
    for name, weight in pair.ours.named_parameters():
        ours, other = weight.grad, theirs[name_in_anyformer(name)].grad
        if name == "table":  # the library does not train the row of padding
            ours, other = ours[1:], other[1:]
        torch.testing.assert_close(ours, other, rtol=1e-9, atol=1e-12)


def test_padding_is_not_seen() -> None:
    pair = Pair(True, 2, 2, 2, 3, 9).double()
    is_token = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    differences(pair.ours, pair.theirs, *pair.ids)
    theirs = pair.theirs(*pair.ids, source_attention_mask=is_token)
    torch.testing.assert_close(pair.ours(*pair.ids, is_token), theirs, rtol=0, atol=ROUNDING)
    assert not torch.equal(theirs, pair.theirs(*pair.ids))


@settings(max_examples=8)
@given(small, small, small, st.integers(1, 9), st.sampled_from(["none", "causal", "padding"]))
def test_the_formula_is_torchs_attention(b: int, h: int, k: int, t: int, kind: str) -> None:
    q, keys, v = torch.randn(3, b, h, t, k, dtype=torch.float64)
    padding = (torch.arange(t) < torch.randint(1, t + 1, (b, 1)))[:, None, None]
    mask: Tensor | None = {"none": None, "causal": causal_mask(t), "padding": padding}[kind]
    theirs = F.scaled_dot_product_attention(q, keys, v, mask)
    torch.testing.assert_close(attention(q, keys, v, mask), theirs, rtol=0, atol=ROUNDING)


def test_it_learns(capsys: pytest.CaptureFixture[str]) -> None:
    text = torch.tensor(list(b"to be or not to be, that is the question. " * 20))
    from_scratch.train(GPT(1, 32, 2, 128, 32), text, length=32, steps=25)
    first, last = (float(loss) for loss in re.findall(r"loss (.*)", capsys.readouterr().out))
    assert last < 0.8 * first


def test_it_is_short() -> None:
    assert len(Path(from_scratch.__file__).read_text(encoding="utf-8").splitlines()) <= 250

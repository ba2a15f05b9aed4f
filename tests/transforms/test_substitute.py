"""Faster classes: the same parameters under the same names, the same numbers in training and decoding, and back."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyformer as af
from anyformer.config import RMSNorm
from anyformer.nn.model import Transformer
from anyformer.nn.transforms import substitute as fast_classes
from anyformer.nn.transforms.substitute import TABLE, Use, restore, substitute
from anyformer.tasks.base import TokenTask
from anyformer.training.objective import Objective

SIZES = {"width": 32, "heads": 4, "vocab": 97}
PRESETS = ["llama", "gpt2", "gemma", "bert", "t5", "mixtral", "vit"]
USES: tuple[Use, ...] = ("cpu", "cuda", "training")


def built(preset: str, depth: int = 2) -> tuple[Transformer, tuple[Tensor, ...]]:
    """A model whose norms are not the identity, and an input."""
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if preset != "vit" or name != "vocab"} | {"depth": depth}
    model = af.Transformer(getattr(af.presets, preset)(**sizes))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(1, 97, (2, 9))
    if preset == "vit":
        return model, (torch.randn(2, *model.config.source.shape),)
    return model, (ids, ids.flip(1)) if model.encoder and model.decoder else (ids,)


def types(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def everywhere(model: nn.Module) -> None:
    for use in USES:
        substitute(model, use)


def learned(model: Transformer, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output of a training step, and the gradients; dropout draws the same."""
    torch.manual_seed(1)
    out = model.train()(*inputs)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    return [out, *torch.autograd.grad(out.float().square().mean(), weights, allow_unused=True)]


def decoded(model: Transformer, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The output for all tokens at once, and for one after the other where there is a cache."""
    model.eval()
    with torch.no_grad():
        found = [model(*inputs)]
        if model.decoder is not None and model.encoder is None:
            cache = model.new_cache(2, 9)
            found += [model(inputs[0][:, i : i + 1], cache=cache) for i in range(9)]
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_bits_and_back(preset: str) -> None:
    model, inputs = built(preset)
    names, plain = list(model.state_dict()), types(model)
    due = [run(model, inputs) for run in (learned, decoded)]
    assert types(model) == plain  # a model alone stays plain
    everywhere(model)
    assert list(model.state_dict()) == names
    for cls, found in zip(plain.values(), types(model).values(), strict=True):
        assert found is (TABLE[cls].fast if cls in TABLE else cls)
        assert issubclass(found, cls)
    for run, before in zip((learned, decoded), due, strict=True):
        for ours, exact in zip(run(model, inputs), before, strict=True):
            assert (ours is None and exact is None) or torch.equal(ours, exact)
    restore(model)
    assert types(model) == plain


def test_these_models_have_every_plain_class() -> None:
    assert {cls for preset in PRESETS for cls in types(built(preset)[0]).values()} >= set(TABLE)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_compiled_half_precision_training(preset: str) -> None:
    """As near to fp32 as plain modules in bf16 are, where several steps are one kernel."""
    torch.compiler.reset()
    model, inputs = built(preset, depth=1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def slopes(run: Callable[..., Tensor], half: bool = True) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = run(*inputs).float().square().mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    exact, plain = slopes(model.train(), half=False), slopes(model)
    everywhere(model)
    fast = slopes(torch.compile(model, backend="aot_eager"))
    for ours, theirs, due in zip(fast, plain, exact, strict=True):
        assert (ours - due).norm() <= 2 * (theirs - due).norm() + 0.01 * due.norm()


def test_who_substitutes() -> None:
    """Decoding and training do, without a request."""
    model, inputs = built("gpt2")
    plain = types(model)
    af.generate(model, inputs[0], max_new_tokens=1)
    used = types(model)
    assert used != plain
    Objective(model, Mock(spec=TokenTask), 0.0)
    assert types(model) != used


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("cast", ["before_scale", "after_scale"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_in_evaluation_on_a_gpu(cast: str, offset: float, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the formula, whichever kernel fits; another precision of γ takes the formula itself."""
    used = list[str]()

    def one_kernel(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        used.append("kernel")
        return F.rms_norm(x, weight.shape, weight, eps)

    monkeypatch.setattr(fast_classes, "runs_fused", lambda x: True)
    monkeypatch.setattr(fast_classes, "can_norm", lambda x, weight: kernel)
    monkeypatch.setattr(fast_classes, "rms_norm", one_kernel)
    norm, x = RMSNorm(offset=offset, cast=cast).build(16), torch.randn(2, 3, 16)
    nn.init.normal_(norm.weight)
    due = norm(x)
    substitute(norm, "cuda")
    torch.testing.assert_close(norm(x), due)
    assert bool(used) == (kernel and cast == "before_scale")
    used.clear()
    half = x.bfloat16()
    found = norm(half)
    assert not used
    restore(norm)
    assert torch.equal(found, norm(half))

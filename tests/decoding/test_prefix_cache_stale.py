"""`Reuse` forgets what it holds when anything that decides the next token has changed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyformer.attention.cache.kv_cache import CacheKind
from anyformer.config import (
    LM,
    Attention,
    BatchNorm,
    Block,
    Experts,
    ModelConfig,
    NoPosition,
    Rotary,
    SigmoidTopK,
    Stack,
    Tokens,
    Window,
)
from anyformer.generation.generate import generate, stream
from anyformer.generation.prefix_cache import Reuse
from anyformer.nn.experts import SigmoidRouter
from anyformer.nn.model import Transformer

PROMPT = torch.tensor([[1, 2, 3, 4, 5, 6]])
FULL = Block(mixer=Attention(heads=2, position=Rotary()))


def build(block: Block = FULL) -> Transformer:
    torch.manual_seed(0)
    stack = Stack(depth=2, blocks=(block,), position=NoPosition())
    model = Transformer(ModelConfig(width=16, target=Tokens(vocab=13), decoder=stack, head=LM()))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)  # so that answers depend on the whole prompt
    return model.eval()


def check_anew(model: Transformer, reuse: Reuse, **options: Any) -> None:
    """Nothing is reused, and the answer is that of the model as it is now."""
    before, options = reuse.spared, {"max_new_tokens": 6, **options}
    assert torch.equal(generate(model, PROMPT, reuse=reuse, **options), generate(model, PROMPT, **options))
    assert reuse.spared == before


def replace_data(model: Transformer) -> None:
    for weight in model.parameters():
        weight.data = weight.data.flip(0).clone()


def change_data_in_place(model: Transformer) -> None:
    for weight in model.parameters():
        weight.data.mul_(-1)


def double_a_norm(model: Transformer) -> None:
    """All ones before, all twos now."""
    next(weight for weight in model.parameters() if weight.dim() == 1).data.fill_(2)


def reverse_each_row(model: Transformer) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.flip(-1))


def round_weights(model: Transformer) -> None:
    model.to(torch.bfloat16).to(torch.float32)


CHANGES = [replace_data, change_data_in_place, double_a_norm, reverse_each_row, round_weights]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_noticed(change: Callable[[Transformer], None]):
    model, reuse = build(), Reuse()
    generate(model, PROMPT, max_new_tokens=6, reuse=reuse)
    change(model)
    check_anew(model, reuse)


def test_changed_batch_norm_statistics_are_noticed():
    model, reuse = build(FULL.model_copy(update={"norm": BatchNorm()})), Reuse()
    generate(model, PROMPT, max_new_tokens=6, reuse=reuse)
    for name, buffer in model.named_buffers():
        if "mean" in name:
            buffer.add_(torch.linspace(-2, 2, len(buffer)))
    check_anew(model, reuse)


def test_a_changed_router_bias_is_noticed():
    experts = Experts(count=4, top_k=2, router=SigmoidTopK())
    model, reuse = build(FULL.model_copy(update={"feedforward": experts})), Reuse()
    generate(model, PROMPT, max_new_tokens=6, reuse=reuse)
    for part in model.modules():
        if isinstance(part, SigmoidRouter):
            part.bias.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
    check_anew(model, reuse)


def test_weights_that_change_within_a_stream_leave_nothing():
    """A stream lets its caller train: the cache then holds tokens read with two sets of weights."""
    model, reuse = build(), Reuse()
    said = stream(model, PROMPT, max_new_tokens=4, reuse=reuse)
    next(said)
    change_data_in_place(model)
    list(said)
    check_anew(model, reuse)


def test_two_models_with_the_same_weights():
    model, reuse = build(), Reuse()
    narrow = FULL.model_copy(update={"mixer": Attention(heads=2, position=Rotary(), pattern=Window(before=2, after=0))})
    other = build(narrow)
    for name, weight in model.named_parameters():
        other.get_parameter(name).data = weight.data
    generate(model, PROMPT, max_new_tokens=6, reuse=reuse)
    check_anew(other, reuse, cache="static")


@pytest.mark.parametrize("first", ["auto", "static", "int8"])
@pytest.mark.parametrize("then", ["auto", "static", "int8"])
def test_another_kind_of_cache(first: CacheKind, then: CacheKind):
    model, reuse = build(), Reuse()
    generate(model, PROMPT, max_new_tokens=1, cache=first, reuse=reuse)
    if "int8" in (first, then) and first != then:  # what was rounded is not what was not
        check_anew(model, reuse, cache=then)
    generate(model, PROMPT, max_new_tokens=1, cache=then, reuse=reuse)
    assert reuse.spared >= PROMPT.shape[1] - 1


def test_another_precision():
    """Autocast before, none now, and the other way round; then weights of another precision."""
    model, reuse = build(), Reuse()
    for narrow in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            check_anew(model, reuse)
    model.to(torch.float64)
    check_anew(model, reuse)


def test_weights_made_for_inference():
    """They count no changes."""
    with torch.inference_mode():
        model, reuse = build(), Reuse()
        generate(model, PROMPT, max_new_tokens=6, reuse=reuse)
        change_data_in_place(model)
        check_anew(model, reuse)


def test_what_has_not_changed_is_reused():
    model, reuse = build(), Reuse()
    for _ in range(3):
        generate(model, PROMPT, max_new_tokens=1, reuse=reuse)
    assert reuse.spared == 2 * (PROMPT.shape[1] - 1)

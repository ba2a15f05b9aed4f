"""Multi-token prediction: the loss by hand, only within a text; and drafts by the model's own layers change no ids."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import LM, Attention, Block, ConfigError, ModelConfig, MultiToken, Plain, Rotary, Stack, Tokens
from anyformer.generation.generate import generate
from anyformer.generation.speculative import speculate
from anyformer.generation.step import compiled
from anyformer.generation.strategy import OwnHead
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.heads import LossTarget, labels_after
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.recipe import AdamW
from anyformer.recipe.recipe import tensor_faults
from tests.strategies import close, seeds, tokens
from tests.training.small import CROPS, run as train, text

VOCAB = 11


def build(multi_token: MultiToken | None, seed: int = 0) -> Transformer:
    block = Block(mixer=Attention(heads=2), feedforward=Plain(width=16))
    decoder = Stack(depth=2, blocks=(block,), position=Rotary())
    head = LM(multi_token=multi_token)
    torch.manual_seed(seed)
    return Transformer(ModelConfig(width=8, target=Tokens(vocab=VOCAB), decoder=decoder, head=head)).double()


def by_hand(model: Transformer, hidden: Tensor, labels: Tensor, segments: Tensor) -> Tensor:
    """The summed loss, token by token."""
    further, total = model.head.further, torch.zeros((), dtype=torch.float64)
    for row in range(labels.shape[0]):
        for i in range(labels.shape[1]):
            for k in range(len(further) + 1):
                at = i + k
                if at >= labels.shape[1] or labels[row, at] == IGNORE or segments[row, at] != segments[row, i]:
                    continue
                h = hidden[row, i]
                h = h if k == 0 else h + F.silu(further[k - 1](h))
                share = 1.0 if k == 0 else further.weight / len(further)
                total = total + share * F.cross_entropy(h @ model.head.table.T, labels[row, at])
    return total


@pytest.mark.parametrize("sparse", [False, True])
def test_the_loss_by_hand(sparse: bool) -> None:
    """Labels of other texts in a packed row, of padding, and ignored ones have no loss."""
    model = build(MultiToken(tokens=3, weight=0.6)).train()
    ids, labels = tokens(0, 2, 9), tokens(1, 2, 9)
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, -1, -1]])
    labels[segments < 0] = labels[0, 2] = IGNORE
    target = LossTarget(labels)
    if sparse:
        at = (labels.flatten() != IGNORE).nonzero()[:, 0]
        at, filled = F.pad(at, (0, 2)), F.pad(labels.flatten()[at], (0, 2), value=IGNORE)
        target = LossTarget(filled[None], at=at)
    found = model(ids, segments=segments, loss_target=target)
    hidden = model.decode(ids, segments=segments)
    close(found.double(), by_hand(model, hidden, labels, segments), 1e-6)  # the loss is fp32
    base = model.eval()(ids, segments=segments, loss_target=target)
    whole = F.cross_entropy(hidden.flatten(0, 1) @ model.head.table.T, labels.flatten(), reduction="sum")
    close(base.double(), whole, 1e-6)


@given(st.integers(1, 6), st.integers(1, 8))
def test_labels_after(k: int, length: int) -> None:
    labels = torch.arange(length)[None]
    found = labels_after(labels, None, k)[0].tolist()
    assert found == [i + k if i + k < length else IGNORE for i in range(length)]


@given(seeds, st.integers(1, 4), st.integers(1, 4), st.sampled_from([0.0, 1.0]))
def test_drafts_change_no_ids(seed: int, further: int, ahead: int, temperature: float) -> None:
    """Greedy and sampled ids are those of `generate`, in no more calls; rows of other lengths beside each other."""
    model, ids = build(MultiToken(tokens=further), seed).eval(), tokens(seed, 3, 5)
    segments = torch.zeros_like(ids)
    segments[1, :2] = -1
    options = {"max_new_tokens": [7, 12, 4], "segments": segments, "temperature": temperature, "stop": [3]}
    options |= {"seed": seed} if temperature else {}
    found = speculate(model, ids, draft=OwnHead(), ahead=ahead, **options)
    assert found.ids.tolist() == generate(model, ids, **options).tolist()
    assert found.calls <= 13
    assert bool((found.accepted <= found.drafted).all())


@given(seeds, st.sampled_from(["auto", "static", "int8"]), st.booleans())
def test_the_model_is_called_with_one_shape(seed: int, cache: str, stops: bool) -> None:
    """After the prompts every call reads as many tokens, in rows of fixed addresses: what a CUDA graph needs."""
    model, ids, shapes = build(MultiToken(tokens=2), seed).eval(), tokens(seed, 3, 5), []
    decode, extend = model.decode, model.extend

    def read(inputs: Any, *given: Any, **options: Any) -> Tensor:
        shapes.append((tuple(inputs.ids.shape), inputs.layout.positions.shape))
        return decode(inputs, *given, **options)

    def step(ids: Tensor, layout: Any, cache: Any) -> Tensor:
        shapes.append((tuple(ids.shape), layout.positions.shape))
        return extend(ids, layout, cache)

    model.decode, model.extend = read, step
    options = {"max_new_tokens": [9, 3, 0], "cache": cache, "stop": [3] if stops else []}
    found = speculate(model, ids, draft=OwnHead(), ahead=2, **options)
    assert len(shapes) == found.calls
    assert set(shapes[1:]) <= {((3, 3), (3, 3))}
    assert found.ids.tolist() == generate(model, ids, **options).tolist()


def test_a_trained_model_needs_fewer_calls(tmp_path: Path) -> None:
    """On a text that repeats, drafts are accepted, and the answer is that of greedy decoding."""
    recipe = text(tmp_path, batches=CROPS, dropout=0.0, steps=150, optimizer=AdamW(lr=0.02))
    (tmp_path / "text.txt").write_text("abcdefgh" * 60)
    model = recipe.model.model_copy(update={"head": LM(multi_token=MultiToken(tokens=3))})
    found = train(recipe.model_copy(update={"model": model}), tmp_path / "run")
    prompt = torch.tensor([found.tokenizer.encode("abcd")])
    plain = generate(found.model, prompt, max_new_tokens=24)
    drafted = speculate(found.model, prompt, draft=OwnHead(), ahead=3, max_new_tokens=24)
    assert drafted.ids.tolist() == plain.tolist()
    assert drafted.calls < 18  # of 24 tokens
    answers = found.generate(["abcd"], max_new_tokens=24)
    assert found.generate(["abcd"], max_new_tokens=24, self_draft=True) == answers


def test_where_it_does_not_apply() -> None:
    with pytest.raises(ConfigError, match=r"self_draft.*train it with model.head.multi_token"):
        speculate(build(None), tokens(0, 1, 3), draft=OwnHead(), max_new_tokens=3)
    (fault,) = tensor_faults(build(MultiToken()).config.model_copy(update={"target": Tokens(vocab=12)}), 2)
    assert fault.path == "head.multi_token"


def test_cost() -> None:
    plain, more = build(None), build(MultiToken(tokens=3))
    added = more.num_parameters() - plain.num_parameters()
    assert added == 3 * 8 * 8
    assert count(more.config, 16).parameters - count(plain.config, 16).parameters == added
    flops = count(more.config, 16).flops - count(plain.config, 16).flops
    assert flops == 3 * 2 * 16 * (8 * 8 + 8 * VOCAB)


def test_a_compiled_step_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification, dropped drafts and new drafts are traced as a whole, for rows of different lengths."""
    real, model = torch.compile, build(MultiToken(tokens=2))
    monkeypatch.setattr(torch, "compile", lambda run, options: real(run, backend="eager", fullgraph=True))
    compiled.cache_clear()
    try:
        for seed in range(2):
            ids, options = tokens(seed, 3, 4) % VOCAB, {"max_new_tokens": [9, 6, 12], "stop": (3,)}
            with torch._dynamo.config.patch(error_on_recompile=True):
                found = speculate(model, ids, draft=OwnHead(), ahead=2, compile=True, **options)
            assert torch.equal(found.ids, generate(model, ids, **options))
    finally:
        compiled.cache_clear()

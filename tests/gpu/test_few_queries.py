"""Decoding on a GPU: the captured step says what the plain one says, and asks nothing of the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer import presets
from anyformer.attention.cache.kv_cache import CacheKind
from anyformer.config import LM, Attention, Block, ModelConfig, Rotary, Stack, Tokens, Window
from anyformer.generation import buffers, session
from anyformer.generation.beam_search import beam_search
from anyformer.generation.generate import generate, stream
from anyformer.generation.request import Request
from anyformer.generation.session import Session
from anyformer.kernels.expert_matmul import MAX_GATHERED_ROWS
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.quantise import quantise
from anyformer.nn.transforms.rounding import Bits

CUDA = torch.device("cuda")


def window() -> ModelConfig:
    """Rings of 8 tokens."""
    block = Block(mixer=Attention(heads=4, kv_heads=2, pattern=Window(before=8, after=0)))
    stack = Stack(depth=2, blocks=(block,), position=Rotary())
    return ModelConfig(width=64, target=Tokens(vocab=97), decoder=stack, head=LM(), tie="output")


SMALL: dict[str, Callable[[], ModelConfig]] = {
    "gpt2": lambda: presets.gpt2(depth=2, width=64, heads=4, vocab=97, length=80),
    "llama": lambda: presets.llama(depth=2, width=64, heads=4, kv_heads=2, vocab=97),
    "window": window,
    "mixtral": lambda: presets.mixtral(depth=2, width=64, heads=4, kv_heads=2, vocab=97, experts=4),
    "deepseek": lambda: presets.deepseek(depth=2, width=64, heads=4, vocab=97),
    "gemma2": lambda: presets.gemma2(depth=2, width=64, heads=4, kv_heads=2, vocab=97),
    "t5": lambda: presets.t5(depth=2, width=64, heads=4, vocab=97),
}


def build(name: str) -> Transformer:
    torch.manual_seed(0)
    return Transformer(SMALL[name]()).to(CUDA).eval()


@torch.no_grad()
def sharpened(model: Transformer) -> Transformer:
    """So that no two beams are as good as each other, which rounding would decide."""
    for x in model.parameters():
        x.mul_(6 if x.dim() > 1 else 1)
    return model


def prompts(seed: int = 1) -> tuple[Tensor, Tensor]:
    """Of unequal length."""
    ids = torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(seed)).to(CUDA)
    segments = torch.zeros_like(ids)
    segments[seed % 3, :5] = -1
    segments[(seed + 1) % 3, :9] = -1
    return ids, segments


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What a function gives without graphs."""

    def say(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(buffers, "captures", lambda device: False)
            return function(*args, **options)

    return say


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3},
    "int8": {"cache": "int8"},
    "static": {"cache": "static", "stop": (5, 6, 7, 8, 9, 10)},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", SMALL)
def test_replayed_as_plain(name: str, how: str, plain: Callable[..., Any]):
    model = build(name)
    for seed in range(1, 4):  # prompts are read plainly, then captured, then replayed
        ids, segments = prompts(seed)
        options = {"max_new_tokens": 40, "segments": segments, **HOW[how]}
        assert torch.equal(generate(model, ids, **options), plain(generate, model, ids, **options))


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_replayed_under_autocast(name: str, plain: Callable[..., Any]):
    """What autocast keeps of weights is gone with it."""
    model = build(name)
    for seed in range(1, 4):
        with torch.no_grad():
            for x in model.parameters():
                x.add_(torch.randn_like(x) * 0.02)
        with torch.autocast("cuda", torch.bfloat16):
            ours = generate(model, prompts(seed)[0], max_new_tokens=20)
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.equal(ours, plain(generate, model, prompts(seed)[0], max_new_tokens=20))


def test_compiled_as_plain(plain: Callable[..., Any]):
    model, (ids, segments) = build("llama"), prompts()
    options: dict[str, Any] = {"max_new_tokens": 40, "segments": segments}
    assert torch.equal(generate(model, ids, compile=True, **options), plain(generate, model, ids, **options))


def test_up_to_the_last_position():
    """A graph looks at no position: near the end of a table of 80, the model itself does."""
    model, ids = build("gpt2"), prompts()[0]
    assert generate(model, ids, max_new_tokens=69).shape == (3, 81)
    with pytest.raises(ValueError, match="past the end of 80"):
        generate(model, ids, max_new_tokens=70)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["t5", "llama", "window"])
def test_beams_on_a_graph(name: str, compile: bool, plain: Callable[..., Any]):
    model = sharpened(build(name))
    for seed in range(1, 4):  # later ones find the graphs of the first
        ids, segments = prompts(seed)
        options: dict[str, Any] = {"beams": 3, "max_new_tokens": 40, "n_best": 2, "stop": (4,), "segments": segments}
        alone = plain(beam_search, model, ids, **options)
        ours = beam_search(model, ids, compile=compile, **options)
        assert torch.equal(ours.ids, alone.ids)
        torch.testing.assert_close(ours.scores, alone.scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(("name", "beams"), [("deepseek", 4), ("mixtral", 12)])
def test_beams_of_many_expert_rows(name: str, beams: int, compile: bool, plain: Callable[..., Any]):
    """In fp32 a step with too many rows to gather a matrix for each cannot read on the host how many an expert has."""
    model = sharpened(build(name))
    for seed in range(1, 4):
        ids, segments = prompts(seed)
        assert len(ids) * beams * {"deepseek": 6, "mixtral": 2}[name] > MAX_GATHERED_ROWS
        options: dict[str, Any] = {"beams": beams, "max_new_tokens": 40, "n_best": 2, "segments": segments}
        alone = plain(beam_search, model, ids, **options)
        ours = beam_search(model, ids, compile=compile, **options)
        assert torch.equal(ours.ids, alone.ids)
        torch.testing.assert_close(ours.scores, alone.scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["deepseek", "mixtral"])
def test_rounded_experts_replayed_as_plain(name: str, bits: Bits, plain: Callable[..., Any]):
    model, (ids, segments) = quantise(sharpened(build(name)), bits), prompts()
    for count in (1, 12):  # few rows, and more than have matrices gathered
        options: dict[str, Any] = {"max_new_tokens": 20, "segments": segments.repeat(count, 1)}
        rows = ids.repeat(count, 1)
        assert torch.equal(generate(model, rows, **options), plain(generate, model, rows, **options))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", ["t5", "llama", "window", "deepseek"])
def test_beams_read_rows_that_stay_in_place(name: str, compile: bool, monkeypatch: pytest.MonkeyPatch):
    """In half precision, as if keys and values moved: the same kernel reads the same values from elsewhere."""
    model = sharpened(build(name)).bfloat16()
    options: dict[str, Any] = {"beams": 4, "max_new_tokens": 40, "n_best": 2, "stop": (4,)}
    problems = [prompts(seed) for seed in range(1, 4)]
    with evaluating(model):
        assert Session(model, Request(problems[0][0], max_new_tokens=2), copies=4).cache.origins is not None
    ours = [beam_search(model, ids, segments=segments, compile=compile, **options) for ids, segments in problems]
    monkeypatch.setattr(session, "_can_share_rows", lambda cache: False)
    moved = build(name).bfloat16()  # without the graphs of the first
    moved.load_state_dict(model.state_dict())
    for found, (ids, segments) in zip(ours, problems, strict=True):
        other = beam_search(moved, ids, segments=segments, compile=compile, **options)
        assert torch.equal(found.ids, other.ids)
        torch.testing.assert_close(found.scores, other.scores)


@pytest.mark.parametrize("name", ["t5", "llama", "window"])
def test_nothing_is_compiled_while_a_step_is_captured(name: str):
    """A compiler that runs then may read from the device, which ends the capture with an error."""
    torch._dynamo.reset()
    model = build(name)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(1, 4):
            ids, segments = prompts(seed)
            beam_search(model, ids, beams=3, max_new_tokens=12, segments=segments, compile=True)
            generate(model, ids, max_new_tokens=12, segments=segments, compile=True)


@pytest.mark.parametrize("kind", ["auto", "int8"])
@pytest.mark.parametrize("name", ["t5", "window", "deepseek"])
@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_neighbours_change_places(name: str, kind: CacheKind, group_size: int):
    """As any rows do."""
    model = build(name)
    ids = torch.randint(3, 97, (6 * group_size, 21), generator=torch.Generator().manual_seed(1)).to(CUDA)
    choice = torch.randint(group_size, (6, group_size), generator=torch.Generator().manual_seed(2))
    rows = (choice + torch.arange(6)[:, None] * group_size).flatten().to(CUDA)
    with evaluating(model):
        one, other = (model.new_cache(len(ids), 40, kind=kind) for _ in range(2))
        for cache in (one, other):
            memory = None if model.encoder is None else model.encode(ids[:, :5] * 0 + 7)
            model.decode(ids, memory, cache=cache)
        one.reorder(rows, group_size=group_size)
        other.reorder(rows)
        assert all(torch.equal(a, b) for a, b in zip(one._state(), other._state(), strict=True))


def test_the_next_call_finds_the_graph(plain: Callable[..., Any]):
    """Other prompts and other weights, in the same places; then two streams at once, and weights elsewhere."""
    model, (ids, _) = build("gpt2"), prompts()
    for seed in range(3):
        ids = torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(seed)).to(CUDA)
        assert torch.equal(generate(model, ids, max_new_tokens=20), plain(generate, model, ids, max_new_tokens=20))
        with torch.no_grad():
            for x in model.parameters():
                x.add_(torch.randn_like(x) * 0.02)
    two = [stream(model, ids[i], max_new_tokens=20) for i in ([0, 1], [1, 2])]
    said = list(zip(*two, strict=True))
    for i, rows in enumerate(([0, 1], [1, 2])):
        whole = plain(generate, model, ids[rows], max_new_tokens=20)
        assert torch.equal(torch.stack([pair[i][0] for pair in said], dim=1), whole[:, 12:])
    model = model.double().float()
    with torch.no_grad():
        model.target.table.weight.add_(1.0)
    assert torch.equal(generate(model, ids, max_new_tokens=20), plain(generate, model, ids, max_new_tokens=20))


@pytest.mark.parametrize("name", SMALL)
def test_a_step_asks_nothing_of_the_host(name: str):
    model, (ids, segments) = build(name), prompts()
    with evaluating(model):
        running = Session(model, Request(ids, max_new_tokens=20, segments=segments))
        for i in range(12):
            if i == 3:  # plain, captured and replayed once
                torch.cuda.set_sync_debug_mode("error")
            try:
                new = running.logits.argmax(dim=-1, keepdim=True)
                running.read(new, torch.ones_like(new, dtype=torch.bool))
            except BaseException:
                torch.cuda.set_sync_debug_mode("default")
                raise
        torch.cuda.set_sync_debug_mode("default")

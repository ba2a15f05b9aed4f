"""torch.compile: one graph, no breaks, no recompilation, the same numbers."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from anyformer.attention.cache.kv_cache import Cache, CacheKind
from anyformer.attention.layout import Layout
from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    FactorisedTable,
    Gated,
    Gelu,
    Latent,
    LayerNorm,
    Learned,
    MaskedLM,
    ModelConfig,
    NoPosition,
    Parallel,
    Pattern,
    Plain,
    Position,
    RMSNorm,
    Rotary,
    Sinusoidal,
    SqrtWidth,
    Stack,
    T5Bias,
    Tokens,
    Unscaled,
    Window,
)
from anyformer.nn.model import Transformer
from tests.strategies import VOCAB, build, tokens

WIDTH = 8


def decoder(position: Position, *blocks: Block, depth: int | None = None, **fields) -> ModelConfig:
    """As deep as there are kinds of blocks: layers of one kind compile alike."""
    stack = Stack(depth=depth or len(blocks), blocks=blocks, position=position, final_norm=blocks[0].norm, **fields)
    return ModelConfig(width=WIDTH, target=Tokens(vocab=VOCAB, pad=0), decoder=stack, head=LM(), tie="output")


def attention(pattern: Pattern | None = None, **fields) -> Attention:
    return Attention(heads=2, pattern=pattern, **fields)


MODERN = Block(
    mixer=Attention(heads=4, kv_heads=2, key_width=4, qk_norm=RMSNorm()), norm=RMSNorm(), feedforward=Gated(width=12)
)
LOCAL = MODERN.model_copy(
    update={"mixer": Attention(heads=2, pattern=Window(before=2, after=0), position=Rotary(theta=100.0))}
)
CROSSING = Block(mixer=attention(scale=Unscaled()), cross=attention(scale=Unscaled()), norm=RMSNorm())
DECODERS = {
    "learned, pre": decoder(
        Learned(length=16), Block(mixer=attention(bias=True), feedforward=Plain(activation=Gelu()))
    ),
    "rotary, grouped, local and global": decoder(Rotary(), LOCAL, MODERN),
    "alibi, parallel": decoder(Alibi(), Block(mixer=attention(), order=Parallel(shared_norm=True))),
    "t5 per layer, sandwich": decoder(
        T5Bias(shared=False), Block(mixer=attention(Window(before=4, after=0)), placement="sandwich"), depth=2
    ),
    "sinusoidal, post": decoder(Sinusoidal(), Block(mixer=attention(), placement="post")),
    "latent, local and global": decoder(
        Rotary(),
        Block(mixer=attention(Window(before=2, after=0), compress=Latent(rank=3, rotary_width=2, query_rank=5))),
        Block(mixer=attention(compress=Latent(rank=5, rotary_width=2))),
    ),
    "none, relu, shared weights": decoder(
        NoPosition(), Block(mixer=attention(normalizer="relu"), placement="branch"), depth=2, share=True
    ),
}
ENCODER = ModelConfig(
    width=WIDTH,
    source=Tokens(vocab=VOCAB, types=2, table=FactorisedTable(width=5), norm=LayerNorm()),
    encoder=Stack(
        depth=1,
        blocks=(Block(mixer=attention(Window(before=2, after=2)), placement="post"),),
        position=Learned(length=16),
    ),
    head=MaskedLM(),
    tie="output",
)
PAIR = ModelConfig(
    width=WIDTH,
    source=Tokens(vocab=VOCAB, scale=SqrtWidth()),
    target=Tokens(vocab=VOCAB, scale=SqrtWidth()),
    encoder=Stack(depth=1, blocks=(CROSSING.model_copy(update={"cross": None}),), position=T5Bias()),
    decoder=Stack(depth=1, blocks=(CROSSING,), position=T5Bias()),
    head=LM(),
    tie="all",
)
CONFIGS = {**DECODERS, "encoder": ENCODER, "encoder-decoder": PAIR}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def call(model: Transformer, seed: int, padded: bool) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """New data of the same shape, with padding or without."""
    ids, segments = tokens(seed, 3, 7), torch.zeros(3, 7, dtype=torch.long)
    segments[0, seed % 3 + 1 :] = -1
    if model.config.shape != "encoder-decoder":
        return (ids,), {"segments": segments} if padded else {}
    return (tokens(seed + 1, 3, 7), ids), {"source_segments": segments} if padded else {}


def trained(model: Transformer, run: Callable, seed: int, padded: bool) -> Tensor:
    """The output and the gradients of all weights, as one vector."""
    args, options = call(model, seed, padded)
    model.zero_grad()
    out = run(*args, **options)
    out.logsumexp(dim=-1).sum().backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([out.detach().flatten(), *grads])


def assert_one_graph() -> None:
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def runs(compiled: Callable, plain: Callable, calls: list[tuple], compare: Callable[[Tensor, Tensor], None]) -> None:
    """The first call compiles, and every later one must do with that."""
    for i, args in enumerate(calls):
        with torch.compiler.set_stance("default" if i == 0 else "fail_on_recompile"):
            compare(compiled(*args[0]), plain(*args[1]))
    assert_one_graph()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        *((name, False) for name in DECODERS),
        *((name, True) for name in ("alibi, parallel", "encoder", "encoder-decoder")),
    ],
)
def test_forward(name: str, padded: bool):
    """In training and with gradients, several batches."""
    model = build(CONFIGS[name]).train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    calls = [((seed,), (seed,)) for seed in range(3)]
    runs(
        lambda seed: trained(model, compiled, seed, padded),
        lambda seed: trained(model, model, seed, padded),
        calls,
        close,
    )


def step_of(model: Transformer) -> Callable[[Tensor, Cache], Tensor]:
    def step(ids: Tensor, cache: Cache) -> Tensor:
        return model.apply_head(model.decode(ids, cache=cache), Layout(cache.following[:, None]))

    return step


def prompted(model: Transformer, seed: int, kind: CacheKind) -> Cache:
    """A ragged prompt in a new cache."""
    cache, segments = model.new_cache(2, 12, kind=kind), torch.tensor([[0, 0, 0, 0], [-1, 0, 0, 0]])
    memory = {"encoder_out": model.encode(tokens(seed + 1, 2, 5))} if model.encoder else {}
    model.decode(tokens(seed, 2, 4), segments=segments, cache=cache, **memory)
    return cache


def steps(model: Transformer, seed: int, kind: CacheKind = "auto") -> list[tuple]:
    """New tokens one by one, into two caches that hold the same."""
    mine, other = prompted(model, seed, kind), prompted(model, seed, kind)
    return [((ids, mine), (ids, other)) for ids in tokens(seed, 4, 2, 1)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "auto") for name in (*DECODERS, "encoder-decoder")), ("latent, local and global", "int8")],
)
def test_decode_step(name: str, kind: CacheKind):
    """One token at a time into a cache: compiled once, for this cache and for the next one of the same size."""
    model = build(CONFIGS[name])
    step, calls = step_of(model), [*steps(model, 0, kind), *steps(model, 10, kind)]
    assert bool(calls[0][0][1].rings) == ("local" in name or "t5 per layer" in name)
    runs(torch.compile(step, backend="eager", fullgraph=True), step, calls, close)
    assert all(int(cache.length) == 8 for args in calls for _, cache in args)


# -- inductor itself, which takes its time ----------------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
deprecated = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on import
SMALL = {name: CONFIGS[name] for name in ("rotary, grouped, local and global", "encoder-decoder")}


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max().clamp(min=1)))


@needs_compiler
@deprecated
@pytest.mark.parametrize("name", SMALL, ids=["decoder", "pair"])
@torch.no_grad()
def test_inductor(name: str):
    """Really compiled, in fp32: outputs within 1e-5 of the model as it is."""
    model = build(SMALL[name]).float()
    compiled = torch.compile(model, fullgraph=True)
    batches = [call(model, seed, padded=True) for seed in range(3)]
    calls = [((args, options), (args, options)) for args, options in batches]
    runs(lambda args, options: compiled(*args, **options), lambda args, options: model(*args, **options), calls, near)


@needs_compiler
@deprecated
@torch.no_grad()
def test_inductor_decode_step():
    model = build(SMALL["rotary, grouped, local and global"]).float()
    step = step_of(model)
    runs(torch.compile(step, fullgraph=True), step, steps(model, 0), near)

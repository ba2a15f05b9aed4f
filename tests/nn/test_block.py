"""Blocks: sublayers around the residual stream, by explicit formula."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn import functional as F

from anyformer.attention.layout import make_layout
from anyformer.attention.lowered import Dense, Relation
from anyformer.config import (
    LM,
    Attention,
    Block,
    Classifier,
    ConfigError,
    LayerNorm,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    Parallel,
    Plain,
    Projected,
    RMSNorm,
    Sequential,
    Stack,
    Tanh,
    TokenLabels,
    Tokens,
)
from anyformer.nn.block import Sublayer, build_block
from anyformer.nn.context import Context, Crossing, Tap
from anyformer.nn.model import Transformer
from tests.strategies import HERE, build, close, seeds, tokens

WIDTH = 6
ATTENTION = Attention(heads=2, output=Projected(bias=True))
FEEDFORWARD = Plain(width=7, activation=Tanh())
PLACEMENTS = ["pre", "post", "branch", "sandwich"]
ORDERS = [Sequential(), Parallel(), Parallel(shared_norm=True)]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def made(spec: Block, seed: int = 0) -> nn.Module:
    block = build_block(spec, WIDTH).double().eval()
    torch.manual_seed(seed)
    for parameter in block.parameters():
        parameter.data = torch.randn_like(parameter)
    return block


def context(seed: int = 0) -> Context:
    return Context(HERE, HERE, Relation(Dense(causal=True)), cross=Crossing(Relation(), random(seed, 2, 3, WIDTH)))


@given(seeds, st.sampled_from([LayerNorm(), RMSNorm(), NoNorm()]))
def test_the_jacobian_of_a_residual_sublayer(seed: int, norm):
    """x + F(N x) has the Jacobian I + J_F: the identity passes every gradient through, whatever F does."""
    block, ctx = made(Block(mixer=ATTENTION, feedforward=FEEDFORWARD, norm=norm), seed), context(seed)
    x = random(seed, 1, 3, WIDTH)
    for sublayer in block.values():

        def branch(x: Tensor, sublayer: Sublayer = sublayer) -> Tensor:
            return sublayer.inner(sublayer.norm_in(x), ctx)

        whole = jacobian(lambda x, sublayer=sublayer: sublayer(x, ctx), x).view(3 * WIDTH, 3 * WIDTH)
        alone = jacobian(branch, x).view(3 * WIDTH, 3 * WIDTH)
        assert alone.abs().max() > 1e-3
        close(whole, torch.eye(3 * WIDTH, dtype=torch.float64) + alone)


def normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), norm.weight, norm.bias, 1e-5)  # fails on a missing sublayer


def formula(block: nn.Module, spec: Block, x: Tensor, ctx: Context) -> Tensor:
    """Every placement in every order, written out."""
    names = ["mixer", *(["cross"] if spec.cross else []), "feedforward"]
    subs = [getattr(block, name) if isinstance(spec.order, Parallel) else block[name] for name in names]
    branches = [lambda x, sub=sub: sub.inner(x, ctx) for sub in subs]

    def past(x: Tensor) -> Tensor | int:
        return x if spec.residual else 0

    match spec.order, spec.placement:
        case Sequential(), "pre":
            for f, sub in zip(branches, subs, strict=True):
                x = past(x) + f(normed(sub.norm_in, x))
        case Sequential(), "post":
            for f, sub in zip(branches, subs, strict=True):
                x = normed(sub.norm_sum, past(x) + f(x))
        case Sequential(), "branch":
            for f, sub in zip(branches, subs, strict=True):
                x = past(x) + normed(sub.norm_branch, f(x))
        case Sequential(), "sandwich":
            for f, sub in zip(branches, subs, strict=True):
                x = past(x) + normed(sub.norm_branch, f(normed(sub.norm_in, x)))
        case Parallel(shared_norm=False), "pre":
            x = past(x) + sum(f(normed(sub.norm_in, x)) for f, sub in zip(branches, subs, strict=True))
        case Parallel(shared_norm=True), "pre":
            x = past(x) + sum(f(normed(block.norm_in, x)) for f in branches)
        case Parallel(), "post":
            x = normed(block.norm_sum, past(x) + sum(f(x) for f in branches))
        case Parallel(), "branch":
            x = past(x) + sum(normed(sub.norm_branch, f(x)) for f, sub in zip(branches, subs, strict=True))
        case Parallel(shared_norm=False), "sandwich":
            x = past(x) + sum(
                normed(s.norm_branch, f(normed(s.norm_in, x))) for f, s in zip(branches, subs, strict=True)
            )
        case Parallel(shared_norm=True), "sandwich":
            x = past(x) + sum(
                normed(s.norm_branch, f(normed(block.norm_in, x))) for f, s in zip(branches, subs, strict=True)
            )
    return x


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "parallel", "parallel-shared"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "bare"])
def test_placements(placement: str, order, cross: bool, residual: bool):
    spec = Block(
        mixer=ATTENTION,
        cross=ATTENTION if cross else None,
        feedforward=FEEDFORWARD,
        placement=placement,
        order=order,
        residual=residual,
    )
    block, x, ctx = made(spec), random(5, 2, 4, WIDTH), context()
    close(block(x, ctx), formula(block, spec, x, ctx))
    # no norm beside those of the formula
    sublayers = 3 if cross else 2
    shared = isinstance(order, Parallel) and (order.shared_norm or placement == "post")
    expected = {"pre": 1, "post": 1, "branch": sublayers, "sandwich": sublayers + 1} if shared else {}
    expected = expected or {"pre": sublayers, "post": sublayers, "branch": sublayers, "sandwich": 2 * sublayers}
    assert sum(isinstance(module, nn.LayerNorm) for module in block.modules()) == expected[placement]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "parallel", "parallel-shared"])
def test_without_norms_all_placements_are_one(placement: str, order):
    spec = Block(mixer=ATTENTION, feedforward=FEEDFORWARD, norm=NoNorm(), placement=placement, order=order)
    reference = Block(
        mixer=ATTENTION,
        feedforward=FEEDFORWARD,
        norm=NoNorm(),
        order=Parallel() if isinstance(order, Parallel) else Sequential(),
    )
    x, ctx = random(5, 2, 4, WIDTH), context()
    close(made(spec)(x, ctx), made(reference)(x, ctx))


def test_no_feedforward_is_no_sublayer():
    block = made(Block(mixer=ATTENTION, feedforward=NoFeedForward()))
    assert list(block) == ["mixer"]
    x, ctx = random(5, 2, 4, WIDTH), context()
    close(block(x, ctx), block["mixer"](x, ctx))


def stack(depth: int, **fields) -> ModelConfig:
    block = Block(mixer=ATTENTION, feedforward=FEEDFORWARD, **fields)
    return ModelConfig(width=WIDTH, source=Tokens(vocab=11), encoder=Stack(depth=depth, blocks=(block,)))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("norm", [NoNorm(), LayerNorm(), RMSNorm()], ids=lambda norm: norm.kind)
@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "parallel", "parallel-shared"])
def test_zeroed_branches(placement: str, norm, order):
    """Then a stack is the identity, exactly; but with post-norms it is N(…N(x))."""
    depth = 3
    model = Transformer(stack(depth, norm=norm, placement=placement, order=order)).double()
    for name, parameter in model.named_parameters():
        if any(last in name for last in ("inner.out.", "inner.down.")):
            nn.init.zeros_(parameter)
    x, layout = random(0, 2, 4, WIDTH) * 3, make_layout(2, 4, torch.device("cpu"))
    out = model.encoder(x, layout)
    if placement != "post" or norm.kind == "none":
        assert torch.equal(out, x)
        return
    for _ in range(depth if isinstance(order, Parallel) else 2 * depth):
        x = F.layer_norm(x, (WIDTH,)) if norm.kind == "layer" else F.rms_norm(x, (WIDTH,), eps=1e-6)
    close(out, x)


def test_only_what_enters_the_residual_stream_is_scaled_by_depth():
    """Where nothing is added up, nothing grows with depth."""
    init = {"kind": "normal", "std": 0.5, "residual": True}
    scaled, whole = (Transformer(stack(8, residual=on).model_copy(update={"init": init})) for on in (True, False))
    for model, std in ((scaled, 0.5 / 4), (whole, 0.5)):
        for part, last in (("mixer", "out"), ("feedforward", "down")):
            weights = [getattr(block[part].inner, last).weight.detach() for block in model.encoder.blocks]
            torch.testing.assert_close(float(torch.stack(weights).std()), std, rtol=0.15, atol=0)


def test_a_block_of_nothing_passes_its_input_on():
    block = {"mixer": "none", "feedforward": "none", "norm": "none"}
    x, ctx = random(0, 2, 4, WIDTH), context()
    for order in ORDERS:
        assert torch.equal(made(Block(**block, order=order))(x, ctx), x)
    with pytest.raises(ConfigError, match=r"encoder\.blocks\.0\.residual = False: a block without sublayers"):
        ModelConfig(width=WIDTH, source=Tokens(vocab=11), encoder=Stack(depth=1, blocks=Block(**block, residual=False)))


# -- dropout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("order", ORDERS, ids=["sequential", "parallel", "parallel-shared"])
def test_dropout_falls_on_what_enters_the_residual_stream(placement: str, order):
    """After the branch's last norm: each number is zero or 1/(1-p) times itself, and x itself is never dropped."""
    p = 0.3
    spec = Block(mixer=ATTENTION, feedforward=NoFeedForward(), placement=placement, order=order, dropout=p)
    block, x = made(spec), random(1, 40, 50, WIDTH)
    seen: dict[str, Tensor] = {}
    taps = Tap(lambda name, x: seen.setdefault(name, x))
    ctx = Context(HERE, HERE, Relation(Dense(causal=True)), taps=taps)
    block.eval()(x, ctx)
    plain = seen.pop("mixer.out")
    out = block.train()(x, ctx)
    added = seen["mixer.out"]
    kept = added != 0
    close(added[kept], plain[kept] / (1 - p))
    assert abs(float(kept.double().mean()) - (1 - p)) < 4 * math.sqrt(p * (1 - p) / added.numel())
    norm = (block if isinstance(order, Parallel) else block["mixer"]).norm_sum
    close(out, norm(x + added))


PLACES = ["embeddings", "weights", "cross weights", "hidden", "sublayers", "stack", "labels", "classes"]


def dropping(place: str | None, p: float) -> ModelConfig:
    """A model that drops in one place only."""

    def at(*places: str) -> float:
        return p if place in places else 0.0

    attention = Attention(heads=2, dropout=at("weights"))
    block = Block(
        mixer=attention,
        cross=Attention(heads=2, dropout=at("cross weights")),
        feedforward=Plain(dropout=at("hidden")),
        dropout=at("sublayers"),
    )
    read = Tokens(vocab=11, dropout=at("embeddings"))
    alone = block.model_copy(update={"cross": None})
    head = LM()
    if place == "labels":
        head = TokenLabels(labels=5, dropout=p)
    if place == "classes":
        head = Classifier(labels=5, dropout=p)
    return ModelConfig(
        width=8,
        source=read,
        target=read,
        encoder=Stack(depth=1, blocks=(alone,), dropout=at("stack")),
        decoder=Stack(depth=1, blocks=(block,)),
        head=head,
    )


@pytest.mark.parametrize("place", PLACES)
def test_every_place_drops_in_training_only(place: str):
    model, args = build(dropping(place, 0.5)), (tokens(0, 2, 5), tokens(1, 2, 4))
    with torch.no_grad():
        still = model.eval()(*args)
        assert torch.equal(model(*args), still)
        model.train()
        first, second = model(*args), model(*args)
    assert not torch.equal(first, still)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("place", PLACES)
def test_without_dropout_training_computes_what_eval_does(place: str):
    """And a probability of 0 draws no random number."""
    model, args = build(dropping(place, 0.0)), (tokens(0, 2, 5), tokens(1, 2, 4))
    before = torch.get_rng_state()
    assert torch.equal(model.train()(*args), model.eval()(*args))
    assert torch.equal(torch.get_rng_state(), before)

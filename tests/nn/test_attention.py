"""Multi-head attention by its formula, head by head."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.attend import attend
from anyformer.attention.cache.ring import Step
from anyformer.attention.layout import make_layout
from anyformer.attention.lowered import Dense, Relation
from anyformer.attention.scores import Scoring
from anyformer.config import (
    Attention,
    Block,
    Latent,
    LayerNorm,
    ModelConfig,
    NoNorm,
    NoOutput,
    Projected,
    RMSNorm,
    Rotary,
    Stack,
    Tokens,
)
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.context import Context, Crossing, PassOptions, Tap
from tests.strategies import HERE, attentions, build as whole, close, seeds, tokens

WIDTH = 8
FREE = Context(HERE, HERE, Relation())  # every key, no positions
CAUSAL = Context(HERE, HERE, Relation(Dense(causal=True)))


def build(spec: Attention, seed: int = 0, cross: bool = False) -> MultiHeadAttention:
    torch.manual_seed(seed)
    module = (CrossAttention(spec, WIDTH) if cross else spec.build(WIDTH)).double().eval()
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    return module


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def every_key(spec: Attention) -> Relation:
    """No mask, for the kernel that supports the layer."""
    plain = spec.normalizer == "softmax" and spec.cap is None and not spec.sinks
    return Relation(Dense(kernel="sdpa" if plain else "eager"))


def look(module: MultiHeadAttention, x: Tensor, context: Context = FREE) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and every activation by its name."""
    seen: dict[str, Tensor] = {}
    return module(x, context._replace(taps=Tap(lambda name, x: seen.setdefault(name, x)))), seen


def linear(part: nn.Linear, x: Tensor, rows: slice) -> Tensor:
    """One part of a fused linear layer: its rows of weight and bias."""
    return F.linear(x, part.weight[rows], None if part.bias is None else part.bias[rows])


def by_head(module: MultiHeadAttention, spec: Attention, x: Tensor, encoder_out: Tensor) -> Tensor:
    """The same from separate linear layers, one head at a time, each reading the whole embedding."""
    h, g = spec.heads, spec.groups
    k, k_v = spec.widths(WIDTH)
    if isinstance(module, CrossAttention):
        query, key_value, first = module.q, module.kv, 0
    else:
        query = key_value = module.qkv
        first = {"separate": h * k, "shared_qk": 0, "shared_qkv": 0}[spec.projections]  # where the keys begin
    values = first if spec.projections == "shared_qkv" else first + g * k
    heads, queries = [], normed(module.q_norm, spec, linear(query, x, slice(0, h * k)), k)
    keys = normed(module.k_norm, spec, linear(key_value, encoder_out, slice(first, first + g * k)), k)
    for i in range(h):
        j = i // (h // g)
        q, key = queries[i], keys[j]
        v = linear(key_value, encoder_out, slice(values + j * k_v, values + (j + 1) * k_v))
        sink = None if module.sinks is None else module.sinks[i : i + 1]
        scoring = Scoring(module.scale, spec.normalizer, spec.cap, sink)
        one = attend(q[:, None], key[:, None], v[:, None], every_key(spec).lowered, scoring)
        if module.gate is not None:
            size = module.gate.out_features // h
            one = one * linear(module.gate, x, slice(i * size, (i + 1) * size)).sigmoid()[:, None]
        heads.append(one[:, 0])
    together = torch.cat(heads, dim=-1)
    return together if isinstance(spec.output, NoOutput) else module.out(together)


def normed(norm: nn.Module, spec: Attention, x: Tensor, width: int) -> tuple[Tensor, ...]:
    """Queries or keys, head by head: normed with one γ, with a γ for each, or before they are split."""
    if spec.qk_norm_over == "projection":
        return norm(x).split(width, dim=-1)
    parts = x.split(width, dim=-1)
    if spec.qk_norm_over == "head":
        return tuple(map(norm, parts))
    gammas = norm.weight.split(width)
    if isinstance(spec.qk_norm, RMSNorm):
        return tuple(F.rms_norm(one, (width,), gamma, 1e-6) for one, gamma in zip(parts, gammas, strict=True))
    both = zip(parts, gammas, norm.bias.split(width), strict=True)
    return tuple(F.layer_norm(one, (width,), gamma, beta, 1e-5) for one, gamma, beta in both)


@given(attentions(), seeds, st.integers(1, 5))
def test_self_attention_head_by_head(spec: Attention, seed: int, length: int):
    """Fused q, k and v equal separate layers, for separate, q = k and q = k = v, for any heads, groups and widths."""
    module, x = build(spec, seed), random(seed, 2, length, WIDTH)
    close(module(x, Context(HERE, HERE, every_key(spec))), by_head(module, spec, x, x))


@given(attentions(cross=True), seeds, st.integers(1, 5), st.integers(1, 5))
def test_cross_attention_head_by_head(spec: Attention, seed: int, length: int, source: int):
    module, x, encoder_out = (
        build(spec, seed, cross=True),
        random(seed, 2, length, WIDTH),
        random(seed + 1, 2, source, WIDTH),
    )
    out = module(x, Context(HERE, HERE, Relation(), cross=Crossing(every_key(spec), encoder_out)))
    close(out, by_head(module, spec, x, encoder_out))


@pytest.mark.parametrize("causal", [False, True])
@given(heads=st.sampled_from([1, 2, 4, 8]), bias=st.booleans(), seed=seeds)
def test_equals_torch(causal: bool, heads: int, bias: bool, seed: int):
    """Equal to torch.nn.MultiheadAttention where the shapes agree."""
    ours = build(Attention(heads=heads, bias=bias, output=Projected(bias=bias)), seed)
    theirs = nn.MultiheadAttention(WIDTH, heads, bias=bias, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.out_proj.weight.copy_(ours.out.weight)
        if bias:
            theirs.in_proj_bias.copy_(ours.qkv.bias)
            theirs.out_proj.bias.copy_(ours.out.bias)
    x = random(seed, 2, 5, WIDTH)
    ahead = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    expected, weights = theirs(x, x, x, attn_mask=ahead, average_attn_weights=False)
    out, seen = look(ours, x, CAUSAL if causal else FREE)
    close(out, expected)
    close(seen["weights"], weights)


@pytest.mark.parametrize(
    ("projections", "rows"), [("separate", 3 * WIDTH), ("shared_qk", 2 * WIDTH), ("shared_qkv", WIDTH)]
)
def test_what_shared_projections_hold(projections: str, rows: int):
    """Three matrices; two where q = k; one where q = k = v."""
    module = build(Attention(heads=2, projections=projections))
    assert module.qkv.weight.shape == (rows, WIDTH)
    _, seen = look(module, random(0, 1, 4, WIDTH))
    assert torch.equal(seen["q"], seen["k"]) == (projections != "separate")
    assert torch.equal(seen["k"], seen["v"]) == (projections == "shared_qkv")


def test_shared_projections_still_norm_queries_and_keys_apart():
    """With q = k = v the norms of queries and keys have their own weights, and values are not normed."""
    module = build(Attention(heads=2, projections="shared_qkv", qk_norm=RMSNorm()))
    x = random(0, 1, 4, WIDTH)
    _, seen = look(module, x)
    plain = F.linear(x, module.qkv.weight).view(1, 4, 2, 4).transpose(1, 2)
    close(seen["v"], plain)
    close(seen["q"], F.rms_norm(plain, (4,), module.q_norm.weight, 1e-6))
    close(seen["k"], F.rms_norm(plain, (4,), module.k_norm.weight, 1e-6))


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm(), RMSNorm(offset=1.0)], ids=lambda norm: norm.kind)
@pytest.mark.parametrize("cross", [False, True])
def test_qk_norm_bounds_the_scores(norm, cross: bool):
    """Over each head's width: making the input a thousand times larger changes nothing but the values."""
    module = build(Attention(heads=2, qk_norm=norm), cross=cross)
    assert module.q_norm.weight.shape == module.k_norm.weight.shape == (4,)
    maps = []
    for size in (1e3, 1e6):
        x = random(0, 2, 5, WIDTH) * size
        _, seen = look(module, x, Context(HERE, HERE, Relation(), cross=Crossing(Relation(), x)))
        maps.append(seen["weights"])
    close(maps[0], maps[1], 1e-6)
    assert maps[0].std() > 0.01  # and yet it attends to something


def test_no_output_projection():
    """The concatenated heads as they are: no parameters, and head i fills its own slice."""
    module, x = build(Attention(heads=4, output=NoOutput())), random(0, 2, 5, WIDTH)
    assert not list(module.out.parameters())
    out, seen = look(module, x)
    for i in range(4):
        close(out[..., 2 * i : 2 * i + 2], seen["heads"][:, i])


@pytest.mark.parametrize("bias", [False, True])
def test_biases(bias: bool):
    module = build(Attention(heads=2, bias=bias, output=Projected(bias=not bias)))
    assert (module.qkv.bias is not None) is bias
    assert (module.out.bias is not None) is not bias


def test_each_head_projects_the_whole_embedding():
    """No head is confined to a slice: each head's output depends on every coordinate of the input."""
    module, x = build(Attention(heads=4)), random(0, 1, 3, WIDTH)

    def heads(x: Tensor) -> Tensor:
        return look(module, x)[1]["heads"].sum(dim=(0, 2, 3))  # [h]

    sensitivity = torch.autograd.functional.jacobian(heads, x).abs().amax(dim=(1, 2))  # [h, d]
    assert (sensitivity > 1e-6).all()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_dropout(backend: Literal["eager", "sdpa"]):
    """On the weights: in training each is zeroed or scaled by 1/(1-p), so the mean stays; in eval nothing happens."""
    p, n = 0.4, 3000
    module = build(Attention(heads=2, value_width=4, output=NoOutput(), dropout=p))
    without = build(Attention(heads=2, value_width=4, output=NoOutput()))
    x = random(0, 1, 3, WIDTH).expand(n, 3, WIDTH)  # n draws of one problem
    context = FREE._replace(relation=Relation(Dense(kernel=backend)))
    plain = without(x[:1], context)
    assert torch.equal(module.eval()(x[:1], context), plain)
    noisy = module.train()(x, context)
    assert not torch.equal(noisy[0], noisy[1])
    spread = noisy.std(dim=0) / math.sqrt(n)
    assert ((noisy.mean(dim=0) - plain[0]).abs() < 4.5 * spread).all()


def test_changed_weights_take_the_place_of_the_kernels():
    """A tap that returns other weights decides what the heads read; one that only looks changes no bit."""
    module, x = build(Attention(heads=2)), random(0, 1, 4, WIDTH)
    plain = module(x, FREE)
    assert torch.equal(look(module, x)[0], plain)

    def first_key(name: str, x: Tensor) -> Tensor:
        return F.one_hot(torch.zeros(x.shape[:-1], dtype=torch.long), x.shape[-1]).to(x) if name == "weights" else x

    changed = module(x, FREE._replace(taps=Tap(first_key)))
    close(changed, changed[:, :1].expand_as(changed))  # every query reads the first value
    close(changed[:, :1], module(x[:, :1], FREE))  # as if it were alone


def test_without_norms_there_are_no_norm_weights():
    module = build(Attention(heads=2, qk_norm=NoNorm()))
    assert {name for name, _ in module.named_parameters()} == {"qkv.weight", "out.weight"}


# -- compressed -------------------------------------------------------------------------------------------------------


def turn(x: Tensor, p: Tensor) -> Tensor:
    """Pairs (i, i + n/2) of x [b, t, n] as complex numbers, turned by p · theta^(-2i/n)."""
    n = x.shape[-1]
    a, b = x.chunk(2, dim=-1)
    angles = p[:, None] * 100.0 ** -(torch.arange(0, n, 2).double() / n)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("query_rank", [None, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_latent_attention_head_by_head(rotary: bool, query_rank: int | None, bias: bool):
    """k_i = [c W_ki ; r], v_i = c W_vi: one vector c and one turned key r per token serve all heads."""
    h, k, k_v, rank, turning, length = 3, 6, 4, 5, 4, 5
    compress = Latent(rank=rank, rotary_width=turning, query_rank=query_rank)
    module = build(Attention(heads=h, key_width=k, value_width=k_v, compress=compress, bias=bias))
    x, p, scheme = random(0, 2, length, WIDTH), torch.tensor([0, 1, 4, 5, 9]), Rotary(theta=100.0)
    relation = Relation(rotation=scheme.prepare(p[None], turning) if rotary else None, scheme=scheme)
    out = module(x, Context(HERE, HERE, relation))

    parts, widths = module.latent, (query_rank or h * k, rank, turning)
    q, c, r = (linear(parts.down, x, slice(sum(widths[:i]), sum(widths[: i + 1]))) for i in range(3))
    if query_rank:
        q = F.linear(F.rms_norm(q, (query_rank,), parts.query_norm.weight, 1e-6), parts.query_up.weight)
    c = F.rms_norm(c, (rank,), parts.norm.weight, 1e-6)
    spin = (lambda x: turn(x, p)) if rotary else (lambda x: x)
    heads = []
    for i in range(h):
        q_i = q[..., i * k : (i + 1) * k]
        q_i = torch.cat((q_i[..., : k - turning], spin(q_i[..., k - turning :])), dim=-1)
        content = linear(parts.up, c, slice(i * (k - turning), (i + 1) * (k - turning)))
        first = h * (k - turning) + i * k_v
        weights = (q_i @ torch.cat((content, spin(r)), dim=-1).mT / math.sqrt(k)).softmax(dim=-1)
        heads.append(weights @ linear(parts.up, c, slice(first, first + k_v)))
    close(out, module.out(torch.cat(heads, dim=-1)), 1e-5 if rotary else 1e-9)  # fp32 angles


def test_latent_attention_without_a_shared_key():
    """`rotary_width` 0: all of a key comes from c."""
    module, x = build(Attention(heads=2, compress=Latent(rank=3, rotary_width=0))), random(0, 2, 5, WIDTH)
    _, seen = look(module, x)
    together = torch.cat((seen["k"], seen["v"]), dim=-1).transpose(1, 2).flatten(2)  # [b, t, h·(k + k_v)]
    assert torch.linalg.matrix_rank(together.flatten(0, 1)) == 3
    close(seen["k"], module.latent.up.split(seen["latent"])[0].unflatten(-1, (2, 4)).transpose(1, 2))


@pytest.mark.parametrize("rank", [2, 12])
@pytest.mark.parametrize("kind", ["auto", "int8"])
@torch.no_grad()
def test_reading_the_compressed_vector_itself(rank: int, kind: str):
    """q·(c W_k) = (q W_kᵀ)·c: few new tokens read c itself; with taps, keys and values are expanded."""
    compress = Latent(rank=rank, rotary_width=4)
    block = Block(mixer=Attention(heads=2, key_width=6, value_width=5, compress=compress))
    stack = Stack(depth=2, blocks=(block,), position=Rotary())
    model = whole(ModelConfig(width=WIDTH, target=Tokens(vocab=11), decoder=stack))
    caches, ids, read = [model.new_cache(2, 20, kind=kind) for _ in range(2)], tokens(0, 2, 20), []
    for cache, taps in zip(caches, (None, Tap(lambda name, x: x)), strict=True):
        read.append(torch.cat([model.decode(part, cache=cache, taps=taps) for part in ids.split((9, 1, 3, 7), 1)], 1))
    close(read[0], read[1])

    def absorbs(queries: int, cached: bool = True, tapped: bool = False) -> bool:
        layout = make_layout(2, queries, ids.device)
        options = PassOptions(taps=Tap(lambda name, x: x) if tapped else None)
        (relation,) = model.decoder.relations([layout], {None: Step(layout)}, cached, options=options)
        return relation.absorbs

    assert absorbs(1)
    assert not absorbs(1, tapped=True)
    assert not absorbs(1, cached=False)
    assert absorbs(9) == (rank == 2)  # narrower than the keys and values of a head

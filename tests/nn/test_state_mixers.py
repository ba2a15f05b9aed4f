"""Mixers with a matrix state: equal to public layers, of constant size in a cache, refused where they do not fit."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer.attention.layout import Layout, make_layout
from anyformer.config import (
    LM,
    Attention,
    Block,
    ChannelDecay,
    ConfigError,
    GatedDelta,
    LinearAttention,
    Mamba2,
    Mixer,
    ModelConfig,
    RMSNorm,
    Rotary,
    Stack,
    Tokens,
)
from anyformer.generation.engine.sequence_pages import is_paged
from anyformer.generation.generate import generate
from anyformer.generation.prefix_cache import Reuse
from anyformer.generation.speculative import Lookup, speculate
from anyformer.nn.context import Context
from anyformer.nn.inspection.cache_growth import cache_growth
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from anyformer.nn.state_mixers.decay_init import TIME_STEPS
from anyformer.nn.state_mixers.gated_delta import GatedDeltaMixer
from anyformer.nn.state_mixers.mamba2 import Mamba2Mixer
from anyformer.nn.transforms.quantise import quantise
from tests.strategies import build, close, tokens

GATED = LinearAttention(
    heads=2, features="none", normalizer="none", decay=ChannelDecay(rank=3), convolution=3, norm=RMSNorm(), gate=True
)
MIXERS: dict[str, Mixer] = {
    "plain": LinearAttention(heads=2),
    "gated": GATED,
    "delta": GatedDelta(heads=2),
    "mamba2": Mamba2(heads=2, state=5),
}


def config(*mixers: Mixer, **rest: Any) -> ModelConfig:
    stack = Stack(depth=len(mixers), blocks=tuple(Block(mixer=mixer) for mixer in mixers), **rest)
    return ModelConfig(width=8, target=Tokens(vocab=11), decoder=stack, head=LM())


def in_context(layout: Layout) -> Context:
    return Context(layout, layout)


# -- definitions ------------------------------------------------------------------------------------------------------


def test_plain_linear_attention_is_attention_without_softmax():
    """o_t = Σ φ(q_t)·φ(k_s) v_s / Σ φ(q_t)·φ(k_s) over s ≤ t, by all pairs."""
    model = build(config(LinearAttention(heads=2)))
    mixer = model.decoder.blocks[0]["mixer"].inner
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in mixer.qkv.split(x))
    weights = (nn_elu(q) @ nn_elu(k).transpose(-1, -2)).tril()
    expected = mixer.out(((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2))
    close(mixer(x, in_context(make_layout(2, 9, x.device))), expected)


def nn_elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.exp())


@pytest.mark.parametrize(("heads", "key_heads", "length"), [(2, None, 5), (4, 2, 80)])
def test_gated_delta_equals_qwen3_next(heads: int, key_heads: int | None, length: int):
    """The layer of `transformers` with the same weights, rows padded on the left included."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    groups = key_heads or heads
    public_config = modeling.Qwen3NextConfig(
        hidden_size=12,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_value_heads=heads,
        linear_num_key_heads=groups,
        linear_key_head_dim=4,
        linear_value_head_dim=6,
        linear_conv_kernel_dim=4,
        hidden_act="silu",
        rms_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    public = modeling.Qwen3NextGatedDeltaNet(public_config, 0)
    own = GatedDeltaMixer(GatedDelta(heads=heads, key_heads=key_heads, key_width=4, value_width=6), 12)
    shared = heads // groups
    with torch.no_grad():
        for parameter in public.parameters():
            parameter.normal_(std=0.4)
        qkvz = public.in_proj_qkvz.weight.unflatten(0, (groups, -1)).split((4, 4, 6 * shared, 6 * shared), dim=1)
        rates = public.in_proj_ba.weight.unflatten(0, (groups, -1)).split((shared, shared), dim=1)
        own.qkvz.weight.copy_(torch.cat([part.flatten(0, 1) for part in qkvz]))
        own.rates.weight.copy_(torch.cat([part.flatten(0, 1) for part in rates]))
        own.conv.weight.copy_(public.conv1d.weight[:, 0])
        own.log_a.copy_(public.A_log)
        own.dt_bias.copy_(public.dt_bias)
        own.norm.weight.copy_(public.norm.weight)
        own.out.weight.copy_(public.out_proj.weight)
    x = torch.randn(2, length, 12)
    close(own(x, in_context(make_layout(2, length, x.device))), public(x), 1e-4)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :2] = 0
    found = own(x, in_context(make_layout(2, length, x.device, segments=torch.where(mask > 0, 0, -1))))
    close(found[mask > 0], public(x, attention_mask=mask)[mask > 0], 1e-4)


@pytest.mark.parametrize(("groups", "length"), [(1, 5), (2, 140)])
def test_mamba2_equals_transformers(groups: int, length: int):
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    public_config = modeling.Mamba2Config(
        hidden_size=8,
        num_heads=4,
        head_dim=4,
        state_size=6,
        n_groups=groups,
        conv_kernel=4,
        expand=2,
        num_hidden_layers=1,
        chunk_size=16,
        layer_norm_epsilon=1e-6,
    )
    torch.manual_seed(0)
    public, own = modeling.Mamba2Mixer(public_config, 0), Mamba2Mixer(Mamba2(heads=4, state=6, groups=groups), 8)
    with torch.no_grad():
        for parameter in public.parameters():
            parameter.normal_(std=0.4)
        own.inputs.weight.copy_(public.in_proj.weight)
        own.conv.weight.copy_(public.conv1d.weight[:, 0])
        own.conv.bias.copy_(public.conv1d.bias)
        own.log_a.copy_(public.A_log)
        own.dt_bias.copy_(public.dt_bias)
        own.skip.copy_(public.D)
        own.norm.weight.copy_(public.norm.weight)
        own.out.weight.copy_(public.out_proj.weight)
    x = torch.randn(2, length, 8)
    close(own(x, in_context(make_layout(2, length, x.device))), public(x), 1e-4)


def test_initialisation_is_that_of_the_papers():
    torch.manual_seed(0)
    for spec, least in ((GatedDelta(heads=8), 0.0), (Mamba2(heads=8), 1.0)):
        mixer = Transformer(config(spec)).decoder.blocks[0]["mixer"].inner
        steps = torch.nn.functional.softplus(mixer.dt_bias)
        assert ((steps >= 0.99 * TIME_STEPS[0]) & (steps <= 1.01 * TIME_STEPS[1])).all()
        assert ((mixer.log_a.exp() > 0.99 * least) & (mixer.log_a.exp() <= 16.01)).all()
        assert mixer.log_a.unique().numel() == 8
    assert (mixer.skip == 1).all()


# -- caches -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXERS)
def test_the_state_does_not_grow(name: str):
    model = build(config(MIXERS[name]))
    grown = cache_growth(model, 9, batch=3)
    assert grown == [count(model.config, n, batch=3, bytes_per_value=8).cache_bytes for n in range(1, 10)]
    assert len(set(grown)) == 1
    assert model.new_cache(3, 9).nbytes() == model.new_cache(3, 9999).nbytes() == grown[0]


def test_states_of_a_half_precision_model_are_fp32():
    model = build(config(GatedDelta(heads=2))).bfloat16()
    cache = model.new_cache(1, 4)
    assert cache.layers[0].states.dtype is torch.float32
    assert cache.nbytes() == count(model.config, 4, bytes_per_value=2).cache_bytes


@pytest.mark.parametrize("name", MIXERS)
def test_truncation_beyond_the_slack_is_refused(name: str):
    model = build(config(MIXERS[name], Attention(heads=2)))
    cache = model.new_cache(2, 9, slack=2)
    model(tokens(0, 2, 7), cache=cache)
    with pytest.raises(ValueError, match=r"a recurrent state can remove at most 2 tokens.*slack=n"):
        cache.truncate(4)
    cache.truncate(6)
    cache.truncate(5)
    with pytest.raises(ValueError, match="can remove at most"):
        cache.truncate(4)
    close(model(tokens(1, 2, 1), cache=cache), model(torch.cat((tokens(0, 2, 7)[:, :5], tokens(1, 2, 1)), 1))[:, 5:])


@pytest.mark.parametrize("name", MIXERS)
def test_speculation_gives_the_ids_of_greedy_decoding(name: str):
    model, ids = build(config(MIXERS[name], Attention(heads=2))), tokens(0, 2, 5)
    found = speculate(model, ids, draft=Lookup(ngram=1), ahead=3, max_new_tokens=9)
    assert torch.equal(found.ids, generate(model, ids, max_new_tokens=9))


@pytest.mark.parametrize("name", MIXERS)
def test_a_known_beginning_is_not_read_again(name: str):
    """A text that continues one that was read starts from its state; another one is read from the start."""
    model, ids, reuse = build(config(MIXERS[name], Attention(heads=2))), tokens(0, 1, 5), Reuse()
    first = generate(model, ids, max_new_tokens=3, reuse=reuse)
    more = torch.cat((first, tokens(1, 1, 2)), dim=1)
    expected = generate(model, more, max_new_tokens=3)
    assert torch.equal(generate(model, more, max_new_tokens=3, reuse=reuse), expected)
    assert reuse.spared == 7  # the last generated token was never read
    generate(model, ids[:, :4], max_new_tokens=1, reuse=reuse)
    assert reuse.spared == 7


def test_a_gap_between_tokens_changes_nothing():
    """Padding inside a row, as rejected drafts leave it, is passed over by the state and by the convolution."""
    for name in MIXERS:
        model, ids = build(config(MIXERS[name])), tokens(0, 1, 6)
        gaps = torch.tensor([[0, -1, 0, 0, -1, -1, 0, 0, 0]])
        padded = torch.full((1, 9), 3).masked_scatter(gaps >= 0, ids)
        close(model(padded, segments=gaps)[gaps >= 0], model(ids)[0])
        cache = model.new_cache(1, 9)
        close(model(padded, segments=gaps, cache=cache)[gaps >= 0], model(ids)[0])


# -- what works with everything else, and what does not ----------------------------------------------------------------


def test_the_engine_reads_such_models_one_request_after_the_other():
    assert not is_paged(build(config(GatedDelta(heads=2))))


@pytest.mark.parametrize("name", MIXERS)
def test_linear_layers_can_be_quantised(name: str):
    torch.manual_seed(0)
    wide = config(MIXERS[name]).model_copy(update={"width": 64})
    model, ids = Transformer(wide).eval(), tokens(0, 2, 6)
    expected = model(ids)
    close(quantise(model, 8)(ids), expected, 0.05)


def test_heads_are_tapped_in_the_order_of_the_row():
    model, ids = build(config(GatedDelta(heads=2))), tokens(0, 1, 5)
    left = torch.tensor([[-1, -1, 0, 0, 0, 0, 0]])
    _, seen = run_with_taps(model, ["*.heads"], torch.cat((ids[:, :2], ids), dim=1), segments=left)
    _, alone = run_with_taps(model, ["*.heads"], ids)
    ((name, heads),) = seen.items()
    assert heads.shape == (1, 2, 7, 4)
    close(heads[:, :, 2:], alone[name])


REFUSED = {
    "set it to 'none', which is usual for mixers with a state": lambda: config(GATED, position=Rotary()),
    "heads = 3: must divide width = 8": lambda: config(LinearAttention(heads=3)),
    "key_heads = 4: must divide heads = 2": lambda: config(GatedDelta(heads=2, key_heads=4)),
    "groups = 4: must divide heads = 2": lambda: config(Mamba2(heads=2, groups=4)),
    "heads = 3: must divide 2 · width = 16": lambda: config(Mamba2(heads=3)),
    "normalizer = 'sum': weights of any sign": lambda: config(LinearAttention(heads=2, features="none")),
    "a recurrent layer has a state": lambda: config(GATED, Attention(heads=2), memory=3),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(message: str):
    with pytest.raises(ConfigError, match=message):
        REFUSED[message]()


def test_rows_that_are_split_are_refused():
    class Whole:
        layout = make_layout(1, 4, torch.device("cpu"))

    layout = make_layout(1, 2, torch.device("cpu"))._replace(whole=Whole())
    mixer = build(config(GatedDelta(heads=2))).decoder.blocks[0]["mixer"].inner
    with pytest.raises(ValueError, match="context parallelism cannot split"):
        mixer(torch.zeros(1, 2, 8, dtype=torch.float64), in_context(layout))

"""Different ways to the same numbers: kernels, building, tapping, counting."""

import pytest
import torch
from hypothesis import given
from torch.utils.flop_counter import FlopCounterMode

from anyformer.config import ModelConfig
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.strategies import build, close, models, seeds, tokens


def inputs(config: ModelConfig, seed: int, batch: int = 2, length: int = 6):
    ids = tokens(seed, batch, length)
    return (tokens(seed + 1, batch, 4), ids) if config.shape == "encoder-decoder" else (ids,)


@given(models(), seeds)
def test_sdpa_equals_eager(config: ModelConfig, seed: int):
    """Outputs and the gradients of all weights, with padding."""
    model = build(config, seed)
    segments = torch.tensor([[0, 0, 0, 0, 0, 0], [-1, -1, 0, 0, 0, 0]])
    name = "target_segments" if config.shape == "encoder-decoder" else "segments"
    results = []
    for backend in ("eager", "sdpa"):
        model.backend = backend
        model.zero_grad()
        out = model(*inputs(config, seed), **{name: segments})
        (out * (segments >= 0)[..., None]).square().sum().backward()
        results.append((out, {n: p.grad for n, p in model.named_parameters()}))
    (one, first), (two, second) = results
    close(two[segments >= 0], one[segments >= 0])
    # where large terms cancel, their rounding stays: a few units in the last place of the largest gradient
    floor = 1e-15 * max(float(grad.abs().max()) for grad in first.values() if grad is not None)
    for parameter, grad in first.items():
        if grad is None:  # a table whose term is the same for every key, or a layer that is never run
            assert second[parameter] is None
        else:
            atol = 1e-8 * max(float(grad.abs().max()), 1.0) + floor
            torch.testing.assert_close(second[parameter], grad, rtol=1e-8, atol=atol)


@given(models(), seeds)
def test_meta_build_then_materialise_equals_direct_build(config: ModelConfig, seed: int):
    torch.manual_seed(seed)
    direct = Transformer(config)
    with torch.device("meta"):
        later = Transformer(config)
    assert all(p.is_meta for p in later.parameters())
    torch.manual_seed(seed)
    later.materialise("cpu")
    for (name, a), (other, b) in zip(direct.named_parameters(), later.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b)
    assert all(p.isfinite().all() for p in direct.parameters())


@given(models(), seeds)
def test_tapping_changes_no_bit(config: ModelConfig, seed: int):
    model, args = build(config, seed), inputs(config, seed)
    with torch.no_grad():
        plain = model(*args)
        tapped, seen = run_with_taps(model, ["*"], *args)
    assert torch.equal(plain, tapped)
    for name, weights in seen.items():
        if name.endswith("weights"):
            assert weights.shape[0] == 2
            assert (weights >= 0).all()


@given(models(), seeds)
def test_count_equals_the_model(config: ModelConfig, seed: int):
    """Parameters and cache bytes exactly, FLOPs to 0.1 % of torch's counter."""
    model = Transformer(config)
    model.backend = "eager"  # torch's counter does not see into the CPU's fused kernel
    args = inputs(config, seed, batch=3, length=7)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args)
    table = count(config, length=7, batch=3, source_length=4 if config.shape == "encoder-decoder" else None)
    assert table.parameters == model.num_parameters()
    assert table.flops == pytest.approx(counter.get_total_flops(), rel=1e-3)
    if config.decoder:
        cache = model.new_cache(3, 7)
        memory = {"encoder_out": model.encode(args[0])} if config.encoder else {}
        model.decode(args[-1], **memory, cache=cache)
        assert table.cache_bytes == cache.nbytes()

"""Norms by their formulae."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn import functional as F

from anyformer.attention.layout import Layout
from anyformer.config import (
    LM,
    Attention,
    BatchNorm,
    Block,
    ConfigError,
    DynamicTanh,
    LayerNorm,
    MaskedLM,
    ModelConfig,
    NoNorm,
    RMSNorm,
    Stack,
    Tokens,
    Transform,
)
from anyformer.kernels.narrow_norm import _lengthened, _shortened
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.model import Transformer
from anyformer.nn.norm import OverBatch, normed
from anyformer.nn.transforms.substitute import substitute
from anyformer.training.parallel import sum_over_processes
from tests.forking import forking
from tests.narrow import begin, kept, same
from tests.strategies import VOCAB, build, close, seeds, tokens

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
widths = st.integers(1, 9)
epsilons = st.sampled_from([1e-12, 1e-5, 0.1])


def filled(spec, width: int, seed: int):
    """The norm with random weights in float64."""
    norm = spec.build(width).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return norm, generator


@given(shapes, widths, epsilons, st.booleans(), seeds)
def test_layer_norm(shape: tuple[int, ...], width: int, eps: float, bias: bool, seed: int):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β, the variance biased, over the last axis."""
    norm, generator = filled(LayerNorm(eps=eps, bias=bias), width, seed)
    x = torch.randn(*shape, width, generator=generator, dtype=torch.float64) * 3 + 1
    centred = x - x.mean(-1, keepdim=True)
    formula = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight
    if bias:
        formula = formula + norm.bias
    assert sum(p.numel() for p in norm.parameters()) == width * (1 + bias)
    torch.testing.assert_close(norm(x), formula, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (width,), norm.weight, norm.bias, eps), rtol=1e-12, atol=1e-12)


@given(shapes, widths, epsilons, st.sampled_from([0.0, 1.0, -0.5]), st.booleans(), seeds)
def test_rms_norm(shape: tuple[int, ...], width: int, eps: float, offset: float, late: bool, seed: int):
    """x / sqrt(E[x²] + eps) · (offset + γ); where it casts is all the same in full precision."""
    cast = "after_scale" if late else "before_scale"
    norm, generator = filled(RMSNorm(eps=eps, offset=offset, cast=cast), width, seed)
    x = torch.randn(*shape, width, generator=generator, dtype=torch.float64) * 3 + 1
    formula = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + norm.weight)
    assert sum(p.numel() for p in norm.parameters()) == width
    torch.testing.assert_close(norm(x), formula, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (width,), offset + norm.weight, eps), rtol=1e-12, atol=1e-12)


@given(shapes, widths, st.sampled_from([0.1, 0.5, 2.0]), seeds)
def test_dynamic_tanh(shape: tuple[int, ...], width: int, alpha: float, seed: int):
    """tanh(α x) · γ + β; each output depends on its own value alone, and large values reach γ + β or β - γ."""
    norm, generator = filled(DynamicTanh(alpha=alpha), width, seed)
    x = torch.randn(*shape, width, generator=generator, dtype=torch.float64, requires_grad=True)
    formula = torch.tanh(norm.alpha * x) * norm.weight + norm.bias
    assert sum(p.numel() for p in norm.parameters()) == 2 * width + 1
    torch.testing.assert_close(norm(x), formula, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(norm(x).sum(), x)
    own = norm.alpha * norm.weight * (1 - torch.tanh(norm.alpha * x).square())
    torch.testing.assert_close(grad, own, rtol=1e-9, atol=1e-12)
    limit = norm.bias + norm.weight * norm.alpha.sign()
    torch.testing.assert_close(norm(torch.full_like(x, 1e9)), limit.expand_as(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.2, 0.5])
def test_dynamic_tanh_starts_at_its_alpha(alpha: float):
    spec = DynamicTanh(alpha=alpha)
    stack = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2)),), final_norm=spec)
    model = Transformer(ModelConfig(width=8, target=Tokens(vocab=VOCAB), decoder=stack, head=LM()))
    norm, x = model.decoder.final_norm, torch.randn(2, 8)
    torch.testing.assert_close(norm(x), torch.tanh(alpha * x))


@pytest.mark.parametrize("cast", ["before_scale", "after_scale"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_order_of_casting_in_low_precision(cast: str, offset: float):
    """bf16 in, bf16 out, fp32 between; the result returns to bf16 before γ, or after it."""
    norm = RMSNorm(offset=offset, cast=cast).build(64)
    norm.weight.data = torch.randn(64).to(torch.bfloat16)
    x = (torch.randn(32, 64) * 5).to(torch.bfloat16)
    wide = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    gain = norm.weight + offset  # rounded to bf16, as it stands in the checkpoint
    orders = {"before_scale": wide.to(torch.bfloat16) * gain, "after_scale": (wide * gain.float()).to(torch.bfloat16)}
    assert not torch.equal(*orders.values())
    assert norm(x).dtype is torch.bfloat16
    torch.testing.assert_close(norm(x), orders[cast], rtol=0, atol=0)


def test_fp32_inside_keeps_large_values_finite():
    """Squares overflow fp16 from 256 on: the mean of squares is taken in fp32."""
    norm = RMSNorm().build(8)
    norm.weight.data = torch.ones(8, dtype=torch.float16)
    assert torch.equal(norm(torch.full((1, 8), 3e4, dtype=torch.float16)), torch.ones(1, 8, dtype=torch.float16))


def test_none_is_the_identity():
    norm, x = NoNorm().build(5), torch.randn(2, 3, 5)
    assert norm(x) is x
    assert not list(norm.parameters())


# -- over a batch -----------------------------------------------------------------------------------------------------


def batch_of(seed: int, rows: int, length: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors, and which of them are real: some, in any place."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, width, generator=generator, dtype=torch.float64) * 3 + 1
    segments = torch.randint(-1, 3, (rows, length), generator=generator)
    segments[0, :2] = 0  # torch's own wants two of them
    return x, segments


def where(segments: torch.Tensor | None) -> Layout:
    return Layout(torch.zeros(1, 1, dtype=torch.long), segments)


@given(st.integers(1, 4), st.integers(2, 6), widths, epsilons, st.sampled_from([0.1, 0.5, 1.0]), seeds, st.booleans())
def test_batch_norm(rows: int, length: int, width: int, eps: float, momentum: float, seed: int, padded: bool):
    """torch's own on the real tokens alone: outputs, gradients and running statistics over some steps, then in eval."""
    norm, _ = filled(BatchNorm(eps=eps, momentum=momentum), width, seed)
    norm.reset()
    theirs = torch.nn.BatchNorm1d(width, eps=eps, momentum=momentum).double()
    theirs.load_state_dict({"weight": norm.weight, "bias": norm.bias}, strict=False)
    for step in range(4):
        if step == 3:
            norm.eval()
            theirs.eval()
        x, segments = batch_of(seed + step, rows, length, width)
        x.requires_grad_()
        aux, real = AuxOutputs(), segments >= 0 if padded else torch.ones_like(segments, dtype=torch.bool)
        out = normed(norm, x, where(segments if padded else None), aux)
        expected = theirs(x[real])
        close(out[real], expected)
        aim = torch.sin(torch.arange(expected.numel(), dtype=torch.float64)).view_as(expected)
        (ours,), (other,) = (torch.autograd.grad((y * aim).sum(), x) for y in (out[real], expected))
        close(ours, other)
        if step < 3:
            norm.statistics = aux.statistics[norm]
            with torch.no_grad():
                norm.commit()
        close(norm.mean, theirs.running_mean)
        close(norm.variance, theirs.running_var)
    assert not aux.statistics


def test_pads_move_nothing():
    """Padding of any value is ignored; a batch of padding alone is finite and does not change the statistics."""
    norm, _ = filled(BatchNorm(), 3, 0)
    norm.reset()
    x, segments = batch_of(0, 2, 5, 3)
    other = torch.where((segments < 0)[..., None], torch.inf, x)
    results = []
    for each in (x, other):
        aux = AuxOutputs()
        results.append((normed(norm, each, where(segments), aux)[segments >= 0], aux.statistics[norm]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    aux = AuxOutputs()
    assert normed(norm, x, where(torch.full_like(segments, -1)), aux).isfinite().all()
    norm.statistics = aux.statistics[norm]
    with torch.no_grad():
        norm.commit()
    assert torch.equal(norm.mean, torch.zeros_like(norm.mean))
    assert torch.equal(norm.variance, torch.ones_like(norm.variance))


def everywhere(**fields) -> ModelConfig:
    """A decoder with batch norm in every place."""
    block = Block(mixer=Attention(heads=2), norm=BatchNorm())
    stack = Stack(depth=3, blocks=(block,), final_norm=BatchNorm(), **fields)
    return ModelConfig(width=8, target=Tokens(vocab=VOCAB, norm=BatchNorm()), decoder=stack, head=LM())


def statistics(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.named_buffers()}


def test_a_model_moves_its_statistics_once_per_step():
    """Not in a forward pass, however often it runs; by the last one, when the step is committed; and then no more."""
    model, fresh = build(everywhere()).train(), statistics(build(everywhere()))
    assert len(fresh) == 2 * (3 * 2 + 2)
    model(tokens(1, 2, 7)), model(tokens(0, 2, 7))
    assert all(torch.equal(x, fresh[name]) for name, x in statistics(model).items())
    model.commit()
    moved = statistics(model)
    assert not any(torch.equal(x, fresh[name]) for name, x in moved.items())
    model.commit()
    model.eval()(tokens(0, 2, 7))
    model.commit()
    assert all(torch.equal(x, moved[name]) for name, x in statistics(model).items())
    once = build(everywhere()).train()
    once(tokens(0, 2, 7))
    once.commit()
    assert all(torch.equal(x, moved[name]) for name, x in statistics(once).items())


@pytest.mark.parametrize("share", [False, True])
def test_recomputed_activations_move_the_same(share: bool):
    """A block that runs twice in a step counts once, also if several layers share it."""
    results = []
    for recompute in (False, True):
        model = build(everywhere(share=share)).train()
        model(tokens(0, 2, 7), recompute=recompute).square().sum().backward()
        model.commit()
        results.append((statistics(model), [p.grad for p in model.parameters()]))
    (first, before), (second, after) = results
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    for a, b in zip(after, before, strict=True):
        close(a, b)


def test_running_statistics_come_to_be_the_data():
    """After many steps on one batch, eval does what training does, but for n / (n - 1) in the variance."""
    model, ids = build(everywhere()).train(), tokens(0, 4, 16)
    for _ in range(200):
        expected = model(ids)
        model.commit()
    close(model.eval()(ids), expected, 0.1)


def test_statistics_travel_with_the_weights():
    model = build(everywhere()).train()
    model(tokens(0, 2, 7))
    model.commit()
    with torch.device("meta"):
        other = Transformer(everywhere())
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other.eval()(tokens(1, 2, 7)), model.eval()(tokens(1, 2, 7)))
    other.to("cpu").train()(tokens(1, 2, 7))
    fresh = Transformer(everywhere())
    for module in fresh.modules():
        if isinstance(module, OverBatch):
            assert torch.equal(module.mean, torch.zeros(8))
            assert torch.equal(module.variance, torch.ones(8))


def test_batch_norm_only_where_tokens_stand_beside_each_other():
    with pytest.raises(ConfigError, match=r"qk_norm\.kind = 'batch': unknown kind; known here: layer, none, rms"):
        Attention(heads=2, qk_norm={"kind": "batch"})
    with pytest.raises(ConfigError, match=r"norm\.kind = 'batch': unknown kind"):
        MaskedLM(transform=Transform(norm={"kind": "batch"}))


def _rank(rank: int, folder: str) -> None:
    """One of two processes: it has one row, and must find what a single process does with both."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    config, ids = everywhere(), tokens(0, 2, 7)
    segments = torch.tensor([[0] * 7, [0] * 4 + [-1] * 3])  # rows of unlike weight
    model = build(config).train()
    aux = AuxOutputs(sum_over_processes)
    out = model(ids[rank : rank + 1], segments=segments[rank : rank + 1], aux=aux)
    (out.logsumexp(-1) * (segments[rank] >= 0)).sum().backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
    model.commit()
    torch.distributed.destroy_process_group()  # the rest runs in one process
    alone = build(config).train()
    expected = alone(ids, segments=segments)
    (expected.logsumexp(-1) * (segments >= 0)).sum().backward()
    alone.commit()
    close(out[0][segments[rank] >= 0], expected[rank][segments[rank] >= 0])
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        close(ours.grad, theirs.grad, 1e-8)
    for ours, theirs in zip(model.buffers(), alone.buffers(), strict=True):
        close(ours, theirs)


def test_a_batch_is_what_all_processes_read(tmp_path: Path):
    """Outputs, gradients and statistics of two processes are those of one that reads all rows."""
    forking()
    torch.multiprocessing.start_processes(_rank, (str(tmp_path),), nprocs=2, start_method="forkserver")


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("spec", [LayerNorm(), LayerNorm(bias=False), RMSNorm(), RMSNorm(offset=1.0)])
def test_a_compiled_step_of_half_precision_keeps_half_of_the_bytes(spec) -> None:
    torch.compiler.reset()
    norm = spec.build(64)
    substitute(norm, "training")
    begin(norm, "cpu")
    run = torch.compile(norm, backend="aot_eager_decomp_partition")
    same(norm, norm, run, 4, 30, 64)
    assert kept(run, 4, 30, 64, device="cpu") < 2.3
    assert kept(norm, 4, 30, 64, device="cpu") > 4


def step_of(spec, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return a norm, its input, and its output in a compiled step under autocast."""
    torch.compiler.reset()
    norm = spec.build(64)
    substitute(norm, "training")
    begin(norm, "cpu")
    x = torch.randn(4, 30, 64)
    with torch.autocast("cpu", dtype):
        return norm, x, torch.compile(norm, backend="aot_eager")(x)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("spec", [LayerNorm(), RMSNorm()])
def test_a_compiled_step_of_half_precision_rounds_once(spec) -> None:
    """The output and the gradient of γ come from the same rounded values."""
    norm, _, found = step_of(spec, torch.bfloat16)
    (slope,) = torch.autograd.grad(found.sum(), norm.weight)
    normalised = (found if spec.kind == "rms" else found - norm.bias) / norm.weight
    torch.testing.assert_close(normalised, normalised.bfloat16().float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope, normalised.sum((0, 1)), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("spec", [LayerNorm(), RMSNorm()])
def test_a_compiled_step_in_fp16_keeps_its_digits(spec) -> None:
    norm, x, found = step_of(spec, torch.float16)
    with torch.autocast("cpu", torch.float16):
        torch.testing.assert_close(found, norm(x))


def test_rounding_keeps_what_is_not_finite() -> None:
    bits = [0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F800000, -(2**23), -1, 0x3F800000, 0x3F80FFFF]
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    rounded = _lengthened(_shortened(x))
    assert rounded[[0, 1, 2, 5]].isnan().all()
    assert rounded[3:5].tolist() == [float("inf"), float("-inf")]
    assert rounded[6:].tolist() == [1.0, 1.0078125]

"""flex and varlen on a GPU: by `eager` in fp64, forward and backward, for every pattern and scheme they claim."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer.attention.attend import attend, choose, lower
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import Layout, Role, make_layout
from anyformer.attention.lowered import Blocks, Documents, FewQueries, densify
from anyformer.attention.position_module import Positions
from anyformer.attention.scores import Scoring
from anyformer.config import (
    LM,
    Alibi,
    Attention,
    BigBird,
    Block,
    BlockLocal,
    Causal,
    Dilated,
    Full,
    Graph,
    ModelConfig,
    NoPosition,
    Pattern,
    Stack,
    T5Bias,
    Tokens,
    Window,
)
from anyformer.config.position import Position
from anyformer.kernels.runtime import Runtime
from anyformer.nn.model import Transformer
from tests.attention.paging import fill_up, to_pages

CUDA = torch.device("cuda")
T, HEADS, GROUPS, WIDTH = 600, 4, 2, 32  # no multiple of a block of 128
# the largest error beside the largest value: fp32 sums of hundreds of terms; a few of bf16's roundings, 2⁻⁸
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

PATTERNS: dict[str, Pattern] = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(before=100, after=0),
    "globals": Window(before=60, after=30, globals=3),
    "dilated": Dilated(before=4, after=2, step=40),
    "block_local": BlockLocal(size=150),
    "bigbird": BigBird(block=32, randoms=1),
    "bigbird, causal": BigBird(block=64, randoms=2, ahead=False),
    "bigbird, both ways": BigBird(block=64, globals=2),  # blocks of 64, each seen as a whole
    "graph": Graph(nodes=T, edges=tuple((q, (q * q) % T) for q in range(T))),
}
T5 = T5Bias(buckets=16, max_distance=100)


def row(*lengths: int) -> list[int]:
    """Segments of these lengths, a negative one of padding."""
    out = [i if n > 0 else -1 for i, n in enumerate(lengths) for _ in range(abs(n))]
    assert len(out) == T
    return out


def laid_out(kind: str) -> Layout:
    rows = {
        "left": [row(T), row(-150, T - 150)],
        "right": [row(T), row(T - 250, -250)],
        "packed": [row(130, 300, 170), row(400, 100, -100)],
    }
    if kind == "plain":
        return make_layout(2, T, CUDA)
    if kind == "marked":
        return make_layout(2, T, CUDA, marks=((torch.arange(T, device=CUDA) % 97) < 2).long()[None] * 2)
    if kind == "grouped":  # images of 70 patches between texts of 27 tokens
        index = torch.arange(T, device=CUDA)
        return make_layout(2, T, CUDA, marks=torch.where(index % 97 < 70, -1 - index // 97, 0)[None])
    segments = torch.tensor(rows[kind], device=CUDA)
    if kind == "right":
        return Layout.right_padded(segments)
    return Layout.packed_rows(segments, documents=5) if kind == "packed" else make_layout(2, T, CUDA, segments=segments)


CASES: dict[str, tuple[str, Position, str, torch.dtype, dict[str, Any]]] = {
    **{f"{name}, t5, packed, fp32": (name, T5, "packed", torch.float32, {}) for name in PATTERNS},
    **{
        f"{name}, left, bf16": (name, NoPosition(), "left", torch.bfloat16, {})
        for name in ("full", "causal", "globals", "bigbird, both ways")  # each case is compiled: 5 s or more
    },
    "window, alibi, bf16": ("window", Alibi(), "plain", torch.bfloat16, {}),
    "bigbird, alibi, marks": ("bigbird", Alibi(), "marked", torch.float32, {}),
    "bigbird in blocks of 64, marks": ("bigbird, both ways", NoPosition(), "marked", torch.bfloat16, {}),
    "causal, groups": ("causal", NoPosition(), "grouped", torch.bfloat16, {}),
    "causal, groups, t5, fp32": ("causal", T5, "grouped", torch.float32, {}),
    "bigbird in blocks of 64": ("bigbird, both ways", NoPosition(), "plain", torch.bfloat16, {}),
    "causal, cap and sinks": ("causal", NoPosition(), "right", torch.float32, {"cap": 2.0, "sinks": True}),
    "window, cap and t5, bf16": ("window", T5, "plain", torch.bfloat16, {"cap": 2.0}),
    "window, narrow values": ("window", NoPosition(), "plain", torch.float32, {"value_width": 16}),
}


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers that bf16 holds exactly, so that every precision is given the same problem."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.bfloat16().to(CUDA, dtype)


def differentiate(
    pattern: Pattern,
    q: Layout,
    k: Layout,
    role: Role,
    scheme: Position,
    dtype: torch.dtype,
    backend: str,
    options: dict,
) -> dict[str, Tensor]:
    """The output for real queries, and the gradients of queries, keys, values, sinks and tables."""
    value_width, cap = options.get("value_width", WIDTH), options.get("cap")
    t, s = q.positions.shape[1], k.positions.shape[1]
    shapes = (HEADS, t, WIDTH), (GROUPS, s, WIDTH), (GROUPS, s, value_width)
    leaves = {
        name: random(i, 2, *shape, dtype=dtype) for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))
    }
    if options.get("sinks"):
        leaves["sinks"] = random(5, HEADS, dtype=dtype if dtype is torch.float64 else torch.float32)
    positions = Positions(scheme, 0, HEADS).to(CUDA, dtype if dtype is torch.float64 else torch.float32)
    for i, table in enumerate(positions.tables.values()):
        table.data = random(10 + i, *table.shape, dtype=table.dtype)
    for leaf in leaves.values():
        leaf.requires_grad_()
    leaves |= dict(positions.tables.items())
    needs = Requirements(WIDTH, value_width, cap=cap, sinks="sinks" in leaves)
    runtime = Runtime("cuda", dtype, training=True)
    lowered = lower(pattern, q, k, role, positions, needs, runtime, backend).lowered
    assert isinstance(lowered, Blocks) == (backend == "flex")
    assert isinstance(lowered, Documents) == (backend == "varlen")
    scoring = Scoring(WIDTH**-0.5, cap=cap, sinks=leaves.get("sinks"))
    out = attend(leaves["q"], leaves["k"], leaves["v"], lowered, scoring)
    real = torch.ones(2, t, device=CUDA) if q.segments is None else (q.segments >= 0).expand(2, t)
    out = out * real[:, None, :, None].to(out.dtype)
    grads = torch.autograd.grad((out * random(6, *out.shape, dtype=dtype)).sum(), list(leaves.values()))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def compare(
    ours: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, measured: Callable[..., None]
) -> None:
    errors = {}
    for name, x in ours.items():
        assert x.isfinite().all(), name
        errors[name] = float((x.double() - exact[name]).abs().max() / exact[name].abs().max().clamp(min=1e-6))
    measured(**errors)
    assert max(errors.values()) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("case", CASES)
def test_flex_equals_eager(case: str, measured: Callable[..., None]):
    name, scheme, layout, dtype, options = CASES[case]
    at = laid_out(layout)
    problem = PATTERNS[name], at, at, "self", scheme
    exact = differentiate(*problem, torch.float64, "eager", options)
    compare(differentiate(*problem, dtype, "flex", options), exact, dtype, measured)


@pytest.mark.parametrize("name", ["full", "window"])
def test_flex_across(name: str, measured: Callable[..., None]):
    """Targets packed with their sources; one target has none, and reads zero."""
    q = laid_out("packed")
    k = make_layout(2, 300, CUDA, segments=torch.tensor([[0] * 100 + [2] * 200, [0] * 250 + [-1] * 50], device=CUDA))
    problem = PATTERNS[name], q, k, "cross", NoPosition()
    exact = differentiate(*problem, torch.float64, "eager", {})
    ours = differentiate(*problem, torch.float32, "flex", {})
    compare(ours, exact, torch.float32, measured)
    assert not ours["out"][0, :, 130:430].any()


@pytest.mark.parametrize("name", ["full", "causal", "window"])
@pytest.mark.parametrize("layout", ["packed", "right"])
def test_varlen_equals_eager(name: str, layout: str, measured: Callable[..., None]):
    at = laid_out(layout)
    problem = PATTERNS[name], at, at, "self", NoPosition()
    exact = differentiate(*problem, torch.float64, "eager", {})
    compare(differentiate(*problem, torch.bfloat16, "varlen", {}), exact, torch.bfloat16, measured)


def test_varlen_across(measured: Callable[..., None]):
    """Targets packed with their sources; one target has none, and reads zero; where only one side has pads, too."""
    q = laid_out("packed")
    full = q._replace(segments=q.segments.where(q.segments >= 0, 1))
    keys = torch.tensor([[0] * 100 + [2] * 200, [0] * 100 + [1] * 150 + [-1] * 50], device=CUDA)
    for a, b in ((q, keys), (q, keys.where(keys >= 0, 1)), (full, keys)):
        problem = Full(), a, Layout.packed_rows(b, documents=5), "cross", NoPosition()
        exact = differentiate(*problem, torch.float64, "eager", {})
        compare(differentiate(*problem, torch.bfloat16, "varlen", {}), exact, torch.bfloat16, measured)


@pytest.mark.parametrize("kind", ["full", "causal", "mask", "bias"])
def test_sdpa_equals_eager(kind: str, measured: Callable[..., None]):
    """In fp32 and bf16, by a flag, a mask or a bias, and where a row sees nothing."""
    at = laid_out("left" if kind in ("mask", "bias") else "plain")
    pattern = Full() if kind == "full" else Causal()
    problem = pattern, at, at, "self", Alibi() if kind == "bias" else NoPosition()
    exact = differentiate(*problem, torch.float64, "eager", {})
    for dtype in TOLERANCE:
        compare(differentiate(*problem, dtype, "sdpa", {}), exact, dtype, measured)


DECODED: dict[str, tuple[int, int, int, int, int, int, int]] = {  # rows, heads, groups, queries, keys, widths
    "one row": (1, 32, 8, 1, 300, 64, 64),
    "many rows": (64, 32, 8, 1, 300, 64, 64),
    "base": (256, 8, 8, 1, 33, 64, 64),
    "one group": (3, 40, 1, 3, 1000, 128, 128),
    "odd widths": (2, 4, 2, 2, 70, 24, 40),
    "wide": (2, 4, 2, 1, 70, 256, 256),
    "one query": (5, 8, 8, 1, 33, 64, 64),
    "one query of wide heads": (1, 4, 4, 1, 2000, 256, 128),
}


@pytest.mark.parametrize("kind", ["full", "mask", "some", "bias"])
@pytest.mark.parametrize("shape", DECODED)
def test_decode_equals_eager(shape: str, kind: str, measured: Callable[..., None]):
    """Few queries of a cache, some of its slots empty."""
    b, h, g, t, s, k, k_v = DECODED[shape]
    tensors = random(0, b, t, h, k).transpose(1, 2), random(1, b, g, s, k), random(2, b, g, s, k_v)
    mask = random(3, b, 1, t, s) > 0.5
    mask[..., s // 2 :] = False
    mask[..., 3] = True
    some = mask & (torch.arange(b, device=CUDA) > 0)[:, None, None, None]  # the queries of a row are fully masked
    bias = random(4, 1, h, t, s).masked_fill(~some, -torch.inf)
    kinds = {"full": FewQueries(), "mask": FewQueries(mask), "some": FewQueries(some), "bias": FewQueries(bias=bias)}
    few, scoring = kinds[kind], Scoring(k**-0.5)
    exact = {"out": attend(*tensors, densify(few)._replace(kernel="eager"), scoring)}
    for dtype in (torch.bfloat16, torch.float16) if shape == "one row" else (torch.bfloat16,):
        for run in (attend, torch.compile(attend)) if shape == "one row" else (attend,):
            ours = run(*(x.to(dtype) for x in tensors), few, scoring)
            compare({"out": ours}, exact, torch.bfloat16, measured)
        origins = (random(5, b, s) * 100).long() % b  # the row that holds each key
        places = origins[:, None], torch.arange(g, device=CUDA)[:, None], torch.arange(s, device=CUDA)
        q, keys, values = tensors
        eager = densify(few)._replace(kernel="eager")
        elsewhere = {"out": attend(q, keys[places], values[places], eager, scoring)}
        shared = attend(*(x.to(dtype) for x in tensors), few._replace(origins=origins), scoring)
        compare({"out": shared}, elsewhere, torch.bfloat16, measured)
        if kind != "full":
            q, keys, values = (x.to(dtype) for x in tensors)
            keys, values, pages = to_pages(keys, values, 16)
            paged = few._replace(
                mask=None if few.mask is None else fill_up(few.mask, pages, False),
                bias=None if few.bias is None else fill_up(few.bias, pages, -torch.inf),
                pages=pages,
            )
            compare({"out": attend(q, keys, values, paged, scoring)}, exact, torch.bfloat16, measured)


# -- whole models -----------------------------------------------------------------------------------------------------


def decoder(pattern: Pattern, position: Position) -> ModelConfig:
    block = Block(mixer=Attention(heads=4, kv_heads=2, pattern=pattern))
    stack = Stack(depth=2, blocks=(block,), position=position)
    return ModelConfig(width=128, target=Tokens(vocab=100), decoder=stack, head=LM(), tie="output")


def step(run: Callable[..., Tensor], model: Transformer, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = run(ids)
    out.logsumexp(dim=-1).mean().backward()
    return {"out": out.detach(), **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_trains_on_flex(compiled: bool, measured: Callable[..., None]):
    """`auto` takes flex for a long row with a window and T5's biases; the whole model may be compiled around it."""
    torch.manual_seed(0)
    model, ids = (
        Transformer(decoder(Window(before=200, after=0), T5)).to(CUDA),
        torch.arange(1100, device=CUDA)[None] % 97,
    )
    at = make_layout(1, 1100, CUDA)
    plan = model.decoder.plans[0]
    runtime = Runtime("cuda", torch.float32, training=True)
    assert choose("auto", plan.pattern, at, at, "self", T5, plan.needs, runtime).kernel == "flex"
    ours = step(torch.compile(model) if compiled else model, model, ids)
    model.backend = "eager"
    exact = step(model, model, ids)
    compare(
        {name: x.double() for name, x in ours.items()},
        {n: x.double() for n, x in exact.items()},
        torch.float32,
        measured,
    )

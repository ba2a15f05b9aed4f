"""Mixers compared: FLOPs, sequential steps, and path length from token to token."""

import bisect
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer import Transformer
from anyformer.config import (
    MAX_DEPTH,
    Attention,
    Block,
    Convolution,
    FanIn,
    Features,
    FullyConnected,
    Mixer,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    PositionMixing,
    Recurrent,
    Stack,
)
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, Rows, Size, Verdict, decide, power
from anyformer.lab.figures import label_ends, lines, log_ticks, panels
from anyformer.nn.inspection.api import run_with_taps
from anyformer_claims.common import DEVICE, median_seconds, mixer_flops

# exponents that the textbooks' table has: of T and d in the FLOPs between tokens, of T in the steps that wait
WANTED = {
    "attention": (2, 1, 0),
    "fully connected": (2, 2, 0),
    "positions": (2, 1, 0),
    "convolution": (1, 2, 0),
    "dilated": (1, 2, 0),
    "recurrent": (1, 2, 1),
}
KERNEL = 3
DEPTHS = [*(2**n for n in range(MAX_DEPTH.bit_length())), MAX_DEPTH]  # tried one after the other for the path
PRODUCTS = ("Addmm", "Mm", "Bmm", "Convolution")  # nodes of autograd's graph that multiply matrices


class Claim(Experiment):
    kind: Literal["layers"] = "layers"
    timed = True

    def cells(self, size: Size) -> list[Cell]:
        width, powers = {"quick": (32, 6), "cpu": (32, 7), "gpu": (64, 7)}[size]
        lengths = [KERNEL**n for n in range(2, powers + 1)]
        widths = [width // 4, width // 2, width, width * 2]
        base = {"kernel": KERNEL, "repeats": 5, "seed": 0}
        by_length: list[Cell] = [{"kind": k, "width": width, "length": t, **base} for k in WANTED for t in lengths]
        by_width: list[Cell] = [{"kind": k, "width": d, "length": 27, **base} for k in WANTED for d in widths]
        by_kernel: list[Cell] = [
            {"kind": "convolution", "width": width, "length": 27, **base, "kernel": k} for k in (9, 27)
        ]
        cells = [cell for cell in by_length if cell["kind"] != "fully connected" or cell["length"] <= KERNEL**5]
        return cells + [cell for cell in by_width + by_kernel if cell not in cells]

    def measure(self, cell: Cell) -> dict[str, Any]:
        kind, d, t, kernel = cell["kind"], cell["width"], cell["length"], cell["kernel"]
        torch.manual_seed(cell["seed"])
        model = _model(kind, d, t, kernel, depth=1)
        x = torch.randn(1, t, d, device=DEVICE)
        _, seen = run_with_taps(model, ["decoder.0.mixer.in", "decoder.0.mixer.out"], x)
        chain = _chain(seen["decoder.0.mixer.out"], seen["decoder.0.mixer.in"])
        between, alone = mixer_flops(model, x)
        once = _model(kind, d, 1, kernel, depth=1)
        _, first = run_with_taps(once, ["decoder.0.mixer.in", "decoder.0.mixer.out"], x[:, :1])
        handed = 1 + chain - _chain(first["decoder.0.mixer.out"], first["decoder.0.mixer.in"])
        layers = _layers_between(kind, t, kernel)
        return {
            "flops": between if kind == "attention" else between + alone,
            "projections": alone if kind == "attention" else 0,
            "parameters": sum(p.numel() for p in model.decoder.parameters()) if model.decoder else 0,
            "chain": chain,
            "layers": layers,
            "path": layers * handed,
            "seconds": median_seconds(model, x, cell["repeats"]),
        }

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        conditions = []
        for kind, wanted in WANTED.items():
            fits = _exponents(results, kind)
            named = zip(("T in FLOPs", "d in FLOPs", "T in sequential matmuls"), fits, wanted, strict=True)
            conditions += [
                Fact(f"{kind}: exponent of {name} {due} ± 0.1", abs(fit - due) <= 0.1, f"{fit:.2f}")
                for name, fit, due in named
            ]
            some = [r for r in _by_length(results) if r["kind"] == kind]
            exact = all(r["path"] == _path(kind, r["length"], r["kernel"]) for r in some)
            at = f"{some[-1]['path']} at T = {some[-1]['length']}"
            conditions.append(Fact(f"{kind}: paths as predicted at every length", exact, at))
        same = [r for r in results if (r["kind"], r["length"], r["width"]) == ("convolution", 27, _width(results))]
        kernels = {r["kernel"]: r["flops"] for r in same}
        by_kernel = power(list(kernels), list(kernels.values())).exponent
        conditions.append(
            Fact("convolution: exponent of K in FLOPs 1 ± 0.1", abs(by_kernel - 1) <= 0.1, f"{by_kernel:.2f}")
        )
        return decide(conditions)

    def setting(self, results: Sequence[CellResult]) -> str:
        return """Stacks of mixers alone (no feed-forward, no norm), causal; attention with one head; one text of random
vectors (batch 1) in fp32."""

    def caption(self, results: Sequence[CellResult]) -> str:
        return "Grey labels: lines that coincide. The fully connected layer is measured up to 243 tokens."

    def result(self, results: Sequence[CellResult]) -> str:
        longest = max(r["length"] for r in _by_length(results) if r["kind"] != "fully connected")
        last = {r["kind"]: r for r in _by_length(results) if r["length"] == longest}
        one, other = last["attention"], last["recurrent"]
        return (
            f"At {longest:,} tokens attention needs {one['chain']} sequential matmuls and a path of {one['path']}, a "
            f"recurrence {other['chain']:,} and {other['path']:,}; with {one['flops'] / other['flops']:.0f} times "
            f"fewer FLOPs the recurrence took {other['seconds'] / one['seconds']:.1f} times as long."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        head = (
            "mixer",
            "FLOPs",
            "exponent of T",
            "exponent of d",
            "parameters",
            "steps",
            "layers",
            "path",
            "ms",
            "exponent of T in time",
        )
        rows = [head]
        for kind in WANTED:
            some = [r for r in _by_length(results) if r["kind"] == kind]
            last, (of_t, of_d, _) = some[-1], _exponents(results, kind)
            late = power([r["length"] for r in some[-3:]], [r["seconds"] for r in some[-3:]]).exponent
            rows.append(
                (
                    f"{kind} (T = {last['length']})",
                    f"{last['flops']:,}" + (f" + {last['projections']:,}" if last["projections"] else ""),
                    f"{of_t:.2f}",
                    f"{of_d:.2f}",
                    f"{last['parameters']:,}",
                    str(last["chain"]),
                    str(last["layers"]),
                    str(last["path"]),
                    f"{last['seconds'] * 1e3:.2f}",
                    f"{late:.2f}",
                )
            )
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        labels = {
            "flops": "FLOPs between tokens",
            "parameters": "parameters",
            "chain": "sequential matmuls",
            "path": "path, first token to last",
        }
        figure, axes = panels(len(labels))
        some = _by_length(results)
        for axis, (name, label) in zip(axes, labels.items(), strict=True):
            lines(axis, {k: {r["length"]: [r[name]] for r in some if r["kind"] == k} for k in WANTED})
            axis.set(yscale="log", xlabel="length T, tokens", ylabel=label)
            log_ticks(axis, sorted({r["length"] for r in some}))
            label_ends(axis)
        return figure


def _mixer(kind: str, length: int, kernel: int, dilation: int = 1) -> Mixer:
    match kind:
        case "attention":
            return Attention(heads=1)
        case "fully connected":
            return FullyConnected(length=length)
        case "positions":
            return PositionMixing(length=length)
        case "recurrent":
            return Recurrent(cell="rnn")
        case _:
            return Convolution(width=kernel, dilation=dilation)


def _model(kind: str, width: int, length: int, kernel: int, depth: int) -> Transformer:
    """Return a causal stack of mixers only; if dilated, layer i is dilated by K^i."""
    dilations = [kernel**i if kind == "dilated" else 1 for i in range(depth)]
    blocks = tuple(
        Block(mixer=_mixer(kind, length, kernel, n), feedforward=NoFeedForward(), norm=NoNorm()) for n in dilations
    )
    stack = Stack(depth=depth, blocks=blocks)
    config = ModelConfig(width=width, target=Features(size=width), decoder=stack, init=FanIn())
    with torch.device(DEVICE):
        model = Transformer(config).eval()
    model.backend = "eager"  # separate matmuls, no fused kernel
    return model


def _chain(out: Tensor, read: Tensor) -> int:
    """Return the longest chain of matmuls between a mixer's input and output, in autograd's graph."""
    depth: dict[Any, int] = {None: 0, read.grad_fn: 0}
    stack = [out.grad_fn]
    while stack:
        node = stack[-1]
        after = [n for n, _ in node.next_functions] if node is not None else []
        if node in depth:
            stack.pop()
        elif missing := [n for n in after if n not in depth]:
            stack += missing
        else:
            multiplies = node is not None and node.name().removesuffix("Backward0") in PRODUCTS
            depth[node] = max((depth[n] for n in after), default=0) + multiplies
            stack.pop()
    return depth[out.grad_fn]


def _layers_between(kind: str, length: int, kernel: int, width: int = 16) -> int:
    """Return the first layer whose last output depends on the first input; fp64, for the gradient is small."""
    for depth in DEPTHS:
        model = _model(kind, width, length, kernel, depth).double()
        x = torch.randn(1, length, width, dtype=torch.float64, device=DEVICE).mul_(0.01).requires_grad_()
        _, seen = run_with_taps(model, ["decoder.*.out"], x)
        outputs = [seen[f"decoder.{layer}.out"][0, -1] for layer in range(depth)]
        if _reaches(outputs[-1], x):
            return bisect.bisect_left(outputs, True, key=lambda out: _reaches(out, x)) + 1
    raise AssertionError


def _reaches(out: Tensor, x: Tensor) -> bool:
    (slope,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    return bool(slope[0, 0].abs().max() > 0)


def _width(results: Sequence[CellResult]) -> int:
    """Return the results of the longest rows."""
    return int(max(results, key=lambda r: r["length"])["width"])


def _by_length(results: Sequence[CellResult]) -> list[CellResult]:
    return [r for r in results if (r["width"], r["kernel"]) == (_width(results), KERNEL)]


def _exponents(results: Sequence[CellResult], kind: str) -> tuple[float, float, float]:
    """Return the exponents of T and d in the FLOPs, and of T in the steps."""
    long = [r for r in _by_length(results) if r["kind"] == kind]
    wide = [r for r in results if (r["kind"], r["length"], r["kernel"]) == (kind, 27, KERNEL)]
    lengths = [r["length"] for r in long]
    return (
        power(lengths, [r["flops"] for r in long]).exponent,
        power([r["width"] for r in wide], [r["flops"] for r in wide]).exponent,
        power(lengths, [r["chain"] for r in long]).exponent,
    )


def _path(kind: str, length: int, kernel: int) -> int:
    """Return the exact prediction of the claim."""
    match kind:
        case "recurrent":
            return length
        case "convolution":
            return math.ceil((length - 1) / (kernel - 1))
        case "dilated":
            return round(math.log(length, kernel))
        case _:
            return 1

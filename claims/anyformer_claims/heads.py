"""Heads share the width: h of width d/h cost the FLOPs of one of width d, and h times the memory for scores."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer import Transformer, count
from anyformer.config import Attention, Block, Features, ModelConfig, NoFeedForward, Stack
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, Rows, Size, Verdict, decide
from anyformer.lab.figures import lines, log_ticks, panel_legend, panels
from anyformer.nn.api import Backend
from anyformer.nn.inspection.api import run_with_taps
from anyformer_claims.common import DEVICE, median_seconds, mixer_flops

ELEMENT = 4  # bytes


class Claim(Experiment):
    kind: Literal["heads"] = "heads"
    timed = True

    def cells(self, size: Size) -> list[Cell]:
        width, length = {"quick": (64, 256), "cpu": (256, 512), "gpu": (1024, 2048)}[size]
        return [{"width": width, "length": length, "heads": h, "repeats": 9} for h in (1, 2, 4, 8, 16, 32)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        block = Block(mixer=Attention(heads=cell["heads"]), feedforward=NoFeedForward())
        config = ModelConfig(
            width=cell["width"], source=Features(size=cell["width"]), encoder=Stack(depth=1, blocks=(block,))
        )
        with torch.device(DEVICE):
            model = Transformer(config)
            x = torch.randn(1, cell["length"], cell["width"])
        between, projections = mixer_flops(model, x)
        _, seen = run_with_taps(model, ["encoder.0.mixer.weights"], x)
        return {
            "flops": between + projections,
            "predicted": next(row.flops for row in count(config, cell["length"]).rows if "attention" in row.part),
            "parameters": model.num_parameters(),
            "scores": seen["encoder.0.mixer.weights"].numel(),
            "kept_plain": _kept(model, x, "eager"),
            "kept_fused": _kept(model, x, "sdpa"),
            "plain": median_seconds(model, x, cell["repeats"], "eager"),
            "fused": median_seconds(model, x, cell["repeats"], "sdpa"),
        }

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        first, last = results[0], results[-1]
        flops = {r["flops"] for r in results} | {r["predicted"] for r in results}
        sizes = {r["parameters"] for r in results}
        times = [r["scores"] / first["scores"] for r in results]
        matrix = ELEMENT * first["length"] ** 2
        plain = all(r["kept_plain"] - first["kept_plain"] == (r["heads"] - 1) * matrix for r in results)
        fused = last["kept_fused"] / first["kept_fused"]
        more = f"{last['kept_plain'] / first['kept_plain']:.1f} times with {last['heads']} heads"
        return decide(
            [
                Fact("every h has the same FLOPs, as predicted", len(flops) == 1, _listed(flops)),
                Fact("every h has the same parameters", len(sizes) == 1, _listed(sizes)),
                Fact("h heads have h times the scores", times == [r["heads"] for r in results], _listed(times)),
                Fact("separate matmuls save hT² scores for the backward pass", plain, more),
                Fact(
                    "a fused kernel saves at most 1.1 times as much as with one head",
                    fused <= 1.1,
                    f"{fused:.2f} times",
                ),
            ]
        )

    def setting(self, results: Sequence[CellResult]) -> str:
        return """One text of random vectors (batch 1) in fp32. The model has a linear input layer, one block of
attention without feed-forward, and its norms."""

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        first, last = results[0], results[-1]
        matrix, mib = ELEMENT * first["length"] ** 2, 2**20
        return {
            "every h has the same FLOPs, as predicted": f"exactly {first['flops']:,}",
            "every h has the same parameters": f"exactly {first['parameters']:,}" if first["parameters"] >= 1e6 else "",
            "separate matmuls save hT² scores for the backward pass": (
                f"{matrix / mib:g} MiB for each head and {(first['kept_plain'] - matrix) / mib:.2f} MiB that do not "
                f"depend on h: {first['kept_plain'] / mib:.2f} MiB with one head, {last['kept_plain'] / mib:.2f} MiB "
                f"with {last['heads']}"
            ),
        }

    def caption(self, results: Sequence[CellResult]) -> str:
        return (
            "FLOPs (rings) and what a fused kernel saves (diamonds) both stay at 1. Saved for backward: bytes that "
            "autograd keeps for the whole model; a part of them does not grow with h."
        )

    def result(self, results: Sequence[CellResult]) -> str:
        most = results[-1]["heads"]
        return (
            f"From 1 to {most} heads FLOPs and parameters stay equal, and scores grow {most} times. Yet the time of a "
            f"forward pass varies by a factor of {_range(results, 'plain')} with separate matmuls and of "
            f"{_range(results, 'fused')} with a fused kernel."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        head = ("heads", "FLOPs", "parameters", "scores", "kept", "kept, fused", "ms", "ms, fused")
        return [
            head,
            *(
                (
                    str(r["heads"]),
                    f"{r['flops']:,}",
                    f"{r['parameters']:,}",
                    f"{r['scores']:,}",
                    f"{r['kept_plain'] / 2**20:.2f} MiB",
                    f"{r['kept_fused'] / 2**20:.2f} MiB",
                    f"{r['plain'] * 1e3:.2f}",
                    f"{r['fused'] * 1e3:.2f}",
                )
                for r in results
            ),
        ]

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right) = panels(2, height=4)
        first = results[0]
        named = {"FLOPs": "flops", "elements of the scores": "scores"}
        kept = {"saved for backward, separate matmuls": "kept_plain", "saved for backward, fused kernel": "kept_fused"}
        lines(left, {label: {r["heads"]: [r[n] / first[n]] for r in results} for label, n in (named | kept).items()})
        left.get_lines()[0].set(markersize=10, markerfacecolor="none", zorder=4)  # visible around the lines below it
        left.set(xlabel="heads h, each of width d/h", ylabel="relative to one head")
        log_ticks(left, [1, 2, 4, 8, 16, 32], across=False)
        times = {"separate matmuls": "plain", "fused kernel": "fused"}
        lines(right, {label: {r["heads"]: [r[n] * 1e3] for r in results} for label, n in times.items()}, first=4)
        right.set(xlabel="heads h, each of width d/h", ylabel="time, forward, ms", ylim=(0, None))
        for axis in (left, right):
            log_ticks(axis, [r["heads"] for r in results])
            panel_legend(axis)
        return figure


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:,g}" for value in sorted(values))


def _kept(model: Transformer, x: Tensor, backend: Backend) -> int:
    """Return the bytes that autograd saves for the backward pass, without weights, each storage once."""
    model.backend, own = backend, {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, Tensor] = {}

    def note(t: Tensor) -> Tensor:
        seen[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = model(x)
    del out
    return sum(t.untyped_storage().nbytes() for at, t in seen.items() if at not in own)


def _range(results: Sequence[CellResult], kernel: str) -> str:
    """Return the ratio of the longest to the shortest time, and both."""
    low, high = (found(r[kernel] for r in results) for found in (min, max))
    return f"{high / low:.1f} ({low * 1e3:.2f} to {high * 1e3:.2f} ms)"

"""Parameters and FLOPs of a block: attention 4d², feed-forward 8d²; scores grow with T², the rest with T."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from anyformer import Transformer, count
from anyformer.config import Attention, Block, ModelConfig, NoHead, Plain, Stack, Tokens
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, Power, Rows, Size, Verdict, decide, power
from anyformer.lab.figures import label_ends, lines, log_ticks, panels, reference
from anyformer.nn.api import Context, make_layout
from anyformer_claims.common import DEVICE, seconds

PARTS = ("scores and values", "projections", "feed-forward")
TIMED = {"scores and values": 2.0, "feed-forward": 1.0}  # and how their time grows once they keep a GPU busy
EXPONENTS = {"scores and values": 2.0, "projections": 1.0, "feed-forward": 1.0}  # of T in their FLOPs
HEADS = 4


class Claim(Experiment):
    kind: Literal["costs"] = "costs"
    timed = True

    def cells(self, size: Size) -> list[Cell]:
        width = {"quick": 64, "cpu": 128, "gpu": 512}[size]
        timed = [2**i for i in range(14, 18)] if size == "gpu" else []
        lengths = [int(width * ratio) for ratio in (0.25, 0.5, 1, 2, 4, 6, 8, 12)]
        return [{"width": width, "length": n, "timed": n in timed} for n in lengths + timed]

    def measure(self, cell: Cell) -> dict[str, Any]:
        """Return the FLOPs of a block by part, counted by torch and predicted from the config, or its time."""
        d, t = cell["width"], cell["length"]
        config = _block(d)
        with torch.device(DEVICE):
            model = Transformer(config).eval()
        assert model.encoder is not None
        block: Any = model.encoder.blocks[0]
        if cell["timed"]:
            return _times(block["feedforward"], d, t)
        model.backend = "eager"  # torch's counter does not see into fused kernels
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, t, dtype=torch.long, device=DEVICE))
        found = counter.get_flop_counts()
        mixer = found[next(name for name in found if name.endswith("blocks.0.mixer"))]
        feedforward = found[next(name for name in found if name.endswith("blocks.0.feedforward"))]
        products = sum(n for op, n in mixer.items() if "bmm" in str(op))
        table = count(config, t)
        return {
            "scores and values": products,
            "projections": sum(mixer.values()) - products,
            "feed-forward": sum(feedforward.values()),
            "predicted": table.flops,
            "counted": counter.get_total_flops(),
            "attention parameters": sum(p.numel() for p in block["mixer"].parameters() if p.dim() == 2),
            "feed-forward parameters": sum(p.numel() for p in block["feedforward"].parameters() if p.dim() == 2),
        }

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        counted, timed = _parted(results)
        d = results[0]["width"]
        conditions = [_grows(f"FLOPs of {part}", counted, part, wanted, 0.1) for part, wanted in EXPONENTS.items()]
        for part, wanted in (("attention", 4), ("feed-forward", 8)):
            size = counted[0][f"{part} parameters"] / d**2
            conditions.append(Fact(f"{part} has {wanted}d² parameters", size == wanted, f"{size:g}d²"))
        for name, others, wanted in (("the projections", PARTS[1:2], 2), ("all the rest", PARTS[1:], 6)):
            met = _crossing(counted, others) / d
            near = abs(met - wanted) <= 0.1 * wanted
            conditions.append(Fact(f"scores and values meet {name} at T = {wanted}d", near, f"{met:.2f} d"))
        if timed:
            conditions += [_grows(f"time of {p}", timed, f"{p} seconds", e, 0.15) for p, e in TIMED.items()]
        return decide(conditions)

    def setting(self, results: Sequence[CellResult]) -> str:
        return f"One block of attention ({HEADS} heads) and feed-forward (width 4d); one text (batch 1)."

    def caption(self, results: Sequence[CellResult]) -> str:
        timed = " Below: time, measured at larger lengths in bf16." if _parted(results)[1] else ""
        return f"At T = 6d scores and values meet the sum of the other two, which is not drawn.{timed}"

    def result(self, results: Sequence[CellResult]) -> str:
        counted, timed = _parted(results)
        d = results[0]["width"]
        exact = "exactly as" if all(r["predicted"] == r["counted"] for r in counted) else "unlike what"
        meets = _crossing(counted, PARTS[1:]) / d
        took = [f"{p} T^{_fit(timed, f'{p} seconds').exponent:.2f}" for p in TIMED if timed]
        return (
            f"FLOPs of scores and values grow as T^{_fit(counted, PARTS[0]).exponent:.2f}, those of the rest as "
            f"T^{_fit(counted, PARTS[2]).exponent:.2f}, {exact} the config predicts, and meet at T = {meets:.1f} d"
            + (f"; from {timed[0]['length']:,} tokens time grows as {' and '.join(took)}." if took else ".")
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        head = ("T / d", *PARTS, "counted by torch", "predicted")
        names = (*PARTS, "counted", "predicted")
        counted, _ = _parted(results)
        return [head, *((f"{r['length'] / r['width']:g}", *(f"{r[name]:,}" for name in names)) for r in counted)]

    def draw(self, results: Sequence[CellResult]) -> Any:
        counted, timed = _parted(results)
        figure, (left, *rest) = panels("a;b" if timed else 1, height=3.2)
        lines(left, {part: {r["length"] / r["width"]: [r[part]] for r in counted} for part in PARTS})
        for ratio in (2, 6):
            reference(left, ratio, f"T = {ratio}d", across=False)
        left.set(yscale="log", xlabel="length T, in multiples of the width d", ylabel="FLOPs of a block, forward")
        log_ticks(left, [r["length"] / r["width"] for r in counted if r["length"] != 8 * r["width"]])
        for axis in rest:
            took = {p: {r["length"]: [r[f"{p} seconds"] * 1e3] for r in timed if p in TIMED} for p in PARTS}
            lines(axis, took)
            axis.set(xlabel="length T, tokens", ylabel="time, forward, ms")
            log_ticks(axis, [r["length"] for r in timed])
            log_ticks(axis, [0.1, 1, 10, 100], across=False)
        for axis in (left, *rest):
            label_ends(axis)
        return figure


def _parted(results: Sequence[CellResult]) -> tuple[list[CellResult], list[CellResult]]:
    """Return the results with counted FLOPs and those with times."""
    return [r for r in results if not r["timed"]], [r for r in results if r["timed"]]


@torch.no_grad()
def _times(feedforward: torch.nn.Module, width: int, length: int, repeats: int = 9) -> dict[str, float]:
    """Time the parts of a block in bf16."""
    x = torch.randn(1, length, width, device=DEVICE, dtype=torch.bfloat16)
    heads = x.view(1, length, HEADS, -1).transpose(1, 2)
    feedforward.to(x.dtype)
    layout = make_layout(1, length, x.device)
    ctx = Context(layout, layout)
    runs = (lambda: F.scaled_dot_product_attention(heads, heads, heads), lambda: feedforward(x, ctx))
    return {f"{part} seconds": seconds(run, repeats) for part, run in zip(TIMED, runs, strict=True)}


def _block(width: int) -> ModelConfig:
    block = Block(mixer=Attention(heads=HEADS), feedforward=Plain(width=4 * width))
    return ModelConfig(width=width, source=Tokens(vocab=8), encoder=Stack(depth=1, blocks=(block,)), head=NoHead())


def _fit(results: Sequence[CellResult], what: str) -> Power:
    """Return how a measurement grows with the length."""
    return power([r["length"] for r in results], [r[what] for r in results])


def _grows(name: str, results: Sequence[CellResult], what: str, exponent: float, tolerance: float) -> Fact:
    fit = _fit(results, what)
    fine = abs(fit.exponent - exponent) <= tolerance
    return Fact(f"{name} grows as T^{exponent:g} ± {tolerance:g}", fine, f"exponent {fit}")


def _crossing(results: Sequence[CellResult], others: tuple[str, ...]) -> float:
    """Return the length at which the fitted lines cross."""
    lengths = [r["length"] for r in results]
    scores = power(lengths, [r["scores and values"] for r in results])
    rest = power(lengths, [sum(r[name] for name in others) for r in results])
    return float((rest.factor / scores.factor) ** (1 / (scores.exponent - rest.exponent)))

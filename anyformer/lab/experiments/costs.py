"""Parameters and FLOPs of a block: attention 4d², feed-forward 8d²; scores grow with T², the rest with T."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from anyformer.config import Attention, Block, ModelConfig, NoHead, Plain, Stack, Tokens
from anyformer.inspection.count import count
from anyformer.lab.cells import Cell, Result
from anyformer.lab.experiment import Experiment, Rows, Size, Verdict, verdict
from anyformer.lab.figures import lines, panels
from anyformer.lab.stats import power
from anyformer.nn.model import Transformer

PARTS = ("scores and values", "projections", "feed-forward")


class Claim(Experiment):
    name = "costs"
    number = 1
    claim = "A block has 4d² parameters in attention and 8d² in the feed-forward; scores cost O(T²d), the rest O(Td²)."
    idea = """Attention projects the input to queries, keys and values and the heads' output back: four matrices of
$d \\times d$. The feed-forward with $f = 4d$ has two of $d \\times 4d$. Each of a sequence's $T$ vectors goes through
all of them, at two FLOPs a weight: $24Td^2$. The scores $QK^\\top$ and their product with $V$ take $2T^2d$ each.
So $4T^2d$ overtakes the projections' $8Td^2$ at $T = 2d$, and all $24Td^2$ at $T = 6d$: for short texts the cost
is linear in $T$, whatever is said of attention."""
    prediction = "Exponents of T: 2.0 ± 0.1 for scores and values, 1.0 ± 0.1 for the rest; crossovers at 2d and 6d."
    parts = ("nn/attention.py", "nn/ffn.py", "inspection/count.py")
    minutes = (0.2, 0.5, 1.0)

    def cells(self, size: Size) -> list[Cell]:
        width = {"quick": 64, "cpu": 128, "gpu": 512}[size]
        return [{"width": width, "length": int(width * ratio)} for ratio in (0.25, 0.5, 1, 2, 4, 6, 8, 12)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        """FLOPs that torch counts while a block runs, by part, beside those that the config predicts."""
        d, t = cell["width"], cell["length"]
        config = _block(d)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(device):
            model = Transformer(config).eval()
        assert model.encoder is not None
        block: Any = model.encoder.blocks[0]
        model.backend = "eager"  # torch's counter does not see into fused kernels
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, t, dtype=torch.long, device=device))
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

    def judge(self, results: Sequence[Result]) -> Verdict:
        d = results[0]["width"]
        fits = {part: power([r["length"] for r in results], [r[part] for r in results]) for part in PARTS}
        sizes = [results[0][f"{part} parameters"] / d**2 for part in ("attention", "feed-forward")]
        wanted = {"scores and values": 2.0, "projections": 1.0, "feed-forward": 1.0}
        fine = all(abs(fits[part].exponent - wanted[part]) <= 0.1 for part in PARTS) and sizes == [4, 8]
        told = ", ".join(f"{part} T^{fits[part].exponent:.2f}" for part in PARTS)
        same = all(r["predicted"] == r["counted"] for r in results)
        return verdict(
            fine,
            f"{told}; {sizes[0]:g}d² and {sizes[1]:g}d² parameters; scores and values meet the projections at "
            f"T = {_crossing(results, ('projections',)) / d:.2f} d and all the rest at "
            f"T = {_crossing(results, ('projections', 'feed-forward')) / d:.2f} d; "
            f"the config's prediction {'equals' if same else 'differs from'} what torch counts",
        )

    def table(self, results: Sequence[Result]) -> Rows:
        head = ("T / d", *PARTS, "counted by torch", "predicted")
        names = (*PARTS, "counted", "predicted")
        return [head, *((f"{r['length'] / r['width']:g}", *(f"{r[name]:,}" for name in names)) for r in results)]

    def draw(self, results: Sequence[Result]) -> Any:
        figure, (axis,) = panels(1, width=6)
        lines(axis, {part: {r["length"] / r["width"]: [r[part]] for r in results} for part in PARTS})
        for ratio, name in ((2, "T = 2d"), (6, "T = 6d")):
            axis.axvline(ratio, color="#8C8C8C", linewidth=0.8)
            axis.annotate(name, (ratio, 1.0), xycoords=("data", "axes fraction"), fontsize=8, ha="right", va="top")
        axis.set(xscale="log", yscale="log", xlabel="length T in widths d", ylabel="FLOPs of a block, forward")
        axis.legend()
        return figure


def _block(width: int) -> ModelConfig:
    block = Block(mixer=Attention(heads=4), feedforward=Plain(width=4 * width))
    return ModelConfig(width=width, source=Tokens(vocab=8), encoder=Stack(depth=1, blocks=(block,)), head=NoHead())


def _crossing(results: Sequence[Result], others: tuple[str, ...]) -> float:
    """The length at which the fitted lines meet."""
    lengths = [r["length"] for r in results]
    scores = power(lengths, [r["scores and values"] for r in results])
    rest = power(lengths, [sum(r[name] for name in others) for r in results])
    return float((rest.factor / scores.factor) ** (1 / (scores.exponent - rest.exponent)))

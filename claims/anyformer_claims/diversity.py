"""One head or several for a task that reads two positions at once: which positions each head attends to."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from anyformer import Transformer
from anyformer.config import LM, Attention, Block, LayerNorm, ModelConfig, Plain, Stack, T5Bias, Tokens, Xavier
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, Rows, Size, Verdict, decide, summary
from anyformer.lab.figures import curves, label_ends, lines, log_ticks, panels, reference
from anyformer.nn.inspection.api import attention_maps
from anyformer_claims.common import DEVICE, learn, mean_token_loss, seeds

AVERAGING = 0.5  # selectivity up to which a head averages: each position gets a quarter of both or more
NEAR, FAR = 2, 5  # distances of the two tokens that must be predicted


class Claim(Experiment):
    kind: Literal["diversity"] = "diversity"

    def cells(self, size: Size) -> list[Cell]:
        width, steps = {"quick": (32, 400), "cpu": (48, 600), "gpu": (128, 1500)}[size]
        task = {"letters": 8, "length": 24, "rows": 32, "width": width, "steps": steps, "lr": 1e-2}
        return [{"heads": h, **task, "seed": s} for h in (1, 2, 4, 8) for s in seeds(size, 8)]

    def measure(self, cell: Cell) -> dict[str, Any]:
        torch.manual_seed(cell["seed"])
        model = _model(cell)
        rows, pairs = _pairs(cell, 512)
        before = _heads(model, rows)
        curve = learn(model, lambda: _pairs(cell, cell["rows"]), cell["steps"], cell["lr"])
        with torch.no_grad():
            logits = model(rows)
        correct = logits[:, FAR:].argmax(dim=-1) == pairs[:, FAR:]
        after = _heads(model, rows)
        return {
            "loss": mean_token_loss(logits, pairs).item(),
            "accuracy": correct.float().mean().item(),
            "curve": curve,
            **after,
            "diversity before": before["diversity"],
        }

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        single = _values(results, 1, "selectivity")
        several = [r["selectivity"] for r in results if r["heads"] > 1]
        separate = True if min(several) > AVERAGING else False if max(several) <= AVERAGING else None
        return decide(
            [
                Fact(
                    f"a single head averages: selectivity at most {AVERAGING} in every seed",
                    max(single) <= AVERAGING,
                    f"{min(single):.2f} to {max(single):.2f}",
                ),
                Fact(
                    f"several heads separate: selectivity above {AVERAGING} in every seed",
                    separate,
                    f"{min(several):.2f} to {max(several):.2f}",
                ),
            ]
        )

    def setting(self, results: Sequence[CellResult]) -> str:
        return f"""One layer with a learned bias for each distance (T5), on rows of random letters
({results[0]["letters"]} different ones)."""

    def caption(self, results: Sequence[CellResult]) -> str:
        return "Dashed: the threshold of the rule, below which a head counts as averaging."

    def result(self, results: Sequence[CellResult]) -> str:
        counts = sorted({r["heads"] for r in results})
        each = ", ".join(f"{summary(_values(results, h, 'selectivity')).mean:.2f} with {h}" for h in counts[1:])
        best = max(counts[1:], key=lambda h: summary(_values(results, h, "accuracy")).mean)
        right = {h: summary(_values(results, h, "accuracy")).mean for h in (1, best)}
        return (
            f"The mean selectivity of heads is {summary(_values(results, 1, 'selectivity')).mean:.2f} with one head, "
            f"{each} (0: averages, 1: reads one position); one head predicts {100 * right[1]:.1f} % of the pairs, "
            f"{best} heads {100 * right[best]:.1f} %."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        names = ("selectivity", "diversity", "diversity before", "places", "loss", "accuracy")
        head = ("heads", "selectivity", "diversity, bits", "at the beginning", "places read", "loss", "pairs predicted")
        counts = sorted({r["heads"] for r in results})
        return [head, *((str(h), *(str(summary(_values(results, h, name))) for name in names)) for h in counts)]

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right, low) = panels("ab;cc", height=3)
        counts = sorted({r["heads"] for r in results})
        lines(left, {"after training": {h: _values(results, h, "selectivity") for h in counts}})
        left.set(title="0: averages, 1: reads one position", ylabel="selectivity", ylim=(0, 1))
        reference(left, AVERAGING, "threshold")
        stages = {"after training": "diversity", "before training": "diversity before"}
        lines(right, {stage: {h: _values(results, h, n) for h in counts if h > 1} for stage, n in stages.items()})
        right.set(title="difference between heads", ylabel="divergence, bits", ylim=(0, None))
        label_ends(right)
        for axis in (left, right):
            axis.set_xlabel("heads h, each of width d/h")
            log_ticks(axis, counts)
        curves(low, {f"{h} head{'s' * (h > 1)}": [r["curve"] for r in results if r["heads"] == h] for h in counts})
        low.set(yscale="log", ylabel="training loss, nats per pair")
        label_ends(low)
        return figure


def _model(cell: Cell) -> Transformer:
    """Return a model of one layer whose heads can attend by distance."""
    block = Block(mixer=Attention(heads=cell["heads"]), feedforward=Plain())
    stack = Stack(depth=1, blocks=(block,), position=T5Bias(), final_norm=LayerNorm())
    config = ModelConfig(
        width=cell["width"], target=Tokens(vocab=cell["letters"] ** 2), decoder=stack, head=LM(), init=Xavier()
    )
    with torch.device(DEVICE):
        return Transformer(config)


def _pairs(cell: Cell, rows: int) -> tuple[Tensor, Tensor]:
    """Return rows of letters and the pair to predict at each; -100 where there is none."""
    x = torch.randint(cell["letters"], (rows, cell["length"]), device=DEVICE)
    pairs = torch.full_like(x, -100)
    pairs[:, FAR:] = x[:, FAR - NEAR : -NEAR] * cell["letters"] + x[:, :-FAR]
    return x, pairs


def _heads(model: Transformer, rows: Tensor) -> dict[str, float]:
    """Return statistics of the heads, from the first token on that has a pair to predict."""
    weights = attention_maps(model, rows)["decoder"][0][:, :, FAR:]  # [b, h, t, s]
    near, far = (weights.diagonal(FAR - back, dim1=-2, dim2=-1).mean(dim=(0, 2)) for back in (NEAR, FAR))
    entropy = torch.special.entr(weights).sum(dim=-1)
    mean = weights.mean(dim=0)  # the part that depends on position alone
    apart = [divergence(mean[i], mean[j]) for i in range(len(mean)) for j in range(i)]
    return {
        "selectivity": ((near - far).abs() / (near + far)).mean().item(),
        "places": entropy.exp().mean().item(),
        "diversity": sum(apart) / len(apart) if apart else 0.0,
    }


def divergence(p: Tensor, q: Tensor) -> float:
    """Return the Jensen–Shannon divergence in bits, averaged over rows."""
    h = [torch.special.entr(x).sum(dim=-1).mean() for x in ((p + q) / 2, p, q)]
    return float(h[0] - (h[1] + h[2]) / 2) / math.log(2)


def _values(results: Sequence[CellResult], heads: int, name: str) -> list[float]:
    return [r[name] for r in results if r["heads"] == heads]

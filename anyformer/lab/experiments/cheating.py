"""A decoder that sees what it is to predict learns to copy it, and nothing else."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import Attention, Block, Causal, Full, LayerNorm, Pattern, Plain, Sinusoidal, Stack
from anyformer.lab.cells import Cell, Result
from anyformer.lab.experiment import Experiment, Rows, Size, Verdict, verdict
from anyformer.lab.experiments.common import all_hold, chain, final, found, sorting, spelling
from anyformer.lab.figures import bars, curves, legend, panels, reference
from anyformer.lab.stats import summary, welch
from anyformer.lab.trial import Trial, trained
from anyformer.nn.model import Transformer

MASKS: dict[str, Pattern] = {"causal": Causal(), "none": Full()}
WINDOWS = 64  # of unseen text


class Claim(Experiment):
    name = "cheating"
    number = 17
    claim = "Trained without the causal mask a decoder cheats: its training loss collapses, and decoding fails."
    idea = """A decoder is trained on all positions of a row at once: at $t$ the target is $x_{t+1}$, which is the next
token of the same row. Only the causal mask, $-\\infty$ on all scores with key $j >$ query $i$, hides it. Without the
mask a model learns to copy the next token. Its loss falls below the entropy of the text, which is impossible from the
earlier tokens alone, and no longer measures anything. In decoding there is no next token to copy. The text here is
synthetic, so that its entropy $H$ is known; the second task is sorting digits. Loss *from what came before* is measured
as in decoding: the model reads $x_1 \\dots x_t$ alone and predicts $x_{t+1}$."""
    prediction = """Without the mask the training loss on text ends below H/2, with it not below H; from what came
before the loss is higher by 0.5 nats without the mask; and it sorts less than a fifth of the rows, with the mask
more than half."""
    parts = ("attention/layout.py", "config/pattern.py", "tasks/lm.py")
    minutes = (2, 10, 3)
    alt = "Training loss with and without the causal mask, and loss and sorted rows of both in decoding"

    def cells(self, size: Size) -> list[Cell]:
        width, depth, longest, letters, length, steps, seeds = {
            "quick": (32, 2, 5, 8, 24, 500, 3),
            "cpu": (64, 2, 8, 12, 48, 1200, 5),
            "gpu": (256, 4, 16, 16, 128, 3000, 5),
        }[size]
        model = {"width": width, "depth": depth, "heads": 4, "steps": steps, "lr": 5e-3 * (32 / width) ** 0.5}
        tasks = {
            "text": {"letters": letters, "text": 200_000, "rows": 16, "length": length},
            "sort": {"longest": longest, "tokens": 16 * length},
        }
        return [
            {"task": task, "mask": mask, **model, **tasks[task], "seed": seed}
            for task in tasks
            for mask in MASKS
            for seed in range(seeds)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        if cell["task"] == "sort":
            pattern = MASKS[cell["mask"]].kind
            changes = [f"model.decoder.blocks.0.mixer.pattern={pattern}", "data.valid.count=100", "train.log_every=1"]
            with trained(sorting(cell, [*changes, "train.precision=fp32"])) as over:
                return {**_seen(over), "right": over.valid["exact_match"]}
        mixer = Attention(heads=cell["heads"], pattern=MASKS[cell["mask"]])
        block = Block(mixer=mixer, feedforward=Plain(width=4 * cell["width"]))
        stack = Stack(depth=cell["depth"], blocks=(block,), position=Sinusoidal(), final_norm=LayerNorm())
        with spelling(cell, stack) as (recipe, text), trained(recipe) as over:
            ids = torch.tensor(over.task.tokenizer.encode(text), device=over.job.device)
            rows = ids[: WINDOWS * cell["length"]].view(WINDOWS, -1)
            entropy = chain(cell["letters"], 2, 1, seed=0)[1]
            return {**_seen(over), "before": _from_before(over.model, rows), "entropy": entropy}

    def judge(self, results: Sequence[Result]) -> Verdict:
        loss = {mask: found(results, "final", task="text", mask=mask) for mask in MASKS}
        before = {mask: found(results, "before", task="text", mask=mask) for mask in MASKS}
        right = {mask: found(results, "right", task="sort", mask=mask) for mask in MASKS}
        entropy = found(results, "entropy", task="text")[0]
        numbers = f"""the last training loss on text of entropy {entropy:.3f} is {summary(loss["causal"])} with and \
{summary(loss["none"])} without the mask; from what came before {summary(before["causal"])} and \
{summary(before["none"])}; rows sorted {summary(right["causal"])} and {summary(right["none"])}"""
        mean = {mask: summary(right[mask]).mean for mask in MASKS}
        if mean["causal"] <= 0.5 or summary(before["causal"]).mean > math.log(results[0]["letters"]):
            return verdict(None, f"with the mask it does not learn this either; {numbers}")
        sure = all(welch(x["causal"], x["none"]) < 0.05 for x in (before, right))
        fails = sure and mean["none"] < 0.2 and summary(before["none"]).mean > summary(before["causal"]).mean + 0.5
        collapsed = max(loss["none"]) < entropy / 2 and min(loss["causal"]) > 0.95 * entropy
        return verdict(all_hold(collapsed, True if fails else False if mean["none"] > 0.5 else None), numbers)

    def table(self, results: Sequence[Result]) -> Rows:
        rows: list[tuple[str, ...]] = [
            ("task", "mask", "last training loss", "loss from what came before", "rows right")
        ]
        for task, mask in dict.fromkeys((r["task"], r["mask"]) for r in results):
            some = [r for r in results if (r["task"], r["mask"]) == (task, mask)]
            shown = (str(summary([r[n] for r in some])) if n in some[0].found else "" for n in ("before", "right"))
            rows.append((task, mask, str(summary([r["final"] for r in some])), *shown))
        return rows

    def draw(self, results: Sequence[Result]) -> Any:
        figure, (left, top, low) = panels("aab;aac", height=2)
        names = {"causal": "causal mask", "none": "no mask"}
        curves(left, {name: found(results, "curve", task="text", mask=mask) for mask, name in names.items()})
        left.set(title="text, training", ylim=(0, None))
        bars(top, {name: found(results, "before", task="text", mask=mask) for mask, name in names.items()})
        top.set(title="text, as in decoding", xlabel="loss, nats per token")
        bars(low, {name: found(results, "right", task="sort", mask=mask) for mask, name in names.items()})
        low.set(title="sorting, decoding", xlabel="rows sorted", xlim=(0, 1.05))
        reference(left, found(results, "entropy", task="text")[0], "entropy of the text", below=True)
        legend(figure, left)
        return figure


def _seen(over: Trial) -> dict[str, Any]:
    return {"diverged": over.diverged, "final": final(over.curve), "curve": over.curve}


@torch.no_grad()
def _from_before(model: Transformer, rows: Tensor) -> float:
    """Return the mean loss of tokens, each predicted from the tokens before it alone, as in decoding."""
    losses = [F.cross_entropy(model(rows[:, :t])[:, -1].float(), rows[:, t]) for t in range(2, rows.shape[1])]
    return float(torch.stack(losses).mean())

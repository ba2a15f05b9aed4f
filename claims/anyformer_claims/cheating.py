"""A decoder that sees what it is to predict learns to copy it, and nothing else."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer import Transformer
from anyformer.config import Attention, Block, Causal, Full, LayerNorm, Pattern, Plain, Sinusoidal, Stack
from anyformer.lab.api import (
    Cell,
    CellResult,
    Experiment,
    Fact,
    More,
    Rows,
    Size,
    Trial,
    Verdict,
    decide,
    summary,
    trained,
)
from anyformer.lab.figures import bars, curves, label_ends, panels, reference
from anyformer_claims.common import chain, final, found, seeds, sorting, spelling

MASKS: dict[str, Pattern] = {"causal": Causal(), "none": Full()}
WINDOWS = 64  # of unseen text


class Claim(Experiment):
    kind: Literal["cheating"] = "cheating"

    def cells(self, size: Size) -> list[Cell]:
        width, depth, longest, letters, length, steps = {
            "quick": (32, 2, 5, 8, 24, 500),
            "cpu": (48, 2, 6, 10, 32, 700),
            "gpu": (256, 4, 16, 16, 128, 3000),
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
            for seed in seeds(size)
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

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        loss = {mask: found(results, "final", task="text", mask=mask) for mask in MASKS}
        before = {mask: found(results, "before", task="text", mask=mask) for mask in MASKS}
        right = {mask: found(results, "right", task="sort", mask=mask) for mask in MASKS}
        entropy = found(results, "entropy", task="text")[0]
        honest, cheat = (summary(right[mask]).mean for mask in MASKS)
        learns = honest > 0.5 and summary(before["causal"]).mean <= math.log(results[0]["letters"])
        few = True if cheat < 0.2 else False if cheat > 0.5 else None
        return decide(
            [
                Fact(
                    "without the mask every training loss ends below H/2",
                    max(loss["none"]) < entropy / 2,
                    f"highest {max(loss['none']):.3f}",
                ),
                Fact(
                    "with the mask none ends below 0.95 H",
                    min(loss["causal"]) > 0.95 * entropy,
                    f"lowest {min(loss['causal']):.3f}",
                ),
                More("loss from what came before, without - with the mask", before["none"], before["causal"], 0.5),
                More("rows sorted, with - without the mask", right["causal"], right["none"]),
                Fact("without the mask less than a fifth of the rows is sorted", few, f"{cheat:.3f}"),
            ],
            requires=[Fact("the model with the mask learns both tasks", learns)],
        )

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        right = summary(found(results, "right", task="sort", mask="causal")).mean
        before = summary(found(results, "before", task="text", mask="causal")).mean
        letters = results[0]["letters"]
        seen = (
            f"{right:.3f} of the rows sorted, bound 0.5; loss from what came before {before:.3f}, "
            f"bound log {letters} = {math.log(letters):.3f}"
        )
        return {"the model with the mask learns both tasks": seen}

    def setting(self, results: Sequence[CellResult]) -> str:
        text, sort = (next(r.cell for r in results if r["task"] == task) for task in ("text", "sort"))
        return f"""Text: {text["letters"]} letters, each of which depends on the two before it; {text["rows"]} rows of
{text["length"]} letters per batch. Sorting: 4 to {sort["longest"]} digits; {sort["tokens"]} tokens per batch. Both are
trained with a decoder with sinusoidal positions, with and without the mask."""

    def result(self, results: Sequence[CellResult]) -> str:
        means = {
            (n, mask): summary(found(results, n, task=task, mask=mask)).mean
            for n, task in (("final", "text"), ("before", "text"), ("right", "sort"))
            for mask in MASKS
        }
        return (
            f"Without the mask the training loss ends at {means['final', 'none']:.3f} nats per token on text of "
            f"entropy {found(results, 'entropy', task='text')[0]:.3f}; as in decoding it is "
            f"{means['before', 'none']:.2f} ({means['before', 'causal']:.2f} with the mask), and "
            f"{100 * means['right', 'none']:.0f} % of rows are sorted ({100 * means['right', 'causal']:.0f} % with it)."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [
            ("task", "mask", "last training loss", "loss from what came before", "rows right")
        ]
        for task, mask in dict.fromkeys((r["task"], r["mask"]) for r in results):
            some = [r for r in results if (r["task"], r["mask"]) == (task, mask)]
            shown = (str(summary([r[n] for r in some])) if n in some[0].found else "–" for n in ("before", "right"))
            rows.append((task, mask, str(summary([r["final"] for r in some])), *shown))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, top, low) = panels("aab;aac", height=2)
        names = {"causal": "causal mask", "none": "no mask"}
        curves(left, {name: found(results, "curve", task="text", mask=mask) for mask, name in names.items()})
        left.set(title="text, training", ylim=(0, None), ylabel="training loss, nats per token")
        bars(top, {name: found(results, "before", task="text", mask=mask) for mask, name in names.items()})
        top.set(title="text, as in decoding", xlabel="loss, nats per token")
        bars(low, {name: found(results, "right", task="sort", mask=mask) for mask, name in names.items()})
        low.set(title="sorting, decoding", xlabel="rows sorted", xlim=(0, 1.05))
        reference(left, found(results, "entropy", task="text")[0], "entropy of the text", below=True)
        label_ends(left)
        return figure


def _seen(over: Trial) -> dict[str, Any]:
    return {"diverged": over.diverged, "final": final(over.curve), "curve": over.curve}


@torch.no_grad()
def _from_before(model: Transformer, rows: Tensor) -> float:
    """Return the mean loss of tokens, each predicted from the tokens before it alone, as in decoding."""
    losses = [F.cross_entropy(model(rows[:, :t])[:, -1].float(), rows[:, t]) for t in range(2, rows.shape[1])]
    return float(torch.stack(losses).mean())

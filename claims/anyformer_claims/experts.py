"""Experts against dense models: the loss at equal active parameters, and which expert serves which task."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anyformer import Transformer
from anyformer.config import (
    LM,
    Attention,
    Block,
    Experts,
    FeedForward,
    LayerNorm,
    ModelConfig,
    Plain,
    SoftmaxTopK,
    Stack,
    Tokens,
    Xavier,
)
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, More, Rows, Side, Size, Verdict, decide, summary
from anyformer.lab.figures import legend, lines, log_ticks, panels
from anyformer.nn.api import StackedLinear
from anyformer.nn.inspection.api import run_with_taps
from anyformer_claims.common import DEVICE, learn, mean_token_loss, seeds, side

DENSE, SPARSE, WIDE = "dense", "experts", "dense, all"
LABELS = {
    DENSE: "dense, equal active parameters",
    SPARSE: "experts, 1 of 8 active",
    WIDE: "dense, equal stored parameters",
}
COUNT = 8  # experts of a layer
BALANCE = 0.01
UNSEEN = 1024  # rows
TOLD = 0.5  # of the largest possible mutual information of task and expert


class Claim(Experiment):
    kind: Literal["experts"] = "experts"

    def cells(self, size: Size) -> list[Cell]:
        width, hidden, letters, tasks, steps, rates = {
            "quick": (32, 16, 32, (4, 16), 400, (5e-3,)),
            "cpu": (32, 16, 32, (4, 32), 1000, (5e-3,)),
            "gpu": (64, 32, 64, (4, 32, 256), 5000, (1.2e-2, 5e-3, 2e-3, 8e-4)),
        }[size]
        rest = {"width": width, "depth": 1, "hidden": hidden, "letters": letters, "length": 16, "rows": 32}
        return [
            {"model": m, "tasks": n, "lr": lr, **rest, "steps": steps, "seed": s}
            for m in LABELS
            for n in tasks
            for lr in rates
            for s in seeds(size)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        torch.manual_seed(cell["seed"])
        with torch.device(DEVICE):
            model = Transformer(config_of(cell))
        curve = learn(model, lambda: _rows(cell, cell["rows"]), cell["steps"], cell["lr"])
        model.eval()
        ids, wanted = _rows(cell, UNSEEN)
        names = ["decoder.*.feedforward.router"] if cell["model"] == SPARSE else []
        with torch.no_grad():
            logits, seen = run_with_taps(model, names, ids)
            loss = mean_token_loss(logits, wanted)
        chosen = [seen[name][:, 1:] > 0 for name in sorted(seen)]  # the first token names the task
        task = (ids[:, :1] - cell["letters"]).expand_as(ids[:, 1:])
        shares = [shares_of(some, task, cell["tasks"]) for some in chosen]
        letters = [shares_of(some, ids[:, 1:], cell["letters"]) for some in chosen]
        told = [information(share) / math.log(min(cell["tasks"], COUNT)) for share in shares]
        best = shares[int(np.argmax(told))] if shares else None
        named = (logits.argmax(dim=-1) == wanted)[wanted >= 0]
        return {
            "loss": float(loss),
            "accuracy": float(named.double().mean()),
            "told": max(told, default=0.0),
            "told of letters": max((information(x) / math.log(COUNT) for x in letters), default=0.0),
            "parameters": model.num_parameters(),
            "active": active_parameters(model),
            "shares": None if best is None else best.round(4).tolist(),
            "curve": curve,
        }

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        most = max(r["tasks"] for r in results)
        dense, sparse = (_values(results, m, most, "loss") for m in (DENSE, SPARSE))
        told = _values(results, SPARSE, most, "told")
        seen = True if min(told) >= TOLD else False if max(told) < TOLD else None
        return decide(
            [
                More(f"loss on {most} tasks, dense of equal active parameters - experts", dense, sparse),
                Fact(f"the experts tell {TOLD:.0%} of what they could about the task", seen, f"{summary(told)}"),
            ]
        )

    def sides(self, results: Sequence[CellResult]) -> list[Side]:
        most = max(r["tasks"] for r in results)
        return [side(LABELS[m], results, "loss", model=m, tasks=most) for m in (DENSE, SPARSE)]

    def result(self, results: Sequence[CellResult]) -> str:
        most = max(r["tasks"] for r in results)
        sizes = _sizes(results, most)
        each = ", ".join(
            f"{k} {summary(_values(results, m, most, 'loss')).mean:.3f} ({sizes[m]})" for m, k in LABELS.items()
        )
        task, letter = (summary(_values(results, SPARSE, most, name)).mean for name in ("told", "told of letters"))
        words = {True: "met", False: "refuted", None: "undecided"}
        first, second = (words[one.holds] for one in self.judge(results).outcomes)
        return (
            f"The loss on {most} tasks (nats per letter; active of stored parameters) is: {each}. The mutual "
            f"information of task and expert is {100 * task:.0f} % of its maximum, where {100 * TOLD:.0f} % are "
            f"required (that of letter and expert {100 * letter:.0f} %). So the first half of the claim is {first}, "
            f"the second {second}."
        )

    def setting(self, results: Sequence[CellResult]) -> str:
        cell = results[0].cell
        return f"""{cell["letters"]} letters; rows of a task's name and {cell["length"]} letters; a decoder of
{cell["depth"]} layer, 4 heads, with a feed-forward of width {cell["hidden"]} in each of {COUNT} experts,
{cell["hidden"] + COUNT // 2} in the dense model of equal active parameters, {COUNT * cell["hidden"]} in that of equal
stored ones."""

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        told = _values(results, SPARSE, max(r["tasks"] for r in results), "told")
        required = f"the experts tell {TOLD:.0%} of what they could about the task"
        mean = 100 * summary(told).mean
        return {required: f"that is {mean:.0f} % of the maximum, where {100 * TOLD:.0f} % are required in every seed"}

    def caption(self, results: Sequence[CellResult]) -> str:
        return (
            f"Right, one seed: 1/{COUNT} everywhere if a task's tokens were spread evenly, 1 if one expert had them "
            "all; black is the largest share."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        tasks = _tasks(results)
        rows: list[tuple[str, ...]] = [
            (
                "model",
                f"parameters with {tasks[-1]} tasks, active of stored",
                *(f"{n} tasks: loss, letters right" for n in tasks),
                "I of task, of letter",
            )
        ]
        for m, label in LABELS.items():
            each = [[summary(_values(results, m, n, name)) for name in ("loss", "accuracy")] for n in tasks]
            told = ", ".join(str(summary(_values(results, m, tasks[-1], n))) for n in ("told", "told of letters"))
            losses = (f"{loss}, {right.mean:.3f}" for loss, right in each)
            rows.append((label, _sizes(results, tasks[-1])[m], *losses, told if m == SPARSE else "–"))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, (left, right) = panels(2, height=4.6)
        tasks = _tasks(results)
        lines(left, {k: {float(n): _values(results, m, n, "loss") for n in tasks} for m, k in LABELS.items()})
        left.set(xlabel="tasks", ylabel="loss on unseen rows, nats per letter")
        left.set_ylim(bottom=0)
        log_ticks(left, tasks)
        shares = np.array(_values(results, SPARSE, tasks[-1], "shares")[0])  # of the first seed
        order = sorted(range(len(shares)), key=lambda task: (shares[task].argmax(), -shares[task].max()))
        image = right.imshow(shares[order], aspect="auto", cmap="Greys", vmin=0)
        right.set(title="one seed", xlabel="expert", ylabel="task, sorted by its main expert")
        right.set_xticks(range(COUNT))
        right.locator_params(axis="y", integer=True)
        right.grid(visible=False)
        bar = figure.colorbar(image, ax=right, location="bottom", label="share of the task's tokens")
        bar.ax.tick_params(axis="y", labelleft=False)
        legend(figure, left, columns=2)
        return figure


def config_of(cell: Cell) -> ModelConfig:
    """Return the config of a model. The dense one is wider by half the number of experts: the router's parameters."""
    hidden = cell["hidden"]
    feedforward: FeedForward = Plain(width=hidden + COUNT // 2)
    if cell["model"] == SPARSE:
        router = SoftmaxTopK(normalize=False)
        feedforward = Experts(count=COUNT, top_k=1, router=router, expert=Plain(width=hidden), balance=BALANCE)
    elif cell["model"] == WIDE:
        feedforward = Plain(width=COUNT * hidden)
    block = Block(mixer=Attention(heads=4), feedforward=feedforward)
    stack = Stack(depth=cell["depth"], blocks=(block,), final_norm=LayerNorm())
    tokens = Tokens(vocab=cell["letters"] + cell["tasks"])
    return ModelConfig(width=cell["width"], target=tokens, decoder=stack, head=LM(), init=Xavier())


def active_parameters(model: Transformer) -> int:
    """Return the parameters that a token uses: those of one expert in each layer, and all others."""
    stacked = [module for module in model.modules() if isinstance(module, StackedLinear)]
    experts = sum(p.numel() for module in stacked for p in module.parameters())
    return model.num_parameters() - experts + experts // COUNT


def information(shares: np.ndarray) -> float:
    """Return I(row; expert) in nats, for the share of each expert in a row [rows, experts], all rows alike frequent."""
    mean = shares.mean(axis=0, keepdims=True)
    ratio = np.divide(shares, mean, out=np.ones_like(shares), where=shares > 0)
    return float((shares * np.log(ratio)).sum() / len(shares))


def shares_of(chosen: Tensor, group: Tensor, groups: int) -> np.ndarray:
    """Return the share of each expert among the tokens of each group, [groups, experts].

    `chosen` is bool [b, t, experts], `group` int [b, t].
    """
    sums = torch.zeros(groups, chosen.shape[-1], dtype=torch.float64, device=chosen.device)
    sums.index_add_(0, group.flatten(), chosen.flatten(0, 1).double())
    return (sums / sums.sum(dim=1, keepdim=True)).cpu().numpy()


def _rows(cell: Cell, count: int) -> tuple[Tensor, Tensor]:
    """Return rows of a task's name and letters, with the cipher of each letter as label."""
    letters, tasks = cell["letters"], cell["tasks"]
    rules = np.random.default_rng([22, cell["seed"]])
    ciphers = torch.tensor(np.array([rules.permutation(letters) for _ in range(tasks)]), device=DEVICE)
    task = torch.randint(tasks, (count, 1), device=DEVICE)
    x = torch.randint(letters, (count, cell["length"]), device=DEVICE)
    return torch.cat((letters + task, x), dim=1), torch.cat((torch.full_like(task, -100), ciphers[task, x]), dim=1)


def _tasks(results: Sequence[CellResult]) -> list[int]:
    return sorted({r["tasks"] for r in results})


def _sizes(results: Sequence[CellResult], tasks: int) -> dict[str, str]:
    some = {r["model"]: r for r in results if r["tasks"] == tasks}
    return {m: f"{r['active']:,} of {r['parameters']:,}" for m, r in some.items()}


def _values(results: Sequence[CellResult], model: str, tasks: int, name: str) -> list[Any]:
    """Return the values of all seeds at the best learning rate."""
    same = [r for r in results if (r["model"], r["tasks"]) == (model, tasks)]
    each = [[r for r in same if r["lr"] == lr] for lr in sorted({r["lr"] for r in same})]
    return [r[name] for r in min(each, key=lambda some: summary([r["loss"] for r in some]).mean)]

"""Experts against dense models: the loss at equal active parameters, and which expert serves which task."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from anyformer.inspection.taps import run_with_taps
from anyformer.lab.cells import Cell, Result
from anyformer.lab.decision import Fact, More, Side, decide
from anyformer.lab.experiment import Experiment, Rows, Size, Verdict
from anyformer.lab.experiments.common import DEVICE, learn, mean_token_loss, seeds, side
from anyformer.lab.figures import legend, lines, log_ticks, panels
from anyformer.lab.stats import summary
from anyformer.nn.experts import StackedLinear
from anyformer.nn.model import Transformer

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
    name = "experts"
    number = 22
    claim = "Experts beat a dense model of equal active parameters on many tasks, and each expert serves some of them."
    idea = """A layer with $n$ experts stores $n$ feed-forwards, and a router sends each token to one of them: the
number of *active* weights is that of a dense layer with one feed-forward. Here one model learns many tasks. Each is a
cipher, a random permutation of the letters; a row begins with the name of its task, and the model must output the
cipher of each letter. All tasks together are more than a small feed-forward can store. No term of the loss asks the
router to divide by task. What it divides by is visible in its choices: with $p(\\text{task}, \\text{expert})$ from
unseen rows, the mutual information $I = \\sum p \\log \\frac{p(\\text{task}, \\text{expert})}{p(\\text{task})\\,
p(\\text{expert})}$ is 0 if tasks share their experts alike, and $\\log 8$ if the expert is known from the task and all
are used. A letter is one of the symbols that a cipher permutes, not of an alphabet. The only other term of the loss is
the usual balance loss (weight 0.01), which is smallest if all experts get equally many tokens, of whatever task. The
dense model is wider by the number of weights that the router has."""
    prediction = """With the most tasks the loss on unseen rows is lower with experts than with the dense model of equal
active parameters (p < 0.05), each at the better of its learning rates. In the layer where it is largest, $I$ is at
least half of its maximum $\\log \\min(\\text{tasks}, 8)$ in all seeds. If the loss is higher (p < 0.05), or $I$ is
below half in all seeds, the claim fails."""
    explanation = """The second condition names the share that is required, 50 %; the table has the observed one beside
it. The maximum of $I$ is $\\log 8$ for 32 tasks and 8 experts: the expert is known from the task. Where a size has one
learning rate, that one is the better."""
    unit = "nats per letter"
    columns = """Parameters are those with the most tasks: each task's name is a token, so with fewer tasks all models
are smaller. Letters right: share of the letters of unseen rows whose cipher is output. I: mutual information of task
and expert, and of letter and expert, as shares of their maxima."""
    measured = (
        "Loss on unseen rows by model and number of tasks; the mutual information of task and expert, and of letter "
        "and expert, each as a share of its maximum."
    )
    limits = """Tasks that share their letters and differ only in a permutation, one layer, eight experts, one of them
active, one weight of the balance loss. Tasks with other inputs, such as languages, may be divided in another way. Equal
active parameters are not equal time: experts run one after another here. At the size for a CPU one learning rate is
tried. Sizes and tasks were chosen so that the dense model of equal active parameters fails, which favours the first
half of the claim; a dense model of about equal stored parameters is better than the experts."""
    sources = (
        "Shazeer et al. (2017), [Outrageously Large Neural Networks](https://arxiv.org/abs/1701.06538)",
        "Fedus et al. (2021), [Switch Transformers](https://arxiv.org/abs/2101.03961)",
        "Barham et al. (2022), [Pathways](https://arxiv.org/abs/2203.12533)",
    )
    parts = ("nn/experts.py", "config/feedforward.py", "nn/feedforward.py")
    minutes = (2, 4, 20)
    changed = (
        "Layers, letters and tasks were chosen by single trainings with another seed, until the dense model did not "
        "learn all tasks; the rule stayed as it was."
    )
    alt = "Loss by the number of tasks for experts and dense models, and the share of each task's tokens by expert"
    spread = "Bands (left): one standard deviation over seeds."

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

    def judge(self, results: Sequence[Result]) -> Verdict:
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

    def sides(self, results: Sequence[Result]) -> list[Side]:
        most = max(r["tasks"] for r in results)
        return [side(LABELS[m], results, "loss", model=m, tasks=most) for m in (DENSE, SPARSE)]

    def result(self, results: Sequence[Result]) -> str:
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

    def setting(self, results: Sequence[Result]) -> str:
        cell = results[0].cell
        return f"""{cell["letters"]} letters; rows of a task's name and {cell["length"]} letters; a decoder of
{cell["depth"]} layer, 4 heads, with a feed-forward of width {cell["hidden"]} in each of {COUNT} experts,
{cell["hidden"] + COUNT // 2} in the dense model of equal active parameters, {COUNT * cell["hidden"]} in that of equal
stored ones."""

    def beside(self, results: Sequence[Result]) -> dict[str, str]:
        told = _values(results, SPARSE, max(r["tasks"] for r in results), "told")
        required = f"the experts tell {TOLD:.0%} of what they could about the task"
        mean = 100 * summary(told).mean
        return {required: f"that is {mean:.0f} % of the maximum, where {100 * TOLD:.0f} % are required in every seed"}

    def caption(self, results: Sequence[Result]) -> str:
        return (
            f"Right, one seed: 1/{COUNT} everywhere if a task's tokens were spread evenly, 1 if one expert had them "
            "all; black is the largest share."
        )

    def table(self, results: Sequence[Result]) -> Rows:
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

    def draw(self, results: Sequence[Result]) -> Any:
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


def _tasks(results: Sequence[Result]) -> list[int]:
    return sorted({r["tasks"] for r in results})


def _sizes(results: Sequence[Result], tasks: int) -> dict[str, str]:
    some = {r["model"]: r for r in results if r["tasks"] == tasks}
    return {m: f"{r['active']:,} of {r['parameters']:,}" for m, r in some.items()}


def _values(results: Sequence[Result], model: str, tasks: int, name: str) -> list[Any]:
    """Return the values of all seeds at the best learning rate."""
    same = [r for r in results if (r["model"], r["tasks"]) == (model, tasks)]
    each = [[r for r in same if r["lr"] == lr] for lr in sorted({r["lr"] for r in same})]
    return [r[name] for r in min(each, key=lambda some: summary([r["loss"] for r in some]).mean)]

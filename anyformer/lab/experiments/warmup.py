"""Post-norm and pre-norm in the first steps: which one needs a warm-up."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from anyformer.lab.cells import Cell, Result
from anyformer.lab.decision import Fact, More, Side, decide, outcomes_of
from anyformer.lab.experiment import Experiment, Rows, Size, Verdict
from anyformer.lab.experiments.common import WIDER, final, found, seeds, side, sorting
from anyformer.lab.figures import curves, label_ends, legend, lines, log_ticks, panels
from anyformer.lab.stats import summary, tabled_test
from anyformer.lab.trial import trained
from anyformer.nn.model import Transformer

PLACEMENTS = {"pre": "layer", "post": "none"}  # and the final norm: after a post-norm block there is one already
MUCH = 0.3  # nats per token


class Claim(Experiment):
    name = "warmup"
    number = 7
    claim = "At rates at which deep pre-norm models learn from the first step, post-norm models need a warm-up."
    idea = """The Transformer of 2017 normalises after each residual sum, $x \\leftarrow N(x + F(x))$; current models
normalise the input of a sublayer, $x \\leftarrow x + F(N(x))$. With pre-norm the gradient has a path around all
sublayers, and in theory is about equally large in every layer at initialisation. With post-norm it passes through all
the norms, each of which shrinks it: it grows towards the last layers. Adam's first steps, as large as all others,
damage the last layers before the first have begun to learn (Xiong et al. 2020). A warm-up raises the rate from 0 over
some steps: $\\eta_t = \\eta \\min(1, t/w)$. The claim is often made without naming the rate; at a small enough rate
post-norm may learn without a warm-up, too (on a CPU it does at 0.001, on a GPU at neither rate that was tried)."""
    prediction = """At one of the rates at which pre-norm loses less than 0.3 nats without a warm-up, post-norm without
one ends more than 0.3 nats above post-norm with one (p < 0.05, corrected for the number of rates). It fails if there
is no such rate for pre-norm, or if post-norm loses less than 0.1 nats at each of them. At initialisation the gradient
grows towards the last layers with post-norm."""
    explanation = """What a model \"loses\" is the difference of its last training loss without and with a warm-up. The
rows \"part of a condition\" compare both at each rate; one of them suffices, so a \"no\" at another rate refutes
nothing."""
    unit = "nats per token"
    columns = """Last training loss (mean of the last tenth) without and with a warm-up; p of their difference (Welch,
not corrected); diverged: trainings whose loss became infinite or NaN."""
    measured = (
        "The last training loss with and without a warm-up, and the gradient norm of each layer at initialisation."
    )
    limits = """Sorting digits, a constant rate after the warm-up, few steps, few rates. At the smaller rate on a CPU
(0.001), with 12 layers, post-norm learns without a warm-up, too. With 18 layers on a GPU it learns at neither rate
without one. With a warm-up of 166 steps it ends between 0.53 and 1.63 at 0.0003. At 0.001 it hardly learns with one
(1.59 to 2.41, three of five seeds at about 2.4), so the comparison at that rate shows nothing. Longer warm-ups were not
tried. Pre-norm's first gradient is not equal in all layers here: from the first layer to the last it falls by a factor
of 2.0 on a CPU and 2.9 on a GPU. On a GPU post-norm's grows by a factor of 1.7 only, and is larger than pre-norm's in
every layer. The gradient norms alone do not explain the difference."""
    sources = (
        "Xiong et al. (2020), [On Layer Normalization in the Transformer "
        "Architecture](https://arxiv.org/abs/2002.04745)",
        "Liu et al. (2020), [Understanding the Difficulty of Training Transformers](https://arxiv.org/abs/2004.08249)",
        "Vaswani et al. (2017), [Attention Is All You Need](https://arxiv.org/abs/1706.03762), section 5.3",
    )
    parts = ("nn/block.py", "recipe/schedule.py")
    minutes = (6, 8, 84)
    alt = (
        "Training loss of pre-norm and post-norm with and without warm-up at each learning rate, and gradient norm by "
        "layer"
    )
    changed = (
        "The claim was first judged at the highest learning rate, at which a deeper model needed a warm-up with "
        "pre-norm, too (18 layers, on a GPU, at a rate of 0.003, which is no longer among those tried); it now names "
        "the rates."
    )

    def cells(self, size: Size) -> list[Cell]:
        width, depth, longest, tokens, steps, rates = {
            "quick": (32, 12, 5, 320, 200, (5e-4, 1e-3, 4e-3, 1.6e-2)),
            "cpu": (32, 12, 5, 320, 250, (2.5e-4, 1e-3, 4e-3, 1.6e-2)),
            "gpu": (256, 18, 16, 4096, 500, (1e-4, 3e-4, 1e-3, 3e-3)),
        }[size]
        task = {"longest": longest, "tokens": tokens, "steps": steps}
        model = {"width": width, "depth": depth, "heads": 4}
        return [
            {"placement": placement, "warmup": warmup, "lr": lr, **model, **task, "seed": seed}
            for lr in rates
            for placement in PLACEMENTS
            for warmup in (0, steps // 3)
            for seed in seeds(size, first=WIDER)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        placement = cell["placement"]
        changes = [
            f"model.decoder.blocks.0.placement={placement}",
            f"model.decoder.final_norm={PLACEMENTS[placement]}",
            f"train.schedule={{kind='constant', warmup={cell['warmup']}}}",
            "train.precision=fp32",
            "train.log_every=1",
            "data.valid=none",
        ]
        gradients: list[float] = []
        with trained(sorting(cell, changes), lambda model: gradients.extend(_gradients(model))) as over:
            return {"diverged": over.diverged, "final": final(over.curve), "gradients": gradients, "curve": over.curve}

    def judge(self, results: Sequence[Result]) -> Verdict:
        rates = sorted({r["lr"] for r in results})
        costs = {(lr, p): _cost(results, lr, p) for lr in rates for p in PLACEMENTS}
        fair = [lr for lr in rates if costs[lr, "pre"] < MUCH]  # at which pre-norm learns from the first step
        each = outcomes_of([_need(results, lr) for lr in fair])
        never = bool(fair) and all(costs[lr, "post"] < MUCH / 3 for lr in fair)
        needed = True if any(one.holds for one in each) else False if never else None
        growth = _growth(results, "post")
        return decide(
            [
                Fact(
                    f"at some rate pre-norm loses less than {MUCH} nats without a warm-up",
                    bool(fair),
                    ", ".join(f"{lr:g}" for lr in fair),
                ),
                Fact(f"at one of these rates post-norm loses more than {MUCH} nats", needed),
                Fact(
                    "with post-norm the first gradient grows towards the last layer", growth > 1, f"{growth:.2g} times"
                ),
            ],
            also=each,
        )

    def sides(self, results: Sequence[Result]) -> list[Side]:
        return [
            side(f"{p}-norm, warm-up of {n} steps", results, "final", placement=p, warmup=n)
            for p in PLACEMENTS
            for n in _warmups(results)
        ]

    def setting(self, results: Sequence[Result]) -> str:
        return f"""A decoder reads 4 to {results[0]["longest"]} digits and outputs them sorted. The warm-up takes
{max(_warmups(results))} steps; the rate is constant after it."""

    def beside(self, results: Sequence[Result]) -> dict[str, str]:
        ratios = [row[-1] / row[0] for row in found(results, "gradients", placement="post")]
        seen = f"last / first layer, mean over seeds (lowest {min(ratios):.1f}, highest {max(ratios):.1f}); not tested"
        return {
            f"at one of these rates post-norm loses more than {MUCH} nats": "see the parts of this condition below",
            "with post-norm the first gradient grows towards the last layer": seen,
        }

    def caption(self, results: Sequence[Result]) -> str:
        return "Below: the norm of the first gradient of all weights of a layer, on random rows."

    def result(self, results: Sequence[Result]) -> str:
        rates = sorted({r["lr"] for r in results})
        each = [
            f"{_cost(results, lr, 'pre'):+.2f} nats with pre-norm and {_cost(results, lr, 'post'):+.2f} with "
            f"post-norm at the rate {lr:g}"
            for lr in rates
        ]
        changes = f"Leaving out the warm-up changes the last training loss by {', '.join(each)}."
        return f"{changes} One rate with a large difference is enough for the claim."

    def table(self, results: Sequence[Result]) -> Rows:
        rows: list[tuple[str, ...]] = [("norm", "rate", "without warm-up", "with", "p", "diverged")]
        for lr in sorted({r["lr"] for r in results}):
            for placement in PLACEMENTS:
                some = _without_and_with(results, lr, placement)
                lost = sum(found(results, "diverged", lr=lr, placement=placement))
                shown = map(str, map(summary, some))
                p = tabled_test(*some)
                rows.append((placement, f"{lr:g}", *shown, p, f"{lost} of {sum(map(len, some))}"))
        return rows

    def draw(self, results: Sequence[Result]) -> Any:
        rates = sorted({r["lr"] for r in results})
        figure, (*lefts, right) = panels("ab;cc" if len(rates) == 2 else len(rates) + 1)
        for axis, lr in zip(lefts, rates, strict=True):
            named = {}
            for placement in PLACEMENTS:
                for warmup in _warmups(results):
                    name = f"{placement}-norm, " + (f"warm-up of {warmup} steps" if warmup else "no warm-up")
                    named[name] = found(results, "curve", lr=lr, placement=placement, warmup=warmup)
            curves(axis, named)
            axis.set(title=f"learning rate {lr:g}", ylim=(0, None), ylabel="training loss, nats per token")
        lines(right, {f"{p}-norm": _by_layer(results, p) for p in PLACEMENTS}, first=4)
        right.set(title="before training", xlabel="layer", ylabel="gradient norm")
        right.set_xticks(range(1, 1 + results[0]["depth"]))
        log_ticks(right, [n for n in (0.25, 0.5, 1, 2, 4) if n < right.get_ylim()[1]], across=False)
        label_ends(right)
        legend(figure, *lefts, columns=2)
        return figure


def _gradients(model: Transformer) -> list[float]:
    """Return the gradient norm of each layer on random rows."""
    ids = torch.randint(model.config.vocab, (32, 16), device=next(model.parameters()).device)
    F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert model.decoder is not None
    norms = [
        math.sqrt(sum(float(p.grad.square().sum()) for p in block.parameters() if p.grad is not None))
        for block in model.decoder.blocks
    ]
    model.zero_grad()
    return norms


def _warmups(results: Sequence[Result]) -> list[int]:
    return sorted({r["warmup"] for r in results})


def _without_and_with(results: Sequence[Result], lr: float, placement: str) -> list[list[float]]:
    """Return the last losses of all seeds."""
    return [found(results, "final", lr=lr, placement=placement, warmup=warmup) for warmup in _warmups(results)]


def _cost(results: Sequence[Result], lr: float, placement: str) -> float:
    """Return how much higher the last loss is without a warm-up."""
    without, given = (summary(some).mean for some in _without_and_with(results, lr, placement))
    return without - given


def _need(results: Sequence[Result], lr: float) -> More:
    without, given = _without_and_with(results, lr, "post")
    return More(f"post-norm at {lr:g}: loss without - with a warm-up", without, given, MUCH)


def _by_layer(results: Sequence[Result], placement: str) -> dict[float, list[float]]:
    lr, warmup = min(r["lr"] for r in results), _warmups(results)[0]  # those of a seed are equal in all cells
    rows = found(results, "gradients", placement=placement, lr=lr, warmup=warmup)
    return {layer: list(values) for layer, values in enumerate(zip(*rows, strict=True), 1)}


def _growth(results: Sequence[Result], placement: str) -> float:
    """Return the ratio of the gradient norms of the last and the first layer."""
    return summary([row[-1] / row[0] for row in found(results, "gradients", placement=placement)]).mean

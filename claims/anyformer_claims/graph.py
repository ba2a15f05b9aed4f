"""Attention over a graph: equal to message passing, and the adjacency as mask against full attention."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anyformer import Transformer
from anyformer.config import (
    Attention,
    Block,
    Full,
    Graph,
    LayerNorm,
    Learned,
    ModelConfig,
    NoPosition,
    Pattern,
    Plain,
    Position,
    Stack,
    TokenLabels,
    Tokens,
    Xavier,
)
from anyformer.lab.api import Cell, CellResult, Experiment, Fact, More, Rows, Size, Verdict, decide, summary
from anyformer.lab.figures import bars, legend, lines, log_ticks, panels, reference
from anyformer.nn.inspection.api import run_with_taps
from anyformer_claims.common import DEVICE, found, learn, seeds

MASK, PLACED, FULL, BLIND = "mask", "mask and positions", "full and positions", "full"
LABELS = {  # in tables and figures
    MASK: "adjacency as mask",
    PLACED: "the same with positions",
    FULL: "full attention with positions",
    BLIND: "full attention without positions",
}
HEADS, DEPTH, COLOURS = 4, 2, 16
UNSEEN = 256  # rows
EXACT = 1e-9  # relative, in fp64
LEARNT = 0.9  # share of the nodes labelled right
MARGIN = 0.05  # smaller differences are ignored
OTHER = 1000  # added to the seed: another graph

Edges = tuple[tuple[int, int], ...]


class Claim(Experiment):
    kind: Literal["graph"] = "graph"

    def cells(self, size: Size) -> list[Cell]:
        width, nodes, counts, steps = {
            "quick": (32, 16, (64, 2048), 300),
            "cpu": (48, 24, (64, 512, 4096), 400),
            "gpu": (128, 48, (64, 1024, 65_536), 3000),
        }[size]
        model = {"width": width, "depth": DEPTH, "nodes": nodes}
        rest = {"rows": 32, "steps": steps, "lr": 5e-3 * (32 / width) ** 0.5}
        exact = [{"part": "exact", "model": m, **model, "seed": s} for m in (MASK, BLIND) for s in seeds(size)]
        return exact + [
            {"part": "task", "model": m, "examples": n, **model, **rest, "seed": s}
            for m in LABELS
            for n in counts
            for s in seeds(size)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        torch.manual_seed(cell["seed"])
        edges = random_graph(cell["nodes"], cell["seed"])
        if cell["part"] == "exact":
            return _errors(cell, edges)
        model = _model(cell, edges)
        train, unseen = (_rows(cell, edges, n, part) for n, part in ((cell["examples"], 1), (UNSEEN, 2)))

        def batch() -> tuple[Tensor, Tensor]:
            some = torch.randint(len(train[0]), (cell["rows"],), device=DEVICE)
            return train[0][some], train[1][some]

        curve = learn(model, batch, cell["steps"], cell["lr"])
        labels = unseen[1].flatten().bincount()
        accuracies = {"accuracy": _right(model, unseen), "seen": _right(model, (train[0][:UNSEEN], train[1][:UNSEEN]))}
        if cell["model"] == MASK:  # the same weights with the mask of another graph
            elsewhere = random_graph(cell["nodes"], cell["seed"] + OTHER)
            moved = _model(cell, elsewhere)
            moved.load_state_dict(model.state_dict())
            accuracies["elsewhere"] = _right(moved, _rows(cell, elsewhere, UNSEEN, 3))
        return {**accuracies, "guessing": float(labels.max() / labels.sum()), "curve": curve}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        exact, task = _parted(results)
        counts = _counts(task)
        errors = {m: max(max(found(exact, name, model=m)) for name in ("outputs", "gradients")) for m in (MASK, BLIND)}
        few = {m: found(task, "accuracy", model=m, examples=counts[0]) for m in LABELS}
        own, elsewhere = (found(task, name, model=MASK, examples=counts[-1]) for name in ("accuracy", "elsewhere"))
        names = {MASK: "the graph as mask", BLIND: "no mask and the complete graph"}
        conditions: list[More | Fact] = [
            *(
                Fact(f"attention is a sum over edges, with {names[m]}", error < EXACT, f"off by {error:.0e}")
                for m, error in errors.items()
            ),
            More(
                f"nodes right after {counts[0]} rows, both with positions: mask - full", few[PLACED], few[FULL], MARGIN
            ),
            More(f"nodes right after {counts[-1]:,} rows, mask: another graph - its own", elsewhere, own, -MARGIN),
        ]
        learnt = Fact(f"the mask labels {LEARNT} of the nodes right in every seed", min(own) >= LEARNT)
        return decide(conditions, requires=[learnt])

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        _, task = _parted(results)
        lowest = min(found(task, "accuracy", model=MASK, examples=_counts(task)[-1]))
        return {f"the mask labels {LEARNT} of the nodes right in every seed": f"lowest {lowest:.4f}"}

    def setting(self, results: Sequence[CellResult]) -> str:
        nodes = results[0]["nodes"]
        return f"""Encoders with {HEADS} heads, feed-forwards twice as wide as the model and layer norms before each
sublayer. Each seed draws a connected graph, a random tree with {nodes // 2} more edges, and {UNSEEN} unseen rows."""

    def result(self, results: Sequence[CellResult]) -> str:
        _, task = _parted(results)
        counts = _counts(task)
        few, most = (
            ", ".join(
                f"{k} {100 * summary(found(task, 'accuracy', model=m, examples=n)).mean:.0f} %"
                for m, k in LABELS.items()
            )
            for n in (counts[0], counts[-1])
        )
        elsewhere = summary(found(task, "elsewhere", model=MASK, examples=counts[-1])).mean
        return (
            f"After {counts[0]} training rows these shares of the nodes of unseen rows are right: {few}; after "
            f"{counts[-1]:,} rows: {most}. With the mask of another graph the same weights label "
            f"{100 * elsewhere:.0f} % right."
        )

    def table(self, results: Sequence[CellResult]) -> Rows:
        _, task = _parted(results)
        counts = _counts(task)
        rows: list[tuple[str, ...]] = [
            ("model", *(f"{n:,} rows: unseen, seen" for n in counts), f"another graph, {counts[-1]:,} rows")
        ]
        for m, label in LABELS.items():
            shown = []
            for n in counts:
                unseen, seen = (summary(found(task, name, model=m, examples=n)) for name in ("accuracy", "seen"))
                shown.append(f"{unseen}, {seen.mean:.3f}")
            elsewhere = found(task, "elsewhere", model=m, examples=counts[-1])
            rows.append((label, *shown, str(summary(elsewhere)) if elsewhere else "–"))
        return rows

    def draw(self, results: Sequence[CellResult]) -> Any:
        _, task = _parted(results)
        figure, (left, right) = panels("aab")
        counts = _counts(task)
        lines(
            left,
            {k: {float(n): found(task, "accuracy", model=m, examples=n) for n in counts} for m, k in LABELS.items()},
        )
        left.set(xlabel="training rows", ylabel="fraction labelled right", ylim=(0, 1.05))
        log_ticks(left, counts)
        reference(left, summary(found(task, "guessing")).mean, "the most frequent label", below=True)
        most = {"model": MASK, "examples": counts[-1]}
        named = {"its own\ngraph": found(task, "accuracy", **most), "another\ngraph": found(task, "elsewhere", **most)}
        bars(right, named)
        right.set(title="same weights, mask of", xlabel="fraction labelled right", xlim=(0, 1.05))
        legend(figure, left, columns=2)
        return figure


def random_graph(nodes: int, seed: int) -> Edges:
    """Return the edges of a connected graph, in both directions: a random tree and half as many edges more."""
    chance = np.random.default_rng([26, seed])
    pairs = {(int(chance.integers(i)), i) for i in range(1, nodes)}
    while len(pairs) < nodes - 1 + nodes // 2:
        a, b = sorted(chance.choice(nodes, 2, replace=False).tolist())
        pairs.add((a, b))
    return tuple(sorted({*pairs, *((b, a) for a, b in pairs)}))


def pass_messages(q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> Tensor:
    """Return the weighted sums of messages, for q, k and v [b, h, t, k]: one message for each edge (receiver, sender).

    The weights are exponentials of scores, divided by their sum over the edges of a receiver.
    """
    receivers, senders = torch.tensor(edges, device=q.device).unbind(dim=1)
    weights = ((q[:, :, receivers] * k[:, :, senders]).sum(dim=-1) * k.shape[-1] ** -0.5).exp()  # [b, h, edges]
    sums = torch.zeros_like(q[..., 0]).index_add(2, receivers, weights)
    messages = weights[..., None] * v[:, :, senders]
    return torch.zeros_like(v).index_add(2, receivers, messages) / sums[..., None]


def _errors(cell: Cell, edges: Edges) -> dict[str, float]:
    """Return the largest relative error of message passing over all layers of an untrained model, with gradients."""
    nodes = cell["nodes"]
    if cell["model"] == MASK:
        sent: Edges = (*edges, *((i, i) for i in range(nodes)))
    else:
        sent = tuple((i, j) for i in range(nodes) for j in range(nodes))
    model, (x, _) = _model(cell, edges).double(), _rows(cell, edges, 8, 0)
    _, seen = run_with_taps(model, [f"encoder.*.mixer.{name}" for name in ("q", "k", "v", "heads")], x)
    outputs, gradients = [0.0], [0.0]
    for layer in range(cell["depth"]):
        q, k, v, heads = (seen[f"encoder.{layer}.mixer.{name}"] for name in ("q", "k", "v", "heads"))
        passed = pass_messages(q, k, v, sent)
        outputs.append(float(((heads - passed).norm() / heads.norm()).detach()))
        direction = torch.randn_like(heads)
        slopes = [torch.autograd.grad(y, (q, k, v), direction, retain_graph=True) for y in (heads, passed)]
        gradients += [float((a - b).norm() / a.norm()) for a, b in zip(*slopes, strict=True)]
    return {"outputs": max(outputs), "gradients": max(gradients)}


def _model(cell: Cell, edges: Edges) -> Transformer:
    pattern: Pattern = Graph(nodes=cell["nodes"], edges=edges) if cell["model"] in (MASK, PLACED) else Full()
    position: Position = Learned(length=cell["nodes"]) if cell["model"] in (PLACED, FULL) else NoPosition()
    block = Block(mixer=Attention(heads=HEADS, pattern=pattern), feedforward=Plain(width=2 * cell["width"]))
    stack = Stack(depth=cell["depth"], blocks=(block,), position=position, final_norm=LayerNorm())
    head = TokenLabels(labels=COLOURS)
    config = ModelConfig(width=cell["width"], source=Tokens(vocab=COLOURS), encoder=stack, head=head, init=Xavier())
    with torch.device(DEVICE):
        return Transformer(config)


def _rows(cell: Cell, edges: Edges, count: int, part: int) -> tuple[Tensor, Tensor]:
    """Return colours of nodes, and for each node the largest colour within as many edges as there are layers."""
    nodes = cell["nodes"]
    step = np.eye(nodes, dtype=np.int64)
    step[tuple(np.array(edges).T)] = 1
    near = np.linalg.matrix_power(step, DEPTH) > 0
    colours = np.random.default_rng([26, cell["seed"], part]).integers(COLOURS, size=(count, nodes))
    labels = np.stack([colours[:, row].max(axis=1) for row in near], axis=1)
    return torch.tensor(colours, device=DEVICE), torch.tensor(labels, device=DEVICE)


@torch.no_grad()
def _right(model: Transformer, rows: tuple[Tensor, Tensor]) -> float:
    model.eval()
    return float((model(rows[0]).argmax(dim=-1) == rows[1]).double().mean())


def _parted(results: Sequence[CellResult]) -> tuple[list[CellResult], list[CellResult]]:
    return [r for r in results if r["part"] == "exact"], [r for r in results if r["part"] == "task"]


def _counts(task: Sequence[CellResult]) -> list[int]:
    return sorted({r["examples"] for r in task})

"""Positions: which tasks need them, where order comes from, and their scale relative to the tokens."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from anyformer.config import (
    LM,
    Attention,
    Block,
    LayerNorm,
    Learned,
    ModelConfig,
    NoPosition,
    Plain,
    Position,
    Sinusoidal,
    Stack,
    Times,
    Tokens,
    Xavier,
)
from anyformer.data.api import Rows as Read
from anyformer.lab.api import (
    Cell,
    CellResult,
    Experiment,
    Fact,
    More,
    Rows,
    Size,
    Verdict,
    decide,
    summary,
    tabled_test,
    trained,
)
from anyformer.lab.figures import bars, curves, label_ends, lines, log_ticks, panels, reference
from anyformer.recipe import (
    AdamW,
    CopyDigits,
    Cosine,
    Data,
    Padded,
    Recipe,
    ReverseDigits,
    Seq2Seq,
    SortDigits,
    Train,
    Words,
)
from anyformer_claims.common import found, seeds

TASKS = {"copy": CopyDigits, "reverse": ReverseDigits, "sort": SortDigits}
SCHEMES: dict[str, Position] = {"none": NoPosition(), "learned": Learned(length=128), "sinusoidal": Sinusoidal()}
READERS = ("encoder", "decoder")
SOME = 0.5  # of unseen rows answered without a mistake


class Claim(Experiment):
    kind: Literal["positions"] = "positions"

    def cells(self, size: Size) -> list[Cell]:
        width, depth, longest, tokens, steps = {
            "quick": (32, {"encoder": 1, "decoder": 2}, 5, 320, {"encoder": 240, "decoder": 400}),
            "cpu": (32, {"encoder": 1, "decoder": 2}, 6, 320, {"encoder": 300, "decoder": 400}),
            "gpu": (128, {"encoder": 2, "decoder": 4}, 12, 4096, {"encoder": 1500, "decoder": 3000}),
        }[size]
        root = round(math.sqrt(width), 3)
        settings = [(r, t, p, root) for r in READERS for t in TASKS for p in SCHEMES]
        settings += [("encoder", "copy", p, scale) for p in ("learned", "sinusoidal") for scale in (1.0, float(width))]
        settings += [(r, t, "sinusoidal", 0.0) for r in READERS for t in TASKS]
        rest = {"width": width, "longest": longest, "tokens": tokens, "lr": 6e-3 * (32 / width) ** 0.5}
        return [
            {"reader": r, "task": t, "position": p, "scale": s, "depth": depth[r], "steps": steps[r], **rest, "seed": n}
            for r, t, p, s in settings
            for n in seeds(size)
        ]

    def measure(self, cell: Cell) -> dict[str, Any]:
        with trained(_recipe(cell)) as over:
            assert over.job.valid is not None
            return {**over.found(), "blind": blind(over.job.valid)}

    def judge(self, results: Sequence[CellResult]) -> Verdict:
        root = results[0]["scale"]

        def rows(reader: str, task: str, position: str, scale: float = root, name: str = "exact_match") -> list[float]:
            return found(results, name, reader=reader, task=task, position=position, scale=scale)

        conditions: list[More | Fact] = []
        for task in ("copy", "reverse"):
            lost, most = rows("encoder", task, "none", name="loss"), rows("encoder", task, "none")
            floor = rows("encoder", task, "none", name="blind")[0]
            best = max((rows("encoder", task, p) for p in SCHEMES if p != "none"), key=lambda x: summary(x).mean)
            blocked = min(lost) > 0.95 * floor and max(most) < SOME
            conditions += [
                Fact(
                    f"encoder without positions: {task} stays at the blind loss",
                    blocked,
                    f"{min(lost):.3f} to {max(lost):.3f}, blind {floor:.3f}",
                ),
                More(f"encoder: rows right in {task}, with - without positions", best, most),
                Fact(
                    f"encoder with positions: {task} is learnt in every seed",
                    True if min(best) > SOME else None,
                    f"lowest {min(best):.2f}",
                ),
            ]
        sort = summary(rows("encoder", "sort", "none"))
        conditions.append(Fact("encoder without positions: sorting is learnt", sort.mean > SOME, f"{sort} of the rows"))
        for task in ("copy", "reverse"):
            loss, floor = rows("decoder", task, "none", name="loss"), rows("decoder", task, "none", name="blind")[0]
            conditions.append(
                More(
                    f"causal decoder without positions: {task} is below the blind loss", [floor - x for x in loss], 0.0
                )
            )
        nothing = max(max(rows(r, t, "sinusoidal", 0.0)) for r in READERS for t in TASKS)
        conditions.append(
            Fact("without tokens no task is learnt", nothing < 0.05, f"at most {nothing:.2f} of the rows")
        )
        return decide(conditions)

    def result(self, results: Sequence[CellResult]) -> str:
        root = results[0]["scale"]

        def mean(name: str, reader: str, task: str, position: str) -> float:
            return summary(found(results, name, reader=reader, task=task, position=position, scale=root)).mean

        shares = " and ".join(
            f"{100 * mean('exact_match', 'encoder', t, 'none'):.0f} % of rows in {t} "
            f"({100 * max(mean('exact_match', 'encoder', t, p) for p in SCHEMES if p != 'none'):.0f} % with positions)"
            for t in ("copy", "reverse")
        )
        leak = " and ".join(f"{mean('loss', 'decoder', t, 'none'):.2f} in {t}" for t in ("copy", "reverse"))
        sort = 100 * mean("exact_match", "encoder", "sort", "none")
        return (
            f"Without positions an encoder gets {shares} right, and {sort:.0f} % in sorting; a causal decoder without "
            f"positions has a loss of {leak}, where one without access to the order could have "
            f"{results[0]['blind']:.2f} at best (nats per token)."
        )

    def setting(self, results: Sequence[CellResult]) -> str:
        first = {reader: next(r.cell for r in results if r["reader"] == reader) for reader in READERS}
        one, other = (first[reader] for reader in READERS)
        return (
            f"Rows of 4 to {one['longest']} digits. Encoder: an encoder–decoder with {one['depth']} layer"
            f"{'s' * (one['depth'] > 1)} on each side, trained for {one['steps']:,} steps; its decoder always has "
            f"sinusoidal positions. Decoder: a decoder alone with {other['depth']} layers, which reads input and "
            f"answer as one sequence, trained for {other['steps']:,} steps. All have 4 heads, and answer "
            "100 unseen rows."
        )

    def beside(self, results: Sequence[CellResult]) -> dict[str, str]:
        given = {"reader": "encoder", "scale": results[0]["scale"]}
        told = {}
        for task in ("copy", "reverse"):
            floor = found(results, "blind", task=task, **given)[0]
            right = {p: found(results, "exact_match", task=task, position=p, **given) for p in SCHEMES if p != "none"}
            best = max(right, key=lambda p: summary(right[p]).mean)
            told[f"encoder without positions: {task} stays at the blind loss"] = f"bound 0.95 of it: {0.95 * floor:.3f}"
            told[f"encoder: rows right in {task}, with - without positions"] = f"with {best} positions"
            told[f"encoder with positions: {task} is learnt in every seed"] = f"with {best} positions"
        return told

    def caption(self, results: Sequence[CellResult]) -> str:
        return "No tokens: token embeddings times 0, so that sinusoidal positions alone are left."

    def table(self, results: Sequence[CellResult]) -> Rows:
        rows: list[tuple[str, ...]] = [
            ("positions of", "task", "positions", "tokens times", "rows right", "loss", "blind")
        ]
        for reader, task, position, scale in dict.fromkeys(_setting(r) for r in results):
            given = {"reader": reader, "task": task, "position": position, "scale": scale}
            shown = (str(summary(found(results, name, **given))) for name in ("exact_match", "loss"))
            blind = found(results, "blind", **given)[0]
            rows.append((reader, task, position, f"{scale:g}", *shown, "–" if task == "sort" else f"{blind:.3f}"))
        return rows

    def remark(self, results: Sequence[CellResult]) -> str:
        given = {"reader": "encoder", "task": "sort", "scale": results[0]["scale"]}
        loss = {p: found(results, "loss", position=p, **given) for p in SCHEMES}
        pairs = (("learned", "none"), ("sinusoidal", "none"), ("learned", "sinusoidal"))
        tests = (f"{a} against {b} {tabled_test(loss[a], loss[b])}" for a, b in pairs)
        return (
            "Sorting, no part of the rule: with an encoder the validation loss ends at "
            f"{summary(loss['learned'])} with learned, {summary(loss['sinusoidal'])} with sinusoidal and "
            f"{summary(loss['none'])} without positions (p values without correction: {', '.join(tests)})."
        )

    def draw(self, results: Sequence[CellResult]) -> Any:
        figure, axes = panels(4, height=3.9)
        root = results[0]["scale"]
        for axis, reader in zip(axes, READERS, strict=False):
            named = {}
            for task in TASKS:
                given = {"reader": reader, "task": task}
                for position in SCHEMES:
                    name = "no positions" if position == "none" else position
                    named[f"{task}: {name}"] = found(results, "exact_match", position=position, scale=root, **given)
                named[f"{task}: no tokens"] = found(results, "exact_match", scale=0.0, **given)
            bars(axis, named)
            axis.set(title=f"positions of the {reader}", xlabel="rows without a mistake", xlim=(0, 1.05))
        copies = [r for r in results if (r["reader"], r["task"]) == ("encoder", "copy") and r["scale"]]
        scales = sorted({r["scale"] for r in copies if r["position"] == "learned"})
        schemes = [p for p in SCHEMES if p != "none"]
        lines(axes[2], {p: {s: found(copies, "loss", position=p, scale=s) for s in scales} for p in schemes})
        axes[2].set(title="encoder, copying", xlabel="factor of the token embeddings", ylabel="validation loss, nats")
        log_ticks(axes[2], [round(s, 2) for s in scales])
        log_ticks(axes[2], [0.001, 0.01, 0.1, 1], across=False)
        reference(axes[2], results[0]["blind"], "blind loss")
        sort = {"reader": "encoder", "task": "sort", "scale": root}
        named = {p if p in schemes else "no positions": found(results, "curve", position=p, **sort) for p in SCHEMES}
        curves(axes[3], {name: named[name] for name in (*schemes, "no positions")})
        axes[3].set(title="encoder, sorting", yscale="log", ylabel="training loss, nats")
        for axis in axes[2:]:
            label_ends(axis)
        return figure


def _recipe(cell: Cell) -> Recipe:
    width, position = cell["width"], SCHEMES[cell["position"]]
    parts: dict[str, Any] = {"feedforward": Plain(width=2 * width), "mixer": Attention(heads=4)}
    tokens = Tokens(scale=Times(value=cell["scale"]))

    def stack(position: Position, **is_more: Any) -> Stack:
        return Stack(
            depth=cell["depth"], blocks=(Block(**parts, **is_more),), position=position, final_norm=LayerNorm()
        )

    rest: dict[str, Any] = {"width": width, "target": tokens, "head": LM(), "init": Xavier()}
    if cell["reader"] == "encoder":  # the decoder always has positions
        decoder = stack(Sinusoidal(), cross=Attention(heads=4))
        model = ModelConfig(source=tokens, encoder=stack(position), decoder=decoder, **rest)
    else:
        model = ModelConfig(decoder=stack(position), **rest)
    task = TASKS[cell["task"]]
    return Recipe(
        task=Seq2Seq(),
        data=Data(
            train=task(count=10_000, shortest=4, longest=cell["longest"]),
            valid=task(count=100, shortest=4, longest=cell["longest"]),
        ),
        tokenizer=Words(),
        model=model,
        batches=Padded(tokens=cell["tokens"]),
        train=Train(
            steps=cell["steps"],
            optimizer=AdamW(lr=cell["lr"], betas=(0.9, 0.98), weight_decay=0.01),
            schedule=Cosine(warmup=cell["steps"] // 10, floor=0.1),
            precision="fp32",
            compile="off",
        ),
        seed=cell["seed"],
    )


def blind(rows: Read) -> float:
    """Return the lowest mean loss of a copy, nats per token, given the digits without their order."""
    sources = [text.split() for text in rows.columns["source"]]
    ways = (math.lgamma(len(row) + 1) - sum(math.lgamma(n + 1) for n in Counter(row).values()) for row in sources)
    return sum(ways) / sum(len(row) + 1 for row in sources)  # including <eos>, which can be predicted


def _setting(result: CellResult) -> tuple[str, str, str, float]:
    return result["reader"], result["task"], result["position"], result["scale"]

"""Tiny runs of every task that writes, and `anyformer predict` on many rows of each; for the CPU and for a GPU."""

import random
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from anyformer.cli.app import app
from anyformer.data.conversations import with_template
from anyformer.generation.batch.predictor import Predictor
from anyformer.recipe import Chat, Mixture, MixturePart, Preferences, Rewards, Seq2Seq
from tests.explore import made
from tests.serve.responsive import responsive

TASKS = made.WORDS.with_special(["<task:sort>", "<task:copy>"])
PARTS = MixturePart(name="sort", max_target=6), MixturePart(name="copy", max_target=6)
WRITERS = {
    "lm": made.RUNS["lm"],
    "prefix_lm": made.RUNS["prefix"],
    "spans": made.RUNS["spans"],
    "chat": (Chat(), made.decoder(made.stack()), with_template(made.LETTERS, "plain")),
    "seq2seq": (Seq2Seq(max_target=20), made.pair(made.stack(), made.stack(made.ACROSS)), made.WORDS),
    "seq2seq, a decoder alone": (Seq2Seq(max_target=20), made.decoder(made.stack()), made.WORDS),
    "seq2seq, recurrent": made.RUNS["cells"],
    "dpo": (Preferences(max_target=20), made.decoder(made.stack()), made.WORDS),
    "grpo": (Rewards(max_target=20, samples=2), made.decoder(made.stack()), made.WORDS),
    "mixture": (Mixture(parts=PARTS), made.pair(made.stack(), made.stack(made.ACROSS)), TASKS),
}
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "0", "1", "2", "3"]
NEW = 12  # tokens of an answer at most


def agreement(name: str, rows: int, folder: Path, checked: int) -> float:
    """Predict rows with the command, and return the share of equal answers to some of them alone on the CPU."""
    rng = random.Random(0)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 7))) for _ in range(rows)]  # 41 letters at most
    texts = [f"{text} <extra_id_0>" if name == "spans" else text for text in texts]
    run, source = folder / "run", folder / "rows.txt"
    found = made.untrained(*WRITERS[name], run)
    made.write(replace(found, model=responsive(found.model)))
    source.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    options = {"max_new_tokens": NEW} | ({"task": "copy"} if name == "mixture" else {})
    flags = [part for key, value in options.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    done = CliRunner().invoke(app, ["predict", str(run), str(source), "--out", str(folder / "out.txt"), *flags])
    assert done.exit_code == 0, done.output
    answers = (folder / "out.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(answers) == rows
    some = range(0, rows, rows // checked)
    alone = Predictor(run, device="cpu", **options)
    return sum(alone.predict([texts[i]]) == [answers[i]] for i in some) / len(some)

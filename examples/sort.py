"""A newcomer's first minute: a small decoder learns to sort digits, answers unseen rows, and shows where it looks.

python examples/sort.py --out runs/demo
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

import torch
from rich.console import Console

import anyformer as af
from anyformer.nn.inspection.plot import plot_map

ROWS = ["3 1 4 1 5 9", "5", "3 1 2", "2 7 1 8 2 8 1", "9 8 7 6 5 4 3 2", "0 0 1 1 0 0 1 1 5", "1 6 1 8 0 3 3 9 8 8 7"]


def main() -> None:
    parser = argparse.ArgumentParser(description="A small decoder learns to sort digits.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the run's folder; an old demo there goes")
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="changes of the recipe, such as train.steps=300"
    )
    options = parser.parse_args()
    if (options.out / "recipe.toml").exists():
        shutil.rmtree(options.out)
    console, start = Console(), time.perf_counter()
    torch.set_num_threads(1)  # matmuls so small that a second thread mostly waits

    run = af.train("sort", options.out, options.changes)
    console.print(f"trained in {time.perf_counter() - start:.0f} s; now it answers:\n")
    for asked, said in zip(ROWS, run.predict(ROWS), strict=True):
        right = said.split() == sorted(asked.split())
        console.print(f"  {asked:<22} →  {said:<22} {'right' if right else 'wrong'}")
    found = af.evaluate(options.out)
    share = found.values["exact_match"]
    console.print(f"\n{share:.1%} of {found.count:,} rows that were not in training sorted exactly")

    tokenizer, answer = run.tokenizer, " ".join(sorted(ROWS[0].split()))
    ids = torch.tensor([[*tokenizer.encode(ROWS[0]), tokenizer.sep, *tokenizer.encode(answer)]])
    names = ["→" if i == tokenizer.sep else tokenizer.token(i) for i in ids[0].tolist()]
    maps = af.attention_maps(run.model, ids)["decoder"]  # [layers, b, heads, t, s]
    path = plot_map(maps[-1, 0], names, names, options.out / "attention.png", f"Sorting {ROWS[0]}: the last layer")
    console.print(f"attention map: {path}")
    command = Path(sys.executable).with_name("anyformer")
    program = command if command.exists() else "anyformer"
    console.print("\nSee how it computes an answer, step by step, with its own numbers:", highlight=False)
    console.print(f"\n  {_short(program)} explore {options.out}\n", highlight=False, soft_wrap=True)


def _short(path: Path | str) -> str:
    """Return a path below the working directory without it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else str(path)


if __name__ == "__main__":
    main()

"""Write the pages of docs/lab from results: one for each claim with tables and figures, and an index of verdicts.

python -m anyformer.lab.report docs/lab    from docs/lab/results/<size>/<name>.jsonl
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from anyformer.lab.cells import Result, read_results
from anyformer.lab.compare import markdown, settings
from anyformer.lab.experiment import Experiment, Size, every
from anyformer.lab.figures import save

CODE = "../../anyformer"  # from docs/lab
TITLES: dict[Size, str] = {"quick": "Quick", "cpu": "On a CPU", "gpu": "On a GPU"}

SIZES = {  # values of cells on every page, and how they are written
    "width": "width {}",
    "depth": "depth {}",
    "heads": "{} heads",
    "steps": "{} training steps",
    "lr": "learning rate {}",
    "tokens": "{} tokens per batch",
}

Found = dict[Size, list[Result]]


def write(folder: Path) -> list[Path]:
    """Write the pages of all measured claims in a folder."""
    made, index = list[Path](), list[tuple[Experiment, Found]]()
    for experiment in every():
        if found := stored(experiment, folder):
            for size, results in found.items():
                save(experiment.draw(results), folder / "figures" / f"{experiment.name}-{size}.png")
            page = folder / f"{experiment.name}.md"
            page.write_text(page_of(experiment, found), encoding="utf-8")
            made.append(page)
            index.append((experiment, found))
    (folder / "README.md").write_text(index_of(index), encoding="utf-8")
    return [*made, folder / "README.md"]


def stored(experiment: Experiment, folder: Path) -> Found:
    """Return the complete sets of results, by size."""
    found: Found = {}
    for size in get_args(Size):
        by_cell = {str(r.cell): r for r in read_results(folder / "results" / size / f"{experiment.name}.jsonl")}
        needed = [str(dict(cell)) for cell in experiment.cells(size)]
        if by_cell and all(cell in by_cell for cell in needed):
            found[size] = [by_cell[cell] for cell in needed]
    return found


def page_of(experiment: Experiment, found: Found) -> str:
    """Return the page of a claim: the idea, the prediction, and the results."""
    parts = ", ".join(f"[{part}]({CODE}/{part})" for part in experiment.parts)
    head = f"""# {experiment.number}. {experiment.claim}

{experiment.idea}

**If so:** {experiment.prediction}
{experiment.changed and f"{chr(10)}**Changed after a look at the data:** {experiment.changed}{chr(10)}"}
**In the code:** {parts}; the experiment itself is [{experiment.name}.py]({CODE}/lab/experiments/{experiment.name}.py).
"""
    return head + "".join(_section(experiment, size, results) for size, results in found.items())


def _section(experiment: Experiment, size: Size, results: Sequence[Result]) -> str:
    machines = "; ".join(dict.fromkeys(r.machine for r in results))
    minutes = sum(r.seconds for r in results) / 60
    size_option = "" if size == "cpu" else f" --size {size}"
    verdict, remark = experiment.judge(results), experiment.remark(results)
    facts = "\n".join(f"- {fact}" for fact in verdict.why.split("; "))
    return f"""
## {TITLES[size]}: {verdict.word}

`anyformer lab {experiment.name}{size_option}` ({len(results)} measurements, {minutes:.1f} minutes in all; {machines})

**Set-up:** {setup(results)}.

**Verdict:** {verdict.word}.

{facts}
{remark and f"{chr(10)}**Note:** {remark}{chr(10)}"}
{markdown(experiment.table(results))}
![{experiment.alt}](figures/{experiment.name}-{size}.png)
"""


def setup(results: Sequence[Result]) -> str:
    """Return the number of seeds, the meaning of ±, and the sizes of models and training that the cells hold."""
    counts = sorted({len(some) for some in settings(results).values()})
    if counts == [1]:
        told = ["each setting measured once"]
        if repeats := {r.cell["repeats"] for r in results if "repeats" in r.cell}:
            told.append(f"times are medians of {max(repeats)} runs")
    else:
        told = [f"{' or '.join(map(str, counts))} seeds for each setting; ± is one standard deviation over seeds"]
    for name, form in SIZES.items():
        if values := sorted({r.cell[name] for r in results if name in r.cell}):
            told.append(form.format(" or ".join(f"{value:,g}" for value in values)))
    if parameters := [r.found["parameters"] for r in results if "parameters" in r.found]:
        least, most = min(parameters), max(parameters)
        told.append(f"{least:,} to {most:,} parameters" if least < most else f"{most:,} parameters")
    return "; ".join(told)


def index_of(index: Sequence[tuple[Experiment, Found]]) -> str:
    rows = [("", "claim", *TITLES.values(), "about")]
    for experiment, found in index:
        words = [experiment.judge(found[size]).word if size in found else "" for size in TITLES]
        about = ", ".join(f"[{part}]({CODE}/{part})" for part in experiment.parts)
        rows.append((str(experiment.number), f"[{experiment.claim}]({experiment.name}.md)", *words, about))
    return f"""# Claims about Transformers, put to the test

Each page has the idea, the command, the numbers and a verdict that is computed from them. `anyformer lab` lists them
with the minutes that they take. `anyformer lab scale` runs one at the size for a CPU, `--size quick` at the smallest
size, `--size gpu` at that of a GPU. An empty column has not been measured. A verdict holds for these small models and
synthetic tasks, and for the seeds, sizes and steps that its page states.

{markdown(rows)}
## By part

{markdown(_by_part([experiment for experiment, _ in index]))}
To compare settings on your data, see [comparing](../comparing.md); for worked examples, [by hand](../by-hand.md); for
failures and surprises, [the log](../log.md). `make lab-report` generates these pages from the results in this folder.
"""


def _by_part(experiments: Sequence[Experiment]) -> list[tuple[str, str]]:
    """Return a table of the files of the package with the claims about each."""
    parts = sorted({part for experiment in experiments for part in experiment.parts})
    rows = [("file", "claims")]
    for part in parts:
        about = [f"{e.number} [{e.name}]({e.name}.md)" for e in experiments if part in e.parts]
        rows.append((f"[{part}]({CODE}/{part})", ", ".join(about)))
    return rows


if __name__ == "__main__":
    for path in write(Path(sys.argv[1])):
        print(path)

"""Write the pages of docs/lab from results: one for each claim, and a gallery of verdicts.

python -m docs_site.lab_report    from docs/lab/results/<size>/<kind>.jsonl
"""

import json
from collections.abc import Sequence
from pathlib import Path

from anyformer.lab.cells import CellResult, key, read_results
from anyformer.lab.compare import markdown
from anyformer.lab.experiment import SIZES, VERDICTS, Experiment, StoredVerdict, every
from anyformer.lab.figures import save
from docs_site.lab_page import CODE, LAB, TITLES, Found, main_size, minutes_of, page_of

THUMBNAIL_DPI = 45  # 360 pixels wide


def write(folder: Path) -> list[Path]:
    """Write the pages of all measured claims in a folder, and the verdicts that `anyformer lab` lists."""
    made, index = list[Path](), list[tuple[Experiment, Found]]()
    for experiment in every():
        if found := stored(experiment, folder):
            for size, results in found.items():
                save(experiment.draw(results), folder / "figures" / f"{experiment.kind}-{size}.png")
            small = folder / "figures" / "small" / f"{experiment.kind}.png"
            save(experiment.draw(found[main_size(found)]), small, dpi=THUMBNAIL_DPI)
            page = folder / f"{experiment.kind}.md"
            page.write_text(page_of(experiment, found), encoding="utf-8")
            made.append(page)
            index.append((experiment, found))
    for figure in unused_figures(index, folder):
        figure.unlink()
    (folder / "README.md").write_text(index_of(index), encoding="utf-8")
    for home in {experiment.file.parent for experiment, _ in index}:
        own = [(experiment, found) for experiment, found in index if experiment.file.parent == home]
        (home / VERDICTS).write_text(verdicts_of(own), encoding="utf-8")
    return [*made, folder / "README.md"]


def unused_figures(index: Sequence[tuple[Experiment, Found]], folder: Path) -> list[Path]:
    """Return figures of results that are gone."""
    used = {f"{experiment.kind}-{size}" for experiment, found in index for size in found}
    small = {experiment.kind for experiment, _ in index}
    figures = folder / "figures"
    return [
        *(path for path in figures.glob("*.png") if path.stem not in used),
        *(path for path in (figures / "small").glob("*.png") if path.stem not in small),
    ]


def stored(experiment: Experiment, folder: Path) -> Found:
    """Return the complete sets of results, by size; the quick size only where there is no other.

    Stale results may be of cells that are no longer measured: they are shown as they are.
    """
    found: Found = {}
    for size in SIZES:
        results = read_results(folder / "results" / size / f"{experiment.kind}.jsonl")
        by_cell, needed = {key(r.cell): r for r in results}, [key(cell) for cell in experiment.cells(size)]
        if results and all(cell in by_cell for cell in needed):
            found[size] = [by_cell[cell] for cell in needed]
        elif results and experiment.rule_for(results) not in {result.rule for result in results}:
            found[size] = sorted(results, key=lambda r: r.cell.get("seed", 0))  # as in cells, which pair by seed
    return {size: results for size, results in found.items() if size != "quick" or len(found) == 1}


def verdicts_of(index: Sequence[tuple[Experiment, Found]]) -> str:
    """Return the verdicts of all measured claims as JSON."""
    found = {
        experiment.kind: {
            size: StoredVerdict(experiment.verdict(results).word, _rule(results), minutes_of(results))._asdict()
            for size, results in sizes.items()
        }
        for experiment, sizes in index
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _rule(results: Sequence[CellResult]) -> str:
    """Return the rule of all results; nothing if they differ."""
    rules = {result.rule for result in results}
    return rules.pop() if len(rules) == 1 else ""


def index_of(index: Sequence[tuple[Experiment, Found]]) -> str:
    """Return the gallery: a row for each claim with its figure, its verdicts and its result at each size."""
    rows = [("", "claim", "verdict")]
    for experiment, found in index:
        page = f"{experiment.kind}.md"
        image = f'<img src="figures/small/{experiment.kind}.png" width="240" alt="{experiment.alt}">'
        words = [f"{TITLES[size]}: **{_word(experiment, results)}**" for size, results in found.items()]
        seen = [f"{TITLES[size]}: {experiment.result(results)}" for size, results in found.items()]
        text = f"**{experiment.number}. [{experiment.claim}]({page})**"
        rows.append((f"[{image}]({page})", "<br>".join((text, *seen)), "<br>".join(words)))
    return f"""# Claims about Transformers, put to the test

Each page gives the result at each size in a few sentences, the idea, a decision rule that was fixed before the data,
the numbers with intervals and effect sizes, limits, sources, the raw data and the command. `anyformer lab` lists
verdicts and minutes.
`anyformer lab scale` runs one claim at the size for a CPU, `--size gpu` at that for a GPU, `--size quick` at the
smallest size, which has three seeds and is for a first look. `anyformer lab all --jobs 8` measures all of them side by
side, and continues where it was stopped.

A claim **holds** if every condition of its rule is met, **does not hold here** if one is refuted, and is **undecided
at this size** otherwise. Where several learning rates are tried, it is also undecided if a best one is the smallest or
the largest of them: beyond it there may be a better one. A verdict is about these small models and synthetic tasks. It
is stale if its rule was changed after its data was measured, or if these data are older than the hashes of rules.

{markdown(rows)}
## By part

{markdown(_by_part([experiment for experiment, _ in index]))}
To compare settings on your data, see [comparing](../comparing.md); for worked examples, [by hand](../by-hand.md); for
failures and surprises, [the log](../log.md). `make lab-report` generates these pages from the results in this folder.
"""


def _word(experiment: Experiment, results: Sequence[CellResult]) -> str:
    return experiment.verdict(results).word + (" (stale)" if experiment.is_stale(results) else "")


def _by_part(experiments: Sequence[Experiment]) -> list[tuple[str, str]]:
    """Return a table of the files of the package with the claims about each."""
    parts = sorted({part for experiment in experiments for part in experiment.parts})
    rows = [("file", "claims")]
    for part in parts:
        about = [f"{e.number} [{e.kind}]({e.kind}.md)" for e in experiments if part in e.parts]
        rows.append((f"[{part}]({CODE}/{part})", ", ".join(about)))
    return rows


if __name__ == "__main__":
    for path in write(LAB):
        print(path)

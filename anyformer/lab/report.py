"""Write the pages of docs/lab from results: one for each claim, and a gallery of verdicts.

python -m anyformer.lab.report docs/lab    from docs/lab/results/<size>/<name>.jsonl
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from anyformer.lab.cells import Result, key, read_results
from anyformer.lab.compare import markdown, settings
from anyformer.lab.decision import METHOD, Verdict, Word
from anyformer.lab.experiment import Experiment, Size, every
from anyformer.lab.figures import save
from anyformer.lab.verdicts import VERDICTS, Stored, minutes_of

CODE = "../../anyformer"  # from docs/lab
TITLES: dict[Size, str] = {"quick": "At the quick size", "cpu": "On a CPU", "gpu": "On a GPU"}
CLAIM: dict[Word, str] = {
    "holds": "holds",
    "does not hold here": "does not hold",
    "undecided at this size": "is undecided at this size",
}
THUMBNAIL_DPI = 45  # 360 pixels wide

SIZES = {  # values of cells on every page, and how they are written
    "width": "width {}",
    "depth": "depth {}",
    "heads": "{} heads",
    "steps": "{} training steps",
    "lr": "learning rate {}",
    "tokens": "{} tokens per batch",
    "rows": "{} rows per batch",
    "length": "length {}",
}
MOST_VALUES = 5  # of a setting that are listed one by one

Found = dict[Size, list[Result]]


def write(folder: Path) -> list[Path]:
    """Write the pages of all measured claims in a folder, and the verdicts that `anyformer lab` lists."""
    made, index = list[Path](), list[tuple[Experiment, Found]]()
    for experiment in every():
        if found := stored(experiment, folder):
            for size, results in found.items():
                save(experiment.draw(results), folder / "figures" / f"{experiment.name}-{size}.png")
            small = folder / "figures" / "small" / f"{experiment.name}.png"
            save(experiment.draw(found[_main(found)]), small, dpi=THUMBNAIL_DPI)
            page = folder / f"{experiment.name}.md"
            page.write_text(page_of(experiment, found), encoding="utf-8")
            made.append(page)
            index.append((experiment, found))
    for figure in unused_figures(index, folder):
        figure.unlink()
    (folder / "README.md").write_text(index_of(index), encoding="utf-8")
    VERDICTS.write_text(verdicts_of(index), encoding="utf-8")
    return [*made, folder / "README.md"]


def unused_figures(index: Sequence[tuple[Experiment, Found]], folder: Path) -> list[Path]:
    """Return figures of results that are gone."""
    used = {f"{experiment.name}-{size}" for experiment, found in index for size in found}
    small = {experiment.name for experiment, _ in index}
    figures = folder / "figures"
    return [
        *(path for path in figures.glob("*.png") if path.stem not in used),
        *(path for path in (figures / "small").glob("*.png") if path.stem not in small),
    ]


def stored(experiment: Experiment, folder: Path) -> Found:
    """Return the complete sets of results, by size; the quick size only where there is no other."""
    found: Found = {}
    for size in get_args(Size):
        by_cell = {key(r.cell): r for r in read_results(folder / "results" / size / f"{experiment.name}.jsonl")}
        needed = [key(cell) for cell in experiment.cells(size)]
        if by_cell and all(cell in by_cell for cell in needed):
            found[size] = [by_cell[cell] for cell in needed]
    return {size: results for size, results in found.items() if size != "quick" or len(found) == 1}


def is_stale(experiment: Experiment, results: Sequence[Result]) -> bool:
    """Test whether some results were measured under another rule than that of today."""
    return any(result.rule != experiment.rule for result in results)


def verdicts_of(index: Sequence[tuple[Experiment, Found]]) -> str:
    """Return the verdicts of all measured claims as JSON."""
    found = {
        experiment.name: {
            size: Stored(experiment.judge(results).word, _rule(results), minutes_of(results))._asdict()
            for size, results in sizes.items()
        }
        for experiment, sizes in index
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _rule(results: Sequence[Result]) -> str:
    """Return the rule of all results; nothing if they differ."""
    rules = {result.rule for result in results}
    return rules.pop() if len(rules) == 1 else ""


def _main(found: Found) -> Size:
    """Return the size that the gallery shows."""
    return next(size for size in ("cpu", "gpu", "quick") if size in found)


def page_of(experiment: Experiment, found: Found) -> str:
    """Return the page of a claim: the result, the idea, the rule, and the measurements."""
    parts = ", ".join(f"[{part}]({CODE}/{part})" for part in experiment.parts)
    code = f"[{experiment.name}.py]({CODE}/lab/experiments/{experiment.name}.py)"
    results = "\n\n".join(_headline(experiment, size, some) for size, some in found.items())
    main = _main(found)
    lines = [
        f"# {experiment.number}. {experiment.claim}",
        results,
        *([] if "gpu" in found else ["Not measured at the size for a GPU."]),
        f"![{experiment.alt}](figures/{experiment.name}-{main}.png)",
        f"*{experiment.alt}. {TITLES[main]}{_band(found[main])}.*",
        "## The idea",
        experiment.idea,
        "## The rule",
        rule_of(experiment, code),
        *(_section(experiment, size, some, size != main) for size, some in found.items()),
        *([f"## Limits\n\n{' '.join(experiment.limits.split())}"] if experiment.limits else []),
        *(["## Sources\n\n" + "\n".join(f"- {source}" for source in experiment.sources)] if experiment.sources else []),
        f"**In the code:** {parts}; the experiment itself is {code}.",
    ]
    return "\n\n".join(lines) + "\n"


def _headline(experiment: Experiment, size: Size, results: Sequence[Result]) -> str:
    verdict = experiment.judge(results)
    stale = (
        " These results are not of the rule that is now in force: they are stale."
        if is_stale(experiment, results)
        else ""
    )
    sentence = experiment.result(results) or f"{verdict.why[0].upper()}{verdict.why[1:]}."
    few = " Three seeds: a first look." if size == "quick" and not experiment.timed else ""
    return f"**{TITLES[size]} the claim {CLAIM[verdict.word]}.** {sentence}{few}{stale}"


def rule_of(experiment: Experiment, code: str) -> str:
    """Return hypothesis, measure and decision rule of a claim, with the hash that results are stored with."""
    changed = experiment.changed and (
        f"\n- **Changed after a look at data:** {experiment.changed} Results of the CPU and GPU sizes are from seeds "
        "that were first used after this change."
    )
    method = "" if experiment.timed else f" {METHOD}."
    return f"""Written in {code} before measurements that store its hash:

- **Hypothesis:** {experiment.claim}
- **Measure:** {experiment.measured or "see the table"}
- **Decision rule:** {" ".join(experiment.prediction.split())}{method} The claim holds if \
every condition is met, does not hold if one is refuted, and is undecided otherwise.
- **Hash of the rule:** `{experiment.rule}`, stored with every result that is measured under it.{changed}"""


def _section(experiment: Experiment, size: Size, results: Sequence[Result], with_figure: bool) -> str:
    machines = "; ".join(dict.fromkeys(r.machine for r in results))
    size_option = "" if size == "cpu" else f" --size {size}"
    verdict, remark = experiment.judge(results), experiment.remark(results)
    raw = f"results/{size}/{experiment.name}.jsonl"
    parts = [
        f"## {TITLES[size]}: {verdict.word}",
        f"`anyformer lab {experiment.name}{size_option}`: {len(results)} measurements, {minutes_of(results):g} minutes "
        f"of one {'process on the GPU' if size == 'gpu' else 'core'} in all ({machines}); [raw data]({raw}).",
        f"**Set-up:** {setup(results)}.",
        f"**Verdict:** {verdict}. {_under(experiment, results)}",
        *([markdown(_conditions(verdict)).rstrip()] if verdict.outcomes else []),
        *([f"**Note:** {remark}"] if remark else []),
        markdown(experiment.table(results)).rstrip(),
        *([f"![{experiment.alt}](figures/{experiment.name}-{size}.png)"] if with_figure else []),
    ]
    return "\n\n".join(parts)


def _under(experiment: Experiment, results: Sequence[Result]) -> str:
    """Return under which rule results were measured, and whether that is the rule of today."""
    rules = sorted({result.rule for result in results})
    if not is_stale(experiment, results):
        return f"Current: measured under the rule `{experiment.rule}`."
    before = " and ".join(f"under the rule `{rule}`" if rule else "before rules were stored" for rule in rules)
    return (
        f"**Stale:** measured {before}. The rule is now `{experiment.rule}`: this verdict applies a rule that was not "
        "fixed before these data."
    )


def _conditions(verdict: Verdict) -> list[tuple[str, ...]]:
    words = {True: "met", False: "refuted", None: "undecided"}
    if not _compares(verdict):
        return [("condition", "observed", ""), *((one.name, one.seen, words[one.holds]) for one in verdict.outcomes)]
    rows: list[tuple[str, ...]] = [("condition", "observed", "effect size g", "p, corrected", "")]
    for one in verdict.outcomes:
        p = "" if math.isnan(one.p) else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
        effect = "" if math.isnan(one.effect) else "∞" if math.isinf(one.effect) else f"{one.effect:.1f}"
        rows.append((one.name, one.seen, effect, p, words[one.holds]))
    return rows


def _compares(verdict: Verdict) -> bool:
    """Test whether a verdict compares means over seeds."""
    return any(not math.isnan(one.p) for one in verdict.outcomes)


def _band(results: Sequence[Result]) -> str:
    """Return what the bands of a figure are; nothing if each setting was measured once."""
    several = any(len(some) > 1 for some in settings(results).values())
    return "; bands, if any: one standard deviation over seeds" if several else ""


def _seeds(results: Sequence[Result]) -> str:
    """Return how many settings have how many seeds, and which."""
    by_seeds: dict[tuple[int, ...], int] = {}
    for some in settings(results).values():
        seeds = tuple(sorted(r.cell["seed"] for r in some))
        by_seeds[seeds] = by_seeds.get(seeds, 0) + 1
    told = []
    for seeds, number in sorted(by_seeds.items()):
        each = "each setting" if len(by_seeds) == 1 else f"each of {number} settings"
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"
        told.append(f"{which} for {each}")
    return ", ".join(told)


def setup(results: Sequence[Result]) -> str:
    """Return the number of seeds, the meaning of ±, and the sizes of models and training that the cells hold."""
    counts = sorted({len(some) for some in settings(results).values()})
    if counts == [1]:
        told = ["each setting measured once"]
        if repeats := {r.cell["repeats"] for r in results if "repeats" in r.cell}:
            told.append(f"times are medians of {max(repeats)} runs")
    else:
        told = [_seeds(results), "± is one standard deviation over seeds", "intervals of differences are 95 %"]
        told.append("g is a difference divided by the pooled standard deviation (Hedges)")
    for name, form in SIZES.items():
        values = sorted({r.cell[name] for r in results if isinstance(r.cell.get(name), int | float)})
        if values:
            listed = [f"{value:,g}" for value in values]
            span = " or ".join(listed) if len(listed) <= MOST_VALUES else f"{listed[0]} to {listed[-1]}"
            told.append(form.format(span))
    if parameters := [r.found["parameters"] for r in results if "parameters" in r.found]:
        least, most = min(parameters), max(parameters)
        told.append(f"{least:,} to {most:,} parameters" if least < most else f"{most:,} parameters")
    return "; ".join(told)


def index_of(index: Sequence[tuple[Experiment, Found]]) -> str:
    """Return the gallery: a row for each claim with its figure, verdicts and result."""
    rows = [("", "claim", "verdict")]
    for experiment, found in index:
        page = f"{experiment.name}.md"
        image = f'<img src="figures/small/{experiment.name}.png" width="240" alt="{experiment.alt}">'
        words = [f"{TITLES[size]}: **{_word(experiment, results)}**" for size, results in found.items()]
        text = f"**{experiment.number}. [{experiment.claim}]({page})** {experiment.result(found[_main(found)])}"
        rows.append((f"[{image}]({page})", text, "<br>".join(words)))
    return f"""# Claims about Transformers, put to the test

Each page gives the result in one sentence, the idea, a decision rule that was fixed before the data, the numbers with
intervals and effect sizes, limits, sources, the raw data and the command. `anyformer lab` lists verdicts and minutes.
`anyformer lab scale` runs one claim at the size for a CPU, `--size gpu` at that for a GPU, `--size quick` at the
smallest size, which has three seeds and is for a first look. `anyformer lab all --jobs 8` measures all of them side by
side, and continues where it was stopped.

A claim **holds** if every condition of its rule is met, **does not hold here** if one is refuted, and is **undecided**
otherwise. A verdict is about these small models and synthetic tasks. A verdict is stale if its rule was changed after
its data was measured.

{markdown(rows)}
## By part

{markdown(_by_part([experiment for experiment, _ in index]))}
To compare settings on your data, see [comparing](../comparing.md); for worked examples, [by hand](../by-hand.md); for
failures and surprises, [the log](../log.md). `make lab-report` generates these pages from the results in this folder.
"""


def _word(experiment: Experiment, results: Sequence[Result]) -> str:
    return experiment.judge(results).word + (" (stale)" if is_stale(experiment, results) else "")


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

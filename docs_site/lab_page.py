"""The page of a claim: its result, the idea, the rule, and the measurements with their set-up and limits."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anyformer.lab.cells import CellResult
from anyformer.lab.compare import markdown, settings
from anyformer.lab.decision import METHOD, NO_VARIATION, RATES, Outcome, Verdict, Word
from anyformer.lab.experiment import SIZES, Experiment, Size
from anyformer.lab.rules import tries_rates

LAB = Path(__file__).resolve().parent.parent / "docs" / "lab"
CODE = "../../anyformer"  # from there
TITLES: dict[Size, str] = {"quick": "At the quick size", "cpu": "On a CPU", "gpu": "On a GPU"}
CLAIM: dict[Word, str] = {
    "holds": "holds",
    "does not hold here": "does not hold here",
    "undecided at this size": "is undecided at this size",
}

FORMS = {  # values of cells on every page, and how they are written
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

Found = dict[Size, list[CellResult]]


def minutes_of(results: Sequence[CellResult]) -> float:
    """Return the minutes of one process that results took."""
    total = sum(r.seconds for r in results) / 60
    return max(0.1, round(total, 1)) if total < 10 else round(total)


def main_size(found: Found) -> Size:
    """Return the size whose figure comes first."""
    return next(size for size in ("cpu", "gpu", "quick") if size in found)


def page_of(experiment: Experiment, found: Found) -> str:
    """Return the page of a claim: the result, the idea, the rule, and the measurements."""
    parts = ", ".join(f"[{part}]({CODE}/{part})" for part in experiment.parts)
    code = f"[{experiment.file.name}]({os.path.relpath(experiment.file, LAB)})"
    main = main_size(found)
    lines = [
        f"# {experiment.number}. {experiment.claim}",
        *(_headline(experiment, size, some) for size, some in found.items()),
        *_missing(found),
        _repeat(experiment, found),
        *_figure(experiment, main, found[main]),
        "## The idea",
        experiment.idea,
        "## The rule",
        rule_of(experiment, code, found),
        *(_section(experiment, size, some, size != main) for size, some in found.items()),
        *([f"## Limits\n\n{' '.join(experiment.limits.split())}"] if experiment.limits else []),
        *(["## Sources\n\n" + "\n".join(f"- {source}" for source in experiment.sources)] if experiment.sources else []),
        f"**In the code:** {parts}; the experiment itself is {code}.",
    ]
    return "\n\n".join(lines) + "\n"


def _missing(found: Found) -> list[str]:
    """Return which sizes were not measured, in a sentence; nothing if all were."""
    sizes = [_place(size) for size in ("cpu", "gpu") if size not in found]
    return [f"Not measured {' or '.join(sizes)}."] if sizes else []


def _place(size: Size) -> str:
    """Return the title of a size within a sentence: "on a CPU"."""
    return TITLES[size][0].lower() + TITLES[size][1:]


def _headline(experiment: Experiment, size: Size, results: Sequence[CellResult]) -> str:
    verdict = experiment.verdict(results)
    stale = ", but this verdict is stale: its rule was not fixed before these data" * experiment.is_stale(results)
    sentence = experiment.result(results) or f"{verdict.why[0].upper()}{verdict.why[1:]}."
    if missing := [one for one in verdict.outcomes if one.role == "precondition" and not one.holds]:
        beside = experiment.beside(results)
        seen = "".join(f"; {text}" for one in missing if (text := one.seen or beside.get(one.name)))
        sentence += f" {verdict.why[0].upper()}{verdict.why[1:]} (a precondition of the rule{seen})."
    few = " Three seeds: a first look." if size == "quick" and not experiment.timed else ""
    return f"**{TITLES[size]} the claim {CLAIM[verdict.word]}{stale}.** {sentence}{few}"


def _repeat(experiment: Experiment, found: Found) -> str:
    """Return the commands that measure a claim again, how long they take, and where their results are."""
    commands, files = [], []
    for size, results in found.items():
        option = "" if size == "cpu" else f" --size {size}"
        device = "" if experiment.timed else f" one after the other on one {'GPU' if size == 'gpu' else 'core'}"
        if size == "gpu" and not experiment.timed:  # those that share a GPU take longer
            device += ", or less: several measurements may have shared it"
        minutes = f"{minutes_of(results):g}"
        if experiment.is_stale(results):  # there may be other cells now
            minutes = f"about {experiment.minutes[SIZES.index(size)]:g}"
        commands.append(f"`anyformer lab {experiment.kind}{option}` ({minutes} minutes{device})")
        files.append(f"`runs/lab/{size}/{experiment.kind}.jsonl`")
    jobs = "one measurement at a time, because they are timed" if experiment.timed else "less with `--jobs N`"
    raw = " and ".join(f"[{size}](results/{size}/{experiment.kind}.jsonl)" for size in found)
    return (
        f"**Repeat with:** {' or '.join(commands)}; {jobs}. The first call measures everything and stores it in "
        f"{' or '.join(files)}; later calls show the stored results. To measure again, delete that file. This page "
        f"shows the results that come with it: {raw}."
    )


def _figure(experiment: Experiment, size: Size, results: Sequence[CellResult]) -> list[str]:
    """Return a figure with its caption."""
    several = any(len(some) > 1 for some in settings(results).values())
    band = f" {experiment.spread}" if several and experiment.spread else ""
    caption = experiment.caption(results)
    return [
        f"![{experiment.alt}](figures/{experiment.kind}-{size}.png)",
        f"*{experiment.alt}. {TITLES[size]}.{f' {caption}' if caption else ''}{band}*",
    ]


def rule_of(experiment: Experiment, code: str, found: Found) -> str:
    """Return hypothesis, measure and decision rule of a claim, with the hash that results are stored with."""
    compares = any(_compares(experiment.judge(results)) for results in found.values())
    tested = f" {METHOD}." if compares else ""
    if any(tries_rates([result.cell for result in results]) for results in found.values()):
        tested += f" {RATES}."
    hashes = " and ".join(dict.fromkeys(f"`{experiment.rule_for(results)}`" for results in found.values()))
    explained = experiment.explanation and f"\n- **Explanation:** {' '.join(experiment.explanation.split())}"
    changed = experiment.changed and (f"\n- **Changed after a look at data:** {experiment.changed} {_fresh(found)}")
    stale = any(experiment.is_stale(results) for results in found.values())
    fixed = "runs below that are not marked as stale" if stale else "runs below"
    return f"""This rule was fixed in {code} before the {fixed}; each of their results stores the rule's hash.

- **Hypothesis:** {experiment.claim}
- **Measure:** {experiment.measured or "see the table"}
- **Decision rule:** {" ".join(experiment.prediction.split())}{tested} The claim holds if \
every condition is met, does not hold here if one is refuted, and is undecided at this size otherwise.{explained}
- **Hash of the rule:** {hashes}.{changed}"""


def _fresh(found: Found) -> str:
    """Return whether the seeds of the results were first used after a change of the rule."""
    fresh = [_place(size) for size in found if size != "quick"]
    if not fresh:
        return "The seeds of the quick size may have been used before this change."
    return f"The results {' and '.join(fresh)} are from seeds that were first used after this change."


def _section(experiment: Experiment, size: Size, results: Sequence[CellResult], with_figure: bool) -> str:
    verdict, remark = experiment.verdict(results), experiment.remark(results)
    stale = " (stale)" if experiment.is_stale(results) else ""
    parts = [
        f"## {TITLES[size]}: {verdict.word}{stale}",
        f"**Measured:** {measured_on(results)}",
        f"**Set-up:** {setup(experiment, results)}.",
        f"**How to read the numbers:** {reading(experiment, results)}.",
        f"**Verdict:** {verdict}. {_under(experiment, results)}",
        *([markdown(_conditions(verdict, experiment.beside(results))).rstrip()] if verdict.outcomes else []),
        *([f"**Note:** {remark}"] if remark else []),
        markdown(experiment.table(results)).rstrip(),
        *([f"*{' '.join(experiment.columns.split())}*"] if experiment.columns else []),
        *(_figure(experiment, size, results) if with_figure else []),
    ]
    return "\n\n".join(parts)


def measured_on(results: Sequence[CellResult]) -> str:
    """Return the number of measurements, the sum of their minutes, and the machines that they ran on."""
    machines = Counter(result.machine for result in results)
    total = f"{len(results)} measurements, {minutes_of(results):g} minutes in all"
    if len(machines) == 1:
        return f"{total}, each on {results[0].machine}."
    each = "; ".join(f"({i}) {count} on {machine}" for i, (machine, count) in enumerate(machines.items(), 1))
    where = [{result.machine for result in some} for some in settings(results).values()]
    counts = [f"{sum(one == {machine} for one in where)} ran on ({i}) alone" for i, machine in enumerate(machines, 1)]
    if both := sum(len(one) > 1 for one in where):
        counts.append(f"{both} on more than one")
    return (
        f"{total}: {each}. They are pooled; of {len(where)} settings {', '.join(counts)}. Machines and versions of "
        "torch round differently, and a difference between settings of different machines includes that."
    )


def _under(experiment: Experiment, results: Sequence[CellResult]) -> str:
    """Return under which rule results were measured, and whether that is the rule of today."""
    rules = sorted({result.rule for result in results})
    if not experiment.is_stale(results):
        return "The results are up to date: they were measured under this version of the rule."
    before = " and ".join(f"under the rule `{rule}`" if rule else "before rules were stored" for rule in rules)
    return (
        f"**Stale:** measured {before}. The rule is now `{experiment.rule_for(results)}`: this verdict applies a rule "
        "that was not fixed before these data."
    )


def _conditions(verdict: Verdict, beside: dict[str, str]) -> list[tuple[str, ...]]:
    """Return the table of conditions, with words `beside` what was observed."""
    compares = _compares(verdict)
    tests = ("effect size g", "p, corrected") if compares else ()
    rows: list[tuple[str, ...]] = [("condition", "observed", *tests, "outcome")]
    for one in verdict.outcomes:
        words = {True: "met", False: "refuted", None: "undecided"}
        name = one.name
        if one.role == "precondition":
            name, words = f"precondition: {name}", {True: "met", False: "not met", None: "not met"}
        elif one.role == "part":
            name, words = f"part of a condition: {name}", {True: "yes", False: "no", None: "undecided"}
        seen = "; ".join(filter(None, (one.seen, beside.get(one.name, ""))))
        rows.append((name, seen, *(_test(one) if compares else ()), words[one.holds]))
    return rows


def _test(one: Outcome) -> tuple[str, str]:
    """Return effect size and p value of a comparison; a dash where nothing is tested."""
    p = "–" if math.isnan(one.p) else "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
    return "–" if math.isnan(one.effect) else f"{one.effect:.1f}", p


def _compares(verdict: Verdict) -> bool:
    """Test whether a verdict compares means over seeds."""
    return any(not math.isnan(one.p) for one in verdict.outcomes)


def reading(experiment: Experiment, results: Sequence[CellResult]) -> str:
    """Return the number of seeds, the meaning of ± and of intervals, and the unit of losses."""
    verdict = experiment.judge(results)
    if all(len(some) == 1 for some in settings(results).values()):
        told = ["each setting measured once"]
        if repeats := {r.cell["repeats"] for r in results if "repeats" in r.cell}:
            told.append(f"times are medians of {max(repeats)} runs")
    else:
        told = [_seeds(results), "± is one standard deviation over seeds"]
    if any("±" in one.seen and "exponent" in one.seen for one in verdict.outcomes):
        told.append("± after an observed exponent is the standard error of its fit (0.00: below 0.005)")
    if any("±" in one.name for one in verdict.outcomes):
        told.append("± in a condition is the tolerance of the rule")
    if _compares(verdict):
        told.append("a difference is followed by its 95 % interval")
        told.append("a significant difference above 0 supports the claim, one below 0 refutes it")
        if any("expected" in one.seen for one in verdict.outcomes):
            told.append("where “more than x expected” follows, x takes the place of 0, in the test as well")
        told.append(_effect(verdict))
    if any(NO_VARIATION in one.seen for one in verdict.outcomes):
        told.append(f"where there is {NO_VARIATION} nothing is tested, and the means decide")
    if experiment.unit:
        told.append(f"losses are in {experiment.unit}")
    return "; ".join(told)


def _effect(verdict: Verdict) -> str:
    """Return by which deviation the effect sizes of a verdict are divided."""
    tested = [one for one in verdict.outcomes if not math.isnan(one.p)]
    bounds = [f"“{one.name}”" for one in tested if one.bound]
    if len(bounds) == len(tested):
        return "g is a difference from a known number divided by the standard deviation of the values (Hedges)"
    text = "g is a difference divided by the pooled standard deviation (Hedges)"
    if not bounds:
        return text
    verb = "compares" if len(bounds) == 1 else "compare"
    return (
        f"{text}; {' and '.join(bounds)} {verb} one value per seed with a known number (0 where none is named), "
        "so there g is divided by the standard deviation of these values"
    )


def _seeds(results: Sequence[CellResult]) -> str:
    """Return how many settings have how many seeds, and which."""
    by_seeds: dict[tuple[int, ...], list[list[CellResult]]] = {}
    for some in settings(results).values():
        by_seeds.setdefault(tuple(sorted(r.cell["seed"] for r in some)), []).append(some)
    told = []
    for seeds, group in sorted(by_seeds.items()):
        rest = [r for other, some in by_seeds.items() if other != seeds for each in some for r in each]
        which = f"seed {seeds[0]}" if len(seeds) == 1 else f"{len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"
        common = _in_common([r for each in group for r in each], rest)
        each = f"each of {len(group)} settings{common}" if rest else "each setting"
        told.append(f"{which} for {each}")
    return ", ".join(told)


def _in_common(some: Sequence[CellResult], others: Sequence[CellResult]) -> str:
    """Return a value of the cells that these results share and the others lack: " (depth 2)"; nothing if none has."""
    for name in ("depth", "steps", "part", "variant"):
        mine, theirs = ({r.cell.get(name) for r in group} for group in (some, others))
        if len(mine) == 1 and not mine & theirs and (value := mine.pop()) is not None:
            return f" ({FORMS[name].format(f'{value:,}')})" if name in FORMS else f" ({value})"
    return ""


def setup(experiment: Experiment, results: Sequence[CellResult]) -> str:
    """Return the models and data of results, and the sizes of models and training that the cells hold."""
    forms: dict[str, str] = {**FORMS, **experiment.sizes}
    told = []
    for name, form in forms.items():
        values = sorted({r.cell[name] for r in results if isinstance(r.cell.get(name), int | float)})
        if values and form:
            told.append(form.format(_listed(values)))
    if parameters := [r.found["parameters"] for r in results if "parameters" in r.found]:
        told.append(f"{_listed(sorted(set(parameters)), 2)} parameters")
    setting = " ".join(experiment.setting(results).split())
    if not told:
        return setting.removesuffix(".")
    return f"{setting} Sizes: {'; '.join(told)}" if setting else "; ".join(told)


def _listed(values: Sequence[Any], most: int = MOST_VALUES) -> str:
    """Return numbers in words: "8, 16 or 32", or the first and last of many."""
    texts = [f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" for value in values]
    if len(texts) > most:
        return f"{texts[0]} to {texts[-1]}"
    return " or ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))

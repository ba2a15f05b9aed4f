"""Which column of a table is the text, the label, the source, ...: by name, else by content. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from anyformer.config.spec import ConfigError, Fault, did_you_mean, shorten
from anyformer.training.new_recipe.examine import COLUMN_NAMES, MAX_SHOWN, Examined, is_number

Role = Literal["text", "pair", "label", "source", "target", "words", "tags"]

MAX_LABELS = 1000
MAX_LABEL_LENGTH = 60  # characters, on average
MIN_LIKENESS = 0.4  # mean length of a column that could be the text ÷ that of the longest column


@dataclass(frozen=True)
class Chosen:
    """A column, and why it is the one."""

    name: str
    why: str


def choose_columns(
    table: Examined, roles: Iterable[Role], given: dict[Role, str], *, numeric: bool = False
) -> dict[Role, Chosen]:
    """Return the column of each role: as given, by name, or the only one that fits. Raise if several could be meant."""
    faults, chosen = [], dict[Role, Chosen]()
    names = list(table.columns)
    for role, name in given.items():
        if name not in names and name.isdecimal() and int(name) < len(names):
            name = names[int(name)]
        if name in names:
            chosen[role] = Chosen(name, f"as --{role} says")
        else:
            what = f"= {name!r}: no such column in {table.path}; {did_you_mean(name, table.columns)}"
            faults.append(Fault(f"--{role}", what))
    if faults:
        raise ConfigError(faults)
    wanted = [role for role in roles if role not in given]
    for role in sorted(wanted, key=lambda role: role not in ("label", "tags")):  # labels are the easiest to recognise
        taken = {one.name for one in chosen.values()}
        found = _choose(table, role, taken, numeric, [*wanted, *given])
        if isinstance(found, Chosen):
            chosen[role] = found
        else:
            faults.append(found)
    if faults:
        raise ConfigError(faults)
    return chosen


def _choose(table: Examined, role: Role, taken: set[str], numeric: bool, roles: list[Role]) -> Chosen | Fault:
    fitting = [name for name in _fitting(table, role, numeric) if name not in taken]
    named = sorted((n for n in fitting if _rank(n, role) < len(COLUMN_NAMES[role])), key=lambda name: _rank(name, role))
    if named:
        return Chosen(named[0], "by its name")
    if len(fitting) == 1:
        return Chosen(fitting[0], f"the only column that could be the {role}")
    two = [other for other in (("source", "target"), ("text", "pair")) if role in other and {*other} <= {*roles}]
    if two and len(fitting) + len(taken & {*_fitting(table, role, numeric)}) == 2:
        return Chosen(fitting[0], "the " + ("first" if role == two[0][0] else "second") + " of two columns of text")
    if not fitting:
        kind = "column of numbers" if numeric and role == "label" else f"column that could be the {role}"
        return Fault(f"--{role}", f"{table.path} has no {kind}; its columns: {_listed(table, table.columns)}")
    what = f"several columns of {table.path} could be the {role}: {_listed(table, fitting)}; write --{role} COLUMN"
    return Fault(f"--{role}", what)


def _rank(name: str, role: Role) -> int:
    """Return the place of a column's name among the usual names of a role."""
    usual, name = COLUMN_NAMES[role], name.rpartition(".")[2].strip().lower()
    return usual.index(name) if name in usual else len(usual)


def _listed(table: Examined, names: Iterable[str]) -> str:
    shown = []
    for name in names:
        example = next((value for value in table.columns[name] if value.strip()), "")
        shown.append(f"'{name}' ({shorten(' '.join(example.split()), MAX_SHOWN)})")
    return ", ".join(shown)


def _fitting(table: Examined, role: Role, numeric: bool) -> list[str]:
    """Return the columns whose content fits a role, in the order of the table."""
    if role in ("words", "tags"):
        return list(table.lists) if table.lists else list(table.columns)
    if role == "label":
        return [name for name in table.columns if _is_label(name, table.columns[name], numeric)]
    texts = {name: _mean_length(values) for name, values in table.columns.items() if _is_text(name, values)}
    if role != "text":
        return list(texts)
    longest = max(texts.values(), default=0)
    return [
        name
        for name, mean in texts.items()
        if mean >= MIN_LIKENESS * longest or _rank(name, role) < len(COLUMN_NAMES[role])
    ]


def _is_label(name: str, values: list[str], numeric: bool) -> bool:
    if name.strip().lower() in COLUMN_NAMES["other"]:
        return False
    if numeric:
        return sum(map(is_number, values)) > 0.95 * len(values)
    different = len({*values})
    few = different <= max(20, min(MAX_LABELS, len(values) // 10)) and (different < len(values) or len(values) < 4)
    return few and _mean_length(values) <= MAX_LABEL_LENGTH


def _is_text(name: str, values: list[str]) -> bool:
    if name.strip().lower() in COLUMN_NAMES["other"]:
        return False
    return sum(map(is_number, values)) < 0.5 * len(values) and any(map(str.strip, values))


def _mean_length(values: list[str]) -> float:
    return sum(map(len, values)) / max(1, len(values))

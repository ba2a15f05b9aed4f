"""The families with the laws of their parts, and reports of which hold."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from anyformer.config import ConfigError, ModelConfig, io
from anyformer.config.part import Part, families, kind_of
from anyformer.config.spec import alternatives
from anyformer.recipe.schedule import Schedule
from anyformer.testing import laws, reading
from anyformer.testing.split import shared_by_two
from anyformer.testing.subject import AROUND, Subject, subjects

Law = Callable[[Subject], str | None]
"""Raises an `AssertionError`, or returns why it is not for this part; its docstring says what holds."""

COMPILE = "compile"  # takes seconds: of one model alone
BLOCK_LAWS: dict[str, Law] = {
    "config": laws.config_survives,
    "meta": laws.builds_on_meta,
    "weights": laws.weights_are_saved,
    "cost": laws.is_counted,
    "gradients": laws.gradients_are_right,
    "training": laws.trains,
    "repeats": laws.repeats,
    "inputs": laws.inputs_are_left_alone,
    "output": laws.output_is_as_said,
    "rows": reading.rows_are_apart,
    "causal": reading.is_causal,
    "padding": reading.padding_is_ignored,
    "packing": reading.packing_is_ignored,
    "cache": reading.cached_is_uncached,
    "generation": reading.generates,
    "segments": reading.segment_memory_is_whole,
    COMPILE: reading.is_compiled,
}
OF_SEQUENCES = ("causal", "padding", "packing", "cache", "generation", "segments")
SPLIT = "tensor"  # of all parts at once, as two processes have to start
PLAIN_LAWS: dict[str, Law] = {"config": laws.config_survives}  # of families without a line below
LAWS: dict[type[Part], dict[str, Law]] = {
    **dict.fromkeys(AROUND, BLOCK_LAWS),
    Schedule: {**PLAIN_LAWS, "steps": laws.factors_are_right},
}
LARGE = 32  # value of integers without a default
FEW = ("heads", "groups", "top_k", "count", "labels")  # those that are 2


class Result(NamedTuple):
    """The outcome of a law; None: it is not for this part."""

    law: str
    holds: bool | None
    remark: str = ""


@dataclass(frozen=True)
class Report:
    """The laws of a part."""

    part: Part
    results: tuple[Result, ...]

    @property
    def broken(self) -> list[Result]:
        return [result for result in self.results if result.holds is False]

    def to_dict(self) -> dict[str, Any]:
        laws = {law: {"holds": holds, "remark": remark} for law, holds, remark in self.results}
        return {"part": type(self.part).__name__, "kind": self.part.kind, "laws": laws}

    def __str__(self) -> str:
        lines = [f"{result.law}: {result.remark}" for result in self.broken] or ["all laws hold"]
        return "\n  ".join([f"{type(self.part).__name__} ({self.part.kind})", *lines])


def known_laws() -> list[str]:
    """Return the names of all laws."""
    return [*dict.fromkeys(name for laws in LAWS.values() for name in laws), SPLIT]


def check_part(part: Part | type[Part], around: dict[str, Any] | None = None, skip: Collection[str] = ()) -> Report:
    """Check a part by all laws of its family.

    A class is checked with its defaults; fields without one get small values. `around` are other parts of its block,
    and `position`. `skip` names laws that are not tried.

    Raises:
        AssertionError: if laws do not hold; it names each.
    """
    (report,) = run_laws([part if isinstance(part, Part) else example(part)], around, skip)
    assert not report.broken, str(report)
    return report


def run_laws(parts: Sequence[Part], around: dict[str, Any] | None = None, skip: Collection[str] = ()) -> list[Report]:
    """Return reports of parts, whether their laws hold or not."""
    found, splits = list[tuple[Part, list[Result]]](), list[ModelConfig | None]()
    for part in parts:
        family = next((family for family in families(type(part)) if family in LAWS), None)
        of_family, splits_with = PLAIN_LAWS if family is None else LAWS[family], family in AROUND
        try:
            own = AROUND[family](part) if family in AROUND else {}
            made = subjects(part, own | (around or {}))
        except ConfigError as error:
            made, results = list[Subject](), [Result("config", False, f"no small model has it: {error}")]
        else:
            tried = {name: law for name, law in of_family.items() if name not in skip}
            results = [_result(name, law, made if name != COMPILE else made[:1]) for name, law in tried.items()]
        found.append((part, results))
        splits.append(made[0].config if made and splits_with else None)
    if SPLIT not in skip:
        shared = [config for config in splits if config is not None]
        outcomes = iter(shared_by_two(shared) if shared else [])
        for (_, results), config in zip(found, splits, strict=True):
            if config is not None:
                results.append(Result(SPLIT, *next(outcomes)))
    return [Report(part, tuple(results)) for part, results in found]


def _result(name: str, law: Law, made: list[Subject]) -> Result:
    """Return whether a law holds for a part in each of the small models."""
    remarks = list[str | None]()
    for subject in made:
        try:
            is_for = subject.is_sequence or name not in OF_SEQUENCES
            remarks.append(law(subject) if is_for else "it gives nothing for each of some tokens")
        except AssertionError as error:
            return Result(name, False, str(error) or "an assertion fails")
        except Exception as error:  # whatever the code of the user raises
            return Result(name, False, f"{type(error).__name__}: {error}".partition("\n")[0])
    if None in remarks:
        return Result(name, True)
    return Result(name, None, remarks[0] or "")


def example(part: type[Part], given: dict[str, Any] | None = None) -> Part:
    """Return a part with these fields, and small values for others that have no default."""
    data = {name: _small(name, field) for name, field in part.model_fields.items() if field.is_required()}
    return io.build(part, {"kind": kind_of(part), **{k: v for k, v in data.items() if v is not None}, **(given or {})})


def _small(name: str, field: FieldInfo) -> Any:
    types = alternatives(field.annotation)
    if int in types:
        return 2 if name.endswith(FEW) else LARGE
    return 0.5 if float in types else None

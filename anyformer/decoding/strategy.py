"""How tokens are chosen: one of four ways, each with options of its own, made from options that all have names of their
own. What belongs to another way, or does nothing in this one, is refused rather than ignored."""

from collections.abc import Iterator
from typing import Any

from pydantic import ConfigDict

from anyformer.config.spec import ConfigError, Fault, Size, did_you_mean
from anyformer.decoding.beam_search import Beam
from anyformer.decoding.contrastive import Contrastive
from anyformer.decoding.logit_processors import Processing, Sampling
from anyformer.decoding.speculative import Draft, Lookup


class Speculation(Sampling):
    """What `Sampling` says, with tokens guessed ahead: by a draft model, or by what followed before."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    draft: Draft | Lookup
    ahead: Size = 4


Strategy = Sampling | Beam | Contrastive | Speculation

# Whoever gives one of these has chosen.
CHOICES: dict[str, type[Strategy]] = {
    "beams": Beam,
    "candidates": Contrastive,
    "alpha": Contrastive,
    "draft": Speculation,
    "lookup": Speculation,
}
NAMES = {Beam: "beam search", Contrastive: "contrastive search", Speculation: "speculation"}
NEEDS = {Beam: "needs beams: say how many", Speculation: "needs a draft or a lookup"}
ELSEWHERE: dict[str, type[Strategy]] = {"seed": Sampling, "phrases": Beam}  # ours, but no fields: each call has its own


def strategy(**options: Any) -> Strategy:
    """The way that some options mean; None is as if not given.

    Those of `Sampling`, or with `beams` of `Beam`, with `candidates` or `alpha` of `Contrastive`, with `draft` (a
    model) or `lookup` (the length of n-grams) of `Speculation`. A `seed` and `phrases` are looked at, but not kept.
    """
    given = {name: value for name, value in options.items() if value is not None}
    chosen = {CHOICES[name]: name for name in reversed(CHOICES) if name in given}
    if len(chosen) > 1:
        *others, first = chosen.values()
        what = f"is of {NAMES[CHOICES[first]]}, and {others[-1]} of {NAMES[CHOICES[others[-1]]]}: give one of them"
        raise ConfigError([Fault(first, what)])
    way = next(iter(chosen), Sampling)
    if faults := list(_faults(way, next(iter(chosen.values()), None), given)):
        raise ConfigError(faults)
    kept = {name: value for name, value in given.items() if name not in ELSEWHERE}
    if way is Speculation:
        ngram = kept.pop("lookup", None)
        kept["draft"] = Lookup(ngram=ngram) if ngram is not None else Draft(kept["draft"])
    made: Strategy = way(**kept)
    if "seed" in given and isinstance(made, Sampling) and made.temperature == 0:
        shown = f"= {given['seed']}: " if isinstance(given["seed"], int) else ""
        raise ConfigError([Fault("seed", f"{shown}needs a temperature above 0: at 0 nothing is drawn")])
    return made


def may_be(way: type[Strategy], options: dict[str, Any]) -> bool:
    """Whether no option is of another way."""
    owners = (_owner(name) for name, value in options.items() if value is not None)
    return all(owner is None or issubclass(way, owner) for owner in owners)


def _faults(way: type[Strategy], by: str | None, given: dict[str, Any]) -> Iterator[Fault]:
    """Options that a way does not have; `by` is the one that chose it."""
    if "lookup" in given and "draft" in given:
        yield Fault("lookup", "guesses tokens instead of a draft: give one of them")
    for name, value in given.items():
        owner = _owner(name)
        if owner is None:
            yield Fault(name, f"unknown option; {did_you_mean(name, [*ELSEWHERE, *CHOICES, *_fields()])}")
        elif not issubclass(way, owner):
            shown = f"= {value}: " if isinstance(value, int | float | str) else ""
            if by is None:
                yield Fault(name, shown + NEEDS[owner])
            elif owner is Sampling:
                yield Fault(name, f"{shown}{NAMES[way]} draws nothing: leave it out, or {by}")
            else:
                yield Fault(name, f"{shown}is of {NAMES[owner]}, and {by} of {NAMES[way]}: leave one of them out")


def _owner(name: str) -> type[Processing] | None:
    """The least that has an option."""
    if owner := ELSEWHERE.get(name) or CHOICES.get(name):
        return owner
    ways: tuple[type[Processing], ...] = (Processing, Sampling, Beam, Contrastive, Speculation)
    return next((way for way in ways if name in way.model_fields), None)


def _fields() -> set[str]:
    return {name for way in (Sampling, Beam, Contrastive, Speculation) for name in way.model_fields}

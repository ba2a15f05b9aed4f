"""Decoding strategies as specs: sampling (or greedy), beam search, contrastive search and speculative decoding.

`strategy` makes one from named options. An option of another strategy, or one without effect, is refused.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from anyformer.config.spec import ConfigError, Count, Fault, Fraction, LengthPenalty, Size, Spec, did_you_mean
from anyformer.nn.model import Transformer

Ids = Annotated[tuple[Count, ...], Field(min_length=1)]

# Within these bounds no finite logit becomes NaN or Inf in fp32, whatever the other options are.
Divisor = Annotated[float, Field(strict=True, ge=1e-3, le=1000)]
Addend = Annotated[float, Field(strict=True, ge=-1e30, le=1e30)]

EarlyStopping = Literal["first", "heuristic", "never"]
"""When a beam search ends that has `beams` finished hypotheses (in `transformers`: True, False, "never").

first: at once. heuristic: when the best running beam, were it to end at its present length, scores no better than the
worst of them. never: when it cannot score better at any length.
"""


class Processing(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """Changes to the logits that every strategy supports. The defaults change nothing."""

    # divides positive logits of tokens in prompt and output, multiplies negative ones; 1: off
    repetition_penalty: Divisor = 1.0
    presence_penalty: Addend = 0.0  # subtracted from the logit of every generated token
    frequency_penalty: Addend = 0.0  # subtracted once per occurrence
    bias: tuple[tuple[Count, Addend], ...] = ()  # added to the logits of these ids
    no_repeat_ngram: Size | None = None  # no n-gram of this length occurs twice; None: off
    banned: tuple[Ids, ...] = ()  # sequences of ids that never occur
    min_new_tokens: Count = 0  # fewest new tokens before a stop id
    prefix: tuple[Count, ...] = ()  # ids that every output begins with


class Sampling(Processing):
    """Sample each token, or choose the top-1 token at temperature 0 (greedy)."""

    temperature: Annotated[float, Field(strict=True, ge=0)] = 0.0  # divisor of the logits; 0: greedy
    top_k: Size | None = None  # samples among the k most probable tokens; None: all
    top_p: Fraction | None = None  # samples among the fewest tokens whose probabilities sum to p; None: all
    min_p: Fraction | None = None  # drops tokens less probable than p times the top-1 token; None: none
    # locally typical sampling: tokens of information close to the entropy, up to mass p; None: all
    typical_p: Fraction | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        filters = ("top_k", "top_p", "min_p", "typical_p")
        unused = [name for name in filters if self.temperature == 0 and getattr(self, name) is not None]
        if unused:
            reason = "needs a temperature above 0: at 0 decoding is greedy"
            raise ConfigError(Fault(name, f"= {getattr(self, name)}: {reason}") for name in unused)
        return self


class Beam(Processing):
    """Search for the hypotheses with the highest score as a whole."""

    beams: Size  # partial outputs that are extended in parallel
    n_best: Size = 1  # hypotheses that are returned
    # power of the length that divides a log-probability; above 0 favours long outputs
    length_penalty: LengthPenalty = 1.0
    early_stopping: EarlyStopping = "heuristic"  # when a search with `beams` finished hypotheses ends
    groups: Size = 1  # groups of beams for diverse beam search; 1: off
    diversity_penalty: Addend = 0.0  # subtracted from a logit once per beam of earlier groups that chose it

    @model_validator(mode="after")
    def _check(self) -> Self:
        faults = []
        if self.n_best > self.beams:
            faults.append(Fault("n_best", f"= {self.n_best}: must be from 1 to the number of beams, {self.beams}"))
        if self.groups > 1 and self.beams % self.groups:
            faults.append(Fault("groups", f"= {self.groups}: must divide beams = {self.beams}"))
        penalty = self.diversity_penalty
        if self.groups > 1 and penalty <= 0:
            faults.append(Fault("diversity_penalty", f"= {penalty}: must be above 0, or all groups are equal"))
        if self.groups == 1 and penalty != 0:
            faults.append(Fault("diversity_penalty", f"= {penalty}: needs groups, and there is 1"))
        if faults:
            raise ConfigError(faults)
        return self


class Contrastive(Processing):
    """Choose among the top tokens the one whose hidden state repeats least."""

    candidates: Size = 5  # most probable tokens among which is chosen
    # weight of the repetition penalty against the probability
    alpha: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.6


class Draft(NamedTuple):
    """Draft tokens by a smaller model of the same shape and vocabulary."""

    model: Transformer


class Lookup(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """Prompt-lookup decoding: draft the tokens that followed the current n-gram where it last occurred.

    `ngram` is its largest length; shorter ones are used where that does not occur. Prompt and answer are searched, and
    a source of the same vocabulary. It pays where answers copy from what was read.
    """

    ngram: Size = 3  # largest n-gram that is looked up, in tokens


class OwnHead(NamedTuple):
    """Draft tokens by the model's own layers for further tokens (`head.multi_token`)."""


class Speculation(Sampling):
    """`Sampling` with up to `ahead` draft tokens that the model verifies in one call."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    draft: Draft | Lookup | OwnHead  # the smaller model, the lookup or the model's own layers that draft
    ahead: Size = 4  # draft tokens per call of the model


Strategy = Sampling | Beam | Contrastive | Speculation

# Options that select a strategy.
SELECTED_BY: dict[str, type[Strategy]] = {
    "beams": Beam,
    "candidates": Contrastive,
    "alpha": Contrastive,
    "draft": Speculation,
    "lookup": Speculation,
    "self_draft": Speculation,
}
NAMES = {Beam: "beam search", Contrastive: "contrastive search", Speculation: "speculation"}
NEEDS = {Beam: "needs beams: give their number", Speculation: "needs a draft, a lookup or self_draft"}
PER_CALL: dict[str, type[Strategy]] = {"seed": Sampling, "phrases": Beam}  # options that are fields of `Request`


def strategy(**options: Any) -> Strategy:
    """Return the strategy that some options select; None counts as not given.

    `beams` selects `Beam`, `candidates` or `alpha` `Contrastive`, `draft` (a model), `lookup` (an n-gram length) or
    `self_draft` (True) `Speculation`; otherwise it is `Sampling`. A `seed` and `phrases` are checked, but belong to the
    `Request`.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if given.get("self_draft") is False:
        del given["self_draft"]
    selected = {SELECTED_BY[name]: name for name in reversed(SELECTED_BY) if name in given}
    if len(selected) > 1:
        *others, first = selected.values()
        other = f"{others[-1]} to {NAMES[SELECTED_BY[others[-1]]]}"
        raise ConfigError([Fault(first, f"belongs to {NAMES[SELECTED_BY[first]]}, and {other}: give one of them")])
    kind = next(iter(selected), Sampling)
    if faults := list(_faults(kind, next(iter(selected.values()), None), given)):
        raise ConfigError(faults)
    fields = {name: value for name, value in given.items() if name not in PER_CALL}
    if kind is Speculation:
        ngram = fields.pop("lookup", None)
        if fields.pop("self_draft", False):
            fields["draft"] = OwnHead()
        else:
            fields["draft"] = Lookup(ngram=ngram) if ngram is not None else Draft(fields["draft"])
    made: Strategy = kind(**fields)
    if "seed" in given and (fault := seed_fault(given["seed"], made)):
        raise ConfigError([fault])
    return made


def seed_fault(seed: object, made: Strategy) -> Fault | None:
    """Return the fault of a seed that has no effect."""
    if not isinstance(made, Sampling) or made.temperature:
        return None
    shown = f"= {seed}: " if isinstance(seed, int) else ""
    return Fault("seed", f"{shown}needs a temperature above 0: at 0 nothing is sampled")


def is_compatible(kind: type[Strategy], options: dict[str, Any]) -> bool:
    """Return whether no option belongs to another strategy."""
    owners = (_owner(name) for name, value in options.items() if value is not None)
    return all(owner is None or issubclass(kind, owner) for owner in owners)


def _faults(kind: type[Strategy], selected_by: str | None, given: dict[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each option that a strategy does not have."""
    if "lookup" in given and "draft" in given:
        yield Fault("lookup", "drafts tokens instead of a draft model: give one of them")
    if "self_draft" in given and {"lookup", "draft"} & given.keys():
        yield Fault("self_draft", "drafts tokens instead of a draft model or a lookup: give one of them")
    for name, value in given.items():
        owner = _owner(name)
        if owner is None:
            yield Fault(name, f"unknown option; {did_you_mean(name, [*PER_CALL, *SELECTED_BY, *_fields()])}")
        elif not issubclass(kind, owner):
            shown = f"= {value}: " if isinstance(value, int | float | str) else ""
            if selected_by is None:
                yield Fault(name, shown + NEEDS[owner])
            elif owner is Sampling:
                yield Fault(name, f"{shown}{NAMES[kind]} does not sample: leave it out, or {selected_by}")
            else:
                other = f"{selected_by} to {NAMES[kind]}"
                yield Fault(name, f"{shown}belongs to {NAMES[owner]}, and {other}: leave one of them out")


def _owner(name: str) -> type[Processing] | None:
    """Return the most general spec that has an option."""
    if owner := PER_CALL.get(name) or SELECTED_BY.get(name):
        return owner
    specs: tuple[type[Processing], ...] = (Processing, Sampling, Beam, Contrastive, Speculation)
    return next((spec for spec in specs if name in spec.model_fields), None)


def _fields() -> set[str]:
    return {name for spec in (Sampling, Beam, Contrastive, Speculation) for name in spec.model_fields}

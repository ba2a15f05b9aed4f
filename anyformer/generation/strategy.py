"""Decoding strategies as specs: sampling (or greedy), beam search, contrastive search and speculative decoding.

`strategy` makes one from named options. An option of another strategy, or one without effect, is refused. `options` is
the table of them all: each is a filter, or a field of a strategy. Imports no torch.
"""

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from anyformer.config.part import Part, kind_of
from anyformer.config.schema import meanings, typed
from anyformer.config.spec import FINDERS, ConfigError, Fault, Flag, LengthPenalty, Size, Spec, did_you_mean, explain
from anyformer.generation.filters import Addend, Filter

if TYPE_CHECKING:
    from torch import Tensor

    from anyformer.generation.request import Request
    from anyformer.nn.model import Transformer

Temperature = Annotated[float, Field(strict=True, ge=0)]
EarlyStopping = Literal["first", "heuristic", "never"]
"""When a beam search ends that has `beams` finished hypotheses (in `transformers`: True, False, "never").

first: at once. heuristic: when the best running beam, were it to end at its present length, scores no better than the
worst of them. never: when it cannot score better at any length.
"""


class Strategy(Part):
    """A way to choose tokens. Its fields are options, and so is each filter: `Sampling(temperature=1.0, top_k=5)`."""

    title: ClassVar[str]
    selected_by: ClassVar[tuple[str, ...]] = ()  # options that select it
    needs: ClassVar[str] = ""  # the missing option where only its others are given
    reads_last: ClassVar[bool] = False  # whether it reads the last token of an answer, which takes a position

    filters: tuple[Filter, ...] = ()  # in the order of their definition

    @abstractmethod
    def run(self, model: "Transformer", request: "Request") -> "Tensor":
        """Return prompts and answers [b, t + new], or [b, 1 + new] with an encoder, of a request of any strategy.

        Raise `NonFiniteLogits` if rows failed.
        """

    def steps(self, model: "Transformer", request: "Request") -> "Generator[None, None, Tensor]":
        """Do the same within `evaluating(model)`, in steps between which a server answers other requests."""
        yield
        return self.run(model, request)

    @property
    def copies(self) -> int:
        """Rows that each prompt takes."""
        return 1

    @property
    def streams(self) -> bool:
        """True if it chooses token by token, as sampling does; others find whole answers."""
        return type(self).run is Sampling.run

    @property
    def given(self) -> dict[str, Any]:
        """The options that are filters, and their values."""
        return {kind_of(type(one)): one.value for one in self.filters}

    @property
    def reads_tokens(self) -> bool:
        """True if the next token depends on the tokens so far other than by the model's logits."""
        return any(one.reads_tokens for one in self.filters)

    @classmethod
    def own_options(cls) -> dict[str, tuple[Any, str]]:
        """Return the type and the meaning of each option that is no filter."""
        texts, fields = meanings(cls), {n: f for n, f in cls.model_fields.items() if n not in ("kind", "filters")}
        return {name: (typed(field), texts.get(name, "")) for name, field in fields.items()}

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        """Return the strategy with some of these options and filters."""
        return cls(**given)

    @model_validator(mode="wrap")
    @classmethod
    def _take_filters(cls, data: Any, handler: Any) -> Any:
        """Take the options that are filters from the others."""
        if not isinstance(data, dict):
            return handler(data)
        known = _filters(data.keys() - cls.model_fields.keys(), issubclass(cls, Sampling))
        rest, faults = {name: value for name, value in data.items() if name in cls.model_fields}, list[Fault]()
        made = {kind_of(type(one)): one for one in rest.get("filters", ())}
        for name, value in data.items():
            if part := known.get(name):
                made.pop(name, None)
                if value is None or (value == part.off and not isinstance(value, bool)):
                    continue
                try:
                    made[name] = part(value=value)
                except ConfigError as error:
                    faults += [Fault(fault.path.replace("value", name, 1), fault.message) for fault in error.faults]
            elif name not in rest:
                faults.append(Fault(name, f"unknown key; {did_you_mean(name, {*known, *cls.model_fields})}"))
        rest["filters"] = tuple(made[name] for name in known if name in made)
        try:
            spec = handler(rest)
        except ValidationError as error:
            faults += explain(error, cls)
        if faults:
            raise ConfigError(faults)
        return spec


class Sampling(Strategy):
    """Sample each token, or choose the top-1 token at temperature 0 (greedy)."""

    title = "sampling"

    kind: Literal["sampling"] = "sampling"
    # 0 is greedy, 1 samples the model's own distribution; by default that of the run's generation_config.json, else 0
    temperature: Temperature = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        unused = [one for one in self.filters if self.temperature == 0 and one.stage == "sample"]
        if unused:
            reason = "needs a temperature above 0: at 0 decoding is greedy"
            raise ConfigError(Fault(kind_of(type(one)), f"= {one.value}: {reason}") for one in unused)
        return self

    def run(self, model: "Transformer", request: "Request") -> "Tensor":
        from anyformer.generation.generate import run_sampling

        return run_sampling(model, replace(request, strategy=self))


def _run_steps(self: Strategy, model: "Transformer", request: "Request") -> "Tensor":
    """Run all steps of a strategy at once."""
    from anyformer.nn.eval_mode import run_steps

    return run_steps(model, self.steps(model, request))


class Beam(Strategy):
    """Search for the hypotheses with the highest score as a whole."""

    title = "beam search"
    selected_by = ("beams",)
    needs = "needs beams: give their number"

    kind: Literal["beam"] = "beam"
    beams: Size  # number of partial answers that are extended in parallel
    n_best: Size = 1  # number of hypotheses that are returned
    # exponent of the length that divides a log-probability; above 0 favours long answers, below 0 short ones
    length_penalty: LengthPenalty = 1.0
    # when a search with `beams` finished hypotheses ends: first, heuristic or never
    early_stopping: EarlyStopping = "heuristic"
    groups: Size = 1  # number of groups of beams, for diverse beam search
    # subtracted from a token's score for each beam of an earlier group that chose it
    diversity_penalty: Addend = 0.0

    @property
    def copies(self) -> int:
        return self.beams

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

    def run(self, model: "Transformer", request: "Request") -> "Tensor":
        return _run_steps(self, model, request)

    def steps(self, model: "Transformer", request: "Request") -> "Generator[None, None, Tensor]":
        from anyformer.generation.beam_search import search_steps

        return (yield from search_steps(model, replace(request, strategy=self))).ids[:, 0]


class Contrastive(Strategy):
    """Choose among the top tokens the one whose hidden state repeats least."""

    title = "contrastive search"
    selected_by = ("candidates", "alpha")
    reads_last = True

    kind: Literal["contrastive"] = "contrastive"
    candidates: Size = 5  # number of the most probable tokens among which is chosen
    # weight of the repetition penalty against the probability, 0 (greedy) to 1
    alpha: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.6

    @property
    def copies(self) -> int:
        return self.candidates

    def run(self, model: "Transformer", request: "Request") -> "Tensor":
        return _run_steps(self, model, request)

    def steps(self, model: "Transformer", request: "Request") -> "Generator[None, None, Tensor]":
        from anyformer.generation.contrastive import contrastive_steps

        return contrastive_steps(model, replace(request, strategy=self))


class Draft(NamedTuple):
    """Draft tokens by a smaller model of the same shape and vocabulary."""

    model: "Transformer"


class Lookup(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """Prompt-lookup decoding: draft the tokens that followed the current n-gram where it last occurred.

    `ngram` is its largest length; shorter ones are used where that does not occur. Prompt and answer are searched, and
    a source of the same vocabulary. It pays where answers copy from the prompt.
    """

    ngram: Size = 3  # largest n-gram that is looked up, in tokens


class OwnHead(NamedTuple):
    """Draft tokens by the model's own layers for further tokens (`head.multi_token`)."""


class Speculation(Sampling):
    """`Sampling` with up to `ahead` draft tokens that the model verifies in one call."""

    title = "speculation"
    selected_by = ("draft", "lookup", "self_draft")
    needs = "needs a draft, a lookup or self_draft"

    kind: Literal["speculation"] = "speculation"  # type: ignore[assignment]
    draft: Any  # the smaller model, the lookup or the model's own layers that draft: Draft, Lookup or OwnHead
    ahead: Size = 4  # number of draft tokens per call of the model

    @model_validator(mode="after")
    def _check_draft(self) -> Self:
        if not isinstance(self.draft, Draft | Lookup | OwnHead):
            what = f"must be Draft(model), Lookup(ngram=n) or OwnHead(), got {type(self.draft).__name__}"
            raise ConfigError([Fault("draft", what)])
        return self

    @classmethod
    def own_options(cls) -> dict[str, tuple[Any, str]]:
        return super().own_options() | {
            "draft": (Any, "a smaller run with the same tokenizer, as draft model"),
            "lookup": (Size, "prompt-lookup decoding: length of the n-grams from whose last occurrence is copied"),
            "self_draft": (Flag, "draft by the model's own layers for further tokens (model.head.multi_token)"),
        }

    @classmethod
    def of(cls, given: dict[str, Any]) -> Self:
        rest = {name: value for name, value in given.items() if name not in cls.selected_by}
        if given.get("self_draft"):
            return cls(draft=OwnHead(), **rest)
        ngram = given.get("lookup")
        return cls(draft=Lookup(ngram=ngram) if ngram is not None else Draft(given["draft"]), **rest)

    def run(self, model: "Transformer", request: "Request") -> "Tensor":
        return _run_steps(self, model, request)

    def steps(self, model: "Transformer", request: "Request") -> "Generator[None, None, Tensor]":
        from anyformer.generation.speculative import speculation_steps

        return (yield from speculation_steps(model, replace(request, strategy=self))).ids


# -- the table of options ---------------------------------------------------------------------------------------------


class Option(NamedTuple):
    """One option of decoding."""

    owner: type[Strategy]  # the most general strategy that has it
    type: Any
    help: str
    filter: type[Filter] | None = None  # None: a field of its owner


# options that are fields of `Request`
PER_CALL: dict[str, type[Strategy]] = {"seed": Sampling, "phrases": Beam}


def options() -> dict[str, Option]:
    """Return all options by name: the filters, and the fields of the strategies."""
    return _options(tuple(Filter.choices()), tuple(Strategy.choices()))


@lru_cache(maxsize=8)
def _options(filters: tuple[type[Filter], ...], strategies: tuple[type[Strategy], ...]) -> dict[str, Option]:
    found = dict[str, Option]()
    for chosen in strategies:
        for name, (kind, meaning) in chosen.own_options().items():
            found.setdefault(name, Option(chosen, kind, meaning))
    for part in filters:
        text = " ".join((part.__doc__ or "").partition("\n\n")[0].split())
        owner = Sampling if part.stage == "sample" else Strategy
        found[kind_of(part)] = Option(owner, typed(part.model_fields["value"]), text, part)
    return found


def selectors() -> dict[str, type[Strategy]]:
    """Return the options that select a strategy."""
    return {name: part for part in Strategy.choices() for name in part.selected_by}


def owner_of(name: str) -> type[Strategy] | None:
    """Return the most general strategy that has an option; None for the name of no option."""
    return _owners().get(name)


def is_compatible(kind: type[Strategy], given: Iterable[str]) -> bool:
    """Return whether no option belongs to another strategy."""
    owners = _owners()
    return all(issubclass(kind, owners[name]) for name in given if name in owners)


def _owners() -> dict[str, type[Strategy]]:
    return PER_CALL | {name: option.owner for name, option in options().items()}


def strategy(**given: Any) -> Strategy:
    """Return the strategy that some options select; None counts as not given.

    `beams` selects `Beam`, `candidates` or `alpha` `Contrastive`, `draft` (a model), `lookup` (an n-gram length) or
    `self_draft` (True) `Speculation`; otherwise it is `Sampling`. A `seed` and `phrases` are checked, but belong to the
    `Request`.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("self_draft") is False:
        del given["self_draft"]
    _filters(given)  # finds those of installed packages
    known = selectors()
    selected = {known[name]: name for name in reversed(known) if name in given}
    if len(selected) > 1:
        *others, first = selected.values()
        other = f"{others[-1]} to {known[others[-1]].title}"
        raise ConfigError([Fault(first, f"belongs to {known[first].title}, and {other}: give one of them")])
    kind = next(iter(selected), Sampling)
    if faults := list(_faults(kind, next(iter(selected.values()), None), given)):
        raise ConfigError(faults)
    made = kind.of({name: value for name, value in given.items() if name not in PER_CALL})
    if "seed" in given and (fault := seed_fault(given["seed"], made)):
        raise ConfigError([fault])
    return made


def seed_fault(seed: object, made: Strategy) -> Fault | None:
    """Return the fault of a seed that has no effect."""
    if not isinstance(made, Sampling) or made.temperature:
        return None
    shown = f"= {seed}: " if isinstance(seed, int) else ""
    return Fault("seed", f"{shown}needs a temperature above 0: at 0 nothing is sampled")


def _faults(kind: type[Strategy], selected_by: str | None, given: dict[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each option that a strategy does not have."""
    if "lookup" in given and "draft" in given:
        yield Fault("lookup", "drafts tokens instead of a draft model: give one of them")
    if "self_draft" in given and {"lookup", "draft"} & given.keys():
        yield Fault("self_draft", "drafts tokens instead of a draft model or a lookup: give one of them")
    owners = _owners()
    for name, value in given.items():
        owner = owners.get(name)
        if owner is None:
            yield Fault(name, f"unknown option; {did_you_mean(name, owners)}")
        elif not issubclass(kind, owner):
            shown = f"= {value}: " if isinstance(value, int | float | str) else ""
            if selected_by is None:
                yield Fault(name, shown + owner.needs)
            elif owner is Sampling:
                yield Fault(name, f"{shown}{kind.title} does not sample: leave it out, or {selected_by}")
            else:
                other = f"{selected_by} to {kind.title}"
                yield Fault(name, f"{shown}belongs to {owner.title}, and {other}: leave one of them out")


def _filters(names: Iterable[str], samples: bool = True) -> dict[str, Any]:
    """Return the filters of a strategy by their names, those of installed packages too if a name is not known."""
    known = options()
    if any(name not in known and name not in PER_CALL for name in names) and any(find() for find in FINDERS):
        known = options()
    filters = ((name, option.filter) for name, option in known.items() if option.filter)
    return {name: part for name, part in filters if samples or part.stage != "sample"}

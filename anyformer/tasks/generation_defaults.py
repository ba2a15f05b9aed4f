"""Default options of generation that belong to a run, such as those of a public model's generation_config.json."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, model_validator

from anyformer.config.spec import Count, Size, Spec
from anyformer.generation.strategy import Sampling, owner_of, strategy

NEVER = -1e30  # added to the logits of suppressed tokens


class GenerationDefaults(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """Options of generation that hold where a call gives no others; None: the option's own default.

    Its fields are these, and every option of `decoding.strategy`.
    """

    model_config = ConfigDict(extra="allow")

    max_new_tokens: Size | None = None  # most new tokens
    suppressed: tuple[Count, ...] = ()  # ids that are never generated

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        strategy(**(self.model_extra or {}))
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The options that are given, without the suppressed ids."""
        named = {"max_new_tokens": self.max_new_tokens, **(self.model_extra or {})}
        return {name: value for name, value in named.items() if value is not None}

    def merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call with these as defaults.

        An option of one strategy drops the defaults that belong to others; a temperature of 0 drops the filters of
        sampling.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        owners = {owner for owner in map(owner_of, chosen) if owner is not None}
        found = {
            name: value
            for name, value in self.options.items()
            if (own := owner_of(name)) is None or all(issubclass(own, one) or issubclass(one, own) for one in owners)
        }
        if chosen.get("temperature") == 0:
            found = {name: value for name, value in found.items() if owner_of(name) is not Sampling}
        found |= chosen
        if self.suppressed:
            found["bias"] = (*chosen.get("bias", ()), *((id, NEVER) for id in self.suppressed))
        return found

    def describe(self) -> str:
        """Return the settings as text, "" if there are none."""
        settings = [f"{name} {value}" for name, value in self.options.items()]
        return ", ".join([*settings, *([f"{len(self.suppressed)} suppressed tokens"] if self.suppressed else [])])


NO_DEFAULTS = GenerationDefaults()

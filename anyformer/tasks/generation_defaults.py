"""Default options of generation that belong to a run, such as those of a public model's generation_config.json."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from anyformer.config.spec import Count, Fraction, LengthPenalty, Size, Spec
from anyformer.decoding.strategy import Divisor, EarlyStopping, strategy

NEVER = -1e30  # added to the logits of suppressed tokens
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
BEAM = ("beams", "length_penalty", "early_stopping")
OTHER_STRATEGIES = ("candidates", "alpha")  # contrastive search
SAMPLES_BY = ("seed", "draft", "lookup")


class GenerationDefaults(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """Options of generation that hold where a call gives no others; None: the option's own default."""

    max_new_tokens: Size | None = None  # most new tokens
    min_new_tokens: Count | None = None  # fewest new tokens before a stop id
    temperature: Annotated[float, Field(strict=True, ge=0)] | None = None  # divisor of the logits; 0: greedy
    top_k: Size | None = None  # samples among the k most probable tokens
    top_p: Fraction | None = None  # nucleus sampling
    min_p: Fraction | None = None  # drops tokens less probable than p times the top-1 token
    typical_p: Fraction | None = None  # locally typical sampling
    repetition_penalty: Divisor | None = None  # divides positive logits of tokens that have occurred
    no_repeat_ngram: Size | None = None  # no n-gram of this length occurs twice
    beams: Size | None = None  # number of beams
    length_penalty: LengthPenalty | None = None  # exponent of the length in scores of beam search
    early_stopping: EarlyStopping | None = None  # when a beam search ends
    suppressed: tuple[Count, ...] = ()  # ids that are never generated

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        strategy(**{name: value for name, value in self._options.items() if name != "max_new_tokens"})
        return self

    @property
    def _options(self) -> dict[str, Any]:
        named = ((name, getattr(self, name)) for name in type(self).model_fields if name != "suppressed")
        return {name: value for name, value in named if value is not None}

    def merged(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a call with these as defaults.

        An option of sampling drops the defaults of beam search, and the other way around; a temperature of 0 drops the
        filters of sampling.
        """
        chosen = {name: value for name, value in given.items() if value is not None}
        dropped: set[str] = set()
        if chosen.keys() & {*BEAM, *OTHER_STRATEGIES}:
            dropped |= {*SAMPLING}
        if chosen.keys() & {*SAMPLING, *SAMPLES_BY, *OTHER_STRATEGIES}:
            dropped |= {*BEAM}
        if chosen.get("temperature") == 0:
            dropped |= {*SAMPLING}
        found = {name: value for name, value in self._options.items() if name not in dropped} | chosen
        if self.suppressed:
            found["bias"] = (*chosen.get("bias", ()), *((id, NEVER) for id in self.suppressed))
        return found

    def describe(self) -> str:
        """Return the settings as text, "" if there are none."""
        settings = [f"{name} {value}" for name, value in self._options.items()]
        return ", ".join([*settings, *([f"{len(self.suppressed)} suppressed tokens"] if self.suppressed else [])])


NO_DEFAULTS = GenerationDefaults()

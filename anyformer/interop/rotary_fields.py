"""Read one table of `rope_parameters`, of any type of scaling that anyformer has."""

import math
import reprlib
from collections.abc import Collection
from typing import Protocol, TypeVar

from anyformer import config as spec
from anyformer.config import ConfigError, Fault
from anyformer.interop.transformers_fields import rope_fields

T = TypeVar("T")


class RotaryTable(Protocol):
    """The methods of `Fields` that are used here."""

    known: Collection[str] | None

    def __call__(self, field: str, default: T, least: int = 1) -> T: ...

    def maybe(self, field: str, kind: type[T]) -> T | None: ...

    def silent(self, *fields: str) -> None: ...

    def fraction(self, usual: float | None) -> float | None: ...

    def fault(self, field: str, message: str) -> Fault: ...

    def close(self) -> None: ...


def read_rotary(fields: RotaryTable, theta: float, fraction: float | None, length: int | None) -> spec.Rotary:
    """Return rotary positions; `theta`, `fraction` and `length` are those of the fields around the table."""
    fields.known = rope_fields()
    kind = fields.maybe("rope_type", str) or fields("type", "default")
    fields.silent("type")
    theta, part = fields("rope_theta", theta), fields.fraction(fraction)
    scaling: spec.RotaryScaling
    if kind == "default":
        scaling = spec.NoScaling()
    elif kind == "linear":
        scaling = spec.LinearScaling(factor=fields("factor", 1.0))
    elif kind in ("yarn", "llama3"):
        original = fields.maybe("original_max_position_embeddings", int) or length
        if original is None:
            raise ConfigError([fields.fault("original_max_position_embeddings", "is missing")])
        if kind == "llama3":
            low, high = fields("low_freq_factor", 1.0), fields("high_freq_factor", 4.0)
            scaling = spec.Llama3Scaling(
                factor=fields("factor", 1.0), original_length=original, low_frequency=low, high_frequency=high
            )
        else:
            factor = fields("factor", (length or original) / original)
            scaling = spec.YarnScaling(
                factor=factor,
                original_length=original,
                beta_fast=fields("beta_fast", 32.0),
                beta_slow=fields("beta_slow", 1.0),
                truncate=fields("truncate", True),
                attention_factor=_attention_factor(fields, factor),
            )
    else:
        what = f"= {reprlib.repr(kind)}: must be default, linear, llama3 or yarn"
        raise ConfigError([fields.fault("rope_type", what)])
    fields.close()
    return spec.Rotary(theta=theta, fraction=1.0 if part is None else part, scaling=scaling)


def _attention_factor(fields: RotaryTable, factor: float) -> float | None:
    """Return the factor of rotated queries and keys: given, or the ratio of two temperatures (DeepSeek)."""
    given = fields.maybe("attention_factor", float)
    above, below = fields.maybe("mscale", float), fields.maybe("mscale_all_dim", float)
    if given is None and above and below:
        return temperature(factor, above) / temperature(factor, below)
    return given


def temperature(factor: float, weight: float) -> float:
    """Return 0.1 · weight · ln(factor) + 1, YaRN's temperature of a text that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

"""Rotary positions in a config.json: `rope_parameters`, of any type of scaling that anyformer has, and older fields."""

import math
from collections.abc import Mapping
from typing import Any

from anyformer import config as spec
from anyformer.config import ConfigError
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.transformers_fields import rope_fields

FULL, NEAR = "full_attention", "sliding_attention"  # kinds of layers
# By `rope_type`: the scaling, and its fields with ours. What is left out has the default of ours.
LENGTH = {"factor": "factor", "original_max_position_embeddings": "original_length"}
LLAMA3 = {"low_freq_factor": "low_frequency", "high_freq_factor": "high_frequency"}
YARN = {name: name for name in ("beta_fast", "beta_slow", "truncate", "attention_factor")}
Scaling = type[spec.LinearScaling | spec.Llama3Scaling | spec.YarnScaling]
SCALINGS: dict[str, tuple[Scaling, dict[str, str]]] = {
    "linear": (spec.LinearScaling, {"factor": "factor"}),
    "llama3": (spec.Llama3Scaling, LENGTH | LLAMA3),
    "yarn": (spec.YarnScaling, LENGTH | YARN),
}


def read_rotary(fields: Fields, theta: float, fraction: float | None = None) -> spec.Rotary:
    """Return rotary positions from `rope_parameters` or fields of older files, for a `fraction` of each head."""
    old_theta, old_fraction = fields("rope_theta", theta), _fraction(fields, fraction)
    fields.alias("rope_scaling", "rope_parameters")
    inner = fields.table("rope_parameters", fields.maybe("rope_parameters", dict) or {})
    return _read(inner, old_theta, old_fraction, fields.maybe("max_position_embeddings", int))


def read_rotaries(fields: Fields, theta: float, near: float) -> tuple[spec.Rotary, spec.Rotary]:
    """Return rotary positions of full and of sliding-window layers; older files scale only the first."""
    given = fields.maybe("rope_parameters", dict)
    if given is None or not {FULL, NEAR} & given.keys():
        return read_rotary(fields, theta), spec.Rotary(theta=near)
    fields.must("rope_scaling")
    length, theta = fields.maybe("max_position_embeddings", int), fields("rope_theta", theta)
    outer = fields.table("rope_parameters", given)
    full, local = (outer.table(kind, outer.maybe(kind, dict) or {}) for kind in (FULL, NEAR))
    found = _read(full, theta, None, length), _read(local, near, None, length)
    outer.close()
    return found


def _fraction(fields: Fields, usual: float | None) -> float | None:
    """Return `partial_rotary_factor`; families without a default do not read it."""
    if usual is not None:
        return fields("partial_rotary_factor", usual)
    fields.must("partial_rotary_factor", 1.0)
    return None


def _read(fields: Fields, theta: float, fraction: float | None, length: int | None) -> spec.Rotary:
    """Return rotary positions; `theta`, `fraction` and `length` are those of the fields around the table."""
    fields.known = rope_fields()
    kind = fields.maybe("rope_type", str) or fields("type", "default")
    fields.silent("type")
    theta, part = fields("rope_theta", theta), _fraction(fields, fraction)
    if kind != "default" and kind not in SCALINGS:
        raise ConfigError([fields.fault("rope_type", f"= {shown(kind)}: must be default, linear, llama3 or yarn")])
    scaling = spec.NoScaling() if kind == "default" else _read_scaling(kind, fields, length)
    fields.close()
    return spec.Rotary(theta=theta, fraction=1.0 if part is None else part, scaling=scaling)


def _read_scaling(kind: str, fields: Fields, length: int | None) -> spec.RotaryScaling:
    made, names = SCALINGS[kind]
    usual: dict[str, Any] = {ours: made.model_fields[ours].default for ours in names.values()} | {"factor": 1.0}
    if "original_length" in usual:
        original = fields.maybe("original_max_position_embeddings", int) or length
        if original is None:
            raise ConfigError([fields.fault("original_max_position_embeddings", "is missing")])
        usual["original_length"] = original
    if kind == "yarn":
        factor = fields("factor", (length or usual["original_length"]) / usual["original_length"])
        usual |= {"factor": factor, "attention_factor": _attention_factor(fields, factor)}
    given = {ours: usual[ours] if usual[ours] is None else fields(name, usual[ours]) for name, ours in names.items()}
    return made(**given)


def _attention_factor(fields: Fields, factor: float) -> float | None:
    """Return the factor of rotated queries and keys: given, or the ratio of two temperatures (DeepSeek)."""
    given = fields.maybe("attention_factor", float)
    above, below = fields.maybe("mscale", float), fields.maybe("mscale_all_dim", float)
    if given is None and above and below:
        return temperature(factor, above) / temperature(factor, below)
    return given


def temperature(factor: float, weight: float) -> float:
    """Return 0.1 · weight · ln(factor) + 1, YaRN's temperature of a text that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def write_rotary(rotary: spec.Rotary, key_width: int) -> dict[str, Any]:
    """Return `rope_parameters`; NTK scaling is written as a larger theta."""
    rotary = plain_theta(rotary, key_width)
    scaling, found = rotary.scaling, {"rope_theta": rotary.theta, "rope_type": "default"}
    if rotary.fraction != 1:
        found["partial_rotary_factor"] = rotary.fraction
    if isinstance(scaling, spec.LongRopeScaling):
        both = {"short_factor": list(scaling.factors), "long_factor": list(scaling.factors)}  # at every length
        return found | {"rope_type": "longrope", **both, "attention_factor": scaling.attention_factor}
    if scaling.kind in SCALINGS:
        given = {name: getattr(scaling, ours) for name, ours in SCALINGS[scaling.kind][1].items()}
        left_out = ("truncate", True), ("attention_factor", None)
        found |= {"rope_type": scaling.kind, **dict(pair for pair in given.items() if pair not in left_out)}
    return found


def write_rotaries(ropes: Mapping[str, spec.Rotary], key_width: int) -> dict[str, Any]:
    """Return `rope_parameters` with a table for each kind of layer."""
    return {kind: write_rotary(ropes[kind], key_width) for kind in (FULL, NEAR)}


def plain_theta(rotary: spec.Rotary, key_width: int) -> spec.Rotary:
    """Return equivalent positions without NTK scaling, by a larger theta."""
    if not isinstance(rotary.scaling, spec.NTKScaling):
        return rotary
    width = rotary.rotated(key_width)
    theta = rotary.theta * rotary.scaling.factor ** (width / (width - 2))
    return rotary.model_copy(update={"theta": theta, "scaling": spec.NoScaling()})

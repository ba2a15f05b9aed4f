"""Norms. Imports no torch."""

from typing import Annotated, Literal

from anyformer.config.spec import BY_KIND, Flag, Number, Positive, Spec


class NoNorm(Spec):
    """The identity."""

    kind: Literal["none"] = "none"


class LayerNorm(Spec):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β over the last axis (Ba et al. 2016)."""

    kind: Literal["layer"] = "layer"
    eps: Positive = 1e-5
    bias: Flag = True


class RMSNorm(Spec):
    """x / sqrt(E[x²] + eps) · (offset + γ) (Zhang & Sennrich 2019); Gemma's offset is 1.

    `cast` says where the fp32 result returns to the input's precision: before γ (Llama, T5) or after it (Gemma).
    """

    kind: Literal["rms"] = "rms"
    eps: Positive = 1e-6
    offset: Number = 0.0
    cast: Literal["before_scale", "after_scale"] = "before_scale"


Norm = Annotated[NoNorm | LayerNorm | RMSNorm, *BY_KIND]

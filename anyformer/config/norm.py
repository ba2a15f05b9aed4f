"""Norms. Imports no torch."""

from typing import Annotated, Literal

from anyformer.config.spec import BY_KIND, Flag, Fraction, Number, Positive, Spec


class NoNorm(Spec):
    """The identity."""

    kind: Literal["none"] = "none"


class LayerNorm(Spec):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β over the last axis (Ba et al. 2016)."""

    kind: Literal["layer"] = "layer"
    eps: Positive = 1e-5  # added to the variance, so that the division stays finite
    bias: Flag = True  # a learned shift β


class RMSNorm(Spec):
    """x / sqrt(E[x²] + eps) · (offset + γ) (Zhang & Sennrich 2019); Gemma's offset is 1.

    `cast` says where the fp32 result returns to the input's precision: before γ (Llama, T5) or after it (Gemma).
    """

    kind: Literal["rms"] = "rms"
    eps: Positive = 1e-6  # added to the mean square, so that the division stays finite
    offset: Number = 0.0  # constant added to γ (Gemma: 1)
    # where fp32 returns to the input's precision: before or after γ
    cast: Literal["before_scale", "after_scale"] = "before_scale"


class BatchNorm(Spec):
    """(x - E[x]) / sqrt(Var[x] + eps) · γ + β, each feature over the real tokens of a batch (Ioffe & Szegedy 2015).

    In training every token thus depends on all others, also on later ones. In evaluation, running statistics replace
    those of the batch, and each token is normalised separately.
    """

    kind: Literal["batch"] = "batch"
    eps: Positive = 1e-5  # added to the variance, so that the division stays finite
    momentum: Fraction = 0.1  # how far a step of training moves the running statistics towards its batch's


class DynamicTanh(Spec):
    """tanh(α x) · γ + β with one learned α: no statistics, each value is squashed alone (DyT, Zhu et al. 2025)."""

    kind: Literal["tanh"] = "tanh"
    alpha: Positive = 0.5  # initial α; larger values squash more


TokenNorm = Annotated[NoNorm | LayerNorm | RMSNorm, *BY_KIND]  # statistics of one vector, independent of the batch
Norm = Annotated[NoNorm | LayerNorm | RMSNorm | BatchNorm | DynamicTanh, *BY_KIND]

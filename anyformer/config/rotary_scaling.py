"""Changes of rotary angles for texts longer than those of the training. Imports no torch."""

from typing import Annotated, Literal

from anyformer.config.spec import BY_KIND, Flag, Positive, Size, Spec


class NoScaling(Spec):
    """Angles as trained."""

    kind: Literal["none"] = "none"


class LinearScaling(Spec):
    """Positions divided by a factor (Chen et al. 2023)."""

    kind: Literal["linear"] = "linear"
    factor: Positive  # divisor of the positions: length now ÷ length in training


class NTKScaling(Spec):
    """A larger base, so that only slow waves are stretched ("NTK-aware"): base · factor^(k/(k-2))."""

    kind: Literal["ntk"] = "ntk"
    factor: Positive  # length now ÷ length in training


class YarnScaling(Spec):
    """Fast waves kept, slow waves stretched, a ramp between, scores tempered (Peng et al. 2023)."""

    kind: Literal["yarn"] = "yarn"
    factor: Positive  # length now ÷ length in training
    original_length: Size  # length in training, in tokens
    beta_fast: Positive = 32.0  # waves with more turns than this over the trained length are kept
    beta_slow: Positive = 1.0  # waves with fewer turns than this are stretched by the factor
    truncate: Flag = True  # the ramp begins and ends at whole waves
    attention_factor: Positive | None = None  # factor of the rotated queries and keys; None: 0.1 ln(factor) + 1


class Llama3Scaling(Spec):
    """Waves longer than the trained context stretched, short ones kept, a ramp between (Llama 3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: Positive  # length now ÷ length in training
    original_length: Size  # length in training, in tokens
    low_frequency: Positive = 1.0  # waves with fewer turns than this over the trained length are stretched
    high_frequency: Positive = 4.0  # waves with more turns than this are kept


class LongRopeScaling(Spec):
    """Each wave stretched by a factor that was searched for, scores tempered (LongRoPE, Ding et al. 2024).

    Phi-3 has two sets of factors, for short and for long texts: a model uses one of them.
    """

    kind: Literal["longrope"] = "longrope"
    factors: tuple[Positive, ...]  # divisor of each frequency, one for each rotated pair
    attention_factor: Positive = 1.0  # factor of the rotated queries and keys
    context: Size | None = None  # tokens of the longest text that the factors are for; None: no limit


RotaryScaling = Annotated[
    NoScaling | LinearScaling | NTKScaling | YarnScaling | Llama3Scaling | LongRopeScaling, *BY_KIND
]

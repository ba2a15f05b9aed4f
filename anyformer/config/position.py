"""Position schemes: how the order of tokens enters a model.

Each scheme is one class: its fields, its learned tables and its mathematics. A scheme acts at one of four points of
the model, and overrides the hooks of that point (`scheme.py`):

    embed             on the token embeddings, before the first block            (sinusoidal, learned)
    prepare, rotate   on queries and new keys, inside self-attention             (rotary)
    levels, score     on the scores, by head, query and key position             (ALiBi, T5)
    relative          on the scores, by the content of query and key, too        (disentangled, in its own file)

To add a scheme, write its class here, or in a file of your own (`part.py`); the grammar, the schema, the builder,
`count` and the property tests pick it up from there. `tables` declares its learned weights, and `fill`
initialises them. Add its test to `tests/nn/test_position.py`.

Importing this file imports no torch: the hooks receive tensors, and import torch when they run.
Positions are passed by the caller, never buffer indices, so a scheme has a maximum length only if it declares one.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from anyformer.config.scheme import Position as Position, Relative as Relative, Rotation as Rotation, Tables as Tables
from anyformer.config.spec import BY_KIND, Count, Fault, Flag, Fraction, Positive, Size, Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# -- changes of rotary angles for texts longer than those of the training ---------------------------------------------


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


# -- schemes ----------------------------------------------------------------------------------------------------------


class NoPosition(Position):
    """No positions: a full-attention encoder is then permutation-equivariant."""

    kind: Literal["none"] = "none"


class Sinusoidal(Position):
    """Fixed waves added to the embeddings (Vaswani et al. 2017).

    PE(p, 2i) = sin(p / base^(2i/d)),  PE(p, 2i+1) = cos(p / base^(2i/d))

    Published programs differ from it: in the order of the waves (Marian, fairseq), in their spacing (tensor2tensor,
    fairseq), and in the number of the first position (fairseq's follows the id of padding).
    """

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: Positive = 10_000.0  # wavelengths grow from 2π to 2π · base
    layout: Literal["interleaved", "halves"] = "interleaved"  # halves: all sines before all cosines
    closed: Flag = False  # exponents i/(n-1) of n = d/2 waves, up to 1, rather than i/n; an odd d then ends with 0
    offset: Count = 0  # number of the first position

    def embed(self, x: "Tensor", positions: "Tensor", tables: Tables) -> "Tensor":
        import torch

        width = x.shape[-1]
        # fp32: bf16 has no distinct values for neighbouring positions past 256
        angles = (positions + self.offset).float()[..., None] * self._frequencies(positions, width)
        sin, cos = angles.sin(), angles.cos()
        match self.layout:
            case "halves":
                waves = torch.cat((sin, cos), dim=-1)[..., :width]
            case "interleaved":
                waves = torch.stack((sin, cos), dim=-1).flatten(-2)[..., :width]
        missing = width - waves.shape[-1]  # of an odd width
        return x + torch.nn.functional.pad(waves, (0, missing)).to(x.dtype)

    def _frequencies(self, like: "Tensor", width: int) -> "Tensor":
        if not self.closed:
            return _frequencies(like.device, self.base, width)
        import torch

        n = width // 2
        return self.base ** -(torch.arange(n, device=like.device, dtype=torch.float32) / max(n - 1, 1))


class Learned(Position):
    """One learned vector per position, added to the embeddings; the first `offset` rows are unused."""

    kind: Literal["learned"] = "learned"
    length: Size  # number of positions: longer inputs are an error
    offset: Count = 0  # unused rows at the beginning of the table (BART: 2)

    @property
    def limit(self) -> int:
        return self.length

    def tables(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {"positions": (self.length + self.offset, width)}

    def embed(self, x: "Tensor", positions: "Tensor", tables: Tables) -> "Tensor":
        return x + tables["positions"][positions + self.offset].to(x.dtype)


class RotaryScheme(Position):
    """Base of rotary schemes: the angle of each pair of dimensions, and the rotation."""

    theta: Positive = 10_000.0  # base of the angles: θ_i = theta^(-2i/k)
    fraction: Fraction = 1.0  # part of each head that is rotated
    scaling: RotaryScaling = NoScaling()  # change of the angles for texts longer than those of the training

    @property
    def limit(self) -> int | None:
        return self.scaling.context if isinstance(self.scaling, LongRopeScaling) else None

    @property
    def trained_length(self) -> int | None:
        """The longest text that the angles were trained for, as far as their scaling says."""
        match self.scaling:
            case (
                YarnScaling(factor=factor, original_length=length)
                | Llama3Scaling(factor=factor, original_length=length)
            ):
                return int(factor * length)
        return None

    def rotated(self, key_width: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(key_width * self.fraction)

    def faults(self, key_width: int) -> Iterator[Fault]:
        if (width := self.rotated(key_width)) % 2 or not width:
            part = f"{self.fraction:g} of key_width = {key_width}" if self.fraction != 1 else "key_width"
            yield Fault("", f"rotary rotates pairs, and {part} is {width}: it must be even and at least 2")
        elif isinstance(self.scaling, NTKScaling) and width == 2:
            yield Fault("scaling", "NTK scaling needs more than one rotated pair")
        if isinstance(self.scaling, Llama3Scaling) and self.scaling.low_frequency >= self.scaling.high_frequency:
            low, high = self.scaling.low_frequency, self.scaling.high_frequency
            yield Fault("scaling.low_frequency", f"= {low}: must be below high_frequency = {high}")
        if isinstance(self.scaling, LongRopeScaling) and len(self.scaling.factors) != width // 2:
            what = f"has {len(self.scaling.factors)} values: there must be one for each of {width // 2} rotated pairs"
            yield Fault("scaling.factors", what)

    def prepare(self, positions: "Tensor", key_width: int) -> Rotation:
        import torch

        # not stored on a GPU, where a captured graph owns them, nor by a compiler, which has none of them yet
        on_cpu = type(positions) is torch.Tensor and positions.device.type == "cpu"
        waves = _waves if on_cpu and not torch.compiler.is_compiling() else _waves.__wrapped__
        frequencies, temper = waves(self, key_width, positions.device)
        angles = self._angles(positions.to(torch.float32), frequencies).unsqueeze(1)  # [b, 1, t, k_rot/2]
        cos, sin = angles.cos() * temper, angles.sin() * temper
        return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))

    def frequencies(self, width: int, device: "torch.device") -> "tuple[Tensor, float]":
        """Return the angle of each pair at position 1, [k_rot/2], and the factor of rotated queries and keys."""
        theta, temper = self.theta, 1.0
        if isinstance(self.scaling, NTKScaling):
            theta *= self.scaling.factor ** (width / (width - 2))
        frequencies = _frequencies(device, theta, width)
        match self.scaling:
            case LinearScaling(factor=factor):
                frequencies = frequencies / factor
            case YarnScaling() as yarn:
                keep = 1 - self._ramp(frequencies, yarn, width)
                frequencies = frequencies / yarn.factor * (1 - keep) + frequencies * keep
                temper = yarn.attention_factor or (0.1 * math.log(yarn.factor) + 1 if yarn.factor > 1 else 1.0)
            case Llama3Scaling() as llama:
                turns = llama.original_length * frequencies / (2 * math.pi)  # in the original context
                keep = (turns - llama.low_frequency) / (llama.high_frequency - llama.low_frequency)
                keep = keep.clamp(0, 1)
                frequencies = frequencies / llama.factor * (1 - keep) + frequencies * keep
            case LongRopeScaling() as long:
                frequencies = frequencies / frequencies.new_tensor(long.factors)
                temper = long.attention_factor
        return frequencies, temper

    def _angles(self, positions: "Tensor", frequencies: "Tensor") -> "Tensor":
        return positions[..., None] * frequencies

    def _ramp(self, frequencies: "Tensor", yarn: YarnScaling, width: int) -> "Tensor":
        """0 for waves that turn more than `beta_fast` times in the original context, 1 for fewer than `beta_slow`."""
        import torch

        def wave_with(turns: float) -> float:
            return width * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = wave_with(yarn.beta_fast), wave_with(yarn.beta_slow)
        if yarn.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        steps = torch.arange(width // 2, device=frequencies.device, dtype=torch.float32)
        return ((steps - low) / ((high - low) or 0.001)).clamp(0, 1)  # below 0, as published: all waves are kept

    def rotate(self, x: "Tensor", rotation: Rotation) -> "Tensor":
        import torch

        cos, sin = rotation  # fp32, so the rotation is computed in fp32
        width = cos.shape[-1]
        if width < x.shape[-1]:
            return torch.cat((self.rotate(x[..., :width], rotation), x[..., width:]), dim=-1)
        # halves (a, b) to (a cos - b sin, b cos + a sin)
        return (x * cos + x.roll(width // 2, dims=-1) * sin).to(x.dtype)


class Rotary(RotaryScheme):
    """Rotary positions (RoPE, Su et al. 2021): rotate pairs of dimensions at position p by the angle p·θ_i.

    The score of a query at m and a key at n then depends on m - n alone.

    θ_i = theta^(-2i/k_rot); the pair is (x_i, x_{i + k_rot/2}), as in GPT-NeoX and Llama's published weights;
    with `fraction` below one only the first part of the head is rotated.
    """

    kind: Literal["rotary"] = "rotary"


class AxialRotary(RotaryScheme):
    """Rotary positions in time, rows and columns (M-RoPE, Wang et al. 2024): pair i rotates by axis i mod 3.

    A token of a text has the same position on all three axes, so that a text alone is read as by `rotary`.
    """

    kind: Literal["rotary_axes"] = "rotary_axes"

    @classmethod
    def reads_coordinates(cls) -> bool:
        return True

    def _angles(self, positions: "Tensor", frequencies: "Tensor") -> "Tensor":
        """[b, t] positions, or [b, t, 3] coordinates, to [b, t, pairs]"""
        if positions.dim() == 2:
            return super()._angles(positions, frequencies)
        import torch

        axis = torch.arange(len(frequencies), device=positions.device) % 3
        return positions[..., axis] * frequencies


class Alibi(Position):
    """A penalty that grows with distance, -m_h · |q - k|, with a slope per head (Press et al. 2022).

    m_i = 2^(-8i/h) for i = 1..h; between powers of two the slopes of the next power are interleaved.
    """

    kind: Literal["alibi"] = "alibi"
    factor: Positive = 1.0  # of all slopes
    # slopes, positions and the penalties from position 0 on are rounded to bfloat16 before `factor` (Falcon)
    rounded: Flag = False

    @staticmethod
    def slopes(heads: int) -> list[float]:
        power = 2 ** int(math.log2(heads))
        first = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
        return first + [2.0 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]

    def levels(self, heads: int, causal: bool, tables: Tables, device: "torch.device") -> "Tensor":
        import torch

        return torch.tensor(self.slopes(heads), dtype=torch.float32, device=device)

    def score(self, levels: "Tensor", head: "Tensor", q: "Tensor", k: "Tensor") -> "Tensor":
        if not self.rounded:
            return -self.factor * levels[head] * (q - k).abs()
        import torch

        def penalty(positions: "Tensor") -> "Tensor":
            return (levels[head].to(torch.bfloat16) * positions.to(torch.bfloat16)).float()

        return -self.factor * (penalty(q) - penalty(k)).abs()


class T5Bias(Position):
    """A learned scalar per head and distance bucket, added to the scores (Raffel et al. 2020).

    Half of the buckets hold one distance each, the rest grow logarithmically up to `max_distance`; where the
    pattern can look ahead, the two directions have half of the buckets each.
    """

    kind: Literal["t5"] = "t5"
    buckets: Size = 32  # number of distance buckets, a multiple of 4
    # distance from which on all share the last bucket, in tokens
    max_distance: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 128
    shared: Flag = True  # one table for the stack, rather than one per layer

    @property
    def per_layer(self) -> bool:
        return not self.shared

    def faults(self, key_width: int) -> Iterator[Fault]:
        if self.buckets < 4 or self.buckets % 4:
            yield Fault("buckets", f"= {self.buckets}: must be a multiple of 4 (two directions, near and far)")
        elif self.max_distance <= self.buckets // 2:
            yield Fault("max_distance", f"= {self.max_distance}: must be more than buckets / 2 = {self.buckets // 2}")

    def tables(self, width: int, heads: int) -> dict[str, tuple[int, ...]]:
        return {"buckets": (self.buckets, heads)}

    def bucket(self, distance: "Tensor", causal: bool) -> "Tensor":
        """The bucket of each distance q - k."""
        import torch

        buckets = self.buckets if causal else self.buckets // 2
        far = distance.clamp(min=0) if causal else distance.abs()
        exact = buckets // 2
        growth = torch.log(far.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        coarse = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
        ahead = 0 if causal else buckets * (distance < 0).long()
        return torch.where(far < exact, far, coarse) + ahead

    def levels(self, heads: int, causal: bool, tables: Tables, device: "torch.device") -> "Tensor":
        """The number of each distance and head, [distances, h]: past `max_distance` they all share a bucket."""
        import torch

        reach = 2 * self.max_distance
        distances = torch.arange(-reach, reach + 1, device=device)
        return tables["buckets"][self.bucket(distances, causal)]

    def score(self, levels: "Tensor", head: "Tensor", q: "Tensor", k: "Tensor") -> "Tensor":
        reach = 2 * self.max_distance
        return levels[(q - k).clamp(-reach, reach) + reach, head]


def _frequencies(device: "torch.device", base: float, width: int) -> "Tensor":
    import torch

    return base ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)  # [ceil(width/2)]


@lru_cache(maxsize=64)
def _waves(scheme: RotaryScheme, key_width: int, device: "torch.device") -> "tuple[Tensor, float]":
    """Store the frequencies of a scheme: each further token would compute them again."""
    return scheme.frequencies(scheme.rotated(key_width), device)

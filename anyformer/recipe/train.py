"""Training settings: optimiser, learning-rate schedule, scheduled sampling, the loop, processes. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from anyformer.config import Spec
from anyformer.config.spec import BY_KIND, Count, Flag, Fraction, Positive, Probability, Size
from anyformer.recipe.task import Metric


class AdamW(Spec):
    """Adam with decoupled weight decay on matrices (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    lr: Positive
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(strict=True, ge=0)] = 0.1


class Adam(Spec):
    """Adam with the settings of the 2017 Transformer (Kingma & Ba 2015)."""

    kind: Literal["adam"] = "adam"
    lr: Positive
    betas: tuple[Probability, Probability] = (0.9, 0.98)
    eps: Positive = 1e-9


Optimizer = Annotated[AdamW | Adam, *BY_KIND]


class Constant(Spec):
    """The peak learning rate, after a warm-up."""

    kind: Literal["constant"] = "constant"
    warmup: Count = 0


class Linear(Spec):
    """Linear decay to `floor` times the peak."""

    kind: Literal["linear"] = "linear"
    warmup: Count = 0
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0


class Cosine(Spec):
    """Decay along half a cosine to `floor` times the peak (Loshchilov & Hutter 2017)."""

    kind: Literal["cosine"] = "cosine"
    warmup: Count = 0
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.1


class InverseSqrt(Spec):
    """lr · sqrt(warmup / step) after a linear warm-up; lr = (d · warmup)^-0.5 gives that of Vaswani et al. 2017."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup: Size = 4000


class WSD(Spec):
    """Warm-up, a constant rate, and a linear decay over the last fraction `decay` of the steps (WSD)."""

    kind: Literal["wsd"] = "wsd"
    warmup: Count = 0
    decay: Fraction = 0.2
    floor: Annotated[float, Field(strict=True, ge=0, le=1)] = 0.0


Schedule = Annotated[Constant | Linear | Cosine | InverseSqrt | WSD, *BY_KIND]


class OwnTokens(Spec):
    """Scheduled sampling (Bengio et al. 2015): the decoder reads the model's own tokens in place of some target tokens.

    With a share of 1, and as many passes as a target has tokens, the decoder is free-running.
    """

    share: Fraction = 0.25  # fraction of the target's tokens that are replaced
    rise: Count = 0  # steps over which the share rises from 0
    passes: Size = 1  # forward passes without gradients before each step: up to this many own tokens in a row


class Train(Spec):
    """The training loop."""

    steps: Size
    optimizer: Optimizer
    schedule: Schedule = Constant()
    clip: Positive | None = 1.0  # largest gradient norm; None: no clipping
    accumulate: Size = 1  # batches per step
    label_smoothing: Probability = 0.0
    own_tokens: OwnTokens | None = None  # None: the decoder reads the target (teacher forcing)
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"  # fp8: matmuls of the blocks; the rest in bf16
    compile: Literal["auto", "on", "off"] = "auto"  # auto: on a GPU, unless rows are padded (many shapes)
    checkpoint_activations: Flag = False
    ema: Probability | None = None  # decay of a moving average of the weights, which is evaluated and saved
    average: Size = 1  # number of last checkpoints whose weights are averaged at the end
    evaluate_every: Size | None = None  # steps; None: at the end only
    save_every: Size | None = None  # steps; None: at the end only
    keep: Size = 2  # newest checkpoints kept, in addition to the best
    snapshots: Count | Literal["auto"] = "auto"  # steps whose weights `explore` shows; auto: 12, at most 256 MiB
    best: Metric = "loss"  # selects the best checkpoint in validation: lowest loss, or highest value of another metric
    patience: Size | None = None  # evaluations without improvement before stopping
    max_bad_steps: Size = 10  # non-finite steps in a row before stopping
    init_from: str | None = None  # folder of a run whose weights training starts from
    base_bits: Literal[8, 4] | None = None  # round the frozen weights under an adapter (QLoRA); None: fp32
    freeze: tuple[str, ...] = ()  # names of weights or modules that are not trained: "encoder.blocks.0"
    layer_decay: Fraction = 1.0  # learning rate of a layer ÷ that of the layer above; the head has the full rate
    log_every: Size = 10


class Processes(Spec):
    """How a model is divided among processes (`torchrun`): "none" replicates it (DDP); "full" shards every weight,
    gradient and optimiser state (FSDP)."""

    shard: Literal["none", "full"] = "none"

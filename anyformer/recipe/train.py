"""Training settings: scheduled sampling, distillation, the loop, processes. Imports no torch."""

from typing import Literal, Self

from pydantic import model_validator

from anyformer.config import ConfigError, Fault, Spec
from anyformer.config.spec import Count, Flag, Fraction, Positive, Probability, Size
from anyformer.recipe.logger import Logger, TensorBoard
from anyformer.recipe.optimizer import Optimizer
from anyformer.recipe.schedule import Constant, Schedule
from anyformer.recipe.task import Share
from anyformer.recipe.width_transfer import StandardScale, WidthScale

PARTS = 1000  # of the time of a training, which its schedule counts as steps


class OwnTokens(Spec):
    """Scheduled sampling (Bengio et al. 2015): the decoder reads the model's own tokens in place of some target tokens.

    With a share of 1, and as many passes as a target has tokens, the decoder is free-running.
    """

    share: Fraction = 0.25  # fraction of the target's tokens that are replaced
    rise: Count = 0  # steps over which the share rises from 0
    passes: Size = 1  # forward passes without gradients before each step: up to this many own tokens in a row


class Teacher(Spec):
    """Distillation (Hinton et al. 2015): the model also learns the distributions of a frozen run, its teacher.

    The loss of a label is (1 - weight) · cross-entropy + weight · temperature² · KL(teacher ‖ model), where the logits
    of both are divided by the temperature.
    """

    run: str  # folder of the teacher's run; its tokenizer and labels must be those of the model
    temperature: Positive = 2.0  # divisor of both logits: above 1, less probable tokens or labels count more
    weight: Share = 0.5  # share of the teacher in the loss; 1: true labels are not read


class Train(Spec):
    """The training loop."""

    steps: Size  # number of weight updates; with minutes, 1,000 parts of that time, in which the schedule counts
    # minutes of the whole training, with evaluations, which determine the number of updates; None: `steps` updates
    minutes: Positive | None = None
    optimizer: Optimizer  # the optimiser and its learning rate
    schedule: Schedule = Constant()  # how the learning rate changes over the steps
    scale: WidthScale = StandardScale()  # how initialisation and learning rates depend on the width
    clip: Positive | Literal["none"] = 1.0  # norm to which larger gradients are scaled down; none: no clipping
    accumulate: Size = 1  # batches per step (gradient accumulation)
    label_smoothing: Probability = 0.0  # probability that is spread evenly over all tokens or labels
    own_tokens: OwnTokens | None = None  # scheduled sampling; None: the decoder reads the target (teacher forcing)
    teacher: Teacher | None = None  # distillation from the logits of another run; None: the labels of the data only
    # auto: bf16 on a GPU with units for it, else fp32; fp8: matmuls of the blocks, the rest in bf16
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    # torch.compile; auto: on a GPU, unless the batches of an epoch differ in shape
    compile: Literal["auto", "on", "off"] = "auto"
    checkpoint_activations: Flag = False  # recomputes activations in the backward pass: less memory, more time
    ema: Probability | None = None  # decay of a moving average of the weights, which is evaluated and saved; None: none
    average: Size = 1  # number of last checkpoints whose weights are averaged at the end
    evaluate_every: Size | None = None  # steps between two evaluations; None: at the end only
    save_every: Size | None = None  # steps between two checkpoints; None: at the end only
    keep: Size = 2  # newest checkpoints kept, in addition to the best
    snapshots: Count | Literal["auto"] = "auto"  # steps whose weights `explore` shows; auto: 12, within snapshot_mib
    snapshot_mib: Count = 256  # MiB of all snapshots of `auto` together: of a large model there are fewer, or none
    best: str = (
        "loss"  # selects the best checkpoint in validation: lowest loss or word_error_rate, highest value of others
    )
    patience: Size | None = None  # evaluations without improvement before training stops; None: it never stops early
    max_bad_steps: Size = 10  # non-finite steps in a row before stopping
    init_from: str | None = None  # folder of a run whose weights training starts from; None: random weights
    base_bits: Literal[8, 4] | None = None  # bits of the frozen weights under an adapter (QLoRA); None: fp32
    freeze: tuple[str, ...] = ()  # names of weights or modules that are not trained: "encoder.blocks.0"
    layer_decay: Fraction = 1.0  # learning rate of a layer ÷ that of the layer above; the head has the full rate
    log_every: Size = 10  # steps between two lines of metrics
    loggers: tuple[Logger, ...] = (TensorBoard(),)  # what gets these lines, beside metrics.jsonl

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.minutes is not None and self.steps != PARTS:
            what = f"= {self.steps}: with minutes it is {PARTS}, the parts of that time; or set train.minutes = none"
            raise ConfigError([Fault("steps", what)])
        if again := [i for i, one in enumerate(self.loggers) if one.kind in {other.kind for other in self.loggers[:i]}]:
            raise ConfigError(Fault(f"loggers.{i}", f"= '{self.loggers[i].kind}': is there already") for i in again)
        return self


class Processes(Spec):
    """How a model is divided among processes (`torchrun`). Their number is a multiple of context · tensor; the quotient
    is the number of processes that read different examples (data parallelism)."""

    shard: Literal["none", "full"] = "none"  # none: every process has the whole model (DDP); full: a part of it (FSDP)
    tensor: Size = 1  # number of processes among which heads, feed-forwards, experts and vocabularies are split
    context: Size = 1  # number of processes among which the tokens of each example are split
    # seconds that a step, an evaluation, a checkpoint or the start may take; then the process ends, and torchrun can
    # restart the run; None: no limit
    timeout: Positive | None = None

"""The training run that is forecast: a model and the rows of a step. Imports no torch."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.kernels.gpu_table import GPU
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.memory import ADAMW, FP32, Precision
from anyformer.recipe import Optimizer, Recipe

STEP_TOKENS = 2**19  # of a model without a recipe
TOKENS_PER_WEIGHT = 20  # of a model without a recipe (Hoffmann et al. 2022)


@dataclass(frozen=True)
class Workload:
    """A training run: a model and the rows of a step."""

    config: ModelConfig
    rows: int  # of a step, over all GPUs
    length: int  # tokens of a row, of the target or of the only side
    source_length: int | None = None  # tokens of a row of the source, in an encoder-decoder
    precision: Literal["fp32", "fp16", "bf16"] = "bf16"
    compiled: bool = True
    averaged: bool = False  # with a moving average of the weights
    optimizer: Optimizer = ADAMW
    batched_by: Literal["rows", "tokens"] = "rows"  # what the recipe limits in a batch

    @property
    def row_tokens(self) -> int:
        return self.length + (self.source_length or 0)

    @property
    def step_tokens(self) -> int:
        return self.rows * self.row_tokens

    @cached_property
    def flops(self) -> float:
        """FLOPs of a step: 3 × those of a forward pass."""
        return 3.0 * self.rows * count(self.config, self.length, source_length=self.source_length).flops

    @property
    def half(self) -> Precision:
        """The precision by its size: memory and time of fp16 and bf16 are the same."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @property
    def size(self) -> int:
        """Bytes of a value that is no weight."""
        return FP32 if self.precision == "fp32" else 2


class StepSizes(NamedTuple):
    """Sizes of a step that replace those of a recipe; None: not given."""

    rows: int | None = None
    length: int | None = None
    source_length: int | None = None


def model_workload(model: ModelConfig, sizes: StepSizes, gpu: GPU) -> tuple[Workload, float]:
    """Return a step of `STEP_TOKENS`, and the tokens of a run with `TOKENS_PER_WEIGHT`."""
    table = count(model, sizes.length, source_length=sizes.source_length)
    rows = sizes.rows or max(1, STEP_TOKENS // (table.length + (table.source_length or 0)))
    work = Workload(model, rows, table.length, table.source_length, _precision("auto", gpu))
    return work, float(TOKENS_PER_WEIGHT * table.parameters)


def recipe_workload(recipe: Recipe, model: ModelConfig, sizes: StepSizes, gpu: GPU) -> tuple[Workload, float]:
    """Return a step of a recipe, and the tokens of its run. Padded rows are as long as `sizes`, or as in `count`.

    `model` is that of the recipe, with its vocabulary sizes.
    """
    batches, train = recipe.batches, recipe.train
    table = count(model, sizes.length or batches.row_length, source_length=sizes.source_length)
    rows = batches.row_count(table.length + (table.source_length or 0))
    work = Workload(
        config=model,
        rows=sizes.rows or rows * train.accumulate,
        length=table.length,
        source_length=table.source_length,
        precision=_precision(train.precision, gpu),
        compiled=train.compile == "on" or (train.compile == "auto" and batches.row_length is not None),
        averaged=train.ema is not None,
        optimizer=train.optimizer,
        batched_by=batches.batched_by,
    )
    if train.minutes is not None:
        what = f"= {train.minutes:g}: a forecast needs a number of steps: set train.minutes = none, and train.steps"
        raise ConfigError([Fault("train.minutes", what)])
    return work, float(train.steps * work.step_tokens)


def _precision(setting: str, gpu: GPU) -> Literal["fp32", "fp16", "bf16"]:
    """Return the precision of `train.precision`, as training chooses it."""
    if setting == "fp8":
        raise ConfigError([Fault("train.precision", "= 'fp8': there is no forecast for it; set it to 'bf16'")])
    if setting == "fp32" or (setting == "auto" and "bf16" not in gpu.flops):
        return "fp32"
    if setting == "bf16" and "bf16" not in gpu.flops:
        raise ConfigError(
            [Fault("train.precision", f"= 'bf16': {gpu.label} has no units for it; use 'fp16' or 'fp32'")]
        )
    return "fp16" if setting == "fp16" else "bf16"

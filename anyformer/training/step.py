"""One training step: forward and backward passes, clipping, the optimiser's update and the moving average."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from anyformer.attention.attend import without_plans
from anyformer.data.batch import Batch, to_device
from anyformer.generation.prefill import synchronises
from anyformer.kernels.private import move_towards
from anyformer.nn.aux_outputs import collect, discard
from anyformer.nn.experts import ExpertMixture
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import Transformer
from anyformer.tasks.base import past_of
from anyformer.tasks.rewards import RewardedAnswers
from anyformer.training.job import Job
from anyformer.training.machine import compile_options
from anyformer.training.objective import StepInputs
from anyformer.training.parallel import clip_gradients, replicate, sync_gradients
from anyformer.training.ranks.tensor import sum_whole_gradients
from anyformer.training.scheduled_sampling import mix_own_tokens
from anyformer.training.step_graphs import StepGraphs


class PendingScalars(NamedTuple):
    """Scalars that are being copied to the CPU."""

    values: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def of(cls, x: Tensor) -> "PendingScalars":
        """Start the copy."""
        if not x.is_cuda:
            return cls(x, None)
        values = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        values.copy_(x, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(values, arrived)

    def read(self) -> list[float]:
        """Return the values. Wait for their own step only, not for later ones."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.values.tolist()
        return values


class StepResult(NamedTuple):
    """Counts of a step, and its scalars: the summed loss, the gradient norm, and the mean reward of answers, if any."""

    labels: int
    scalars: PendingScalars
    tokens: int  # that the step trains on; those of sampled answers count in each update


class TrainingStep:
    """A step as a function of its batches.

    On a GPU the whole step is captured as a CUDA graph, if it needs nothing from the CPU.
    """

    def __init__(self, job: Job, loss: Any = None):
        """`loss` replaces the compiled objective of the job."""
        self.job = job
        self.loss = compile_objective(job) if loss is None else loss
        self.packed = job.recipe.batches.packs
        self.graphs = StepGraphs(job.device) if can_capture(job) else None
        if self.graphs is not None:
            for group in job.optimizer.param_groups:  # a captured step reads the rate from device memory
                group["lr"] = torch.tensor(group["lr"], device=job.device)

    def __call__(self, batches: list[Batch]) -> StepResult:
        """Take one step.

        A step whose loss or gradient is not finite changes nothing. A step of the task grpo samples answers, and
        updates the weights `task.updates` times; loss and norm are then means.
        """
        job = self.job
        with nullcontext() if job.compiled else without_plans():
            if isinstance(job.task, RewardedAnswers):
                return self._policy_step(job.task, batches)
            return self._step(batches)

    def _step(self, batches: list[Batch]) -> StepResult:
        job, labels = self.job, [batch.target_count for batch in batches]
        if not job.model.training:
            job.model.train()
        inputs = [job.objective.select_labels(self._decoder_inputs(job.ranks.split(batch))) for batch in batches]
        counts = torch.tensor([max(sum(labels), 1), *labels], dtype=torch.float32)
        if self.graphs is not None:
            scalars = self.graphs.run(lambda tree: self._update(*tree), (inputs, counts))
        else:
            scalars = self._update([one.to(job.device) for one in inputs], to_device(counts, job.device))
        return StepResult(sum(labels), PendingScalars.of(scalars), sum(batch.tokens for batch in batches))

    def _policy_step(self, task: RewardedAnswers, batches: list[Batch]) -> StepResult:
        """Sample answers to the sources of batches, and learn from their rewards."""
        job, updates = self.job, task.spec.updates
        sampled = [task.sample(job.model, batch, job.recipe.seed, job.state.step + 1) for batch in batches]
        answers = [batch.target_count for batch in sampled]
        rewards = torch.cat([batch.sampled.rewards for batch in sampled if batch.sampled is not None])
        inputs = [job.objective.select_labels(batch).to(job.device) for batch in sampled]
        if updates > 1:  # before the first of them changes the weights
            with job.autocast():
                inputs = [one._replace(batch=task.with_log_probabilities(job.model, one.batch)) for one in inputs]
        job.model.train()
        counts = to_device(torch.tensor([sum(answers), *answers], dtype=torch.float32), job.device)
        each = torch.stack([self._update(inputs, counts) for _ in range(updates)])  # [updates, 2]
        scalars = torch.cat([each.mean(dim=0), rewards.mean(dim=0, keepdim=True).to(job.device)])
        tokens = updates * sum(batch.tokens for batch in sampled)
        return StepResult(sum(answers), PendingScalars.of(scalars), tokens)

    def _decoder_inputs(self, batch: Batch) -> Batch:
        """Return the batch with the tokens that the decoder reads: the targets, or some of the model's own."""
        job, spec = self.job, self.job.recipe.train.own_tokens
        if spec is None:
            return batch
        with job.autocast():
            return mix_own_tokens(
                job.model, batch.to(job.device), self.packed, spec, job.state.step + 1, job.ranks.reduce
            )

    def _frozen_logits(self, inputs: tuple[Inputs, ...]) -> Tensor | None:
        """Return the logits of the frozen model; None if there is none."""
        if self.job.frozen is None:
            return None
        with torch.no_grad():
            logits: Tensor = self.job.frozen(*inputs)
        return logits

    def _update(self, inputs: list[StepInputs], counts: Tensor) -> Tensor:
        """Return the summed loss and the gradient norm. `counts`: labels of all batches together, then of each."""
        job, total = self.job, torch.zeros((), device=self.job.device)
        for number, one in enumerate(inputs, start=1):
            with sync_gradients(self.loss, last=number == len(inputs)):
                with job.autocast():
                    memory = past_of(job.model, one.batch, job.state.segment_memory)
                    arguments = job.objective.arguments(one, self.packed)
                    frozen_logits = self._frozen_logits(arguments[0])
                    loss, auxiliary, job.state.segment_memory = self.loss(
                        *arguments, memory, frozen_logits, one.batch.sampled
                    )
                if number < len(inputs):
                    collect(job.model)
                # A sum over the tokens of all batches and processes, divided once: never a mean of means. DDP and FSDP
                # average gradients over processes, hence the factor. Auxiliary losses are per token, as the loss.
                job.scaler.scale((loss + auxiliary * counts[number]) * job.ranks.shares.size / counts[0]).backward()
            total += loss.detach()
        total = job.ranks.sum(total)
        return torch.stack([total, self._apply_gradients(total).detach().float()])

    def _apply_gradients(self, total: Tensor) -> Tensor:
        """Clip the gradients and update the weights, if loss and gradients are finite. Return the gradient norm."""
        job, decay = self.job, self.job.recipe.train.ema
        sum_whole_gradients(job.model)
        job.scaler.unscale_(job.optimizer)
        clip = job.recipe.train.clip
        norm = clip_gradients(job.model, math.inf if clip == "none" else clip)
        finite = norm.isfinite() & total.isfinite()
        if job.steps_in_flight:  # without reading `finite` on the CPU
            capturing = torch.cuda.is_current_stream_capturing()
            for group in job.optimizer.param_groups:
                group["capturable"] = capturing
            job.optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]  # the fused kernel then skips
            job.optimizer.step()
            if decay is not None:
                update_ema(job, (1 - decay) * finite)
        elif finite:
            job.scaler.step(job.optimizer)
            job.model.commit()
            if decay is not None:
                update_ema(job, 1 - decay)
        else:
            discard(job.model)
        job.scaler.update()
        job.optimizer.zero_grad(set_to_none=True)
        return norm


def can_capture(job: Job) -> bool:
    """Return whether steps can be captured: of one shape and compiled, or of few, and without anything that needs the
    CPU."""
    spec, batches = job.recipe.train, job.recipe.batches
    if spec.own_tokens is not None or spec.checkpoint_activations or not job.objective.dense or not job.steps_in_flight:
        return False
    if job.compiled:
        return not any(isinstance(module, ExpertMixture) for module in job.model.modules())
    return batches.rounds_lengths and not synchronises(job.model)


def compile_objective(job: Job) -> Any:
    """Return the objective, compiled and replicated as the job requires.

    In a sharded model each block has already been compiled by itself.
    """
    if isinstance(job.model, FSDPModule):
        return job.objective
    if not job.compiled:
        return replicate(job.objective, job.ranks)
    options = compile_options(job.model.config, job.precision == "fp8")
    return replicate(torch.compile(job.objective, options=options), job.ranks)


def set_learning_rate(job: Job, lr: float) -> None:
    """Set the learning rate of every parameter group: `lr` times the group's `lr_scale`."""
    for group in job.optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * group["lr_scale"])
        else:
            group["lr"] = lr * group["lr_scale"]


# -- moving average of the weights -------------------------------------------------------------------------------------


@torch.no_grad()
def update_ema(job: Job, share: float | Tensor) -> None:
    """Move the average towards the weights by `share`, a float or a scalar on the device."""
    if not job.state.ema:
        job.state.ema = {name: p.detach().clone() for name, p in job.model.named_parameters()}
        return
    averages = [job.state.ema[name] for name, _ in job.model.named_parameters()]
    weights = [p.detach() for p in job.model.parameters()]
    if isinstance(share, float):
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight, share)
        return
    move_towards(averages, weights, share)


@contextmanager
def ema_weights(job: Job) -> Iterator[None]:
    """Run the block with the averaged weights in the model, if there are any."""
    if not job.state.ema:
        yield
        return
    weights = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    _load(job.model, job.state.ema)
    try:
        yield
    finally:
        _load(job.model, weights)


@torch.no_grad()
def _load(model: Transformer, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


# -- compiled code in the user's cache folder --------------------------------------------------------------------------


@contextmanager
def stored_code(job: Job) -> Iterator[None]:
    """Read and write compiled code in the user's cache folder; damaged code is compiled again."""
    if (cache := job.compile_cache) is None or not job.ranks.on_first(cache.hold):
        yield
        return
    if cache.damaged:
        text = f"{cache.folder}: the compiled code was damaged or incomplete, and is compiled again"
        job.console.print(text, highlight=False, markup=False, soft_wrap=True)
    with cache.in_use():
        yield
        record_code(job)


def record_code(job: Job) -> None:
    """Store the digests of the code that is compiled by now."""
    if job.compile_cache is not None and job.ranks.is_first:
        job.compile_cache.record()

"""The training loss as one module: model and loss compile together, so logits never leave the graph."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anyformer.attention.cache.segment_memory import Past
from anyformer.data.batch import Batch, SampledAnswers, to_device
from anyformer.kernels.conventions import IGNORE
from anyformer.kernels.private import allow_dynamic_size
from anyformer.nn.aux_outputs import AuxOutputs, Reduce, identity
from anyformer.nn.heads import LossTarget
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import CallOptions, Transformer
from anyformer.nn.transforms.substitute import substitute
from anyformer.tasks.base import BuiltTask, TokenTask, inputs_of
from anyformer.tasks.rewards import RewardedAnswers
from anyformer.training.ranks.context import ContextGroup

MAX_SPARSE_SHARE = 0.75  # of tokens with a label: up to here the head is applied to labelled tokens only
FrozenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The summed loss of logits, labels, and the logits of a frozen model."""

SIZES_PER_POWER = 8  # label counts are rounded up to 1/8 of a power of two, so that few shapes are compiled


class Objective(nn.Module):
    """Model and loss as one module, so that they compile together.

    `forward` returns the summed loss of a batch, the auxiliary losses per token, and the segment memory after it.
    """

    def __init__(
        self,
        model: Transformer,
        task: BuiltTask | TokenTask,
        smoothing: float,
        recompute: bool = False,
        reduce: Reduce = identity,
        context: ContextGroup | None = None,
        frozen_loss: FrozenLoss | None = None,
    ):
        """`reduce` sums statistics of a batch over the processes that each read a part of it.

        `context` are the processes that hold parts of the same rows; None: this one holds whole rows.
        `frozen_loss` replaces the loss of the task; `forward` then needs the logits of a frozen model. That of the task
        grpo needs `sampled`, and these logits if the model is compared with its start.
        """
        super().__init__()
        substitute(model, "training")
        self.model, self.smoothing, self.recompute = model, smoothing, recompute
        self.reduce, self.context = reduce, context
        in_head = isinstance(task, TokenTask) and model.config.head.predicts_tokens  # the head has the loss
        self.policy_loss = task.policy_loss if isinstance(task, RewardedAnswers) else None
        self.fused = in_head and frozen_loss is None and self.policy_loss is None
        self.dense = self.fused or (frozen_loss is None and not model.config.head.joint and task.dense_loss)
        # other losses may loop over words or pairs, or read values of the device
        self.loss = task.loss if self.dense else torch.compiler.disable(task.loss)
        self.frozen_loss = frozen_loss if frozen_loss is None or in_head else torch.compiler.disable(frozen_loss)

    def forward(
        self,
        inputs: tuple[Tensor | Inputs, ...],
        target: LossTarget,
        memory: Past | None,
        frozen_logits: Tensor | None = None,
        sampled: SampledAnswers | None = None,
    ) -> tuple[Tensor, Tensor, Past | None]:
        aux, memory_after = AuxOutputs(self.reduce), None
        options: CallOptions = {"aux": aux, "recompute": self.recompute}
        if self.fused:
            options["loss_target"] = target
        with nullcontext() if self.context is None else self.context.saving_own_parts():
            if memory is None:
                out = self.model(*inputs, **options)
            else:
                out, memory_after = self.model(*inputs, **options, past=memory)
        if self.fused:
            loss = out
        elif self.policy_loss is not None:
            assert sampled is not None
            loss = self.policy_loss(out, target.labels, sampled, frozen_logits)
        elif self.frozen_loss is None:
            loss = self.loss(out, target.labels, self.smoothing)
        else:
            assert frozen_logits is not None
            loss = self.frozen_loss(out, target.labels, frozen_logits)
        return loss, sum(aux.losses, torch.zeros_like(loss)), memory_after

    def select_labels(self, batch: Batch) -> "StepInputs":
        """Return a batch without its example numbers, and with only the labelled positions where these are few.

        Under context parallelism the labels are those of this process.
        """
        batch = batch._replace(examples=())
        tokens = batch.tokens_in_ids if self.fused else 0
        if self.context is not None:
            batch, tokens = self.context.share(batch, self.model), tokens // self.context.size
        if self.fused and (labelled := labelled_positions(batch.labels, tokens)) is not None:
            positions, labels = labelled
            return StepInputs(batch._replace(labels=labels), positions)
        return StepInputs(batch, None)

    def arguments(self, inputs: "StepInputs", packed: bool) -> tuple[tuple[Inputs, ...], LossTarget]:
        """Return the arguments of `forward` before the segment memory."""
        labels, positions = inputs.batch.labels, inputs.positions
        if positions is not None:  # their number differs between batches: compile for any
            allow_dynamic_size(positions, 0)
            allow_dynamic_size(labels, 1)
        sides = inputs_of(inputs.batch, packed)
        if self.context is not None:
            sides = tuple(self.context.split(side) for side in sides)
        return sides, LossTarget(labels, self.smoothing, positions)


class StepInputs(NamedTuple):
    """A batch as a training step reads it."""

    batch: Batch
    positions: Tensor | None  # of the labels, as in `LossTarget`

    def to(self, device: torch.device) -> "StepInputs":
        return StepInputs(self.batch.to(device), None if self.positions is None else to_device(self.positions, device))


def labelled_positions(labels: Tensor, tokens: int) -> tuple[Tensor, Tensor] | None:
    """Return the positions that have a label, [n], in the flattened labels [b, t], and these labels, [1, n].

    Return None if more than `MAX_SPARSE_SHARE` of the `tokens` have a label. Both are filled up to a rounded size; the
    labels of the filling are IGNORE.
    """
    flat = labels.flatten()
    labelled = (flat != IGNORE).nonzero()[:, 0]
    if len(labelled) > MAX_SPARSE_SHARE * tokens:
        return None
    unit = max(8, 2 ** max(0, len(labelled).bit_length() - 1) // SIZES_PER_POWER)
    positions = labelled.new_zeros(max(1, -(-len(labelled) // unit)) * unit)
    positions[: len(labelled)] = labelled
    chosen = flat[positions]
    chosen[len(labelled) :] = IGNORE
    return positions, chosen[None]

"""What a step makes small, as one function of a batch: compiled as one, so that logits live inside it alone."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from anyformer.cache.segment_memory import Past
from anyformer.conventions import IGNORE
from anyformer.data.batch import Batch, to_device
from anyformer.kernels.cross_entropy import token_loss
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.heads import LossTarget, VocabularyHead
from anyformer.nn.inputs import Inputs
from anyformer.nn.model import CallOptions, Transformer
from anyformer.tasks.base import Task, inputs_of
from anyformer.training.parallel import sum_over_processes

FEW = 0.75  # of the tokens that something is asked of: below it the head is applied to these alone
PARTS = 8  # of a power of two, in which the number of such places is rounded up: few shapes to compile


class Objective(nn.Module):
    """The summed loss of a batch, what parts of the model add to it for each token, and the past after it."""

    def __init__(self, model: Transformer, task: Task, smoothing: float, recompute: bool = False):
        super().__init__()
        self.model, self.smoothing, self.recompute = model, smoothing, recompute
        self.says = says_words(model, task)
        # what is no loss of words may loop, over a row's words or a batch's pairs: that is not compiled
        self.loss = torch.compiler.disable(task.loss)

    def forward(
        self, inputs: tuple[Tensor | Inputs, ...], target: LossTarget, past: Past | None
    ) -> tuple[Tensor, Tensor, Past | None]:
        aux, after = AuxOutputs(sum_over_processes), None
        options: CallOptions = {"aux": aux, "recompute": self.recompute}
        if self.says:
            options["loss_target"] = target
        if past is None:
            out = self.model(*inputs, **options)
        else:
            out, after = self.model(*inputs, **options, past=past)
        loss = out if self.says else self.loss(out, target.labels, self.smoothing)
        return loss, sum(aux.losses, torch.zeros_like(loss)), after

    def read(self, batch: Batch) -> "StepInputs":
        """A batch without what no step needs to know, and with its labels together where they are few."""
        batch = batch._replace(examples=())
        if self.says and (places := few(batch.labels, batch.tokens_in_ids)) is not None:
            return StepInputs(batch._replace(labels=places[1]), places[0])
        return StepInputs(batch, None)

    def ask(self, given: "StepInputs", packed: bool) -> tuple[tuple[Inputs, ...], LossTarget]:
        """What it is called with, beside the past."""
        labels, at = given.batch.labels, given.at
        if at is not None:  # of another number in each batch: compiled for any
            torch._dynamo.maybe_mark_dynamic(at, 0)
            torch._dynamo.maybe_mark_dynamic(labels, 1)
        return inputs_of(given.batch, packed), LossTarget(labels, self.smoothing, at)


class StepInputs(NamedTuple):
    """A batch as a step reads it."""

    batch: Batch
    at: Tensor | None  # where its labels stand, as in `LossTarget`

    def to(self, device: torch.device) -> "StepInputs":
        return StepInputs(self.batch.to(device), None if self.at is None else to_device(self.at, device))


def says_words(model: Transformer, task: Task) -> bool:
    """Whether the loss is the cross-entropy of words, which the head itself can tell."""
    return isinstance(model.head, VocabularyHead) and getattr(task, "loss", None) is token_loss


def few(labels: Tensor, tokens: int) -> tuple[Tensor, Tensor] | None:
    """Where something is asked in [b, t], as places in all rows one after the other, [n], and what, [1, n].

    None: at nearly all of the `tokens`. The last places may be there to fill up, and nothing is asked of them.
    """
    flat = labels.flatten()
    at = (flat != IGNORE).nonzero()[:, 0]
    if len(at) > FEW * tokens:
        return None
    step = max(8, 2 ** max(0, len(at).bit_length() - 1) // PARTS)
    filled = at.new_zeros(max(1, -(-len(at) // step)) * step)
    filled[: len(at)] = at
    asked = flat[filled]
    asked[len(at) :] = IGNORE
    return filled, asked[None]

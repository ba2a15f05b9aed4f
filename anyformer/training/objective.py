"""What a step makes small, as one function of a batch: compiled as one, so that logits live inside it alone."""

from typing import Any

import torch
from torch import Tensor, nn

from anyformer.data.batch import IGNORE, Batch
from anyformer.nn.heads import Asked, VocabularyHead
from anyformer.nn.loss import token_loss
from anyformer.nn.model import Transformer
from anyformer.nn.past import Past
from anyformer.nn.running import Notes
from anyformer.tasks.base import Task, arguments

FEW = 0.75  # of the places that are asked: below it the head is applied to these alone
PARTS = 8  # of a power of two, in which the number of such places is rounded up: few shapes to compile


class Objective(nn.Module):
    """The summed loss of a batch, what parts of the model add to it for each token, and the past after it."""

    def __init__(self, model: Transformer, task: Task, smoothing: float):
        super().__init__()
        self.model, self.smoothing = model, smoothing
        self.says = says_words(model, task)
        # what is no loss of words may loop, over a row's words or a batch's pairs: that is not compiled
        self.loss = torch.compiler.disable(task.loss)

    def forward(
        self, inputs: tuple[Tensor, ...], options: dict[str, Any], asked: Asked, past: Past | None
    ) -> tuple[Tensor, Tensor, Past | None]:
        notes, after = Notes(), None
        options = {**options, "asked": asked} if self.says else options
        if past is None:
            out = self.model(*inputs, **options, notes=notes)
        else:
            out, after = self.model(*inputs, **options, past=past, notes=notes)
        loss = out if self.says else self.loss(out, asked.labels, self.smoothing)
        return loss, sum(notes.losses, torch.zeros_like(loss)), after

    def ask(self, batch: Batch, packed: bool, device: torch.device) -> tuple[tuple[Tensor, ...], dict[str, Any], Asked]:
        """What it is called with for a batch that is still on the host, beside the past."""
        here = batch.to(device)
        inputs, options = arguments(here, packed)
        if self.says and (places := few(batch.labels)) is not None:
            at, labels = (x.to(device, non_blocking=True) for x in places)
            return inputs, options, Asked(labels, self.smoothing, at)
        return inputs, options, Asked(here.labels, self.smoothing)


def says_words(model: Transformer, task: Task) -> bool:
    """Whether the loss is the cross-entropy of words, which the head itself can tell."""
    return isinstance(model.head, VocabularyHead) and getattr(task, "loss", None) is token_loss


def few(labels: Tensor) -> tuple[Tensor, Tensor] | None:
    """Where something is asked in [b, t], as places in all rows one after the other, [n], and what, [1, n].

    None: nearly everywhere. The last places may be there to fill up, and nothing is asked of them.
    """
    flat = labels.flatten()
    at = (flat != IGNORE).nonzero()[:, 0]
    step = max(8, 2 ** max(0, len(at).bit_length() - 1) // PARTS)
    size = max(1, -(-len(at) // step)) * step
    if size > FEW * len(flat):
        return None
    filled = at.new_zeros(size)
    filled[: len(at)] = at
    asked = flat[filled]
    asked[len(at) :] = IGNORE
    return filled, asked[None]

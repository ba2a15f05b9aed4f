"""The task dpo: a decoder learns to prefer one answer to another (direct preference optimisation).

Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.

A row has a source, a target and a rejected answer. With the log-probabilities p of the model and q of the frozen model
that training starts from, the loss is -log σ(beta · ((p - q)(target) - (p - q)(rejected))).
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ModelConfig
from anyformer.data.batch import Example
from anyformer.data.loader import ExampleLoader, Loader, longest_first
from anyformer.data.readers import Rows
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, ExampleBatches, Preferences
from anyformer.tasks.base import MAX_INFERENCE_TOKENS, Metrics, bad_row_notes, call, token_log_probabilities
from anyformer.tasks.seq2seq import SequenceToSequence


class Preferring(SequenceToSequence):
    """Pairs of answers, to texts as in the task seq2seq, or to conversations (see `chat_answers.py`)."""

    spec: Preferences
    answers = ("target", "rejected")

    def preference_loss(self, logits: Tensor, labels: Tensor, reference: Tensor | None = None) -> Tensor:
        """Return the summed loss of logits [2b, t, v] and labels [b, 2, t], target first.

        `reference` are the logits of the frozen model; without them it is one that finds both answers equally probable.
        """
        scores = log_probabilities(logits, labels)
        if reference is not None:
            scores = scores - log_probabilities(reference, labels)
        each = -F.logsigmoid(self.spec.beta * (scores[:, 0] - scores[:, 1]))
        return torch.where((labels != IGNORE).flatten(1).any(dim=1), each, 0).sum()

    def pairs(self, rows: Rows) -> list[Example]:
        """Return the examples of rows: the target, and the rejected answer as its pair."""
        both = (self.encode(rows, both_sides=False, role=role) for role in self.answers)
        return [one._replace(pair=other.ids, pair_labels=other.labels) for one, other in zip(*both, strict=True)]

    def row_faults(
        self, rows: Rows, config: ModelConfig, batches: Batches | None, role: str = "target"
    ) -> Iterator[str]:
        half = batches and batches.model_copy(update={"tokens": max(1, batches.row_limit // 2)})
        faults = (super(Preferring, self).row_faults(rows, config, half, role) for role in self.answers)
        answers = (self.encoded_answers(rows, role) for role in self.answers)
        for one, other, target, rejected in zip(*faults, *answers, strict=True):
            yield one or other or ("the rejected answer is the target" if target == rejected else "")

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, ExampleBatches)
        pad = self.tokenizer.pad or 0
        return ExampleLoader(self.pairs(rows), batches, seed, pad, source_pad=0, media=self.tokenizer.media)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure how often the target is more probable than the rejected answer, by how much, and the model's answers.

        The loss is that without the frozen model, which a run does not have.
        """
        device, total, correct, margin = next(model.parameters()).device, 0.0, 0, 0.0
        pad, media = self.tokenizer.pad or 0, self.tokenizer.media
        with torch.no_grad():
            for batch in longest_first(self.pairs(rows), MAX_INFERENCE_TOKENS // 2, pad, pad, media):
                moved = batch.to(device)
                logits = call(model, moved, packed=False)
                total += float(self.preference_loss(logits, moved.labels))
                scores = log_probabilities(logits, moved.labels)
                correct += int((scores[:, 0] > scores[:, 1]).sum())
                margin += float((scores[:, 0] - scores[:, 1]).sum())
        values = {"loss": total / len(rows), "accuracy": correct / len(rows), "margin": margin / len(rows)}
        scored, notes = self.score_predictions(model, rows)
        return Metrics("dpo", len(rows), values | scored, {**bad_row_notes(rows), **notes})


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probabilities [b, 2] of two answers, from logits [2b, t, v] and labels [b, 2, t]."""
    return token_log_probabilities(logits, labels).sum(dim=-1)  # [b, 2, t] -> [b, 2]

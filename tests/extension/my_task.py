"""A task as a user writes it: an ordinal number, such as stars, for each text or pair of texts."""

from typing import ClassVar, Literal

from torch.nn import functional as F

from anyformer.config import Fault, Flag, Size
from anyformer.recipe import Task
from anyformer.tasks.sequence_level import SequenceLevelTask


class Ordinal(Task):
    """Predict a whole number from 0 to `highest`: output k of the head says whether it is above k."""

    kind: Literal["ordinal"] = "ordinal"
    highest: Size = 5  # largest number
    pairs: Flag = False  # a row is a pair of texts

    head_kind: ClassVar = "classifier"
    batches: ClassVar = ("padded",)
    reads: ClassVar = "has one number per row"
    measures: ClassVar = ("loss", "mean_error")
    lower_is_better: ClassVar = measures
    has_distribution: ClassVar = False

    @property
    def columns(self):
        return ("text", "pair", "label") if self.pairs else ("text", "label")

    def model_faults(self, model):
        yield from super().model_faults(model)
        if getattr(model.head, "labels", self.highest) != self.highest:
            yield Fault("model.head.labels", f"= {model.head.labels}: set it to task.highest = {self.highest}")

    def row_measures(self, predicted, target):
        return {"mean_error": abs(float(predicted) - float(target))}

    def build(self, tokenizer, source_tokenizer=None):
        return Ordering(self, tokenizer)


class Ordering(SequenceLevelTask):
    def parse_label(self, label):
        if not label.isdecimal() or int(label) > self.spec.highest:
            raise ValueError(f"the label {label!r} is no whole number up to {self.spec.highest}")
        return [float(int(label) > k) for k in range(self.spec.highest)]

    def format_prediction(self, logits):
        return str(int((logits > 0).sum()))

    def format_label(self, label):
        return str(int(label.sum()))

    def loss(self, logits, labels, smoothing=0.0):
        each = F.binary_cross_entropy_with_logits(logits.float(), labels.clamp(min=0).float(), reduction="none")
        return (each * (labels >= 0)).sum()  # the others are padding

    def measure(self, logits, labels):
        errors = (logits > 0).sum(dim=-1) - labels.sum(dim=-1)
        return {"mean_error": float(errors.abs().float().mean())}, {}

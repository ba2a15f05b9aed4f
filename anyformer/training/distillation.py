"""Distillation: a model learns the distributions of a frozen teacher beside the labels (Hinton et al. 2015).

The loss of a label is (1 - w) · CE(z, label) + w · T² · KL(softmax(y/T) ‖ softmax(z/T)), with the student's logits z
and the teacher's y. The factor T² keeps the gradient of the second term, T (softmax(z/T) - softmax(y/T)), about as
large at every temperature. The teacher is in eval mode, has no gradient, and is not saved.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.config import ConfigError, Fault, IdInput, Input, ModelConfig
from anyformer.data.readers import Rows
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import Recipe, Teacher, TextBatches
from anyformer.runs.run import Run
from anyformer.tasks.base import BuiltTask, TokenTask
from anyformer.tasks.preferences import Preferring
from anyformer.training.make_task import TEACHER, load_other, vocabularies
from anyformer.training.objective import FrozenLoss


def soft_loss(logits: Tensor, teacher: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return T² · KL(softmax(teacher/T) ‖ softmax(logits/T)), summed over labels that are not ignored, in fp32.

    Both logits are [..., v], and labels [...] only select rows.
    """
    student, target = (F.log_softmax(x.flatten(0, -2).float() / temperature, dim=-1) for x in (logits, teacher))
    each = (target.exp() * (target - student)).sum(dim=-1)
    return temperature**2 * torch.where(labels.flatten() != IGNORE, each, 0).sum()


def distillation_loss(spec: Teacher, task: BuiltTask | TokenTask, smoothing: float) -> FrozenLoss:
    """Return the loss of a student: of its logits, of labels, and of the teacher's logits."""

    def loss(logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        soft = soft_loss(logits, teacher, labels, spec.temperature)
        return (1 - spec.weight) * task.loss(logits, labels, smoothing) + spec.weight * soft

    return loss


def load_teacher(spec: Teacher, recipe: Recipe, task: BuiltTask, train: Rows, config: ModelConfig) -> Transformer:
    """Return the teacher of a recipe; raise a `ConfigError` that says why it cannot teach the model."""
    folder = spec.run
    run = load_other(folder, TEACHER)
    faults = list(_faults(run, task, config)) or list(_length_faults(run.config, recipe, task, train))
    if faults:
        raise ConfigError(Fault(TEACHER, f"= '{folder}': {what}") for what in faults)
    return run.model


def _faults(run: Run, task: BuiltTask, config: ModelConfig) -> Iterator[str]:
    """Yield why a run cannot teach a model: other inputs, another vocabulary, other labels."""
    teacher = run.config
    if teacher.shape != config.shape:
        yield f"is a model of the shape '{teacher.shape}', and this one is '{config.shape}'"
        return
    if teacher.head.kind != config.head.kind:
        yield f"has the head '{teacher.head.kind}', and this model '{config.head.kind}'"
        return
    if vocabularies(run.task) != vocabularies(task):
        yield "its tokenizer differs from that of train.init_from"
    for name in ("source", "target"):
        one_side, other_side = getattr(teacher, name), getattr(config, name)
        for what, one, other in zip(READ, _read_by(one_side), _read_by(other_side), strict=True):
            if one != other:
                yield f"has {name}.{what} = {one}, and this model {other}: both read the same batches"
    theirs, ours = run.spec.label_names or (), task.spec.label_names or ()
    if theirs != ours:
        yield f"its labels are {', '.join(theirs)}, and those of the task {', '.join(ours)}: both need the same order"
    if teacher.head.joint:
        yield "has a CRF, and so no distribution for each word"
    if teacher.decoder is not None and teacher.decoder.memory:
        yield f"has decoder.memory = {teacher.decoder.memory}: a teacher reads each batch alone"


READ = ("vocab", "types", "spelling.longest", "media")


def _read_by(inputs: Input | None) -> tuple[object, ...]:
    """Return what the tensors of a batch depend on."""
    if not isinstance(inputs, IdInput):
        return (None, None, None, inputs)
    return inputs.vocab, inputs.token_types, inputs.spelled_bytes, inputs.stream


def _length_faults(teacher: ModelConfig, recipe: Recipe, task: BuiltTask, train: Rows) -> Iterator[str]:
    """Yield which rows are too long for the teacher."""
    batches, limits = recipe.batches, [stack.limit for stack in teacher.stacks.values() if stack.limit is not None]
    if not limits:
        return
    if isinstance(batches, TextBatches):
        if batches.length > min(limits):
            yield f"has {min(limits)} positions, and batches.length = {batches.length}"
        return
    fitting = task.filter_rows(train, teacher)
    if len(fitting) < len(train):
        yield f"cannot read {len(train) - len(fitting):,} of the rows: {fitting.bad[-1].why}"


# -- the frozen model -------------------------------------------------------------------------------------------------
#
# A frozen model beside the trained one, whose logits are part of the loss: a teacher, or the start of the model.
#
# It is in eval mode, has no gradient, and is not saved: a resumed run loads it again.


def frozen_loss(recipe: Recipe, task: BuiltTask) -> FrozenLoss | None:
    """Return the loss that reads the logits of a frozen model; None if a recipe has none."""
    if isinstance(task, Preferring):
        return task.preference_loss
    spec = recipe.train.teacher
    return None if spec is None else distillation_loss(spec, task, recipe.train.label_smoothing)


def load_frozen(
    recipe: Recipe, task: BuiltTask, train: Rows, config: ModelConfig, device: torch.device
) -> Transformer | None:
    """Return the frozen model of a recipe; None if it has none."""
    if recipe.task.compares_with_start:
        assert recipe.train.init_from is not None
        model = load_other(recipe.train.init_from, "train.init_from").model
    elif recipe.train.teacher is not None:
        model = load_teacher(recipe.train.teacher, recipe, task, train, config)
    else:
        return None
    return model.to(device).requires_grad_(False).eval()

"""A frozen model beside the trained one, whose logits are part of the loss: a teacher, or the start of the model.

It is in eval mode, has no gradient, and is not saved: a resumed run loads it again.
"""

import torch

from anyformer.config import ModelConfig
from anyformer.data.readers import Rows
from anyformer.nn.model import Transformer
from anyformer.recipe import Recipe
from anyformer.tasks.base import Task
from anyformer.tasks.preferences import Preferring
from anyformer.training.distillation import distillation_loss, load_teacher
from anyformer.training.make_task import load_other
from anyformer.training.objective import FrozenLoss


def frozen_loss(recipe: Recipe, task: Task) -> FrozenLoss | None:
    """Return the loss that reads the logits of a frozen model; None if a recipe has none."""
    if isinstance(task, Preferring):
        return task.preference_loss
    spec = recipe.train.teacher
    return None if spec is None else distillation_loss(spec, task, recipe.train.label_smoothing)


def load_frozen(
    recipe: Recipe, task: Task, train: Rows, config: ModelConfig, device: torch.device
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

"""Fine-tuning: weights copied from another run, frozen weights, and a learning rate for each layer."""

from collections.abc import Iterator, Sequence
from functools import partial

from anyformer.config import ConfigError, Fault, ModelConfig, Side, io
from anyformer.config.adapter import within
from anyformer.config.model import learning
from anyformer.config.spec import close_to
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask
from anyformer.runs.run import Run

FREE = ("context", "init", "special")  # parts of a config that may differ
FREE_WITH_OWN_HEAD = (*FREE, "head", "tie")


def config_differences(first: ModelConfig, model: ModelConfig, task: AnyTask) -> list[str]:
    """Return why the weights of a first model do not fit another.

    Dropout and the scaling of rotary angles may differ, an adapter may be added, and a task with its own head (labels,
    masked language model) replaces the head.
    """
    if first.adapter is None:
        model = model.model_copy(update={"adapter": None})
    free = FREE if task.head_kind == "lm" else FREE_WITH_OWN_HEAD
    without_weights = ("dropout", "position.scaling")
    changes = [
        change
        for change in io.diff(first, model)
        if not any(name in change.path for name in without_weights) and change.path.partition(".")[0] not in free
    ]
    return [f"its model differs: {change}" for change in changes]


def copy_weights(model: Transformer, task: AnyTask, first: Run) -> list[str]:
    """Copy the weights of a run that have the same meaning in a model. Return the names of the other, new ones."""
    own, given = model.state_dict(), first.model.state_dict()
    fits = partial(_fits, config=model.config, task=task, first=first)
    taken = {name: x for name, x in given.items() if name in own and x.shape == own[name].shape and fits(name)}
    model.load_state_dict(own | taken)
    return [name for name in own if name not in taken]


def _fits(name: str, config: ModelConfig, task: AnyTask, first: Run) -> bool:
    """Return whether a weight of the first run has the same meaning here; of its head: a pooler, or equal labels."""
    if not name.startswith("head."):
        return True
    if name.startswith("head.transform."):
        return getattr(config.head, "transform", None) == getattr(first.config.head, "transform", None)
    return config.head.kind == first.config.head.kind and (task.label_names or ()) == (first.spec.label_names or ())


def describe_new(first: str, new: list[str]) -> str:
    """Return a line about the weights that a run to start from does not have, which is normal for a new head."""
    what = "new head" if all(name.startswith("head.") for name in new) else "new parts"
    return f"{what}, not in {first}, to be trained: {', '.join(new)}"


def freeze(model: Transformer, patterns: Sequence[str], new: Sequence[str] = ()) -> None:
    """Exclude weights from training: those that a pattern names, as a weight or as a part with its weights.

    `*` matches anything. With an adapter, only the adapter and a head without a vocabulary are trained; `new` names
    weights without values from another run, which therefore must be trained.
    """
    names = [name for name, _ in model.named_parameters()]
    if faults := list(_unmatched(patterns, names)):
        raise ConfigError(faults)
    trained = learning(model.config)
    if lost := [name for name in new if not any(within(name, part) for part in trained)]:
        what = f"{', '.join(lost)} would keep random values: train all weights, or start from a run that has them"
        raise ConfigError([Fault("model.adapter", what)])
    for name, parameter in model.named_parameters():
        frozen = any(within(name, pattern) for pattern in patterns)
        parameter.requires_grad_(not frozen and any(within(name, part) for part in trained))
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError([Fault("train.freeze", f"= {list(patterns)}: no weight is left to train")])


def _unmatched(patterns: Sequence[str], names: Sequence[str]) -> Iterator[Fault]:
    parts = list(dict.fromkeys(name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)))
    for i, pattern in enumerate(patterns):
        if not any(within(name, pattern) for name in names):
            close = close_to(pattern, parts)
            hint = f"did you mean '{close}'?" if close else "parts are " + ", ".join(p for p in parts if "." not in p)
            yield Fault(f"train.freeze.{i}", f"= '{pattern}': the model has no such weights; {hint}")


def lr_scale(name: str, config: ModelConfig, decay: float) -> float:
    """Return the factor on the learning rate of a weight (Clark et al. 2020).

    It is 1 in the head, `decay` in the last layer of a stack, and decay^(depth + 1) in its input.
    """
    part, *rest = name.split(".")
    sides: dict[str, Side] = {"source": "encoder", "encoder": "encoder", "target": "decoder", "decoder": "decoder"}
    if part not in sides:
        return 1.0
    depth = config.stacks[sides[part]].depth
    if part in ("source", "target") or rest[0] == "embedder":
        return float(decay ** (depth + 1))
    return float(decay ** (depth - int(rest[1]))) if rest[0] == "blocks" else 1.0

"""Beginning with the weights of another run: which are taken, which stay as they are, how fast each layer learns."""

from collections.abc import Iterator, Sequence

from anyformer.config import ConfigError, Fault, ModelConfig, Side, io
from anyformer.config.adapter import within
from anyformer.config.model import learning
from anyformer.config.spec import close_to
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask, Classify, Embed, Encoder, MaskedLanguageModel, Regress, Tag
from anyformer.run import Run

NO_MATTER = ("init", "special")  # to weights that are there
TOP = ("head", "tie")
OWN_HEAD = (Classify, Regress, Embed, Tag, MaskedLanguageModel)


def differing(first: ModelConfig, model: ModelConfig, task: AnyTask) -> list[str]:
    """Why the weights of a first model do not fit; dropout may differ, a task that labels or masks has its own head,
    and there may be an adapter beside them."""
    if first.adapter is None:
        model = model.model_copy(update={"adapter": None})
    free = NO_MATTER + TOP if isinstance(task, OWN_HEAD) else NO_MATTER
    changes = [c for c in io.diff(first, model) if "dropout" not in c.path and c.path.partition(".")[0] not in free]
    return [f"its model differs: {change}" for change in changes]


def inherit(model: Transformer, task: AnyTask, first: Run) -> list[str]:
    """Takes all weights of a run that mean the same in a model; the names of those that are new."""
    own, given = model.state_dict(), first.model.state_dict()
    taken = {name: x for name, x in given.items() if name in own and x.shape == own[name].shape}
    for name in [name for name in taken if name.startswith("head.") and not _same(name, model.config, task, first)]:
        del taken[name]
    model.load_state_dict(own | taken)
    return [name for name in own if name not in taken]


def _same(name: str, config: ModelConfig, task: AnyTask, first: Run) -> bool:
    """Whether a weight of a head does the same in another: a pooler does, and what says the same labels."""
    if name.startswith("head.transform."):
        return getattr(config.head, "transform", None) == getattr(first.config.head, "transform", None)
    return config.head.kind == first.config.head.kind and _labels(task) == _labels(first.spec)


def _labels(task: AnyTask) -> tuple[str, ...]:
    return task.labels if isinstance(task, Classify | Encoder | Tag) else ()


def freeze(model: Transformer, patterns: Sequence[str], new: Sequence[str] = ()) -> None:
    """Weights that are named so, or that are parts of what is named so, learn nothing; `*` stands for anything.

    With an adapter only that learns, and a head that says something else than tokens. What is `new` must not stay so.
    """
    names = [name for name, _ in model.named_parameters()]
    if faults := list(_unfit(patterns, names)):
        raise ConfigError(faults)
    left = learning(model.config)
    if lost := [name for name in new if not any(within(name, part) for part in left)]:
        what = f"{', '.join(lost)} would stay as chance made them: train all weights, or begin from a run that has them"
        raise ConfigError([Fault("model.adapter", what)])
    for name, parameter in model.named_parameters():
        learns = any(within(name, part) for part in left) and not any(within(name, pattern) for pattern in patterns)
        parameter.requires_grad_(learns)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError([Fault("train.freeze", f"= {list(patterns)}: nothing is left to be trained")])


def _unfit(patterns: Sequence[str], names: Sequence[str]) -> Iterator[Fault]:
    parts = list(dict.fromkeys(name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)))
    for i, pattern in enumerate(patterns):
        if not any(within(name, pattern) for name in names):
            close = close_to(pattern, parts)
            hint = f"did you mean '{close}'?" if close else "parts are " + ", ".join(p for p in parts if "." not in p)
            yield Fault(f"train.freeze.{i}", f"= '{pattern}': the model has no such weights; {hint}")


def pace(name: str, config: ModelConfig, decay: float) -> float:
    """The share of the learning rate at which a weight learns: 1 in the head, decay in the last layer of a stack, and
    decay to the depth + 1 in its input (Clark et al. 2020)."""
    part, *rest = name.split(".")
    sides: dict[str, Side] = {"source": "encoder", "encoder": "encoder", "target": "decoder", "decoder": "decoder"}
    if part not in sides:
        return 1.0
    depth = config.stacks[sides[part]].depth
    if part in ("source", "target") or rest[0] == "embedder":
        return float(decay ** (depth + 1))
    return float(decay ** (depth - int(rest[1]))) if rest[0] == "blocks" else 1.0

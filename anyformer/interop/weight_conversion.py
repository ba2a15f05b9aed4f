"""The weights of a folder as ours, and ours as theirs, by the rules of a family."""

import functools
import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import visible
from anyformer.interop import weight_files as files
from anyformer.interop.family import BODY, Family
from anyformer.interop.weight_files import Stored, wrong
from anyformer.interop.weight_rules import Alias, Constant, Tie
from anyformer.nn.model import Transformer

HEADS = ("lm_head.", "cls.", "classifier.")  # how names of weights begin that no body has
SHOWN = 5  # faults told of those that are alike


def named(family: Family, stored: dict[str, Stored]) -> dict[str, Stored]:
    """Tensors by the names of today, as in a model with a head."""
    found = {}
    for name, tensor in stored.items():
        for old, new in family.older:
            name = re.sub(old, new, name)
        found[name] = tensor
    if family.prefix and not any(name.startswith(family.prefix) for name in found):
        bodies = {name: name if name.startswith(HEADS) else family.prefix + name for name in found}
        found = {bodies[name]: tensor for name, tensor in found.items()}
    return found


def translated(family: Family, config: ModelConfig, stored: dict[str, Stored], folder: Path) -> dict[str, Tensor]:
    """The state of our model, in the widest precision among theirs."""
    fitted = fit(family, config, stored)
    _check(fitted, family, stored, folder)
    ties, spare = fitted.ties, fitted.spare
    dtypes = {stored[name].dtype for tie in ties for name in tie.theirs}
    if other := [dtype for dtype in dtypes if not dtype.is_floating_point]:
        raise wrong(folder, f"holds weights of {other[0]}: only floating-point weights are read")
    dtype = functools.reduce(torch.promote_types, dtypes)
    found, spoilt = {}, []
    for tie in sorted(ties, key=lambda tie: -sum(map(math.prod, tie.shapes))):  # the largest while there is most room
        parts = [stored[name].read().to(dtype) for name in tie.theirs]
        spoilt += [name for name, x in zip(tie.theirs, parts, strict=True) if not bool(x.isfinite().all())]
        found[tie.ours] = tie.way.join(parts).contiguous()
    for rule in spare:
        _check_spare(rule, stored)
    if spoilt:
        what = f"{visible(spoilt[0])}{f' and {len(spoilt) - 1} others' if len(spoilt) > 1 else ''}"
        warnings.warn(f"{stored[spoilt[0]].file}: {what}: some numbers are not finite", stacklevel=3)
    return found


class Fit(NamedTuple):
    """The tensors of a folder beside those that a model needs."""

    ties: list[Tie]
    spare: list[Alias | Constant]
    missing: dict[str, tuple[int, ...]]  # the shape that each should have
    misshapen: dict[str, tuple[int, ...]]
    unused: list[str]  # known to belong to another head
    left: list[str]  # unknown


def fit(family: Family, config: ModelConfig, stored: dict[str, Stored]) -> Fit:
    """Compare names and shapes, reading no values."""
    ties = family.ties(config)
    spare = [rule for rule in family.rules(config) if isinstance(rule, (Alias, Constant))]
    wanted = {name: shape for tie in ties for name, shape in zip(tie.theirs, tie.shapes, strict=True)}
    claimed = {*wanted, *(rule.theirs for rule in spare)}
    others = [name for name in stored if name not in claimed and not _any(family.buffers, name)]
    unused = [name for name in others if _any(family.unused, name)]
    return Fit(
        ties,
        spare,
        {name: shape for name, shape in wanted.items() if name not in stored},
        {name: shape for name, shape in wanted.items() if name in stored and stored[name].shape != shape},
        sorted(unused),
        sorted(set(others) - set(unused)),
    )


def _check(found: Fit, family: Family, stored: dict[str, Stored], folder: Path) -> None:
    """Refuse tensors that are missing, misshapen or unknown; warn of those that no head uses."""
    faults = []
    for name, shape in found.misshapen.items():
        what = f"{name} has shape {list(stored[name].shape)}, but config.json needs {list(shape)}"
        faults.append(Fault(visible(str(stored[name].file)), what))
    for name, shape in found.missing.items():
        faults.append(Fault(visible(str(folder)), f"has no weight {name}, of shape {list(shape)}"))
    for name in found.left:
        what = f"{visible(name)} is a weight that no {family.kind} with this head has"
        faults.append(Fault(visible(str(stored[name].file)), what))
    if faults:
        more = [Fault(visible(str(folder)), f"{len(faults) - SHOWN} more weights do not fit the config")]
        raise ConfigError([*faults[:SHOWN], *(more if len(faults) > SHOWN else [])])
    if found.unused:
        names = ", ".join(found.unused)
        warnings.warn(f"{folder}: left out, as the head does not use them: {names}", stacklevel=4)


def _check_spare(rule: Alias | Constant, stored: dict[str, Stored]) -> None:
    if rule.theirs not in stored:
        return
    tensor, file = stored[rule.theirs].read(), visible(str(stored[rule.theirs].file))
    if isinstance(rule, Constant):
        what, off = ("zero", 0.0) if rule.make is torch.zeros else ("what it always is", 0.01)  # in any precision
        if tensor.shape != rule.shape or not torch.allclose(tensor.float(), rule.value, rtol=0, atol=off):
            raise wrong(file, f"{rule.theirs} is not {what}, and the model has nothing like it")
    if isinstance(rule, Alias) and not torch.equal(tensor, stored[rule.of].read()):
        raise wrong(file, f"{rule.theirs} is not {rule.of}, and the config says that they are tied")


def _any(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def write(path: Path, family: Family, model: Transformer) -> None:
    """Our weights under their names; tensors are made one after the other."""
    state, ties = model.state_dict(), family.ties(model.config)
    constants = [rule for rule in family.rules(model.config) if isinstance(rule, Constant)]
    prefix = family.prefix if model.config.head.kind in BODY else ""
    dtype = next(iter(state.values())).dtype

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for tie in ties:
            parts = tie.way.part(state[tie.ours])
            yield from zip((name.removeprefix(prefix) for name in tie.theirs), parts, strict=True)
        for constant in constants:
            yield constant.theirs, constant.value.to(dtype)

    shapes: files.Shapes = {
        name.removeprefix(prefix): (state[tie.ours].dtype, shape)
        for tie in ties
        for name, shape in zip(tie.theirs, tie.shapes, strict=True)
    }
    files.write(path, shapes | {constant.theirs: (dtype, constant.shape) for constant in constants}, tensors())

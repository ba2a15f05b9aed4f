"""Convert the weights of a public folder to our names, and back, by the rules of a family."""

import functools
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import visible
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import weight_files
from anyformer.interop.family import BODY, Family, WeightNames
from anyformer.interop.weight_files import StoredTensor, wrong
from anyformer.interop.weight_rules import Alias, ConstantTensor, TensorRule
from anyformer.kernels.conventions import Note
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask, LanguageModel

# prefixes of weights that belong to a head
HEADS = ("lm_head.", "cls.", "classifier.", "score.", "qa_outputs.", "classification_head.")
MAX_FAULTS = 5  # similar faults listed in an error
MAX_EXCESS = 100  # times the values in the weights: a config that needs more parameters is not built


class ImportedModel(NamedTuple):
    """A model of another program with its tokenizer and task."""

    model: Transformer
    tokenizer: TextTokenizer
    spec: AnyTask = LanguageModel(framed=True)


def named(family: Family, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Rename tensors of older files, and add the body's prefix if it is missing."""
    found = {}
    for name, tensor in stored.items():
        for old, new in family.older:
            name = re.sub(old, new, name)
        found[name] = tensor
    if family.prefix and not any(name.startswith(family.prefix) for name in found):
        bodies = {name: name if name.startswith(HEADS) else family.prefix + name for name in found}
        found = {bodies[name]: tensor for name, tensor in found.items()}
    return found


def check_excess(config: ModelConfig, stored: Mapping[str, StoredTensor], path: Path) -> None:
    """Refuse a model that is far too large for its weights, before anything of it is built."""
    held = sum(math.prod(tensor.shape) for tensor in stored.values())
    if (needed := count(config).parameters) > MAX_EXCESS * max(held, 1):
        what = f"describes a model of {needed:,} parameters, {4 * needed / 2**30:,.0f} GiB in fp32"
        raise wrong(path, f"{what}; the weights beside it hold {held:,} values")


def build(family: WeightNames, config: ModelConfig, stored: dict[str, StoredTensor], source: Path) -> Transformer:
    """Return the model with the weights of a folder or file, in eval mode."""
    state = translated(family, config, stored, source)
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(state, assign=True)
    return model.eval()


def translated(
    family: WeightNames, config: ModelConfig, stored: dict[str, StoredTensor], folder: Path
) -> dict[str, Tensor]:
    """Return the state dict of our model, in the widest precision of the stored tensors."""
    fitted = fit(family, config, stored)
    _check(fitted, family, stored, folder)
    tensor_rules, spare = fitted.tensor_rules, fitted.spare
    dtypes = {stored[name].dtype for rule in tensor_rules for name in rule.theirs}
    if other := [dtype for dtype in dtypes if not dtype.is_floating_point]:
        raise wrong(folder, f"holds weights of {other[0]}: only floating-point weights are read")
    dtype = functools.reduce(torch.promote_types, dtypes)
    found, nonfinite = dict[str, Tensor](), list[str]()
    for rule in sorted(
        tensor_rules, key=lambda rule: -sum(map(math.prod, rule.shapes))
    ):  # the largest first, while most memory is free
        parts = [stored[name].read().to(dtype) for name in rule.theirs]
        nonfinite += [name for name, x in zip(rule.theirs, parts, strict=True) if not is_finite(x)]
        found |= rule.join(parts)
    for spare_rule in spare:
        _check_spare(spare_rule, stored)
    if nonfinite:
        warn_nonfinite(stored[nonfinite[0]].file, nonfinite)
    return found


def warn_nonfinite(file: Path, names: list[str]) -> None:
    """Warn of NaN or Inf in some tensors of a file."""
    what = f"{visible(names[0])}{f' and {len(names) - 1} others' if len(names) > 1 else ''}"
    warnings.warn(f"{file}: {what}: some values are not finite", stacklevel=3)


def is_finite(x: Tensor) -> bool:
    """Check the extremes, which are NaN if a value is: no temporaries, which leave holes between the weights."""
    return not x.numel() or all(math.isfinite(extreme) for extreme in x.aminmax())


class Fit(NamedTuple):
    """Comparison of the tensors of a folder with those that a model needs."""

    tensor_rules: list[TensorRule]
    spare: list[Alias | ConstantTensor]
    missing: dict[str, tuple[int, ...]]  # the shape that each should have
    misshapen: dict[str, tuple[int, ...]]
    unused: list[str]  # known to belong to another head
    left: list[str]  # unknown


def fit(family: WeightNames, config: ModelConfig, stored: dict[str, StoredTensor]) -> Fit:
    """Compare names and shapes, reading no values."""
    tensor_rules = family.tensor_rules(config)
    spare = [rule for rule in family.rules(config) if isinstance(rule, (Alias, ConstantTensor))]
    wanted = {name: shape for rule in tensor_rules for name, shape in zip(rule.theirs, rule.shapes, strict=True)}
    claimed = {*wanted, *(rule.theirs for rule in spare)}
    others = [name for name in stored if name not in claimed and not _any(family.buffers, name)]
    unused = [name for name in others if _any(family.unused, name)]
    return Fit(
        tensor_rules,
        spare,
        {name: shape for name, shape in wanted.items() if name not in stored},
        {name: shape for name, shape in wanted.items() if name in stored and stored[name].shape != shape},
        sorted(unused),
        sorted(set(others) - set(unused)),
    )


def _check(found: Fit, family: WeightNames, stored: dict[str, StoredTensor], folder: Path) -> None:
    """Refuse tensors that are missing, misshapen or unknown; warn of those that no head uses."""
    faults = []
    for name, shape in found.misshapen.items():
        what = f"{name} has shape {list(stored[name].shape)}, but the config needs {list(shape)}"
        faults.append(Fault(visible(str(stored[name].file)), what))
    for name, shape in found.missing.items():
        faults.append(Fault(visible(str(folder)), f"has no weight {name}, of shape {list(shape)}"))
    for name in found.left:
        what = f"{visible(name)} is a weight that no {family.kind} with this head has"
        faults.append(Fault(visible(str(stored[name].file)), what))
    if faults:
        more = [Fault(visible(str(folder)), f"{len(faults) - MAX_FAULTS} more weights do not fit the config")]
        raise ConfigError([*faults[:MAX_FAULTS], *(more if len(faults) > MAX_FAULTS else [])])
    if found.unused:
        names = ", ".join(found.unused)
        what = "weights that its task does not use are left out, which changes no result"
        warnings.warn(f"{folder}: {what}: {names}", Note, stacklevel=4)


def _check_spare(rule: Alias | ConstantTensor, stored: dict[str, StoredTensor]) -> None:
    if rule.theirs not in stored:
        return
    tensor, file = stored[rule.theirs].read(), visible(str(stored[rule.theirs].file))
    if isinstance(rule, ConstantTensor):
        what, off = ("zero", 0.0) if rule.make is torch.zeros else ("the expected constant", 0.01)  # in any precision
        if tensor.shape != rule.shape or not torch.allclose(tensor.float(), rule.value, rtol=0, atol=off):
            raise wrong(file, f"{rule.theirs} is not {what}, and anyformer's model has no such weight")
    if isinstance(rule, Alias) and not torch.equal(tensor, stored[rule.of].read()):
        raise wrong(file, f"{rule.theirs} is not {rule.of}, but the config ties them")


def _any(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def write(path: Path, family: Family, model: Transformer) -> None:
    """Write our weights under their public names, one tensor at a time."""
    state, tensor_rules = model.state_dict(), family.tensor_rules(model.config)
    constants = [rule for rule in family.rules(model.config) if isinstance(rule, ConstantTensor)]
    prefix = family.prefix if model.config.head.kind in BODY else ""
    dtype = next(iter(state.values())).dtype

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for rule in tensor_rules:
            yield from zip((name.removeprefix(prefix) for name in rule.theirs), rule.part(state), strict=True)
        for constant in constants:
            yield constant.theirs.removeprefix(prefix), constant.value.to(dtype)

    shapes: weight_files.Shapes = {
        name.removeprefix(prefix): (state[rule.ours].dtype, shape)
        for rule in tensor_rules
        for name, shape in zip(rule.theirs, rule.shapes, strict=True)
    }
    shapes |= {constant.theirs.removeprefix(prefix): (dtype, constant.shape) for constant in constants}
    weight_files.write(path, shapes, tensors())

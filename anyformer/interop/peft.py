"""Folders of PEFT (Mangrulkar et al. 2022): LoRA adapters of public models, in both directions.

adapter_config.json         rank, alpha and the adapted modules
adapter_model.safetensors   lora_A [r, in] and lora_B [out, r] of each, under the names of `transformers`

There queries, keys and values have an adapter each; here they are one layer with one adapter. On import the A of the
parts are stacked, and each B gets its own rows: [B_q 0; 0 B_k] [A_q; A_k]. On export every part has the same A.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.config import LM, ConfigError, Fault, LoRA, ModelConfig
from anyformer.config.adapter import adapted, every_matrix
from anyformer.config.spec import visible
from anyformer.generation.constraints import regex
from anyformer.generation.constraints.automaton import Automaton
from anyformer.generation.constraints.regex import EMPTY, Alt, Chars, Repeat, Seq, literal, optional, without
from anyformer.interop import weight_files
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.families import candidates
from anyformer.interop.family import Family, find_family
from anyformer.interop.weight_conversion import is_finite, warn_nonfinite
from anyformer.interop.weight_files import StoredTensor, must_be_new, wrong
from anyformer.interop.weight_rules import Grouped, Interleaved, StackedRows, TensorRule, Transposed
from anyformer.nn.model import Transformer
from anyformer.runs.run import Run, write_folder

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
# Fields that the tensors repeat, or that only matter before or in training.
# fmt: off
SILENT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "lora_ga_config", "loftq_config",
    "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "task_type", "velora_config",
)
# fmt: on
PLAIN_INIT = (True, False, "gaussian", "orthogonal", "eva")  # others change the base model, too


def is_folder(folder: Path) -> bool:
    """Return whether a folder holds an adapter of PEFT."""
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str | None:
    """Return the name of the model that an adapter was trained on, if the folder has one."""
    name = weight_files.read_json(folder / CONFIG).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


# -- reading ----------------------------------------------------------------------------------------------------------


class _AdapterScales(NamedTuple):
    """The factor of B A."""

    alpha: float
    patterns: list[tuple[Automaton, float]]  # alpha of some modules, by patterns of their names
    by_root: bool  # alpha / sqrt(r) (rsLoRA) in place of alpha / r
    dropout: float

    def of(self, module: str, rank: int) -> float:
        found = (a for pattern, a in self.patterns if pattern.accepts(module))
        return next(found, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


class _LowRank(NamedTuple):
    """The adapter of one of our layers, its scale included in B."""

    a: Tensor  # [r, in]
    b: Tensor  # [out, r]


def read(folder: Path, base: Transformer, *, family: str | None = None, allow_pickle: bool = False) -> Transformer:
    """Return a model with the adapter of a folder; `family` is that of the base, if several fit."""
    if base.config.adapter is not None:
        raise ConfigError([Fault("--base", "has an adapter: give the model that the adapter was trained on")])
    scales = _read_config(folder / CONFIG)
    one, _ = find_family(candidates(family), base.config)
    stored = _named(one, _stored(folder, allow_pickle))
    if nonfinite := [name for name, x in stored.items() if not is_finite(x.read())]:
        warn_nonfinite(stored[nonfinite[0]].file, nonfinite)
    rules = one.tensor_rules(base.config)
    low_rank = _low_rank(rules, stored, scales, folder)
    if not low_rank:
        raise wrong(folder, "has no weight lora_A")
    state = base.state_dict() | _replaced(rules, stored, folder)
    rank = max(len(x.a) for x in low_rank.values())
    for name, x in low_rank.items():
        state |= {f"{name}.lora.a": _padded(x.a, rank, 0), f"{name}.lora.b": _padded(x.b, rank, 1)}
    lora = LoRA(rank=rank, dropout=scales.dropout, targets=_targets(base.config, set(low_rank)))
    with torch.device("meta"):
        model = Transformer(base.config.model_copy(update={"adapter": lora}))
    model.load_state_dict(state, assign=True)
    return model.eval()


def _read_config(path: Path) -> _AdapterScales:
    data = weight_files.read_json(path)
    given = {key: value for key, value in data.items() if value not in (None, {}, []) and value is not False}
    fields = Fields(given, path)
    fields.must("peft_type", "LORA")
    if (init := data.get("init_lora_weights", True)) not in PLAIN_INIT:
        how = "convert it with PEFT's path_initial_model_for_weight_conversion"
        fields.refuse("init_lora_weights", f"= {shown(init)}: it changes the base model; {how}")
    fields.silent("init_lora_weights", "bias", *SILENT)
    alpha, by_root = _finite(fields, "lora_alpha", 8.0), fields("use_rslora", False)
    dropout = fields("lora_dropout", 0.0)
    named = fields.maybe("alpha_pattern", dict) or {}
    alphas = fields.table("alpha_pattern", named)
    patterns = [(_pattern(name, fields), _finite(alphas, name, math.nan)) for name in named]
    fields.finish()
    return _AdapterScales(alpha, patterns, by_root, dropout)


def _finite(fields: Fields, field: str, default: float) -> float:
    value = fields(field, default)
    if not math.isfinite(value):
        raise ConfigError([fields.fault(field, f"= {value}: must be a finite number")])
    return value


def _pattern(text: str, fields: Fields) -> Automaton:
    """Return the automaton of a pattern: it matches the end of a module's name, whole parts of it, or all after ^."""
    above = optional(Seq((Repeat(Chars(without(()))), literal("."))))
    try:
        found = regex.parse_anchored(text)
        return Automaton(Alt(tuple(Seq((EMPTY if first else above, node)) for first, node, _ in found)))
    except ConfigError as error:
        raise ConfigError([fields.fault("alpha_pattern", error.faults[0].message)]) from None


def _stored(folder: Path, allow_pickle: bool) -> dict[str, StoredTensor]:
    if not (folder / WEIGHTS).exists() and not (folder / PICKLED).exists():
        raise wrong(folder, f"holds no {WEIGHTS}")
    return weight_files.stored_in(folder / (WEIGHTS if (folder / WEIGHTS).exists() else PICKLED), allow_pickle)


def _named(family: Family, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors under the names of the family's rules: without PEFT's prefix, with that of the body."""
    names = {name: name.removeprefix(PREFIX) for name in stored}
    if family.prefix and not any(name.startswith(family.prefix) for name in names.values()):
        names = {name: family.prefix + short for name, short in names.items()}
    return {names[name]: tensor for name, tensor in stored.items()}


def _low_rank(
    rules: list[TensorRule], stored: dict[str, StoredTensor], scales: _AdapterScales, folder: Path
) -> dict[str, _LowRank]:
    """Return the adapters of our layers, and take their tensors out of `stored`."""
    found = {}
    for rule in rules:
        modules = [name.removesuffix(".weight") for name in rule.theirs]
        pairs = {
            i: _pair(module, stored, scales) for i, module in enumerate(modules) if f"{module}.lora_A.weight" in stored
        }
        if not pairs:
            continue
        if not isinstance(rule.conversion, StackedRows | Transposed | Interleaved | Grouped):
            raise wrong(folder, f"adapts {modules[0]}: anyformer has no adapters for such layers")
        found[rule.ours.removesuffix(".weight")] = _joined(rule, pairs, folder)
    return found


def _pair(module: str, stored: dict[str, StoredTensor], scales: _AdapterScales) -> _LowRank:
    a, b = (stored.pop(f"{module}.lora_{part}.weight", None) for part in "AB")
    assert a is not None
    if b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise wrong(a.file, f"{module}: lora_A and lora_B do not fit together")
    if not a.shape[0]:
        raise wrong(a.file, f"{module}: lora_A and lora_B have rank 0")
    low, high = a.read().float(), b.read().float()
    return _LowRank(low, high * scales.of(module, len(low)))


def _joined(rule: TensorRule, pairs: dict[int, _LowRank], folder: Path) -> _LowRank:
    """Return the adapter of our layer from those of its parts."""
    transposed = isinstance(rule.conversion, Transposed)
    for i, x in pairs.items():
        shape = rule.shapes[i][::-1] if transposed else rule.shapes[i]
        if (x.b.shape[0], x.a.shape[1]) != shape:
            raise wrong(folder, f"{rule.theirs[i]} is {list(shape)}: its adapter is {[x.b.shape[0], x.a.shape[1]]}")
    if transposed:
        return pairs[0]

    def rows(parts: Mapping[int, Tensor], rank: int) -> Tensor:
        """Join rows of the parts, 0 for those that have none."""
        blank = (torch.zeros(shape[0], rank) for shape in rule.shapes)
        return rule.conversion.join([parts.get(i, zero) for i, zero in enumerate(blank)]).contiguous()

    first = next(iter(pairs.values())).a
    if all(torch.equal(x.a, first) for x in pairs.values()):
        return _LowRank(first, rows({i: x.b for i, x in pairs.items()}, len(first)))
    return _LowRank(
        torch.cat([x.a for x in pairs.values()]),
        torch.cat([rows({i: x.b}, len(x.a)) for i, x in pairs.items()], dim=1),
    )


def _replaced(rules: list[TensorRule], stored: dict[str, StoredTensor], folder: Path) -> dict[str, Tensor]:
    """Return our weights that the folder stores whole (`modules_to_save`, biases); refuse tensors that are left."""
    found: dict[str, Tensor] = {}
    for rule in rules:
        if all(name in stored for name in rule.theirs):
            parts = [stored.pop(name) for name in rule.theirs]
            if tuple(part.shape for part in parts) != rule.shapes:
                raise wrong(folder, f"{rule.theirs[0]} has another shape than in the base model")
            found |= rule.join([part.read() for part in parts])
    if stored:
        raise wrong(folder, f"has a weight that the base model has no place for: {visible(min(stored))}")
    return found


def _padded(x: Tensor, rank: int, dim: int) -> Tensor:
    """Return a matrix with zeros up to the rank of the adapter, which is one for all layers."""
    shape = list(x.shape)
    shape[dim] = rank - shape[dim]
    return torch.cat((x, x.new_zeros(shape)), dim).contiguous()


def _targets(config: ModelConfig, names: set[str]) -> tuple[str, ...]:
    """Return patterns that match these layers alone: "*.mixer.inner.qkv" if all layers of that name are among them."""
    every = every_matrix(config.stacks, config.width)
    short = tuple(dict.fromkeys("*." + re.sub(r"^\w+\.blocks\.\d+\.", "", name) for name in sorted(names)))
    if names <= every.keys() and set(adapted(LoRA(rank=1, targets=short), config.stacks, config.width)) == names:
        return short
    return tuple(sorted(names))


# -- writing ----------------------------------------------------------------------------------------------------------


def export_peft(run: Run, folder: str | Path, *, family: str | None = None) -> str:
    """Write the adapter of a run as a folder of PEFT, and return the name of the base model's family."""
    folder, lora = Path(folder), run.config.adapter
    must_be_new(folder)
    if lora is None:
        raise ConfigError([Fault("adapter", "the run has no LoRA adapter: export it with --format hf")])
    if not isinstance(run.config.head, LM):
        what = f"= '{run.config.head.kind}': it was trained with the adapter; merge both: --format hf"
        raise ConfigError([Fault("head", what)])
    plain = run.config.model_copy(update={"adapter": None})
    one, _ = find_family(candidates(family), plain)
    rules = one.tensor_rules(plain)
    tensors = dict(_parts(rules, run.model.state_dict()))
    modules = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    every = [name.removesuffix(".weight") for rule in rules for name in rule.theirs if name.endswith(".weight")]
    data = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if run.config.shape == "decoder" else "SEQ_2_SEQ_LM",
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.rank if lora.alpha is None else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": _short_names(modules, every),
        "fan_in_fan_out": any(isinstance(rule.conversion, Transposed) for rule in rules),
        "bias": "none",
    }

    def fill(path: Path) -> None:
        weight_files.write_json(path / CONFIG, data)
        shapes: weight_files.Shapes = {PREFIX + name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        weight_files.write(path / WEIGHTS, shapes, ((PREFIX + name, x) for name, x in tensors.items()))

    write_folder(folder, fill)
    return one.kind


def _parts(rules: list[TensorRule], state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the A and B of each public module."""
    for rule in rules:
        name = rule.ours.removesuffix(".weight")
        shared = [one.removesuffix(".weight") for one in (rule.ours, *rule.also)] if rule.also else []
        if any(f"{one}.lora.a" in state for one in shared):
            what = f"has an adapter: the family stores {' and '.join(shared)} in one weight; merge it: --format hf"
            raise ConfigError([Fault(name, what)])
        if f"{name}.lora.a" not in state:
            continue
        a, b = state[f"{name}.lora.a"], state[f"{name}.lora.b"]
        parts = [b] if isinstance(rule.conversion, Transposed) else rule.conversion.part(b)
        for theirs, part in zip(rule.theirs, parts, strict=True):
            module = theirs.removesuffix(".weight")
            yield f"{module}.lora_A.weight", a
            yield f"{module}.lora_B.weight", part.contiguous()


def _short_names(modules: list[str], every: list[str]) -> list[str]:
    """Return the last parts of the names, as people write them, where they select these modules alone."""
    short = list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    chosen = [name for name in every if any(name == one or name.endswith(f".{one}") for one in short)]
    return short if sorted(chosen) == sorted(modules) else modules

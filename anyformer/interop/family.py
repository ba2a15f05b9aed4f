"""A family of public models: its config.json and its weights, each in both directions.

To add one, write `families/NAME.py` with a `Family` and name it in `families/__init__.py`:

    read    the fields of a config.json to a `ModelConfig`; every field is read, or the import names it. Their defaults
            are in transformers_fields.json, which tests/interop/make_transformers_fields.py writes
    write   a `ModelConfig` to fields, without checks: the result is read again, and the model fits the family only
            if both are the same model
    rules   the public tensors that make up each of ours (`weight_rules.py`)
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from anyformer import config as spec
from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.config.spec import did_you_mean
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.same_model import differences, facts
from anyformer.interop.transformers_fields import fields_of
from anyformer.interop.weight_rules import AnyRule, Rule, TensorRule, tensor_rules
from anyformer.nn.model import Transformer

T = TypeVar("T")
BODY = ("none", "embedder")  # kinds of head that count as no head: at most a pooler


class Framing(NamedTuple):
    """Roles of the special tokens around a text, for tokenizer files that do not name them."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


PLAIN = Framing()


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """The names of a program's weights, and the rules that convert them to ours."""

    kind: str
    rules: Callable[[ModelConfig], Iterable[AnyRule]]
    buffers: tuple[str, ...] = ()  # patterns of tensors without information
    unused: tuple[str, ...] = ()  # patterns of tensors that no head uses: skipped with a warning

    def tensor_rules(self, config: ModelConfig, whole: bool = True) -> list[TensorRule]:
        """Return the rules of a model, tensor by tensor."""
        with torch.device("meta"):
            model = Transformer(config)
        return tensor_rules((rule for rule in self.rules(config) if isinstance(rule, Rule)), model, whole)


@dataclass(frozen=True, kw_only=True)
class Family(WeightNames):
    """A family of public models: one `model_type`."""

    shape: spec.Shape
    heads: Mapping[str, str]  # class name to kind of head or "body"; the first of a kind is written
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    text: Framing = PLAIN
    prefix: str = ""  # of the body's weights in a model with a head
    older: tuple[tuple[str, str], ...] = ()  # patterns in tensor names of older files, and their replacements

    def config(self, fields: Fields, classes: Any) -> ModelConfig:
        """Return the model that a config.json describes."""
        found = self._config(fields, classes)
        fields.finish()
        return found

    def _config(self, fields: Fields, classes: Any) -> ModelConfig:
        """Return the model of a config.json that may have recorded faults."""
        name = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
        if not isinstance(name, str):
            known = ", ".join(self.heads)
            raise ConfigError([fields.fault("architectures", f"must name the class of the model, one of {known}")])
        name = next((known for known in self.heads if known.lower() == name.lower()), name)  # once LLaMAForCausalLM
        if name not in self.heads:
            hint = "--ignore-field architectures reads the head that fits the weights best"
            what = f"= {shown(name)}: {did_you_mean(name, self.heads)}; {hint}"
            raise ConfigError([fields.fault("architectures", what)])
        fields.head = self.heads[name]
        schema = fields_of(self.kind)
        fields.known = schema.fields
        for other, field in schema.aliases.items():
            fields.alias(other, field)
        fields.must("is_encoder_decoder", self.shape == "encoder-decoder")
        if fields.maybe("pruned_heads", dict):
            fields.refuse("pruned_heads", "must be empty: layers with fewer heads than the others are not supported")
        with fields.named():
            return self.read(fields)

    def fields(self, config: ModelConfig) -> dict[str, Any]:
        """Return the config.json of a model; raise `ConfigError` with the parts that the family does not support."""
        if config.shape != self.shape:
            raise ConfigError([Fault("", f"is {config.shape}: {self.kind} is {self.shape}")])
        kind = "body" if config.head.kind in BODY else config.head.kind
        name = next((name for name, head in self.heads.items() if head == kind), None)
        if name is None:
            known = ", ".join(dict.fromkeys(self.heads.values()))
            raise ConfigError([Fault("head", f"= '{config.head.kind}': {self.kind} has {known}")])
        found = {"model_type": self.kind, "architectures": [name], **self.write(config)}
        ids = config.special
        found |= {f"{role}_token_id": id for role, id in (("pad", ids.pad), ("bos", ids.bos), ("eos", ids.eos))}
        if ids.stops:
            found["eos_token_id"] = [*([] if ids.eos is None else [ids.eos]), *ids.stops]
        if self.shape == "encoder-decoder":
            found |= {"is_encoder_decoder": True, "decoder_start_token_id": config.special.start}
        if isinstance(config.head, spec.LabelHead):
            found["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.head.count)}
        fields = Fields(found, "config.json", lambda: self._names(config))
        back = self._config(fields, [name])
        if faults := [*differences(config, back, self.kind), *fields.faults()]:
            raise ConfigError(faults)
        return found

    def _names(self, config: ModelConfig) -> list[str]:
        """Return the public tensor names of a model, which may not belong to this family."""
        return [name for rule in self.tensor_rules(config, whole=False) for name in rule.theirs]


def find_family(
    families: Iterable[Family], config: ModelConfig, noun: str = "public family"
) -> tuple[Family, dict[str, Any]]:
    """Return the first family that supports a model, and its config.json; else raise the faults of the nearest.

    `noun`: what the families are to the reader of the error.
    """
    misfits: list[tuple[Family, ConfigError]] = []
    for family in families:
        try:
            return family, family.fields(config)
        except ConfigError as misfit:
            misfits.append((family, misfit))
    family, error = min(misfits, key=lambda pair: (_distance(pair[0], config), len(pair[1].faults)))
    known = f"(no {noun} supports this; {family.kind} is nearest)"
    raise ConfigError(Fault(fault.path, f"{fault.message} {known}") for fault in error.faults)


def _distance(family: Family, config: ModelConfig) -> int:
    """Return the number of parts that differ in kind from the family's default; 1000 for another shape or head."""
    kind = "body" if config.head.kind in BODY else config.head.kind
    name = next((name for name, head in family.heads.items() if head == kind), None)
    if config.shape != family.shape or name is None:
        return 1000
    mine, usual = (_kinds(one) for one in (config, family.config(Fields({}, ""), [name])))
    return len(mine ^ usual) + 1000 * any(key in ("source.kind", "target.kind") for key, _ in mine ^ usual)


def _kinds(config: ModelConfig) -> set[tuple[str, Any]]:
    """Return the kinds of all parts of a model and its first layers."""
    return {(key, value) for key, value in facts(config).items() if key.endswith(".kind") and not _LATER.search(key)}


_LATER = re.compile(r"\.[1-9]\d*\.")


def expect(value: Any, kind: type[T], path: str) -> T:
    """Return a part of a config that must be of one kind; raise otherwise."""
    if not isinstance(value, kind):
        name = "none" if value is None else f"= '{getattr(value, 'kind', type(value).__name__)}'"
        wanted = getattr(kind, "model_fields", {}).get("kind")
        raise ConfigError([Fault(path, f"{name}: must be {wanted.default if wanted else 'there'}")])
    return value


def attention(block: spec.Block, side: spec.Side = "decoder") -> spec.Attention:
    return expect(block.mixer, spec.Attention, f"{side}.blocks.0.mixer")


def stack_of(config: ModelConfig) -> spec.Stack:
    """Return the stack of a model that has one."""
    (stack,) = config.stacks.values()
    return stack


def with_stack(config: ModelConfig, layers: Sequence[spec.Block] | None = None, **changes: Any) -> ModelConfig:
    """Return a model whose one stack has other layers, or other settings."""
    ((side, stack),) = config.stacks.items()
    tiles = {} if layers is None else tile_layers(layers)._asdict()
    return config.model_copy(update={side: stack.model_copy(update=tiles | changes)})


def map_blocks(config: ModelConfig, change: Callable[[spec.Block], spec.Block], **changes: Any) -> ModelConfig:
    """Return a model whose one stack has changed blocks, and other settings."""
    stack = stack_of(config)
    return with_stack(
        config, prefix=tuple(map(change, stack.prefix)), blocks=tuple(map(change, stack.blocks)), **changes
    )


def with_mixer(block: spec.Block, **changes: Any) -> spec.Block:
    """Return a block with other settings of its attention."""
    return block.model_copy(update={"mixer": attention(block).model_copy(update=changes)})


class Tiles(NamedTuple):
    """Prefix and repeated blocks of a stack."""

    prefix: tuple[spec.Block, ...]
    blocks: tuple[spec.Block, ...]


def tile_layers(layers: Sequence[spec.Block]) -> Tiles:
    """Return the fewest blocks that make up these layers."""
    distinct = list(dict.fromkeys(layers))
    kinds, n = [distinct.index(layer) for layer in layers], len(layers)
    ways = ((size - tile, tile) for size in range(1, n + 1) for tile in range(1, size + 1))
    head, tile = next((h, t) for h, t in ways if all(kinds[i] == kinds[i + t] for i in range(h, n - t)))
    return Tiles(tuple(layers[:head]), tuple(layers[head : head + tile]))

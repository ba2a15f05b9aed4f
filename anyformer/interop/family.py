"""A family of public models: its config.json and its weights, each in both directions.

To add one, write `families/NAME.py` with a `Family` and name it in `families/__init__.py`:

    read    the fields of a config.json to a `ModelConfig`; every field is read, or the import names it
    write   a `ModelConfig` to fields, taking what it needs and checking nothing: what was written is read again, and
            only if that is the same model does it fit
    rules   which tensors of theirs make which of ours (`rules.py`)
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from anyformer.config import Attention, Block, Classifier, ConfigError, Fault, ModelConfig, Shape, Side, TokenLabels
from anyformer.config.spec import did_you_mean
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.same_model import differences, facts
from anyformer.interop.schema import schema_of
from anyformer.interop.weight_rules import AnyRule, Rule, Tie, ties
from anyformer.nn.model import Transformer

T = TypeVar("T")
BODY = ("none", "embedder")  # kinds of head that a model without one has: at most a pooler


class Text(NamedTuple):
    """The roles of tokens around a text, for vocab.txt and byte pairs, whose files do not name them."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


PLAIN = Text()


@dataclass(frozen=True)
class Family:
    """One `model_type`."""

    kind: str
    shape: Shape
    heads: Mapping[str, str]  # the class of a model, and its head's kind, or "body"; of a kind, the first is written
    read: Callable[[Fields], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    rules: Callable[[ModelConfig], Iterable[AnyRule]]
    text: Text = PLAIN
    prefix: str = ""  # of the body's weights, which those of a body alone do not have
    buffers: tuple[str, ...] = ()  # patterns of tensors that say nothing
    unused: tuple[str, ...] = ()  # patterns of tensors that no head here uses: left out, and told
    older: tuple[tuple[str, str], ...] = ()  # patterns in names of older files, and what stands there today

    def config(self, given: Fields, classes: Any) -> ModelConfig:
        """Return the model that a config.json describes."""
        found = self._config(given, classes)
        given.finish()
        return found

    def _config(self, given: Fields, classes: Any) -> ModelConfig:
        """Return the model of a config.json that may have recorded faults."""
        name = classes[0] if isinstance(classes, list) and len(classes) == 1 else None
        if not isinstance(name, str):
            known = ", ".join(self.heads)
            raise ConfigError([given.fault("architectures", f"must name the class of the model, one of {known}")])
        name = next((known for known in self.heads if known.lower() == name.lower()), name)  # once LLaMAForCausalLM
        if name not in self.heads:
            hint = "--ignore-field architectures reads the head that fits the weights best"
            what = f"= {shown(name)}: {did_you_mean(name, self.heads)}; {hint}"
            raise ConfigError([given.fault("architectures", what)])
        given.head = self.heads[name]
        schema = schema_of(self.kind)
        given.known = schema.fields
        for other, field in schema.aliases.items():
            given.alias(other, field)
        given.must("is_encoder_decoder", self.shape == "encoder-decoder")
        if given.maybe("pruned_heads", dict):
            given.refuse("pruned_heads", "must be empty: layers with fewer heads than the others are not supported")
        with given.named():
            return self.read(given)

    def fields(self, config: ModelConfig) -> dict[str, Any]:
        """The config.json of a model, or a `ConfigError` that names what of it the family does not have."""
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
        if isinstance(config.head, (TokenLabels, Classifier)):
            found["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.head.labels)}
        given = Fields(found, "config.json", lambda: self._names(config))
        back = self._config(given, [name])
        if faults := [*differences(config, back, self.kind), *given.faults()]:
            raise ConfigError(faults)
        return found

    def ties(self, config: ModelConfig, whole: bool = True) -> list[Tie]:
        """The rules of a model, tensor by tensor."""
        with torch.device("meta"):
            model = Transformer(config)
        return ties((rule for rule in self.rules(config) if isinstance(rule, Rule)), model, whole)

    def _names(self, config: ModelConfig) -> list[str]:
        """Of the tensors of a model that may not be one of this family."""
        return [name for tie in self.ties(config, whole=False) for name in tie.theirs]


def fitting(families: Iterable[Family], config: ModelConfig) -> tuple[Family, dict[str, Any]]:
    """The first family that has such models, and the model's config.json; else what keeps it out of the nearest."""
    misfits: list[tuple[Family, ConfigError]] = []
    for family in families:
        try:
            return family, family.fields(config)
        except ConfigError as misfit:
            misfits.append((family, misfit))
    family, error = min(misfits, key=lambda pair: (_far(pair[0], config), len(pair[1].faults)))
    known = f"(no public form has this; {family.kind} is nearest)"
    raise ConfigError(Fault(fault.path, f"{fault.message} {known}") for fault in error.faults)


def _far(family: Family, config: ModelConfig) -> int:
    """How many parts are of another kind in a family's usual model; another shape, input or head is furthest."""
    kind = "body" if config.head.kind in BODY else config.head.kind
    name = next((name for name, head in family.heads.items() if head == kind), None)
    if config.shape != family.shape or name is None:
        return 1000
    mine, usual = (_kinds(one) for one in (config, family.config(Fields({}, ""), [name])))
    return len(mine ^ usual) + 1000 * any(key in ("source.kind", "target.kind") for key, _ in mine ^ usual)


def _kinds(config: ModelConfig) -> set[tuple[str, Any]]:
    """Of the parts of a model and its first layers."""
    return {(key, value) for key, value in facts(config).items() if key.endswith(".kind") and not _LATER.search(key)}


_LATER = re.compile(r"\.[1-9]\d*\.")


def the(value: Any, kind: type[T], path: str) -> T:
    """A part of a config that a family has in one kind alone."""
    if not isinstance(value, kind):
        name = "none" if value is None else f"= '{getattr(value, 'kind', type(value).__name__)}'"
        wanted = getattr(kind, "model_fields", {}).get("kind")
        raise ConfigError([Fault(path, f"{name}: must be {wanted.default if wanted else 'there'}")])
    return value


def attention(block: Block, side: Side = "decoder") -> Attention:
    return the(block.mixer, Attention, f"{side}.blocks.0.mixer")


class Tiles(NamedTuple):
    """Layers as a stack repeats them."""

    prefix: tuple[Block, ...]
    blocks: tuple[Block, ...]


def tiled(layers: Sequence[Block]) -> Tiles:
    """The fewest blocks that make these layers."""
    distinct = list(dict.fromkeys(layers))
    kinds, n = [distinct.index(layer) for layer in layers], len(layers)
    ways = ((size - tile, tile) for size in range(1, n + 1) for tile in range(1, size + 1))
    head, tile = next((h, t) for h, t in ways if all(kinds[i] == kinds[i + t] for i in range(h, n - t)))
    return Tiles(tuple(layers[:head]), tuple(layers[head : head + tile]))

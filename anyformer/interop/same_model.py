"""Compare two configs by what their models compute, whatever their notation and training settings."""

import re
from typing import Any

from anyformer import config as spec
from anyformer.config import Fault, ModelConfig, pattern_across, pattern_of, position_of, tower_config
from anyformer.config.parse import to_data
from anyformer.interop.rotary_fields import plain_theta

TRAINING = re.compile(r"(.*\.)?(dropout|balance|rate|context|init(\..*)?|(source|target)\.pad)")


def differences(mine: ModelConfig, other: ModelConfig, kind: str) -> list[Fault]:
    """Return the differences of a model from the nearest one of a family, by paths of the first config."""
    left, right = facts(mine), facts(other)
    differing = [key for key in dict.fromkeys((*left, *right)) if left.get(key) != right.get(key)]
    others = {key.removesuffix("kind") for key in differing if key.endswith(".kind")}
    found: dict[str, Fault] = {}
    for key in differing:
        if not any(key.startswith(part) and key != f"{part}kind" for part in others):  # another kind: its fields differ
            path = _path(key, mine)
            other_value = f"{kind} has {_shown(right.get(key))}"
            found.setdefault(path, Fault(path, f"= {_shown(left.get(key))}: {other_value}"))
    return list(found.values())


def facts(config: ModelConfig) -> dict[str, Any]:
    """Return all settings that affect the computation, layer by layer, with derived values filled in."""
    found = _flat(to_data(config.model_copy(update={"encoder": config.encoder, "decoder": config.decoder})))
    found = {key: value for key, value in found.items() if not key.startswith(("encoder.", "decoder."))}
    if "source.image_height" in found:
        found["source.image_width"] = found.get("source.image_width") or found["source.image_height"]
    if config.shape != "encoder-decoder":
        found.pop("special.start", None)
    if (tower := tower_config(config)) is not None:
        found = {key: value for key, value in found.items() if not key.startswith("image_tower.")}
        found |= {f"image_tower.{key}": value for key, value in facts(tower).items()}
    for side, stack in config.stacks.items():
        whole = _flat(to_data(stack))
        if not stack.position.embeds():  # then it is in the layers
            whole = {key: value for key, value in whole.items() if not key.startswith("position.")}
        found |= {f"{side}.{key}": x for key, x in whole.items() if not key.startswith(("blocks", "prefix"))}
        for i, block in enumerate(stack.unrolled()):
            layer = _flat(to_data(_resolved(block, stack, side, config.width)))
            found |= {f"{side}.{i}.{key}": value for key, value in layer.items()}
    return {key: value for key, value in found.items() if not TRAINING.fullmatch(key)}


def _resolved(block: spec.Block, stack: spec.Stack, side: spec.Side, width: int) -> spec.Block:
    """Return a block with all derived values filled in."""
    changes: dict[str, Any] = {}
    mixer, network = block.mixer, block.feedforward
    if isinstance(mixer, spec.Attention):
        scheme: spec.Position = position_of(mixer, stack)
        position = None if scheme.embeds() else scheme
        if isinstance(position, spec.Rotary):
            position = plain_theta(position, mixer.rotary_width(width))
        changes["mixer"] = _sized(mixer, width, pattern=pattern_of(mixer, side), position=position)
    if isinstance(mixer, spec.GatedDelta):
        key, value = mixer.widths(width)
        sizes = {"key_heads": mixer.groups, "key_width": key, "value_width": value}
        changes["mixer"] = mixer.model_copy(update=sizes)
    if block.cross:
        changes["cross"] = _sized(block.cross, width, pattern=pattern_across(block.cross))
    if isinstance(network, (spec.Plain, spec.Gated)):
        changes["feedforward"] = network.model_copy(update={"width": network.hidden(width)})
    elif isinstance(network, spec.Experts):
        expert = network.expert.model_copy(update={"width": network.expert.hidden(width)})
        changes["feedforward"] = network.model_copy(update={"expert": expert})
    return block.model_copy(update=changes)


def _sized(attention: spec.Attention, width: int, **changes: Any) -> spec.Attention:
    key, value = attention.widths(width)
    sizes = {"kv_heads": attention.groups, "key_width": key, "value_width": value}
    return attention.model_copy(update={**sizes, **changes})


def _flat(data: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found


def _path(key: str, config: ModelConfig) -> str:
    """Return the config path of a setting of a layer."""
    side, _, rest = key.partition(".")
    number, _, rest = rest.partition(".")
    if not number.isdigit():
        return key
    stack = config.encoder if side == "encoder" else config.decoder
    if stack is None or int(number) >= stack.depth:
        return f"{side}.depth"
    i, head = int(number), len(stack.prefix)
    return f"{side}.prefix.{i}.{rest}" if i < head else f"{side}.blocks.{(i - head) % len(stack.blocks)}.{rest}"


def _shown(value: Any) -> str:
    return "nothing" if value is None else repr(value)

"""Look up the attention layers of a model by name (`decoder.0.mixer`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from anyformer.config import Side
from anyformer.config.spec import did_you_mean
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.block import Sublayer
from anyformer.nn.model import Transformer
from anyformer.nn.stack import BlockStack

Kind = Literal["encoder", "decoder", "cross"]


def stacks_of(model: Transformer) -> dict[Side, BlockStack]:
    """Return the stacks of a model, in the order in which they run."""
    both: dict[Side, BlockStack | None] = {"encoder": model.encoder, "decoder": model.decoder}
    return {side: stack for side, stack in both.items() if stack is not None}


def attentions(model: Transformer) -> dict[str, MultiHeadAttention]:
    """Return all attention layers in the order in which they run: `encoder.0.mixer`, ..., `decoder.0.cross`, ...

    With shared weights, one module has several names.
    """
    layers = {}
    for side, stack in stacks_of(model).items():
        for i, run in enumerate(stack.runs):
            for name, part in stack.blocks[run].named_children():
                if isinstance(part, Sublayer) and isinstance(part.inner, MultiHeadAttention):
                    layers[f"{side}.{i}.{name}"] = part.inner
    return layers


def parse_name(name: str) -> tuple[Side, int, str]:
    """Return side, layer and sublayer of a name such as `decoder.0.mixer`."""
    side, layer, sublayer = name.split(".")
    return cast(Side, side), int(layer), sublayer


def attentions_by_kind(model: Transformer) -> dict[Kind, dict[int, str]]:
    """Return the names of all attention layers, by kind and layer."""
    names: dict[Kind, dict[int, str]] = {}
    for name in attentions(model):
        side, layer, sublayer = parse_name(name)
        names.setdefault("cross" if sublayer == "cross" else side, {})[layer] = name
    return names


def labels_at(model: Transformer, tokens: Mapping[Side, list[str]], name: str) -> tuple[list[str], list[str]]:
    """Return the tokens of the queries and keys of an attention layer; pooled tokens are joined."""
    side, layer, sublayer = parse_name(name)
    if sublayer == "cross":
        return tokens[side], tokens["encoder"]
    stack, queries = stacks_of(model)[side], tokens[side]
    size = stack.pooling.factor ** stack.levels[layer] if stack.pooling else 1
    pooled = ["".join(queries[i : i + size]) for i in range(0, len(queries), size)]
    return pooled, pooled


def attention_at(model: Transformer, name: str) -> MultiHeadAttention:
    """Return the attention layer with that name; raise if there is none."""
    known = attentions(model)
    if name not in known:
        raise ValueError(f"no attention is called {name!r}: {did_you_mean(name, known)}")
    return known[name]


def check_heads(attention: MultiHeadAttention, name: str, heads: Sequence[int]) -> None:
    """Raise if an attention layer lacks one of the heads."""
    if wrong := [head for head in heads if not -attention.heads <= head < attention.heads]:
        raise ValueError(f"head {wrong[0]}: {name} has heads 0 to {attention.heads - 1}")


def refuse_state(options: Mapping[str, Any], why: str) -> None:
    """Raise if the options hold a cache or segment memory."""
    if wrong := [name for name in ("cache", "past") if options.get(name) is not None]:
        raise ValueError(f"{why}: leave `{wrong[0]}` out")

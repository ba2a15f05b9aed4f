"""View `path`: the stages of a forward pass, in the order in which a token takes them.

A stage is `{kind}.{name}`: the kind is encoder, decoder, cross (attention of a decoder to the encoder) or head.

    tokens, embed, position        the text as ids, their vectors, and what positions add
    norm, qkv, scores, mask,       attention, for one head; `norm` only where a norm comes first
    softmax, values, out
    mix                            a mixer that is not attention, as one stage
    add                            the residual stream after a mixer
    ff, ffadd                      the feed-forward, and the residual stream after it
    layers, final                  the same in all layers, and the final norm
    pool, logits, sample           the head: `pool` for heads that pool tokens

`follow.{level}` walks back from one output (`follow.py`); `follow.check` switches a head off.
"""

from typing import Any, Literal

from torch import nn

from anyformer.config import Side
from anyformer.explore.requests import TextRequest
from anyformer.explore.trace import Trace, last_side, output_kind
from anyformer.explore.view import TextView
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.block import ParallelBlock, Sublayer
from anyformer.nn.heads import PooledHead
from anyformer.nn.inspection.frozen import FROZEN_HEADS
from anyformer.nn.inspection.sublayers import Kind, stacks_of

ATTENTION = ("qkv", "scores", "mask", "softmax", "values", "out")  # of one head
LAYER_STAGES = (*ATTENTION, "norm", "mix", "add", "ff", "ffadd")


class PathView(TextView):
    """The stages by stack, the first token followed, and the kind of output."""

    kind: Literal["path"] = "path"
    group, place, key = "start", 1, "1"

    def answer(self, trace: Trace, request: TextRequest) -> dict[str, Any]:
        model = trace.run.model
        sides = []
        for side, stack in stacks_of(model).items():
            layers = [layer_stages(side, stack.blocks[run]) for run in stack.runs]
            end = [f"{side}.layers"] + ([] if isinstance(stack.final_norm, nn.Identity) else [f"{side}.final"])
            begin = [f"{side}.{name}" for name in ("tokens", "embed", "position")]
            sides.append({"side": side, "begin": begin, "layers": layers, "end": end, "heads": _heads(trace, side)})
        pools = ["head.pool"] if isinstance(model.head, PooledHead) else []
        return {
            "sides": sides,
            "head": [*pools, "head.logits", "head.sample"],
            "follow": _follow(trace),
            "last": last_side(trace.run),
            "says": output_kind(trace.run),
        }


def _follow(trace: Trace) -> list[str]:
    """Return the stages of `follow.py`, from an output back to dimensions."""
    head, side = trace.run.model.head, last_side(trace.run)
    if not isinstance(head, FROZEN_HEADS):
        return []
    pooled = isinstance(head, PooledHead) and head.how in ("mean", "max") and len(trace.reading.tokens[side]) > 1
    attends = any(kind != "encoder" or side == "encoder" for kind in trace.attentions)
    levels = ["positions"] * pooled + ["parts", "tokens"] + ["dimensions", "check"] * attends
    return [f"follow.{level}" for level in levels]


def layer_stages(side: Side, block: Any) -> list[str]:
    """Return the stages of a layer."""
    parallel, stages = isinstance(block, ParallelBlock), list[str]()
    parts = {name: part for name, part in block.named_children() if isinstance(part, Sublayer)}
    for name, part in parts.items():
        kind = "cross" if name == "cross" else side
        if name == "feedforward":
            stages += [f"{side}.ff"] + ([] if parallel else [f"{side}.ffadd"])
            continue
        norm_in = block.norm_in if isinstance(block, ParallelBlock) else part.norm_in
        norms = [one for one in (norm_in, part.norm_in) if not isinstance(one, nn.Identity)]
        stages += [f"{kind}.norm"] if norms else []
        attends = isinstance(part.inner, MultiHeadAttention)
        stages += [f"{kind}.{stage}" for stage in ATTENTION] if attends else [f"{kind}.mix"]
        stages += [] if parallel else [f"{kind}.add"]
    return [*stages, f"{side}.add"] if parallel and parts else stages


def _heads(trace: Trace, side: Side) -> list[int]:
    """Return the number of heads of each layer; the most of its mixer and cross-attention, 0 without attention."""
    found = []
    for i in range(len(stacks_of(trace.run.model)[side].runs)):
        kinds: tuple[Kind, ...] = ("decoder", "cross") if side == "decoder" else ("encoder",)
        names = [trace.attentions[kind][i] for kind in kinds if i in trace.attentions.get(kind, {})]
        found.append(max((trace.attention(name).heads for name in names), default=0))
    return found

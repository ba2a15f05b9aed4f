"""Rules of a stack as a whole: segment memory and pooling. Imports no torch."""

from collections.abc import Iterator

from anyformer.config.block import Side, Stack
from anyformer.config.mixer import NoMixer, Recurrent
from anyformer.config.spec import Fault
from anyformer.config.state_mixer import StateMixer


def stack_faults(stack: Stack, side: Side, has_encoder: bool) -> Iterator[Fault]:
    """Yield the faults of a stack's `memory` and `pooling`; `has_encoder`: the model has one."""
    yield from _memory(stack, side, has_encoder)
    yield from _pooling(stack, side)


def _memory(stack: Stack, side: Side, has_encoder: bool) -> Iterator[Fault]:
    """Yield faults of `memory`: positions must be unlimited, and all layers must keep tokens."""
    if not stack.memory:
        return
    mixers = [block.mixer for block in (*stack.prefix, *stack.blocks)]
    ends, what = stack.ends, f"= {stack.memory}:"
    if side == "encoder" or has_encoder:
        yield Fault("memory", f"{what} only a decoder without an encoder reads a text in segments; leave it out")
    elif stack.position.embeds():
        within = "rotary, alibi or t5"
        yield Fault("memory", f"{what} {stack.position.kind} positions are absolute; choose one of distances: {within}")
    elif ends:
        yield Fault(
            "memory", f"{what} positions go on from segment to segment, and there are {ends[0][0]} {ends[0][1]}"
        )
    elif any(isinstance(mixer, Recurrent | StateMixer) for mixer in mixers):
        yield Fault("memory", f"{what} it keeps tokens for attention, and a recurrent layer has a state; leave one out")
    elif all(isinstance(mixer, NoMixer) for mixer in mixers):
        yield Fault("memory", f"{what} no layer reads other tokens")


def _pooling(stack: Stack, side: Side) -> Iterator[Fault]:
    pooling = stack.pooling
    if not pooling:
        return
    if side == "decoder":
        yield Fault("pooling", "a window would show tokens what comes after them: only an encoder pools")
    if len(pooling.stages) < 2:
        yield Fault("pooling.stages", f"= {list(pooling.stages)}: pooling is between stages, so there are two or more")
    if (layers := sum(pooling.stages) + pooling.tail) != stack.depth:
        yield Fault("depth", f"= {stack.depth}: the stages and the tail of `pooling` are {layers} layers")

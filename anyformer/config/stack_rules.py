"""Rules of a stack as a whole: segment memory, pooling, global tokens and skips. Imports no torch."""

from collections.abc import Iterator

from anyformer.config.block import Side, Stack
from anyformer.config.spec import Fault


def stack_faults(stack: Stack, side: Side, has_encoder: bool, width: int) -> Iterator[Fault]:
    """Yield the faults of a stack's `memory`, `pooling` and global tokens; `has_encoder`: the model has one."""
    yield from _memory(stack, side, has_encoder, width)
    yield from _pooling(stack, side)
    yield from _global_projections(stack, side)


def _memory(stack: Stack, side: Side, has_encoder: bool, width: int) -> Iterator[Fault]:
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
            "memory", f"{what} positions continue from segment to segment, and there are {ends[0][0]} {ends[0][1]}"
        )
    elif any(mixer.has_state for mixer in mixers):
        yield Fault("memory", f"{what} it keeps tokens for attention, and a recurrent layer has a state; leave one out")
    elif kinds := [mixer.kind for mixer in mixers if mixer.stores(width) is None]:
        yield Fault("memory", f"{what} it keeps tokens, and '{kinds[0]}' layers store nothing; leave one out")
    elif all(mixer.is_none for mixer in mixers):
        yield Fault("memory", f"{what} no layer reads other tokens")


def _pooling(stack: Stack, side: Side) -> Iterator[Fault]:
    pooling = stack.pooling
    if not pooling:
        return
    if side == "decoder":
        yield Fault("pooling", "a window would show later tokens: only an encoder pools")
    if len(pooling.stages) < 2:
        yield Fault("pooling.stages", f"= {list(pooling.stages)}: pooling is between stages, so there are two or more")
    if (layers := sum(pooling.stages) + pooling.tail) != stack.depth:
        yield Fault("depth", f"= {stack.depth}: the stages and the tail of `pooling` are {layers} layers")


def _global_projections(stack: Stack, side: Side) -> Iterator[Fault]:
    """Yield faults of separate projections of global tokens: a cache has no room for their keys and values."""
    for name, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
        for i, block in enumerate(blocks):
            mixer, path = block.attention, f"{name}.{i}.mixer.global_projections"
            if block.cross and block.cross.global_projections:
                yield Fault(f"{name}.{i}.cross.global_projections", "= True: across there are no global tokens")
            if mixer is None or not mixer.global_projections:
                continue
            if side == "decoder":
                yield Fault(path, "= True: only an encoder has separate projections of global tokens")
            elif (scheme := mixer.position or stack.position).reads_content():
                yield Fault(path, f"= True: {scheme.kind} positions compare distances with one kind of query and key")


def skip_faults(stack: Stack, width: int) -> Iterator[Fault]:
    """Yield faults of connections that skip layers: of outputs, embeddings and values."""
    for name in ("embedding_skip", "unet_skips"):
        if getattr(stack, name) and stack.pooling:
            yield Fault(name, "= True: layers of a pooled stack read sequences of other lengths: leave pooling out")
    if stack.unet_skips and stack.depth < 2:
        yield Fault("unet_skips", f"= True: needs two layers or more, and depth = {stack.depth}")
    sizes = set[tuple[int, int]]()
    for name, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
        for i, block in enumerate(blocks):
            path, mixer = f"{name}.{i}.mixer.value_residual", block.attention
            if block.cross and block.cross.value_residual:
                yield Fault(f"{name}.{i}.cross.value_residual", "= True: values across are those of the encoder")
            if mixer is None or not mixer.value_residual:
                continue
            if stack.pooling:
                yield Fault(path, "= True: layers of a pooled stack have values of other lengths: leave pooling out")
            elif mixer.latent:
                yield Fault(path, "= True: latent attention stores no values: leave compress out")
            else:
                sizes.add((mixer.groups, mixer.widths(width)[1]))
            if len(sizes) > 1:
                yield Fault(path, "= True: all layers that have it need the same kv_heads and value_width")
                return

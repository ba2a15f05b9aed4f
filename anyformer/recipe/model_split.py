"""Rules for models that several processes share: their layers (`parallel.tensor`) or rows (`parallel.context`)."""

from collections.abc import Iterator

from anyformer.config import Block, Fault, IdInput, ModelConfig


def context_faults(model: ModelConfig) -> Iterator[str]:
    """Yield the parts of a model that need whole rows, each with the reason."""
    for name, source in model.inputs.items():
        if not isinstance(source, IdInput):
            yield f"model.{name} = '{source.kind}' is read as a whole"
    for side, stack in model.stacks.items():
        for name, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
            for i, block in enumerate(blocks):
                if block.mixer.has_state:
                    yield f"model.{side}.{name}.{i}.mixer = '{block.mixer.kind}' reads one token after the other"
        if stack.memory:
            yield f"model.{side}.memory = {stack.memory} stores whole rows"
        if stack.pooling:
            yield f"model.{side}.pooling pools tokens that different processes hold"
    if model.head.further:
        yield "model.head.multi_token predicts tokens that other processes hold"


def tensor_faults(config: ModelConfig, size: int) -> Iterator[Fault]:
    """Yield faults of a model whose layers `size` processes share (`parallel.tensor`)."""
    for side, stack in config.stacks.items():
        for field, blocks in (("prefix", stack.prefix), ("blocks", stack.blocks)):
            for i, block in enumerate(blocks):
                yield from (fault.under(f"{side}.{field}.{i}") for fault in _block_faults(block, config.width, size))
    if config.head.further:
        what = f"is computed by one process: leave it out, or set parallel.tensor = 1, not {size}"
        yield Fault("head.multi_token", what)
    for name, tokens in config.inputs.items():
        if tokens.rows % size:
            fix = f"set it to {-(-tokens.rows // size) * size}, and the last rows are unused"
            yield Fault(f"{name}.vocab", f"= {tokens.rows}: {_must_divide(size)}; {fix}")


def _block_faults(block: Block, width: int, size: int) -> Iterator[Fault]:
    for name, mixer in block.attentions():
        if mixer.qk_norm_over != "head" and size > 1:
            what = f"= '{mixer.qk_norm_over}': heads with their own norms, or one for all, cannot be split"
            yield Fault(f"{name}.qk_norm_over", f"{what}; set parallel.tensor = 1")
        for field, heads in (("heads", mixer.heads), ("kv_heads", mixer.groups)):
            if heads % size and (field == "heads" or mixer.heads % size == 0):
                fix = "lower parallel.tensor, or change the heads"
                yield Fault(f"{name}.{field}", f"= {heads}: {_must_divide(size)}; {fix}")
    for field, value, whole in block.feedforward.divided_sizes(width):
        if whole % size and whole == value:
            fix = f"set it to {-(-whole // size) * size}"
            yield Fault(f"feedforward.{field}", f"= {whole}: {_must_divide(size)}; {fix}")
        elif whole % size:
            what = f"= {value}: the {field} network is {whole} wide, and this {_must_divide(size)}"
            yield Fault(f"feedforward.{field}", what)


def _must_divide(size: int) -> str:
    return f"must be a multiple of parallel.tensor = {size}"

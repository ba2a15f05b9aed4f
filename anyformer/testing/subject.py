"""A part in a small model whose other parts are known to be right."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.config import (
    Activation,
    ConfigError,
    FeedForward,
    Head,
    IdInput,
    Input,
    Mixer,
    ModelConfig,
    Norm,
    Pattern,
    Position,
    Router,
    Side,
    Stack,
    Tokens,
    io,
)
from anyformer.config.part import Part
from anyformer.nn.block import Sublayer
from anyformer.nn.experts import ExpertMixture
from anyformer.nn.model import Transformer

VOCAB, WIDTH, LENGTH, ROWS = 12, 8, 9, 3

Around = Callable[[Part], dict[str, Any]]
"""Returns the parts of a block, the position scheme of its stack, the input and the head, with a part in them."""

AROUND: dict[type[Part], Around] = {
    Position: lambda part: {"position": part},
    Pattern: lambda part: {"mixer": {"heads": 2, "pattern": part}},
    Norm: lambda part: {"norm": part},
    Activation: lambda part: {"feedforward": {"kind": "plain", "width": 6, "activation": part}},
    FeedForward: lambda part: {"feedforward": part},
    Router: lambda part: {"feedforward": {"kind": "experts", "count": 4, "top_k": 2, "router": part}},
    Mixer: lambda part: {"mixer": part},
    Input: lambda part: {"input": part} if isinstance(part, IdInput) else {"input": part, "head": "none"},
    Head: lambda part: {"head": part},
}


@dataclass(frozen=True)
class Subject:
    """A part, and the config of a model with it."""

    part: Part
    config: ModelConfig

    @cached_property
    def model(self) -> Transformer:
        """The model; laws that change it copy it."""
        return built(self.config)

    def copy(self) -> Transformer:
        return deepcopy(self.model)

    @property
    def side(self) -> Side:
        return "encoder" if self.config.decoder is None else "decoder"

    @property
    def stack(self) -> Stack:
        return self.config.stacks[self.side]

    @property
    def reads_back(self) -> bool:
        """True if a token reads no later one, as the mixer claims."""
        return self.stack.blocks[0].mixer.reads_back(self.side)

    @property
    def generates(self) -> bool:
        return self.config.generates and self.reads_back

    @property
    def is_sequence(self) -> bool:
        """True if it gives something for each of its token ids."""
        return isinstance(self.config.last_input, IdInput) and not self.config.head.per_row

    @cached_property
    def ids(self) -> Tensor:
        """The inputs of the model: token ids, mostly."""
        return random_inputs(self.config, 0)

    @cached_property
    def out(self) -> Tensor:
        """The output for `ids`."""
        with torch.no_grad():
            out: Tensor = self.model(self.ids)
        return out

    def modules(self, model: Transformer) -> Iterator[nn.Module]:
        """Yield the modules of the part in a model that are called with activations, if it has any."""
        for module in model.modules():
            if isinstance(self.part, Norm) and isinstance(module, Sublayer):
                yield from (module.norm_in, module.norm_branch, module.norm_sum)
            elif isinstance(self.part, Router) and isinstance(module, ExpertMixture):
                yield module.router
        if isinstance(self.part, Head):
            yield model.head
        if isinstance(self.part, Mixer | FeedForward):
            name = "mixer" if isinstance(self.part, Mixer) else "feedforward"
            blocks = model.get_submodule(self.side).get_submodule("blocks").children()
            inners = (block.get_submodule(f"{name}.inner") for block in blocks if name in dict(block.named_children()))
            yield from inners


def built(config: ModelConfig, seed: int = 0) -> Transformer:
    """Return a model in double precision and eval mode, with random weights: none is 0 or 1."""
    torch.manual_seed(seed)
    model = Transformer(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def close(found: Tensor, expected: Tensor, message: str) -> None:
    assert found.shape == expected.shape, f"{message}: the shape is {list(found.shape)}, not {list(expected.shape)}"
    assert bool(found.isfinite().all()), f"{message}: not all values are finite"
    error = float((found - expected).detach().abs().max()) if found.numel() else 0.0
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6), f"{message}: they differ by {error:.2g}"


def random_ids(seed: int, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def random_inputs(config: ModelConfig, seed: int, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    """Return ids, or other values that a model reads."""
    if isinstance(config.last_input, IdInput):
        return random_ids(seed, rows, length)
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(config.last_input.reads(rows, length), generator=chance, dtype=torch.double)


def model_with(side: Side = "decoder", **parts: Any) -> ModelConfig:
    """Return a model of two blocks with these parts of a block: of attention, if no mixer is given.

    `position`, `input` and `head` are those of the model.
    """
    name, head = {"decoder": ("target", "lm"), "encoder": ("source", "masked_lm")}[side]
    position, head, read = (parts.pop(*one) for one in (("position", "none"), ("head", head), ("input", Tokens())))
    read = read.model_copy(update={"vocab": VOCAB}) if isinstance(read, IdInput) else read
    block = {"mixer": {"heads": 2}, "norm": "rms", **parts}
    stack = {"depth": 2, "blocks": block, "position": position, "final_norm": "rms"}
    return io.build(ModelConfig, {"width": WIDTH, name: read, side: stack, "head": head})


def subjects(part: Part, around: dict[str, Any]) -> list[Subject]:
    """Return a decoder with a part, and an encoder if the part is about what tokens read, or fits into no decoder."""
    found, fault = list[Subject](), None
    sides: tuple[Side, ...] = ("decoder", "encoder")
    for side in sides:
        if found and not isinstance(part, Position | Pattern | Mixer):
            break
        try:
            found.append(Subject(part, model_with(side, **around)))
        except ConfigError as error:
            fault = fault or error
    if not found:
        assert fault is not None
        raise fault
    return found

"""Small models and inputs for tests of inspection."""

from hypothesis import settings
from torch import Tensor

from anyformer.config import (
    LM,
    Attention,
    Block,
    LayerNorm,
    ModelConfig,
    NoFeedForward,
    NoNorm,
    NoPosition,
    Plain,
    Position,
    Sinusoidal,
    Stack,
    Tokens,
)
from anyformer.nn.model import Transformer
from tests.strategies import build, tokens

READ = Tokens(vocab=11)
BLOCK = Block(mixer=Attention(heads=2), feedforward=Plain(width=8))
PAIR = ModelConfig(
    width=8,
    source=READ,
    target=READ,
    encoder=Stack(depth=2, blocks=(BLOCK,), position=Sinusoidal()),
    decoder=Stack(depth=3, blocks=(BLOCK.model_copy(update={"cross": Attention(heads=4)}),), final_norm=LayerNorm()),
    head=LM(),
)
SOURCE, TARGET = tokens(0, 2, 5), tokens(1, 2, 4)
FEW_EXAMPLES = settings(max_examples=15)


def read(config: ModelConfig) -> tuple[Tensor, ...]:
    return (SOURCE, TARGET) if config.shape == "encoder-decoder" else (TARGET,)


NO_POSITION = NoPosition()


def decoder(block: Block, position: Position = NO_POSITION, depth: int = 2, **changes: object) -> Transformer:
    stack = Stack(depth=depth, blocks=(block,), position=position)
    config = ModelConfig(width=8, target=READ, decoder=stack, head=LM())
    return build(config.model_copy(update=changes))


def bare(position: Position, **changes: object) -> Transformer:
    """Build a decoder without a norm before the first scores."""
    attention = Attention(heads=2, kv_heads=1, bias=True).model_copy(update=changes)
    return decoder(Block(mixer=attention, feedforward=NoFeedForward(), norm=NoNorm()), position)

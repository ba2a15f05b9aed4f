"""Small decoders and encoder-decoders for tests of decoding."""

from typing import Any

from anyformer.config import LM, Attention, Block, ModelConfig, Rotary, Special, Stack, Tokens
from anyformer.nn.model import Transformer
from tests.strategies import VOCAB, build, models, speaks

BLOCK = Block(mixer=Attention(heads=2))
READ = Tokens(vocab=VOCAB)
STACK = Stack(depth=2, blocks=(BLOCK,), position=Rotary())
CROSSING = STACK.model_copy(update={"blocks": (BLOCK.model_copy(update={"cross": Attention(heads=2)}),)})
SPECIAL = Special(pad=0, start=1)
either = models(shapes=("decoder", "encoder-decoder")).filter(speaks)  # or all tokens may be equally likely


def decoder(seed: int = 0, **fields: Any) -> Transformer:
    parts = {"width": 8, "target": READ, "decoder": STACK, "head": LM(), "special": SPECIAL}
    return build(ModelConfig(**{**parts, **fields}), seed)


def pair(seed: int = 0, **fields: Any) -> Transformer:
    parts = {"width": 8, "source": READ, "target": READ, "encoder": STACK, "decoder": CROSSING, "head": LM()}
    return build(ModelConfig(**{**parts, "special": SPECIAL, **fields}), seed)

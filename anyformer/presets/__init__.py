"""Well-known Transformers, each a function of a few numbers. Imports no torch.

Without arguments a preset is the published size. Every number can be given; what is not given follows the family's own
rule: feed-forward width, head width, the ratio of heads to key/value heads. `head` takes the place of the family's own,
and the output is tied only where the head has a vocabulary. Anything else is `model_copy` away. `PRESETS` lists them.

decoders  decoders with layer norms
encoders  encoders, of text and of images
family    what families share
llamas    Llama and its kin
pairs     encoder–decoders
"""

from collections.abc import Callable

from anyformer.config import ModelConfig
from anyformer.presets.decoders import bloom, gpt1, gpt2, gpt3, neox, palm
from anyformer.presets.encoders import bert, bigbird, modernbert, roberta, vit
from anyformer.presets.llamas import deepseek, gemma, gemma2, gemma3, llama, mistral, mixtral, qwen3
from anyformer.presets.pairs import bart, t5, vaswani

_ALL: tuple[Callable[..., ModelConfig], ...] = (
    *(vaswani, t5, bart),
    *(bert, roberta, bigbird, modernbert, vit),
    *(gpt1, gpt2, gpt3, neox, bloom, palm),
    *(llama, mistral, mixtral, qwen3, gemma, gemma2, gemma3, deepseek),
)
PRESETS = {preset.__name__: preset for preset in _ALL}

__all__ = [
    "PRESETS",
    "bart",
    "bert",
    "bigbird",
    "bloom",
    "deepseek",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt1",
    "gpt2",
    "gpt3",
    "llama",
    "mistral",
    "mixtral",
    "modernbert",
    "neox",
    "palm",
    "qwen3",
    "roberta",
    "t5",
    "vaswani",
    "vit",
]

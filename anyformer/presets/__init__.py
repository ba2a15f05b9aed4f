"""Well-known Transformers, each a function of a few numbers. Imports no torch.

Without arguments a preset has the published size. Sizes that are not given follow the family's rule: feed-forward
width, head width, the ratio of heads to key/value heads. `head` replaces the family's head; the output is tied only if
the head has a vocabulary. Change anything else with `model_copy`. `PRESETS` lists them all.

decoders  GPT and other decoders with layer norms
encoders  BERT and other encoders of text, ViT, CLIP
family    parts shared by several families
llamas    Llama, Mistral, Qwen, Gemma, DeepSeek: RMS norms, rotary positions, gated feed-forwards
pairs     encoder-decoders: the 2017 Transformer, T5, BART, Whisper
"""

from collections.abc import Callable

from anyformer.config import ModelConfig
from anyformer.presets.decoders import bloom, gpt1, gpt2, gpt3, neox, palm
from anyformer.presets.encoders import bert, bigbird, clip, modernbert, roberta, vit
from anyformer.presets.llamas import deepseek, gemma, gemma2, gemma3, llama, mistral, mixtral, qwen3
from anyformer.presets.pairs import bart, t5, vaswani, whisper

_ALL: tuple[Callable[..., ModelConfig], ...] = (
    *(vaswani, t5, bart, whisper),
    *(bert, roberta, bigbird, modernbert, vit, clip),
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
    "clip",
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
    "whisper",
]

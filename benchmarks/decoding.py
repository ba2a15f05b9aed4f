"""Tokens decoded: our models and their peers', greedily or by beams, of random weights and the same shape."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
import transformers
from torch import Tensor

from anyformer import presets
from anyformer.config import ModelConfig
from anyformer.decoding.beam import beam_search
from anyformer.decoding.decode import generate
from anyformer.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.nn.quantise import quantise
from benchmarks.ctranslate import ctranslate
from benchmarks.sheet import DEVICE, Way
from benchmarks.training import marian

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def built(config: Callable[[], ModelConfig]) -> Transformer:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Transformer(config()).to(DTYPE).eval()


def ours(
    config: Callable[[], ModelConfig], ids: Tensor, new: int, beams: int = 1, bits: Any = None, fused: bool = True
) -> Way:
    """Compiled, or as it is. A decoder reads all weights for each token that it adds to all rows."""

    def make() -> Callable[[], Tensor]:
        model = built(config)
        model = model if bits is None else quantise(model, bits)
        if beams > 1:
            return lambda: beam_search(model, ids, beams=beams, max_new_tokens=new, compile=fused).ids
        return lambda: generate(model, ids, max_new_tokens=new, compile=fused)

    size = DTYPE.itemsize if bits is None else bits / 8
    return Way("ours", make, reads=None if beams > 1 or config().encoder else new * size * count(config()).parameters)


def theirs(build: Callable[[], Any], ids: Tensor, new: int, beams: int = 1, **how: Any) -> Way:
    def make() -> Callable[[], Tensor]:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = build().to(DTYPE).eval()
        options = {"do_sample": False, "num_beams": beams, "pad_token_id": 0, "eos_token_id": None, **how}
        return lambda: model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **options
        )

    return Way("theirs", make)


def gpt2(
    depth: int, width: int, heads: int, vocab: int, rows: int, prompt: int, new: int
) -> tuple[int, dict[str, Way]]:
    """Tokens of a call, and the ways."""
    ids = torch.randint(5, vocab, (rows, prompt), device=DEVICE)

    def config() -> ModelConfig:
        return presets.gpt2(depth=depth, width=width, heads=heads, vocab=vocab)

    def hf() -> Any:
        sizes = {"n_layer": depth, "n_embd": width, "n_head": heads, "vocab_size": vocab}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))

    return rows * new, {
        "ours": ours(config, ids, new, fused=False),
        "ours, compiled": ours(config, ids, new),
        "ours, 4 bits, compiled": ours(config, ids, new, bits=4),
        "transformers": theirs(hf, ids, new),
    }


def base(
    depth: int, width: int, heads: int, ff: int, vocab: int, rows: int, source: int, new: int, beams: int
) -> tuple[int, dict[str, Way]]:
    """Of the hypotheses that are returned."""
    ids = torch.randint(5, vocab, (rows, source), device=DEVICE)

    def config() -> ModelConfig:
        made = presets.vaswani(depth=depth, width=width, heads=heads, ff=ff, vocab=vocab, dropout=0.0)
        return made.model_copy(update={"special": made.special.model_copy(update={"start": 1})})

    ways = {
        "ours": ours(config, ids, new, beams),
        "transformers": theirs(lambda: marian(depth, width, heads, ff, vocab), ids, new, beams),
    }
    if DEVICE == "cpu":
        ways |= {f"ours, {bits} bits": ours(config, ids, new, beams, bits) for bits in (8, 4)}
        if find_spec("ctranslate2"):
            numbers = {"CTranslate2": "float32", "CTranslate2 int8": "int8"}
            ways |= {name: ctranslate(lambda: built(config), ids, new, beams, kind) for name, kind in numbers.items()}
    return rows * new, ways


def llama(
    depth: int, width: int, heads: int, kv_heads: int, ff: int, vocab: int, rows: int, prompt: int, new: int
) -> tuple[int, dict[str, Way]]:
    """Theirs with its static cache, which it compiles itself on a GPU."""
    ids = torch.randint(5, vocab, (rows, prompt), device=DEVICE)

    def config() -> ModelConfig:
        made = presets.llama(depth=depth, width=width, heads=heads, kv_heads=kv_heads, ff=ff, vocab=vocab)
        return made.model_copy(update={"tie": "output"})

    def hf() -> Any:
        sizes = {"num_hidden_layers": depth, "hidden_size": width, "intermediate_size": ff, "vocab_size": vocab}
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))

    return rows * new, {
        "ours": ours(config, ids, new),
        "ours, 8 bits": ours(config, ids, new, bits=8),
        "transformers": theirs(hf, ids, new, cache_implementation="static"),
    }

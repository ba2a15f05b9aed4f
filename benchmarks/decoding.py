"""Decoding speed of our models and their peers with the same random weights, greedy or with beams."""

import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
import transformers
from torch import Tensor

from anyformer import presets
from anyformer.config import ModelConfig
from anyformer.generation.beam_search import beam_search
from anyformer.generation.generate import generate
from anyformer.kernels.cross_entropy import token_loss
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.quantise import quantise
from benchmarks import peer_files
from benchmarks.ctranslate import ctranslate
from benchmarks.sheet import DEVICE, Way, same
from benchmarks.training import begun, public, said, vaswani

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32


def built(config: ModelConfig, dtype: torch.dtype = DTYPE) -> Transformer:
    return begun(config).to(dtype).eval()


@torch.no_grad()
def first_loss(config: ModelConfig, ids: Tensor, says: Callable[..., Tensor]) -> float:
    """Return the loss of the prompt, or of a source as its own target; `says` computes the logits."""
    given = (ids, ids) if config.encoder else (ids,)
    return float(token_loss(says(*given), said(config, given)) / ids.numel())


def ours(config: ModelConfig, ids: Tensor, new: int, beams: int = 1, bits: Any = None, fused: bool = True) -> Way:
    """Our model, compiled or eager. A decode step reads all weights once for all rows."""

    def make() -> Callable[[], Tensor]:
        model = built(config)
        model = model if bits is None else quantise(model, bits)
        if beams > 1:
            return lambda: beam_search(model, ids, beams=beams, max_new_tokens=new, compile=fused).ids[:, 0, -new:]
        return lambda: generate(model, ids, max_new_tokens=new, compile=fused)[:, -new:]

    def first() -> float:
        return first_loss(config, ids, built(config))

    reads = None if beams > 1 or config.encoder else new * _weight_bytes(config, bits)
    return Way("ours", make, None if bits else first, reads=reads)


def _weight_bytes(config: ModelConfig, bits: Any) -> float:
    """Return the bytes of all weights. With 4 bits, 32 weights share a scale of 2 bytes, and the head has 8 bits."""
    weights, head = count(config).parameters, config.vocab * config.width
    if bits == 4:
        return head + (weights - head) * (0.5 + 2 / 32)
    return weights * (DTYPE.itemsize if bits is None else bits / 8)


def theirs(config: ModelConfig, kind: str, into: Any, ids: Tensor, new: int, beams: int = 1, **how: Any) -> Way:
    """The model of `transformers` with our weights."""

    def build() -> Any:
        return public(config, kind, into, DTYPE).to(DEVICE).eval()

    def make() -> Callable[[], Tensor]:
        model = build()
        model.config.use_cache = True
        options = {"do_sample": False, "num_beams": beams, "pad_token_id": 0, "eos_token_id": None, **how}
        return lambda: model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **options
        )[:, -new:]

    def first() -> float:
        model, names = build(), ("input_ids", "decoder_input_ids")
        return first_loss(config, ids, lambda *given: model(**dict(zip(names, given, strict=False))).logits)

    return Way("theirs", make, first)


def gpt2(
    depth: int, width: int, heads: int, vocab: int, rows: int, prompt: int, new: int
) -> tuple[int, dict[str, Way]]:
    """Return the number of generated tokens, and the implementations."""
    ids = torch.randint(5, vocab, (rows, prompt), device=DEVICE)
    config = presets.gpt2(depth=depth, width=width, heads=heads, vocab=vocab)
    return rows * new, {
        "ours": ours(config, ids, new, fused=False),
        "ours, compiled": ours(config, ids, new),
        "ours, 4 bits, compiled": ours(config, ids, new, bits=4),
        "transformers": theirs(config, "gpt2", transformers.GPT2LMHeadModel, ids, new),
    }


def base(
    depth: int, width: int, heads: int, ff: int, vocab: int, rows: int, source: int, new: int, beams: int
) -> tuple[int, dict[str, Way]]:
    """Return the number of generated tokens, and the implementations."""
    ids = torch.randint(5, vocab, (rows, source), device=DEVICE)
    made = vaswani(depth=depth, width=width, heads=heads, ff=ff, vocab=vocab, dropout=0.0)
    config = made.model_copy(update={"special": made.special.model_copy(update={"start": 1})})

    ways = {
        "ours": ours(config, ids, new, beams),
        "transformers": theirs(config, "marian", transformers.MarianMTModel, ids, new, beams),
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
    """Ours, and `transformers` with its static cache, which it compiles itself on a GPU."""
    ids = torch.randint(5, vocab, (rows, prompt), device=DEVICE)
    made = presets.llama(depth=depth, width=width, heads=heads, kv_heads=kv_heads, ff=ff, vocab=vocab)
    config = made.model_copy(update={"tie": "output"})
    ways = {
        "ours": ours(config, ids, new),
        "ours, 8 bits": ours(config, ids, new, bits=8),
        "ours, 4 bits": ours(config, ids, new, bits=4),
        "transformers": theirs(config, "llama", transformers.LlamaForCausalLM, ids, new, cache_implementation="static"),
    }
    if peer_files.find("gpt-fast"):
        ways["gpt-fast"] = gptfast(config, ids, new)
    return rows * new, ways


def gptfast(config: ModelConfig, ids: Tensor, new: int) -> Way:
    """The model of gpt-fast with our weights."""

    def build() -> Any:
        return peer_files.gptfast(built(config), config, DEVICE)

    def first() -> float:
        return first_loss(config, ids, lambda ids: peer_files.gptfast_logits(build(), ids))

    return Way("gpt-fast", lambda: peer_files.gptfast_generate(build(), ids, new), first)


def prefill(
    depth: int, width: int, heads: int, kv_heads: int, ff: int, vocab: int, length: int
) -> tuple[int, dict[str, Way]]:
    """Read one prompt and choose the next token. FLOPs: of the weights, the head once, and half of the attention."""
    ids = torch.randint(5, vocab, (1, length), device=DEVICE)
    made = presets.llama(depth=depth, width=width, heads=heads, kv_heads=kv_heads, ff=ff, vocab=vocab)
    config = made.model_copy(update={"tie": "output"})
    body = count(config).parameters - vocab * width
    flops = 2.0 * body * length + 2.0 * vocab * width + 2.0 * depth * width * length**2
    peer = theirs(config, "llama", transformers.LlamaForCausalLM, ids, 1)
    return length, {
        "ours": replace(ours(config, ids, 1), flops=flops, reads=None, first=None),
        "transformers": replace(peer, flops=flops, first=None),
    }


def llama_ids_in_fp32(
    depth: int, width: int, heads: int, kv_heads: int, ff: int, vocab: int, rows: int, prompt: int, new: int
) -> float:
    """Return the fraction of greedy ids on which `transformers` and ours agree in fp32, both eager."""
    ids = torch.randint(5, vocab, (rows, prompt), device=DEVICE)
    made = presets.llama(depth=depth, width=width, heads=heads, kv_heads=kv_heads, ff=ff, vocab=vocab)
    config = made.model_copy(update={"tie": "output"})
    own = generate(built(config, torch.float32), ids, max_new_tokens=new)[:, -new:]
    peer = public(config, "llama", transformers.LlamaForCausalLM, torch.float32).to(DEVICE).eval()
    peer.config.use_cache = True
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "min_new_tokens": new}
    found = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **options)[:, -new:]
    return same({"ours": own, "transformers": found})["transformers"]

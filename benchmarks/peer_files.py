"""Peers that are single model files: nanoGPT and gpt-fast, with our weights.

`BENCH_PEERS` names a folder with `nanoGPT/model.py` and `gpt-fast/model.py`, as their repositories have them; what is
missing is left out. The files are imported as they are.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from anyformer.config import ModelConfig
from anyformer.nn.model import Transformer

TURNED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # matrices that `transformers` stores as [in, out]


def find(project: str) -> Path | None:
    """Return the model file of a project, or None if there is none."""
    path = Path(os.environ.get("BENCH_PEERS", "")) / project / "model.py"
    return path if "BENCH_PEERS" in os.environ and path.is_file() else None


def versions() -> dict[str, str]:
    """Return the projects that are there, with the beginning of the SHA-256 of their model files."""
    paths = {project: find(project) for project in ("nanoGPT", "gpt-fast")}
    return {
        name: f"model.py {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}" for name, path in paths.items() if path
    }


def _module(project: str) -> ModuleType:
    path = find(project)
    assert path is not None
    name = f"peer_{project.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def nanogpt(public: nn.Module, length: int) -> Any:
    """Return nanoGPT's model with the weights of GPT-2 as `transformers` has it."""
    module, config = _module("nanoGPT"), public.config
    sizes = {"block_size": length, "vocab_size": config.vocab_size, "n_layer": config.n_layer}
    model = module.GPT(module.GPTConfig(**sizes, n_head=config.n_head, n_embd=config.n_embd, dropout=0.0, bias=True))
    theirs = model.state_dict()
    given = {name: x.T if name.endswith(TURNED) else x for name, x in public.state_dict().items() if name in theirs}
    model.load_state_dict(given)
    return model


def gptfast(model: Transformer, config: ModelConfig, device: str) -> Any:
    """Return gpt-fast's model with the weights of a Llama of ours; it rotates pairs of neighbours, ours two halves."""
    module, own = _module("gpt-fast"), model.state_dict()
    decoder = config.decoder
    assert decoder is not None
    block: Any = decoder.unrolled()[0]
    heads, groups = block.mixer.heads, block.mixer.groups
    args = module.ModelArgs(
        vocab_size=len(own["target.table.weight"]), n_layer=decoder.depth, n_head=heads, dim=config.width,
        intermediate_size=block.feedforward.width, n_local_heads=groups, rope_base=decoder.position.theta,
        norm_eps=block.norm.eps,
    )  # fmt: skip
    width = config.width // heads
    given = {"tok_embeddings.weight": own["target.table.weight"], "output.weight": own["target.table.weight"]}
    given["norm.weight"] = own["decoder.final_norm.weight"]
    for i in range(decoder.depth):
        at, to = f"decoder.blocks.{i}", f"layers.{i}"
        q, k, v = own[f"{at}.mixer.inner.qkv.weight"].split([heads * width, groups * width, groups * width])
        given[f"{to}.attention.wqkv.weight"] = torch.cat((_neighbours(q, width), _neighbours(k, width), v))
        given[f"{to}.attention.wo.weight"] = own[f"{at}.mixer.inner.out.weight"]
        gate, up = own[f"{at}.feedforward.inner.gate_up.weight"].chunk(2)
        given |= {f"{to}.feed_forward.w1.weight": gate, f"{to}.feed_forward.w3.weight": up}
        given[f"{to}.feed_forward.w2.weight"] = own[f"{at}.feedforward.inner.down.weight"]
        given[f"{to}.attention_norm.weight"] = own[f"{at}.mixer.norm_in.weight"]
        given[f"{to}.ffn_norm.weight"] = own[f"{at}.feedforward.norm_in.weight"]
    with torch.device("meta"):
        peer = module.Transformer(args)
    peer.load_state_dict(given, assign=True)
    return peer.to(device).eval()


def _neighbours(weight: Tensor, width: int) -> Tensor:
    """Reorder the rows of each head from two halves to pairs of neighbours."""
    return weight.unflatten(0, (-1, 2, width // 2)).transpose(1, 2).flatten(0, 2)


@torch.no_grad()
def gptfast_logits(peer: Any, ids: Tensor) -> Tensor:
    with torch.device(ids.device):
        peer.setup_caches(*ids.shape)
        return peer(ids, torch.arange(ids.shape[1]))


def gptfast_generate(peer: Any, ids: Tensor, new: int) -> Callable[[], Tensor]:
    """Return a function that decodes greedily: its step compiled with CUDA graphs, as its script does."""
    (rows, length), device = ids.shape, ids.device
    with torch.device(device):
        peer.setup_caches(rows, length + new)

    def choose(token: Tensor, at: Tensor) -> Tensor:
        return peer(token, at)[:, -1].argmax(-1, keepdim=True)

    step = torch.compile(choose, mode="reduce-overhead", fullgraph=True) if device.type == "cuda" else choose

    @torch.no_grad()
    def generate() -> Tensor:
        at = torch.arange(length, device=device)
        found = [choose(ids, at)]
        at = at[-1:] + 1
        while len(found) < new:
            found.append(step(found[-1], at).clone())
            at = at + 1
        return torch.cat(found, dim=1)

    return generate

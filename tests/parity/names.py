"""Weight names between our models and those of `transformers`, and where their layout is not ours.

Several of theirs may be our rows one after the other.
"""

from collections.abc import Callable
from functools import partial

import torch
import transformers as hf
from torch import Tensor
from transformers.pytorch_utils import Conv1D

DEPTH = 2

Names = dict[str, str]


def layers(ours: str, theirs: str, norm: str, *, depth: int = DEPTH, **sublayers: str) -> Names:
    """The names of all blocks. A sublayer of theirs is its norm, then its linear layers in the order of ours."""
    linears = {
        "mixer": ("qkv", "out"),
        "cross": ("q", "kv", "out"),
        "plain": ("up", "down"),
        "gated": ("gate_up", "down"),
        "experts": ("router.linear", "up.weight", "down.weight"),
        "latent": ("latent.down", "latent.norm", "latent.up", "out"),
    }
    names = {}
    for sublayer, parts in sublayers.items():
        home = {"mixer": "mixer", "latent": "mixer", "cross": "cross"}.get(sublayer, "feedforward")
        place = f"{ours}.blocks.{{i}}.{home}"
        ends = (norm, *(f"inner.{linear}" for linear in linears[sublayer]))
        for end, part in zip(ends, parts.split(", "), strict=True):
            names[f"{place}.{end}"] = " ".join(f"{theirs}.{{i}}.{each}" for each in part.split())
    return {a.format(i=i): b.format(i=i) for i in range(depth) for a, b in names.items()}


GPT2 = {
    "target.table": "transformer.wte",
    "decoder.embedder.tables.positions": "transformer.wpe.weight",
    **layers(
        "decoder",
        "transformer.h",
        "norm_in",
        mixer="ln_1, attn.c_attn, attn.c_proj",
        plain="ln_2, mlp.c_fc, mlp.c_proj",
    ),
    "decoder.final_norm": "transformer.ln_f",
}
GPT1 = {
    "target.table": "transformer.tokens_embed",
    "decoder.embedder.tables.positions": "transformer.positions_embed.weight",
    **layers(
        "decoder",
        "transformer.h",
        "norm_sum",
        mixer="ln_1, attn.c_attn, attn.c_proj",
        plain="ln_2, mlp.c_fc, mlp.c_proj",
    ),
}
NEO = {
    **GPT2,
    **layers(
        "decoder",
        "transformer.h",
        "norm_in",
        mixer="ln_1, {0}.q_proj {0}.k_proj {0}.v_proj, {0}.out_proj".format("attn.attention"),
        plain="ln_2, mlp.c_fc, mlp.c_proj",
    ),
}
LLAMA_MIXER = "input_layernorm, self_attn.q_proj self_attn.k_proj self_attn.v_proj, self_attn.o_proj"
GATED = "mlp.gate_proj mlp.up_proj, mlp.down_proj"
EXPERTS = "post_attention_layernorm, mlp.gate, mlp.experts.gate_up_proj, mlp.experts.down_proj"
LATENT = "input_layernorm, {0}.q_proj {0}.kv_a_proj_with_mqa, {0}.kv_a_layernorm, {0}.kv_b_proj, {0}.o_proj"
SHARED = "model.layers.1.mlp.shared_experts"
DEEPSEEK = {  # the first layer is dense, the second has experts
    "target.table": "model.embed_tokens",
    **layers("decoder", "model.layers", "norm_in", latent=LATENT.format("self_attn"), experts=EXPERTS),
    **layers("decoder", "model.layers", "norm_in", depth=1, gated=f"post_attention_layernorm, {GATED}"),
    "decoder.blocks.1.feedforward.inner.shared.gate_up": f"{SHARED}.gate_proj {SHARED}.up_proj",
    "decoder.blocks.1.feedforward.inner.shared.down": f"{SHARED}.down_proj",
    "decoder.final_norm": "model.norm",
    "head.table": "lm_head.weight",
}


def modernbert(depth: int) -> Names:
    """Our first two blocks are their first layer, whose attention has no norm."""
    names = layers(
        "encoder",
        "model.layers",
        "norm_in",
        depth=depth,
        mixer="attn_norm, attn.Wqkv, attn.Wo",
        gated="mlp_norm, mlp.Wi, mlp.Wo",
    )

    def place(name: str) -> str:
        i, rest = name.removeprefix("encoder.blocks.").split(".", 1)
        return f"encoder.blocks.{int(i) + (i != '0' or rest.startswith('feedforward'))}.{rest}"

    del names["encoder.blocks.0.mixer.norm_in"]
    return {
        "source.table": "model.embeddings.tok_embeddings",
        "source.norm": "model.embeddings.norm",
        **{place(ours): theirs for ours, theirs in names.items()},
        "encoder.final_norm": "model.final_norm",
        "head.transform.linear": "head.dense",
        "head.transform.norm": "head.norm",
        "head.bias": "decoder.bias",
    }


VIT = {
    "source.class_token.weight": "embeddings.cls_token",
    "source.project": "embeddings.patch_embeddings.projection",
    "encoder.embedder.tables.positions": "embeddings.position_embeddings",
    **layers(
        "encoder",
        "layers",
        "norm_in",
        mixer="layernorm_before, {0}.q_proj {0}.k_proj {0}.v_proj, {0}.o_proj".format("attention"),
        plain="layernorm_after, mlp.fc1, mlp.fc2",
    ),
    "encoder.final_norm": "layernorm",
    "head.transform.linear": "pooler.dense",
}


def bert_body(theirs: str) -> Names:
    return {
        "source.table": f"{theirs}embeddings.word_embeddings",
        "source.types": f"{theirs}embeddings.token_type_embeddings",
        "source.norm": f"{theirs}embeddings.LayerNorm",
        "encoder.embedder.tables.positions": f"{theirs}embeddings.position_embeddings.weight",
        **layers(
            "encoder",
            f"{theirs}encoder.layer",
            "norm_sum",
            mixer="attention.output.LayerNorm, "
            "attention.self.query attention.self.key attention.self.value, attention.output.dense",
            plain="output.LayerNorm, intermediate.dense, output.dense",
        ),
    }


POOLER = {**bert_body(""), "head.transform.linear": "pooler.dense"}
BERT = {
    **bert_body("bert."),
    "head.transform.linear": "cls.predictions.transform.dense",
    "head.transform.norm": "cls.predictions.transform.LayerNorm",
    "head.bias": "cls.predictions.bias",
}
# -- where their layout is not ours ---------------------------------------------------------------------------------


def by_turns(config: hf.PretrainedConfig, weight: Tensor) -> Tensor:
    """q, k and v take turns by head (NeoX, BLOOM)."""
    return weight.unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def in_halves(weight: Tensor, *, heads: int, still: int) -> Tensor:
    """Rotary turns neighbours (DeepSeek), and ours the numbers of two halves; `still` do not turn."""
    rows = weight.unflatten(0, (heads, -1)) if heads > 1 else weight[None]
    turning = rows[:, still:].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat((rows[:, :still], turning), dim=1).flatten(0, 1)


def apart(config: hf.PretrainedConfig, weight: Tensor) -> Tensor:
    """Keys and values take turns by head (DeepSeek)."""
    rows = weight.unflatten(0, (config.num_attention_heads, -1))
    return torch.cat([part.flatten(0, 1) for part in rows.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)])


def layouts(config: hf.PretrainedConfig) -> dict[str, Callable[[Tensor], Tensor]]:
    """By how the name of a weight ends."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "query_key_value.weight": partial(by_turns, config),
        "query_key_value.bias": partial(by_turns, config),
        "cls_token": lambda x: x[0],
        "position_embeddings": lambda x: x[0],
        "projection.weight": lambda x: x.flatten(1),
    }
    if config.model_type == "deepseek_v2":
        heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        found["q_proj.weight"] = partial(in_halves, heads=heads, still=nope)
        found["kv_a_proj_with_mqa.weight"] = partial(in_halves, heads=1, still=rank)
        found["kv_b_proj.weight"] = partial(apart, config)
    return found


def translated(names: Names, theirs: hf.PreTrainedModel) -> dict[str, Tensor]:
    """Their weights under our names. Every one of theirs is used."""
    weights, changes = dict(theirs.named_parameters()), layouts(theirs.config)
    for name, module in theirs.named_modules():
        if isinstance(module, Conv1D):  # GPT's: [in, out]
            weights[f"{name}.weight"] = module.weight.T
    for name, weight in weights.items():
        weights[name] = next((change(weight) for end, change in changes.items() if name.endswith(end)), weight)
    found, used = {}, set()
    for ours, parts in names.items():
        for end in ("", ".weight", ".bias"):
            sources = [part + end for part in parts.split()]
            if sources[0] in weights:
                found[ours + end] = torch.cat([weights[source] for source in sources])
                used.update(sources)
    assert used == set(weights)
    return found

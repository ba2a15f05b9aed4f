"""The families that `transformers` has too: our preset and their model, both tiny, and the weight names between them.

Weights are random and loud enough that a wrong mask, position, eps or activation shows in the logits.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from anyformer import presets
from anyformer.config import Gelu, LayerNorm, MaskedLM, ModelConfig, Transform
from anyformer.config.edit import override
from anyformer.nn.model import Transformer

DEPTH, WIDTH, HEADS, FF, VOCAB, LENGTH = 2, 32, 4, 48, 97, 64
SIZE = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "ff": FF, "vocab": VOCAB}
PAD = 1

# -- weights: our names and theirs; several of theirs are our rows one after the other --------------------------------

Names = dict[str, str]


def layers(ours: str, theirs: str, norm: str, **sublayers: str) -> Names:
    """The names of all blocks. A sublayer of theirs is its norm, then its linear layers in the order of ours."""
    linears = {
        "mixer": ("qkv", "out"),
        "cross": ("q", "kv", "out"),
        "plain": ("up", "down"),
        "gated": ("gate_up", "down"),
    }
    names = {}
    for sublayer, parts in sublayers.items():
        place = f"{ours}.blocks.{{i}}.{sublayer if sublayer in ('mixer', 'cross') else 'feedforward'}"
        ends = (norm, *(f"inner.{linear}" for linear in linears[sublayer]))
        for end, part in zip(ends, parts.split(", "), strict=True):
            names[f"{place}.{end}"] = " ".join(f"{theirs}.{{i}}.{each}" for each in part.split())
    return {a.format(i=i): b.format(i=i) for i in range(DEPTH) for a, b in names.items()}


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
BLOOM = {
    "target.table": "transformer.word_embeddings",
    "target.norm": "transformer.word_embeddings_layernorm",
    **layers(
        "decoder",
        "transformer.h",
        "norm_in",
        mixer="input_layernorm, self_attention.query_key_value, self_attention.dense",
        plain="post_attention_layernorm, mlp.dense_h_to_4h, mlp.dense_4h_to_h",
    ),
    "decoder.final_norm": "transformer.ln_f",
}
NEOX = {
    "target.table": "gpt_neox.embed_in",
    **layers(
        "decoder",
        "gpt_neox.layers",
        "norm_in",
        mixer="input_layernorm, attention.query_key_value, attention.dense",
        plain="post_attention_layernorm, mlp.dense_h_to_4h, mlp.dense_4h_to_h",
    ),
    "decoder.final_norm": "gpt_neox.final_layer_norm",
    "head.table": "lm_head.weight",
}
GEMMA = {
    "target.table": "model.embed_tokens",
    **layers(
        "decoder",
        "model.layers",
        "norm_in",
        mixer="input_layernorm, self_attn.q_proj self_attn.k_proj self_attn.v_proj, self_attn.o_proj",
        gated="post_attention_layernorm, mlp.gate_proj mlp.up_proj, mlp.down_proj",
    ),
    "decoder.final_norm": "model.norm",
}
LLAMA = {**GEMMA, "head.table": "lm_head.weight"}
QWEN3 = GEMMA | {
    f"decoder.blocks.{i}.mixer.inner.{norm}": f"model.layers.{i}.self_attn.{norm}"
    for i in range(DEPTH)
    for norm in ("q_norm", "k_norm")
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
ROBERTA = {
    **bert_body("roberta."),
    "head.transform.linear": "lm_head.dense",
    "head.transform.norm": "lm_head.layer_norm",
    "head.bias": "lm_head.bias",
}


def t5_side(side: str, ff: str, **cross: str) -> Names:
    own = "layer.0.SelfAttention"
    return {
        f"{side}.schemes.0.tables.buckets": f"{side}.block.0.{own}.relative_attention_bias.weight",
        **layers(
            side,
            f"{side}.block",
            "norm_in",
            mixer=f"layer.0.layer_norm, {own}.q {own}.k {own}.v, {own}.o",
            plain=f"{ff}.layer_norm, {ff}.DenseReluDense.wi, {ff}.DenseReluDense.wo",
            **cross,
        ),
        f"{side}.final_norm": f"{side}.final_layer_norm",
    }


T5_CROSS = "layer.1.layer_norm, {0}.q, {0}.k {0}.v, {0}.o".format("layer.1.EncDecAttention")
T5 = {
    "source.table": "shared",
    **t5_side("encoder", "layer.1"),
    **t5_side("decoder", "layer.2", cross=T5_CROSS),
}


def bart_side(side: str, read: str, **cross: str) -> Names:
    return {
        f"{read}.norm": f"model.{side}.layernorm_embedding",
        f"{side}.embedder.tables.positions": f"model.{side}.embed_positions.weight",
        **layers(
            side,
            f"model.{side}.layers",
            "norm_sum",
            mixer="self_attn_layer_norm, self_attn.q_proj self_attn.k_proj self_attn.v_proj, self_attn.out_proj",
            plain="final_layer_norm, fc1, fc2",
            **cross,
        ),
    }


BART_CROSS = "{0}_layer_norm, {0}.q_proj, {0}.k_proj {0}.v_proj, {0}.out_proj".format("encoder_attn")
BART = {
    "source.table": "model.shared",
    **bart_side("encoder", "source"),
    **bart_side("decoder", "target", cross=BART_CROSS),
}


def translated(names: Names, theirs: hf.PreTrainedModel) -> dict[str, Tensor]:
    """Their weights under our names. Every one of theirs is used."""
    weights = dict(theirs.named_parameters())
    for name, module in theirs.named_modules():
        if isinstance(module, Conv1D):  # GPT's: [in, out]
            weights[f"{name}.weight"] = module.weight.T
        if name.endswith("query_key_value"):  # q, k and v take turns by head
            for kind in ("weight", "bias"):
                by_head = weights[f"{name}.{kind}"].unflatten(0, (theirs.config.num_attention_heads, 3, -1))
                weights[f"{name}.{kind}"] = by_head.transpose(0, 1).flatten(0, 2)
    found, used = {}, set()
    for ours, parts in names.items():
        for end in ("", ".weight", ".bias"):
            sources = [part + end for part in parts.split()]
            if sources[0] in weights:
                found[ours + end] = torch.cat([weights[source] for source in sources])
                used.update(sources)
    assert used == set(weights)
    return found


# -- families -------------------------------------------------------------------------------------------------------


class Family(NamedTuple):
    """One architecture, ours and theirs, both tiny."""

    config: ModelConfig
    names: Names
    theirs: Callable[[], hf.PreTrainedModel]
    numbers: bool = True  # theirs can be told positions
    left: bool = True  # theirs can be padded on the left


def made(model: Any, config: Any, **settings: Any) -> Callable[[], hf.PreTrainedModel]:
    return lambda: model(config(vocab_size=VOCAB, attn_implementation="eager", **settings))


def llama_like(model: Any, config: Any, *, kv_heads: int = 2, **settings: Any) -> Callable[[], hf.PreTrainedModel]:
    return made(
        model,
        config,
        hidden_size=WIDTH,
        intermediate_size=FF,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        max_position_embeddings=LENGTH,
        **{"head_dim": WIDTH // HEADS, "rms_norm_eps": 1e-5, **settings},
    )


def llama(scaling: str = "none", **theirs: Any) -> Family:
    """Llama with grouped heads, and a way to stretch its positions; theirs is named as they name it."""
    config = override(presets.llama(**SIZE, kv_heads=2), [f"decoder.position.scaling={scaling}"])
    parameters = {"rope_parameters": {"rope_theta": 1e4, **theirs}} if theirs else {}
    return Family(config, LLAMA, llama_like(hf.LlamaForCausalLM, hf.LlamaConfig, **parameters))


def gpt(model: Any, config: Any) -> Callable[[], hf.PreTrainedModel]:
    return made(
        model, config, n_embd=WIDTH, n_layer=DEPTH, n_head=HEADS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )


def bert_like(model: Any, config: Any, **settings: Any) -> Callable[[], hf.PreTrainedModel]:
    return made(
        model,
        config,
        hidden_size=WIDTH,
        intermediate_size=FF,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        **{"max_position_embeddings": LENGTH, **settings},
    )


def bloom(width: int, heads: int) -> Family:
    config = presets.bloom(depth=DEPTH, width=width, heads=heads, vocab=VOCAB)
    theirs = made(hf.BloomForCausalLM, hf.BloomConfig, hidden_size=width, n_layer=DEPTH, n_head=heads)
    return Family(config, BLOOM, theirs, numbers=False)


GPT_SIZE = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "vocab": VOCAB, "length": LENGTH}
ROBERTA_LM = MaskedLM(transform=Transform(activation=Gelu(), norm=LayerNorm()))
ROBERTA_SETTINGS = {
    "max_position_embeddings": LENGTH + 2,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,  # as published; the class has BERT's
    "pad_token_id": PAD,
}

FAMILIES = {
    "gpt1": Family(presets.gpt1(**GPT_SIZE), GPT1, gpt(hf.OpenAIGPTLMHeadModel, hf.OpenAIGPTConfig)),
    "gpt2": Family(presets.gpt2(**GPT_SIZE), GPT2, gpt(hf.GPT2LMHeadModel, hf.GPT2Config)),
    "bert": Family(
        presets.bert(**SIZE, length=LENGTH, head=MaskedLM()), BERT, bert_like(hf.BertForMaskedLM, hf.BertConfig)
    ),
    "roberta": Family(
        presets.roberta(**SIZE, length=LENGTH, head=ROBERTA_LM),
        ROBERTA,
        bert_like(hf.RobertaForMaskedLM, hf.RobertaConfig, **ROBERTA_SETTINGS),
        numbers=False,  # it counts the tokens that are not pads
    ),
    "t5": Family(
        presets.t5(**SIZE, key_width=12),
        T5,
        made(
            hf.T5ForConditionalGeneration,
            hf.T5Config,
            d_model=WIDTH,
            d_kv=12,
            d_ff=FF,
            num_layers=DEPTH,
            num_heads=HEADS,
            decoder_start_token_id=0,
        ),
        numbers=False,
    ),
    "bart": Family(
        presets.bart(**SIZE, length=LENGTH),
        BART,
        made(
            hf.BartForConditionalGeneration,
            hf.BartConfig,
            d_model=WIDTH,
            encoder_layers=DEPTH,
            decoder_layers=DEPTH,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=FF,
            decoder_ffn_dim=FF,
            max_position_embeddings=LENGTH,
        ),
        numbers=False,
        left=False,
    ),
    "llama": llama(),
    "llama-linear": llama('{kind="linear", factor=4.0}', rope_type="linear", factor=4.0),
    "llama-yarn": llama(
        '{kind="yarn", factor=4.0, original_length=16}',
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama-llama3": llama(
        '{kind="llama3", factor=8.0, original_length=32}',
        rope_type="llama3",
        factor=8.0,
        original_max_position_embeddings=32,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
    "mistral": Family(
        override(presets.mistral(**SIZE, kv_heads=2), ["decoder.blocks.*.mixer.pattern.before=7"]),
        LLAMA,
        llama_like(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=8),
    ),
    "qwen3": Family(
        presets.qwen3(**SIZE, key_width=12),
        QWEN3,
        llama_like(
            hf.Qwen3ForCausalLM,
            hf.Qwen3Config,
            head_dim=12,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
        ),
    ),
    "gemma": Family(
        presets.gemma(**SIZE, key_width=12),
        GEMMA,
        llama_like(hf.GemmaForCausalLM, hf.GemmaConfig, kv_heads=1, head_dim=12, rms_norm_eps=1e-6),
    ),
    "neox": Family(
        presets.neox(depth=DEPTH, width=64, heads=HEADS, ff=FF, vocab=VOCAB),
        NEOX,
        made(
            hf.GPTNeoXForCausalLM,
            hf.GPTNeoXConfig,
            hidden_size=64,
            intermediate_size=FF,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            hidden_act="gelu_fast",  # as published; the class's default is the exact form
        ),
    ),
    "bloom": bloom(WIDTH, HEADS),
    "bloom-6-heads": bloom(48, 6),
}
POOLED = {
    "bert": Family(presets.bert(**SIZE, length=LENGTH), POOLER, bert_like(hf.BertModel, hf.BertConfig)),
    "roberta": Family(
        presets.roberta(**SIZE, length=LENGTH),
        POOLER,
        bert_like(hf.RobertaModel, hf.RobertaConfig, **ROBERTA_SETTINGS),
        numbers=False,
    ),
}


@cache
def built(family: str, *, pooled: bool = False) -> tuple[Transformer, hf.PreTrainedModel]:
    """Ours and theirs with the same loud weights."""
    config, names, make, *_ = (POOLED if pooled else FAMILIES)[family]
    torch.manual_seed(0)
    theirs = make().eval()
    assert theirs.config._attn_implementation == "eager"
    tables = {"lm_head.weight"} | {
        f"{name}.weight" for name, module in theirs.named_modules() if isinstance(module, nn.Embedding)
    }
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if p.dim() == 1:  # norms around 1 (Gemma's around 0), biases around 0
                p.copy_(p + (0.2 if name.endswith("weight") else 0.02) * torch.randn_like(p))
            elif name in tables and "relative" not in name:
                p.normal_(std=0.05)  # quiet, so that the first norm's eps counts
            else:
                p.normal_(std=0.3)
    ours = Transformer(config).eval()
    ours.load_state_dict(translated(names, theirs))
    return ours, theirs

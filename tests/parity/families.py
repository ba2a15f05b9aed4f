"""The families that `transformers` has too: our preset and their model, both tiny.

Between them are the rules of `anyformer.interop`, or `names.py` for families that are not exchanged. Weights are random
and loud enough that a wrong mask, position, eps or activation shows in the logits.
"""

from collections.abc import Callable
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

from anyformer import presets
from anyformer.config import Gelu, LayerNorm, MaskedLM, ModelConfig, Transform
from anyformer.config.overrides import override
from anyformer.interop.families import FAMILIES as PUBLIC
from anyformer.interop.hf_folder import read_model
from anyformer.interop.same_model import differences
from anyformer.nn.model import Transformer
from tests.parity import names
from tests.parity.names import DEPTH, Names, translated

hf.logging.disable_progress_bar()

WIDTH, HEADS, FF, VOCAB, LENGTH = 32, 4, 48, 97, 64
SIZE = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "ff": FF, "vocab": VOCAB}
PAD = 1


class Family(NamedTuple):
    """One architecture, ours and theirs, both tiny."""

    config: ModelConfig
    names: Names | None  # None: the rules of interop
    theirs: Callable[[], hf.PreTrainedModel]
    numbers: bool = True  # theirs can be told positions
    left: bool = True  # theirs can be padded on the left


def made(model: Any, config: Any, **settings: Any) -> Callable[[], hf.PreTrainedModel]:
    return lambda: model(config(vocab_size=VOCAB, attn_implementation="eager", **settings))


def llama_like(model: Any, config: Any, *, kv_heads: int = 2, **settings: Any) -> Callable[[], hf.PreTrainedModel]:
    usual = {"intermediate_size": FF, "num_hidden_layers": DEPTH, "head_dim": WIDTH // HEADS, "rms_norm_eps": 1e-5}
    return made(
        model,
        config,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        max_position_embeddings=LENGTH,
        **{**usual, **settings},
    )


def llama(scaling: str = "none", **theirs: Any) -> Family:
    """Llama with grouped heads, and a way to stretch its positions; theirs is named as they name it."""
    config = override(presets.llama(**SIZE, kv_heads=2), [f"decoder.position.scaling={scaling}"])
    parameters = {"rope_parameters": {"rope_theta": 1e4, **theirs}} if theirs else {}
    return Family(config, None, llama_like(hf.LlamaForCausalLM, hf.LlamaConfig, **parameters))


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
        num_attention_heads=HEADS,
        **{"num_hidden_layers": DEPTH, "max_position_embeddings": LENGTH, **settings},
    )


def gemma_like(model: Any, config: Any, depth: int, **settings: Any) -> Callable[[], hf.PreTrainedModel]:
    sizes = {"num_hidden_layers": depth, "head_dim": 12, "rms_norm_eps": 1e-6, "sliding_window": 8}
    return llama_like(model, config, kv_heads=2, **sizes, query_pre_attn_scalar=12, **settings)


def without_pooler() -> hf.PreTrainedModel:
    """Which their masked-LM has, and does not use."""
    model = bert_like(hf.BigBirdForMaskedLM, hf.BigBirdConfig, attention_type="original_full")()
    model.bert.pooler = None
    return model


def bloom(width: int, heads: int) -> Family:
    config = presets.bloom(depth=DEPTH, width=width, heads=heads, vocab=VOCAB)
    theirs = made(hf.BloomForCausalLM, hf.BloomConfig, hidden_size=width, n_layer=DEPTH, n_head=heads)
    return Family(config, None, theirs, numbers=False)


GPT_SIZE = {"depth": DEPTH, "width": WIDTH, "heads": HEADS, "vocab": VOCAB, "length": LENGTH}
ROBERTA_LM = MaskedLM(transform=Transform(activation=Gelu(), norm=LayerNorm()))
BIGBIRD_LM = MaskedLM(transform=Transform(activation=Gelu(approximate="tanh"), norm=LayerNorm(eps=1e-12)))
MODERNBERT_LM = MaskedLM(transform=Transform(activation=Gelu(), norm=LayerNorm(bias=False), bias=False))
ROBERTA_SETTINGS = {
    "max_position_embeddings": LENGTH + 2,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,  # as published; the class has BERT's
    "pad_token_id": PAD,
}

FAMILIES = {
    "gpt1": Family(presets.gpt1(**GPT_SIZE), names.GPT1, gpt(hf.OpenAIGPTLMHeadModel, hf.OpenAIGPTConfig)),
    "gpt2": Family(presets.gpt2(**GPT_SIZE), None, gpt(hf.GPT2LMHeadModel, hf.GPT2Config)),
    "gpt3": Family(  # as GPT-Neo: no bias on q, k and v, and scores as they are
        override(
            presets.gpt3(**GPT_SIZE),
            [
                "decoder.blocks.1.mixer.pattern.before=7",
                "decoder.blocks.*.mixer.bias=false",
                "decoder.blocks.*.mixer.scale=none",
            ],
        ),
        names.NEO,
        made(
            hf.GPTNeoForCausalLM,
            hf.GPTNeoConfig,
            hidden_size=WIDTH,
            num_layers=DEPTH,
            attention_types=[[["global", "local"], DEPTH // 2]],
            num_heads=HEADS,
            window_size=8,
            max_position_embeddings=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        ),
    ),
    "bert": Family(
        presets.bert(**SIZE, length=LENGTH, head=MaskedLM()), None, bert_like(hf.BertForMaskedLM, hf.BertConfig)
    ),
    "roberta": Family(
        presets.roberta(**SIZE, length=LENGTH, head=ROBERTA_LM),
        None,
        bert_like(hf.RobertaForMaskedLM, hf.RobertaConfig, **ROBERTA_SETTINGS),
        numbers=False,  # it counts the tokens that are not pads
    ),
    "bigbird": Family(  # theirs draws other random blocks: all see all
        override(presets.bigbird(**SIZE, length=LENGTH, head=BIGBIRD_LM), ["encoder.blocks.*.mixer.pattern=full"]),
        names.BERT,
        without_pooler,
    ),
    "modernbert": Family(
        override(
            presets.modernbert(**{**SIZE, "depth": 4}, head=MODERNBERT_LM),
            [f"encoder.blocks.{i}.mixer.pattern={{kind='window', before=4, after=4}}" for i in (0, 1)],
        ),
        names.modernbert(4),
        bert_like(
            hf.ModernBertForMaskedLM,
            hf.ModernBertConfig,
            num_hidden_layers=4,
            local_attention=8,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), PAD),
        ),
    ),
    "t5": Family(
        presets.t5(**SIZE, key_width=12),
        None,
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
        override(presets.bart(**SIZE, length=LENGTH), ["head.bias=true"]),  # theirs is a buffer
        None,
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
        None,
        llama_like(hf.MistralForCausalLM, hf.MistralConfig, sliding_window=8),
    ),
    "mixtral": Family(
        presets.mixtral(**SIZE, kv_heads=2, experts=4),
        None,
        llama_like(hf.MixtralForCausalLM, hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    ),
    "deepseek": Family(
        override(presets.deepseek(**SIZE, key_width=12, experts=6, top_k=3), ["decoder.prefix.0.feedforward.width=40"]),
        names.DEEPSEEK,
        llama_like(
            hf.DeepseekV2ForCausalLM,
            hf.DeepseekV2Config,
            kv_heads=HEADS,
            head_dim=4,
            rms_norm_eps=1e-6,
            q_lora_rank=None,
            kv_lora_rank=WIDTH // 4,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=8,
            intermediate_size=40,
            moe_intermediate_size=FF,
            n_routed_experts=6,
            num_experts_per_tok=3,
            n_shared_experts=2,
            first_k_dense_replace=1,
        ),
    ),
    "qwen3": Family(
        presets.qwen3(**SIZE, key_width=12),
        None,
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
        None,
        llama_like(hf.GemmaForCausalLM, hf.GemmaConfig, kv_heads=1, head_dim=12, rms_norm_eps=1e-6),
    ),
    "gemma2": Family(
        override(
            presets.gemma2(**SIZE, key_width=12),
            ["decoder.blocks.0.mixer.pattern.before=7", "decoder.blocks.*.mixer.cap=2.0", "head.cap=1.5"],
        ),
        None,
        gemma_like(
            hf.Gemma2ForCausalLM, hf.Gemma2Config, DEPTH, attn_logit_softcapping=2.0, final_logit_softcapping=1.5
        ),
    ),
    "gemma3": Family(
        override(
            presets.gemma3(**{**SIZE, "depth": 6}, kv_heads=2, key_width=12),
            [f"decoder.blocks.{i}.mixer.pattern.before=7" for i in range(5)],
        ),
        None,
        gemma_like(hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, 6),
    ),
    "neox": Family(
        presets.neox(depth=DEPTH, width=64, heads=HEADS, ff=FF, vocab=VOCAB),
        None,
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
    "bert": Family(presets.bert(**SIZE, length=LENGTH), None, bert_like(hf.BertModel, hf.BertConfig)),
    "bigbird": Family(
        override(presets.bigbird(**SIZE, length=LENGTH), ["encoder.blocks.*.mixer.pattern=full"]),
        {**names.POOLER, "head.transform.linear": "pooler"},
        bert_like(hf.BigBirdModel, hf.BigBirdConfig, attention_type="original_full"),
    ),
    "roberta": Family(
        presets.roberta(**SIZE, length=LENGTH),
        None,
        bert_like(hf.RobertaModel, hf.RobertaConfig, **ROBERTA_SETTINGS),
        numbers=False,
    ),
}


@cache
def built(family: str, *, pooled: bool = False) -> tuple[Transformer, hf.PreTrainedModel]:
    """Ours and theirs, by name."""
    return matched((POOLED if pooled else FAMILIES)[family])


def matched(family: Family) -> tuple[Transformer, hf.PreTrainedModel]:
    """Ours and theirs with the same loud weights."""
    torch.manual_seed(0)
    theirs = family.theirs().eval()
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
    ours = Transformer(family.config).eval()
    if family.names is not None:
        ours.load_state_dict(translated(family.names, theirs))
        return ours, theirs
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        found = read_model(folder).model
    faults = differences(family.config, found.config, theirs.config.model_type)
    assert not [
        fault for fault in faults if not fault.path.startswith("special")
    ]  # whose ids are not in a tiny vocabulary
    ours.load_state_dict(found.state_dict())
    return ours, theirs


def norms(family: Family, theirs: hf.PreTrainedModel) -> dict[str, str]:
    """Our norms and theirs, by name."""
    names = family.names
    if names is None:
        rules = PUBLIC[theirs.config.model_type].tensor_rules(family.config)
        pairs = [(rule.ours, rule.theirs[0]) for rule in rules if rule.ours.endswith(".weight")]
        names = {ours.removesuffix(".weight"): theirs.removesuffix(".weight") for ours, theirs in pairs}
    return {ours: theirs for ours, theirs in names.items() if "norm" in ours}

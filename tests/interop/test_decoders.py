"""Public decoders: the same logits and greedy ids here and there, and the way back to the byte."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import anyformer as af
from anyformer.generation.generate import generate
from tests.interop.public import (
    BOS,
    EOS,
    LENGTH,
    PAD,
    TOLERANCE,
    VOCAB,
    WIDTH,
    PublicModel,
    again,
    furthest,
    ragged,
    same_tokens,
    tensors,
)

IDS = {"vocab_size": VOCAB, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def gpt2(**settings: Any) -> PublicModel:
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 5, "n_positions": LENGTH, **IDS}
    return PublicModel(hf.GPT2LMHeadModel, hf.GPT2Config(**{**sizes, **settings}))


def llama(title: str = "Llama", **settings: Any) -> PublicModel:
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": LENGTH,
        **IDS,
    }
    config = getattr(hf, f"{title}Config")(**{**sizes, **settings})
    return PublicModel(getattr(hf, f"{title.removesuffix('Text')}ForCausalLM"), config, ("<s>", "$A"))


def neox(**settings: Any) -> PublicModel:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_position_embeddings": LENGTH,
        **IDS,
    }
    return PublicModel(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**{**sizes, **settings}))


def opt(**settings: Any) -> PublicModel:
    sizes = {
        "hidden_size": WIDTH,
        "ffn_dim": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "max_position_embeddings": LENGTH,
        **IDS,
    }
    return PublicModel(hf.OPTForCausalLM, hf.OPTConfig(**{**sizes, **settings}), ("</s>", "$A"))


def bloom(**settings: Any) -> PublicModel:
    sizes = {"hidden_size": WIDTH, "n_layer": 2, "n_head": 5, **IDS}
    return PublicModel(hf.BloomForCausalLM, hf.BloomConfig(**{**sizes, **settings}))


def falcon(**settings: Any) -> PublicModel:
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": LENGTH}
    return PublicModel(hf.FalconForCausalLM, hf.FalconConfig(**{**sizes, "ffn_hidden_size": 40, **IDS, **settings}))


def moe(title: str = "Qwen3Moe", **settings: Any) -> PublicModel:
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 10}
    return llama(title, **{**sizes, **settings})


def qwen3_next(**settings: Any) -> PublicModel:
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    widths = {
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "head_dim": 8,
        "shared_expert_intermediate_size": 16,
    }
    return moe("Qwen3Next", **{"num_hidden_layers": 4, **heads, **widths, **settings})


def phi(**settings: Any) -> PublicModel:
    return llama("Phi", **{"num_attention_heads": 3, "num_key_value_heads": 1, **settings})


def gptj(**settings: Any) -> PublicModel:
    sizes = {"n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": LENGTH, "rotary_dim": 4, **IDS}
    return PublicModel(hf.GPTJForCausalLM, hf.GPTJConfig(**{**sizes, **settings}))


def gpt_neo(**settings: Any) -> PublicModel:
    sizes = {"hidden_size": WIDTH, "num_layers": 3, "num_heads": 5, "max_position_embeddings": LENGTH, **IDS}
    kinds = {"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": 8}
    return PublicModel(hf.GPTNeoForCausalLM, hf.GPTNeoConfig(**{**sizes, **kinds, **settings}))


def mpt(**settings: Any) -> PublicModel:
    sizes = {"d_model": WIDTH, "n_layers": 2, "n_heads": 5, "max_seq_len": LENGTH, **IDS}
    return PublicModel(hf.MptForCausalLM, hf.MptConfig(**{**sizes, **settings}))


def xglm(**settings: Any) -> PublicModel:
    sizes = {"d_model": WIDTH, "num_layers": 2, "attention_heads": 5, "ffn_dim": 40, "max_position_embeddings": LENGTH}
    return PublicModel(hf.XGLMForCausalLM, hf.XGLMConfig(**{**sizes, **IDS, **settings}), ("</s>", "$A"))


def deepseek(version: int, **settings: Any) -> PublicModel:
    widths = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "kv_lora_rank": 8, "q_lora_rank": 12}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2}
    sizes: dict[str, Any] = {"num_key_value_heads": 6, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
    sizes |= {"topk_method": "group_limited_greedy"} if version == 2 else {}
    return llama(f"DeepseekV{version}", **{**widths, **experts, **sizes, **settings})


def gpt_oss(**settings: Any) -> PublicModel:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 8}
    return llama("GptOss", **{**sizes, **settings})


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5e4, **parameters}}


ORIGINAL = {"original_max_position_embeddings": 16}
DECODERS = {
    "gpt2": gpt2(),
    "gpt2-untied": gpt2(tie_word_embeddings=False, activation_function="relu", n_inner=17, scale_attn_weights=False),
    "llama": llama(),
    "llama-wide-heads": llama(head_dim=10, num_key_value_heads=1, rms_norm_eps=1e-4, **rope()),
    "llama-biases": llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu"),
    "llama-linear": llama(**rope(rope_type="linear", factor=4.0)),
    "llama-llama3": llama(
        **rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL)
    ),
    "llama-yarn": llama(**rope(rope_type="yarn", factor=4.0, **ORIGINAL)),
    "llama-yarn-betas": llama(
        **rope(rope_type="yarn", factor=4.0, beta_fast=16.0, beta_slow=2.0, attention_factor=1.25, **ORIGINAL)
    ),
    "neox": neox(),
    "neox-in-turn": neox(
        use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True, hidden_act="gelu_new", **rope()
    ),
    "opt": opt(),
    "opt-narrow": opt(word_embed_proj_dim=10, do_layer_norm_before=False, activation_function="gelu"),
    "opt-bare": opt(enable_bias=False, tie_word_embeddings=False, _remove_final_layer_norm=True),
    "bloom": bloom(),
    "bloom-untied": bloom(tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    "mistral": llama("Mistral", sliding_window=8),
    "mistral-far": llama("Mistral", sliding_window=None, head_dim=6, tie_word_embeddings=True),
    "mixtral": llama("Mixtral", num_local_experts=3, num_experts_per_tok=2),
    "mixtral-window": llama("Mixtral", num_local_experts=5, num_experts_per_tok=1, sliding_window=8),
    "gemma": llama("Gemma", head_dim=10),
    "gemma2": llama("Gemma2", head_dim=10, sliding_window=8, query_pre_attn_scalar=7, attn_logit_softcapping=2.0),
    "gemma2-uncapped": llama(
        "Gemma2",
        head_dim=8,
        query_pre_attn_scalar=8,
        layer_types=["full_attention"] * 3,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
    ),
    "gemma3": llama("Gemma3Text", head_dim=10, sliding_window=8, query_pre_attn_scalar=10, num_hidden_layers=7),
    "gemma3-linear": llama(
        "Gemma3Text",
        head_dim=8,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
        tie_word_embeddings=False,
    ),
    "qwen2": llama("Qwen2"),
    "qwen2-windows": llama("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": llama("Qwen3", head_dim=10),
    "qwen3-moe": moe(norm_topk_prob=True),
    "qwen3-moe-some": moe(mlp_only_layers=[1], tie_word_embeddings=True, attention_bias=True),
    "falcon": falcon(),
    "falcon-groups": falcon(new_decoder_architecture=True, num_kv_heads=3, tie_word_embeddings=False),
    "falcon-one-norm": falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, **rope()),
    "falcon-in-turn": falcon(multi_query=False, parallel_attn=False, bias=True),
    "mpt": mpt(),
    "mpt-scaled": mpt(n_heads=3, attn_config={"softmax_scale": 0.7}, tie_word_embeddings=False),
    "xglm": xglm(),
    "xglm-unscaled": xglm(scale_embedding=False, activation_function="relu", tie_word_embeddings=False, num_layers=3),
    "phi3": llama("Phi3"),
    "phi3-partial": llama("Phi3", num_attention_heads=3, sliding_window=8, **rope(partial_rotary_factor=0.5)),
    "phi": phi(),
    "phi-normed": phi(
        qk_layernorm=True, tie_word_embeddings=True, hidden_act="relu", **rope(partial_rotary_factor=1.0)
    ),
    "gptj": gptj(),
    "gptj-tied": gptj(tie_word_embeddings=True, rotary_dim=12, n_inner=17, activation_function="relu"),
    "gpt-neo": gpt_neo(),
    "gpt-neo-far": gpt_neo(attention_types=[[["global"], 3]], tie_word_embeddings=False, intermediate_size=17),
    "starcoder2": llama("Starcoder2"),
    "starcoder2-window": llama("Starcoder2", sliding_window=8, use_bias=False, tie_word_embeddings=False, **rope()),
    "smollm3": llama("SmolLM3", no_rope_layer_interval=2),
    "smollm3-windows": llama(
        "SmolLM3", no_rope_layers=[0, 1, 1], use_sliding_window=True, sliding_window=8, mlp_bias=True
    ),
    "olmo2": llama("Olmo2"),
    "olmo2-biases": llama("Olmo2", attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1, **rope()),
    "olmo3": llama("Olmo3", sliding_window=8, num_hidden_layers=5),
    "olmo3-yarn": llama(
        "Olmo3",
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e5, **ORIGINAL},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    ),
    "stablelm": llama("StableLm", num_attention_heads=3),
    "stablelm-normed": llama(
        "StableLm",
        num_attention_heads=3,
        num_key_value_heads=1,
        qk_layernorm=True,
        use_parallel_residual=True,
        use_qkv_bias=True,
        tie_word_embeddings=True,
    ),
    "cohere": llama("Cohere"),
    "cohere-normed": llama("Cohere", use_qk_norm=True, logit_scale=1.0, attention_bias=True, tie_word_embeddings=False),
    "qwen2-moe": moe("Qwen2Moe", head_dim=4, shared_expert_intermediate_size=32),
    "qwen2-moe-some": moe(
        "Qwen2Moe", head_dim=4, shared_expert_intermediate_size=16, qkv_bias=False, mlp_only_layers=[1]
    ),
    "qwen3-next": qwen3_next()._replace(seed=4),
    "qwen3-next-other": qwen3_next(
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_hidden_layers=3,
        linear_num_key_heads=4,
        linear_conv_kernel_dim=2,
        shared_expert_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        tie_word_embeddings=True,
        **rope(partial_rotary_factor=0.5),
    ),
    "deepseek-v2": deepseek(2),
    "deepseek-v2-greedy": deepseek(2, topk_method="greedy", q_lora_rank=None, routed_scaling_factor=2.0),
    "deepseek-v3": deepseek(3),
    "deepseek-v3-yarn": deepseek(
        3,
        attention_bias=True,
        norm_topk_prob=False,
        **rope(rope_type="yarn", factor=4.0, mscale=1.0, mscale_all_dim=0.7, **ORIGINAL),
    ),
    "gpt-oss": gpt_oss(),
    "gpt-oss-far": gpt_oss(layer_types=["full_attention"] * 3, attention_bias=False, swiglu_limit=0.5, **rope()),
    "qwen3-windows": llama(
        "Qwen3", head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=2, attention_bias=True
    ),
}


SHARED = ("falcon", "phi3", "smollm3")  # some of their models belong to GPT-NeoX or Llama, too


@torch.no_grad()
def logits(model: hf.PreTrainedModel, batch: Any) -> Any:
    numbers = {"position_ids": batch.positions} if model.config.model_type != "bloom" else {}
    return model(batch.ids, attention_mask=batch.mask, use_cache=False, **numbers).logits


@pytest.mark.parametrize("name", DECODERS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    public = DECODERS[name]
    theirs = public.saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there")
    for side in ("right", "left"):
        batch = ragged(44, 40, 17, side=side)
        with torch.no_grad():
            found = run.model(batch.ids, segments=batch.segments)
            exact = copy.deepcopy(run.model).double()(batch.ids, segments=batch.segments)
        rounding = furthest(found, exact, batch.real)  # of deep stacks whose norms divide by small numbers
        assert furthest(found, logits(theirs, batch), batch.real) <= min(max(TOLERANCE, 3 * rounding), 2 * TOLERANCE)
    greedy(run.model, theirs)
    kind = public.config.model_type
    kin = kind if kind in SHARED else None
    exported = again(run, tmp_path / "back", hf.AutoModelForCausalLM, kin)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    batch = ragged(44, 40, 17)
    assert torch.equal(logits(exported, batch)[batch.real], logits(theirs, batch)[batch.real])
    same_tokens(run, tmp_path / "back")


def greedy(ours: af.Transformer, theirs: hf.PreTrainedModel) -> None:
    """By a forward pass for each token: no cache of theirs is trusted."""
    batch = ragged(24, 20, 7, side="left")
    found = generate(ours, batch.ids, segments=batch.segments, max_new_tokens=8)[:, -8:]
    for _ in range(8):
        new = logits(theirs, batch)[:, -1:].argmax(-1)
        batch = type(batch)(torch.cat((batch.ids, new), 1), torch.cat((batch.real, new >= 0), 1))
    assert torch.equal(found, batch.ids[:, -8:])
    assert found.unique().numel() > 2


def test_all_ends_and_the_context_travel(tmp_path: Path) -> None:
    """Several ids may end a text, some told beside the config alone; where positions do not end, the context is."""
    llama().saved(tmp_path / "there")
    run, text = af.from_hf(tmp_path / "there"), "abc zebra"
    prompt = torch.tensor(run.task.prompts([text], run.config))
    said = generate(run.model, prompt, max_new_tokens=9)[0, prompt.shape[1] :].tolist()
    other = next(id for i, id in enumerate(said) if i > 2 and id not in said[:i])
    ends = [EOS, 7, other]
    (tmp_path / "there" / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    run = af.from_hf(tmp_path / "there")
    assert (run.config.special.eos, run.config.special.stops, run.config.context) == (EOS, (7, other), LENGTH)
    assert run.generate([text], max_new_tokens=9) == [run.tokenizer.decode(said[: said.index(other)])]
    af.to_hf(run, tmp_path / "back")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text())["eos_token_id"] == ends
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == LENGTH


def test_an_answer_of_no_given_length_stays_within_the_context(tmp_path: Path) -> None:
    llama(eos_token_id=None, max_position_embeddings=24).saved(tmp_path)
    run = af.from_hf(tmp_path)
    room = run.config.context - len(run.task.prompts(["abc"], run.config)[0]) + 1
    assert 0 < room < 24
    assert run.generate(["abc"], stop_ids=[]) == run.generate(["abc"], stop_ids=[], max_new_tokens=room)
    more = {"max_new_tokens": 30, "stop_ids": []}
    assert run.generate(["abc"], **more) == run.generate(["abc"], stop_ids=[])
    assert run.generate(["abc"], **more, context=64)[0] > run.generate(["abc"], stop_ids=[])[0]

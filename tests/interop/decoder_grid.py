"""Fields of random configs of public decoders, for `test_grid.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import strategies as st

from tests.interop.public import LENGTH, PublicModel
from tests.interop.test_decoders import (
    bloom,
    deepseek,
    falcon,
    gpt2,
    gpt_neo,
    gpt_oss,
    gptj,
    llama,
    moe,
    mpt,
    neox,
    opt,
    phi,
    qwen3_next,
    xglm,
)

Fields = dict[str, st.SearchStrategy[Any]]
flags = st.booleans()
depths = st.integers(1, 3)
eps = st.sampled_from([1e-12, 1e-6, 1e-3])
activations = st.sampled_from(["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "relu2", "tanh", "sigmoid"])
windows = st.sampled_from([1, 2, 7, 16, LENGTH])
FULL, NEAR = "full_attention", "sliding_attention"


@st.composite
def ropes(draw: st.DrawFn, *, parts: bool = False, temper: bool = False) -> dict[str, Any]:
    """Every scaling that is read."""
    factor, original = draw(st.sampled_from([1.0, 2.0, 3.5])), draw(st.sampled_from([8, 16, 48]))
    kind = draw(st.sampled_from(["default", "linear", "llama3", "yarn"]))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.sampled_from([100.0, 1e4, 5e5]))}
    if kind != "default":
        found["factor"] = factor
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = original
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.sampled_from([2.0, 4.0]))}
    if kind == "yarn":
        found |= draw(st.sampled_from([{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.5}]))
        found |= draw(st.sampled_from([{}, {"truncate": False}]))
        found |= draw(st.sampled_from([{}, {"mscale": 1.0, "mscale_all_dim": 0.707}])) if temper else {}
    if parts:
        found["partial_rotary_factor"] = draw(st.sampled_from([0.25, 0.5, 1.0]))
    return found


# (heads, groups) of a width of 24
GROUPS = [(1, 1), (2, 1), (3, 3), (3, 1), (4, 2), (6, 3), (6, 2), (12, 4)]
LLAMA: Fields = {
    "grouped": st.sampled_from(GROUPS),
    "num_hidden_layers": depths,
    "intermediate_size": st.sampled_from([17, 40]),
    "rms_norm_eps": eps,
    "tie_word_embeddings": flags,
    "rope_parameters": ropes(),
}
HEAD: Fields = {"head_dim": st.sampled_from([2, 8, 10])}
GEMMA: Fields = (
    {key: draw for key, draw in LLAMA.items() if key != "rope_parameters"} | HEAD | {"attention_bias": flags}
)
KINDS = {"layer_types": st.lists(st.sampled_from([FULL, NEAR]), min_size=3, max_size=3)}
CAPPED: Fields = {
    **GEMMA,
    **KINDS,
    "num_hidden_layers": st.just(3),
    "sliding_window": windows,
    "query_pre_attn_scalar": st.sampled_from([1, 5, 24]),
    "hidden_activation": activations,
    "attn_logit_softcapping": st.sampled_from([None, 1.0, 50.0]),
    "final_logit_softcapping": st.sampled_from([None, 2.0]),
}
QWEN: Fields = LLAMA | {
    "hidden_act": activations,
    "use_sliding_window": flags,
    "sliding_window": windows,
    "max_window_layers": st.integers(0, 3),
}
PHI: Fields = LLAMA | {
    "grouped": st.sampled_from([(1, 1), (2, 1), (3, 3), (3, 1)]),
    "hidden_act": activations,
    "rope_parameters": st.builds(
        lambda theta, part: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part},
        theta=st.sampled_from([100.0, 1e4]),
        part=st.sampled_from([0.5, 1.0]),
    ),
    "sliding_window": st.none() | windows,
}
PHI1: Fields = {
    "grouped": st.sampled_from([(1, 1), (2, 1), (3, 3), (3, 1)]),
    "num_hidden_layers": depths,
    "intermediate_size": st.sampled_from([1, 40]),
    "hidden_act": activations,
    "layer_norm_eps": eps,
    "qk_layernorm": flags,
    "tie_word_embeddings": flags,
    "rope_parameters": PHI["rope_parameters"],
}
NEOX: Fields = {
    "num_attention_heads": st.sampled_from([1, 2, 3, 6]),
    "num_hidden_layers": depths,
    "intermediate_size": st.sampled_from([1, 40]),
    "hidden_act": activations,
    "layer_norm_eps": eps,
    "use_parallel_residual": flags,
    "attention_bias": flags,
    "tie_word_embeddings": flags,
    "rope_parameters": ropes(parts=True).filter(lambda rope: rope["rope_type"] in ("default", "linear")),
}

DEEPSEEK: Fields = {
    "num_hidden_layers": st.integers(2, 3),  # a model without experts is not written
    "intermediate_size": st.sampled_from([17, 40]),
    "first_k_dense_replace": st.integers(0, 1),
    "rms_norm_eps": eps,
    "tie_word_embeddings": flags,
    "q_lora_rank": st.sampled_from([None, 12]),
    "qk_nope_head_dim": st.sampled_from([2, 6]),
    "v_head_dim": st.sampled_from([3, 8]),
    "num_experts_per_tok": st.integers(1, 4),
    "n_shared_experts": st.integers(1, 2),
    "routed_scaling_factor": st.sampled_from([1.0, 2.5]),
    "n_group": st.sampled_from([2, 4]),
    "topk_group": st.just(2),
    "hidden_act": activations,
    "rope_parameters": ropes(temper=True),
}
FALCONS = [{"multi_query": shared, "parallel_attn": side} for shared in (True, False) for side in (True, False)]
FALCONS += [
    {"new_decoder_architecture": True, "num_kv_heads": n, "num_ln_in_parallel_attn": m} for n in (1, 2) for m in (1, 2)
]

Grid = dict[str, tuple[Callable[..., PublicModel], Fields]]
DECODER_GRID: Grid = {
    "gpt2": (
        gpt2,
        {
            "n_head": st.sampled_from([1, 3, 5, 15]),
            "n_layer": depths,
            "n_inner": st.sampled_from([None, 1, 17]),
            "activation_function": activations,
            "layer_norm_epsilon": eps,
            "scale_attn_weights": flags,
            "tie_word_embeddings": flags,
        },
    ),
    "llama": (llama, LLAMA | HEAD | {"attention_bias": flags, "mlp_bias": flags, "hidden_act": activations}),
    "mistral": (llama, LLAMA | HEAD | {"sliding_window": st.none() | windows, "hidden_act": activations}),
    "mixtral": (
        llama,
        LLAMA
        | HEAD
        | {
            "intermediate_size": st.sampled_from([16, 40]),  # theirs multiplies by multiples of 16 bytes
            "num_local_experts": st.integers(2, 4),
            "num_experts_per_tok": st.integers(1, 2),
            "sliding_window": st.none() | windows,
        },
    ),
    "qwen2": (llama, QWEN),
    "qwen3": (llama, QWEN | HEAD | {"attention_bias": flags}),
    "qwen3_moe": (
        moe,
        LLAMA
        | HEAD
        | {
            "num_experts": st.integers(2, 4),
            "num_experts_per_tok": st.integers(1, 2),
            "norm_topk_prob": flags,
            "attention_bias": flags,
        },
    ),
    "phi3": (llama, PHI),
    "gemma": (llama, GEMMA | {"rope_parameters": ropes()}),
    "gemma2": (llama, CAPPED | {"rope_parameters": ropes()}),
    "gemma3_text": (
        llama,
        CAPPED
        | {
            "attn_logit_softcapping": st.none(),
            "rope_parameters": st.fixed_dictionaries({FULL: ropes(), NEAR: ropes()}),
        },
    ),
    "gpt_neox": (neox, NEOX),
    "opt": (
        opt,
        {
            "num_attention_heads": st.sampled_from([1, 3, 5, 15]),
            "num_hidden_layers": depths,
            "ffn_dim": st.sampled_from([1, 40]),
            "word_embed_proj_dim": st.sampled_from([4, 30]),
            "do_layer_norm_before": flags,
            "_remove_final_layer_norm": flags,
            "activation_function": activations,
            "enable_bias": flags,
            "tie_word_embeddings": flags,
        },
    ),
    "bloom": (
        bloom,
        {
            "n_head": st.sampled_from([1, 3, 5, 6, 15]),
            "n_layer": depths,
            "layer_norm_epsilon": eps,
            "tie_word_embeddings": flags,
        },
    ),
    "falcon": (
        falcon,
        {
            "num_attention_heads": st.sampled_from([2, 6, 12]),
            "num_hidden_layers": depths,
            "shared": st.sampled_from(FALCONS),
            "bias": flags,
            "tie_word_embeddings": flags,
            "layer_norm_epsilon": eps,
            "rope_parameters": ropes(),
        },
    ),
    "mpt": (
        mpt,
        {
            "n_heads": st.sampled_from([1, 3, 5, 15]),
            "n_layers": depths,
            "layer_norm_epsilon": eps,
            "attn_config": st.fixed_dictionaries({"softmax_scale": st.sampled_from([None, 0.3])}),
            "tie_word_embeddings": flags,
        },
    ),
    "xglm": (
        xglm,
        {
            "attention_heads": st.sampled_from([1, 3, 5, 15]),
            "num_layers": depths,
            "ffn_dim": st.sampled_from([1, 40]),
            "activation_function": activations,
            "scale_embedding": flags,
            "tie_word_embeddings": flags,
        },
    ),
    "phi": (phi, PHI1),
    "gptj": (
        gptj,
        {
            "n_head": st.sampled_from([1, 2, 3]),
            "n_layer": depths,
            "n_inner": st.sampled_from([None, 1, 17]),
            "rotary_dim": st.sampled_from([2, 6, 12]),
            "activation_function": activations,
            "layer_norm_epsilon": eps,
            "tie_word_embeddings": flags,
        },
    ),
    "gpt_neo": (
        gpt_neo,
        {
            "num_heads": st.sampled_from([1, 3, 5]),
            "attention_types": st.sampled_from(
                [[[["local"], 3]], [[["global", "local", "local"], 1]], [[["global"], 2], [["local"], 1]]]
            ),
            "window_size": windows,
            "intermediate_size": st.sampled_from([None, 1, 17]),
            "activation_function": activations,
            "layer_norm_epsilon": eps,
            "tie_word_embeddings": flags,
        },
    ),
    "starcoder2": (
        llama,
        {key: draw for key, draw in LLAMA.items() if key != "rms_norm_eps"}
        | HEAD
        | {"norm_epsilon": eps, "use_bias": flags, "hidden_act": activations, "sliding_window": st.none() | windows},
    ),
    "smollm3": (
        llama,
        LLAMA
        | HEAD
        | {
            "num_hidden_layers": st.just(3),
            "no_rope_layers": st.lists(st.integers(0, 1), min_size=3, max_size=3),
            "use_sliding_window": flags,
            "sliding_window": windows,
            "attention_bias": flags,
            "mlp_bias": flags,
            "hidden_act": activations,
        },
    ),
    "olmo2": (llama, LLAMA | HEAD | {"attention_bias": flags, "hidden_act": activations}),
    "olmo3": (
        llama,
        LLAMA
        | HEAD
        | KINDS
        | {
            "num_hidden_layers": st.just(3),
            "attention_bias": flags,
            "sliding_window": windows,
            "rope_parameters": st.fixed_dictionaries({FULL: ropes(), NEAR: ropes()}),
        },
    ),
    "stablelm": (llama, PHI1 | {"use_qkv_bias": flags, "use_parallel_residual": flags}),
    "cohere": (
        llama,
        {key: draw for key, draw in LLAMA.items() if key != "rms_norm_eps"}
        | HEAD
        | {
            "layer_norm_eps": eps,
            "use_qk_norm": flags,
            "attention_bias": flags,
            "logit_scale": st.sampled_from([0.0625, 1.0, 3.0]),
            "hidden_act": activations,
        },
    ),
    "qwen2_moe": (
        moe,
        LLAMA
        | {
            "num_hidden_layers": st.integers(2, 3),  # a model without experts is not written
            "head_dim": st.sampled_from([2, 8]),
            "num_experts": st.integers(2, 4),
            "num_experts_per_tok": st.integers(1, 2),
            "shared_expert_intermediate_size": st.sampled_from([16, 48]),
            "mlp_only_layers": st.sampled_from([[], [0]]),
            "norm_topk_prob": flags,
            "qkv_bias": flags,
        },
    ),
    "qwen3_next": (
        qwen3_next,
        LLAMA
        | {
            "num_hidden_layers": st.just(4),
            "head_dim": st.sampled_from([8, 16]),
            "linear_num_value_heads": st.sampled_from([2, 6]),
            "linear_num_key_heads": st.sampled_from([1, 2]),
            "linear_key_head_dim": st.sampled_from([8, 12]),
            "linear_value_head_dim": st.sampled_from([7, 16]),
            # a norm of small heads, whose values may be near 0, makes the rounding of both programs large: at 1e-3 a
            # third of the configs differ by more than 1e-4, and both differ as much from fp64
            "rms_norm_eps": st.sampled_from([3e-2, 1e-1]),
            "linear_conv_kernel_dim": st.integers(1, 4),
            "num_experts": st.integers(2, 4),
            "num_experts_per_tok": st.integers(1, 2),
            "shared_expert_intermediate_size": st.sampled_from([16, 48]),
            "mlp_only_layers": st.sampled_from([[], [0]]),
            "norm_topk_prob": flags,
        },
    ),
    "deepseek_v2": (
        partial(deepseek, 2),
        DEEPSEEK | {"topk_method": st.sampled_from(["greedy", "group_limited_greedy"])},
    ),
    "deepseek_v3": (partial(deepseek, 3), DEEPSEEK | {"norm_topk_prob": flags}),
    "gpt_oss": (
        gpt_oss,
        LLAMA
        | HEAD
        | KINDS
        | {
            "num_hidden_layers": st.just(3),
            "intermediate_size": st.sampled_from([16, 40]),
            "num_local_experts": st.integers(2, 4),
            "num_experts_per_tok": st.integers(1, 2),
            "sliding_window": windows,
            "attention_bias": flags,
            "swiglu_limit": st.sampled_from([0.3, 7.0]),
        },
    ),
}
DECODER_TITLES = {
    "qwen2_moe": "Qwen2Moe",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "stablelm": "StableLm",
    "cohere": "Cohere",
    "starcoder2": "Starcoder2",
    "smollm3": "SmolLM3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
}

"""Public models of random configs: whatever a family's config.json may say, the model is the same one here.

Each family draws from the fields that it has: grouped heads, tied or not, biases, every rope scaling, windows, odd head
counts, activations. `HYPOTHESIS_PROFILE=thorough` looks at many more.
"""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from anyformer.interop.families import FAMILIES
from tests.interop.measure import measure
from tests.interop.public import LENGTH, PublicModel
from tests.interop.test_decoders import bloom, falcon, gpt2, gpt_neo, gptj, llama, moe, neox, opt, phi
from tests.interop.test_encoders import LABELS, bert, distilbert, modern, mpnet, roberta
from tests.interop.test_pairs import bart, t5

PROMISE = 1e-4
FEW = 3  # examples of a family, unless a profile asks for more

Fields = dict[str, st.SearchStrategy[Any]]
flags = st.booleans()
depths = st.integers(1, 3)
eps = st.sampled_from([1e-12, 1e-6, 1e-3])
activations = st.sampled_from(["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "relu2", "tanh", "sigmoid"])
windows = st.sampled_from([1, 2, 7, 16, LENGTH])
FULL, NEAR = "full_attention", "sliding_attention"


@st.composite
def ropes(draw: st.DrawFn, *, partial: bool = False) -> dict[str, Any]:
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
    if partial:
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
    "rope_parameters": ropes(partial=True).filter(lambda rope: rope["rope_type"] in ("default", "linear")),
}
BERT: Fields = {
    "head": st.sampled_from(["MaskedLM", "SequenceClassification", "TokenClassification", "Model"]),
    "num_attention_heads": st.sampled_from([1, 3, 5, 15]),
    "num_hidden_layers": depths,
    "intermediate_size": st.sampled_from([1, 40]),
    "hidden_act": activations,
    "layer_norm_eps": eps,
    "type_vocab_size": st.integers(1, 3),
}
ALBERT: Fields = BERT | {"embedding_size": st.sampled_from([3, 12, 30]), "inner_group_num": st.integers(1, 2)}
ROBERTA: Fields = {key: draw for key, draw in BERT.items() if key not in ("type_vocab_size", "layer_norm_eps")}
BART: Fields = {
    "encoder_layers": depths,
    "decoder_layers": depths,
    "encoder_attention_heads": st.sampled_from([1, 3, 5]),
    "decoder_attention_heads": st.sampled_from([1, 2, 15]),
    "encoder_ffn_dim": st.sampled_from([1, 40]),
    "decoder_ffn_dim": st.sampled_from([1, 40]),
    "activation_function": activations,
    "scale_embedding": flags,
}
T5: Fields = {
    "d_model": st.sampled_from([15, 30]),
    "d_kv": st.sampled_from([1, 7, 8]),
    "d_ff": st.sampled_from([1, 40]),
    "num_layers": st.integers(1, 2),  # scores are not scaled: more layers make noise of the last bits
    "num_decoder_layers": st.integers(1, 2),
    "num_heads": st.sampled_from([1, 3, 4]),
    "relative_attention_num_buckets": st.sampled_from([4, 8, 32]),
    "relative_attention_max_distance": st.sampled_from([20, 64, 128]),
    "feed_forward_proj": st.sampled_from(["relu", "gelu", "gated-gelu", "gated-silu", "gated-relu"]),
}
MODERN: Fields = {
    "head": BERT["head"],
    "num_attention_heads": st.sampled_from([2, 4, 5]),
    "layer_types": st.lists(st.sampled_from([FULL, NEAR]), min_size=4, max_size=4),
    "local_attention": st.sampled_from([2, 12, 2 * LENGTH]),
    "hidden_activation": activations,
    "norm_bias": flags,
    "attention_bias": flags,
    "mlp_bias": flags,
}

FALCONS = [{"multi_query": shared, "parallel_attn": side} for shared in (True, False) for side in (True, False)]
FALCONS += [
    {"new_decoder_architecture": True, "num_kv_heads": n, "num_ln_in_parallel_attn": m} for n in (1, 2) for m in (1, 2)
]

GRID: dict[str, tuple[Callable[..., PublicModel], Fields]] = {
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
    "bert": (bert, BERT),
    "roberta": (roberta, ROBERTA),
    "xlm-roberta": (roberta, ROBERTA),
    "camembert": (roberta, ROBERTA),
    "mpnet": (mpnet, ROBERTA),
    "distilbert": (
        distilbert,
        {
            "head": BERT["head"],
            "n_layers": depths,
            "n_heads": st.sampled_from([1, 3, 5, 15]),
            "hidden_dim": st.sampled_from([1, 40]),
            "activation": activations,
        },
    ),
    "albert": (bert, ALBERT),
    "electra": (bert, {key: draw for key, draw in ALBERT.items() if key != "inner_group_num"}),
    "modernbert": (modern, MODERN),
    "bart": (bart, BART),
    "mbart": (bart, BART),
    "marian": (bart, BART),
    "pegasus": (bart, BART),
    "m2m_100": (bart, BART),
    "t5": (t5, T5 | {"shared": st.sampled_from([{}, {"own_head": True, "tie_word_embeddings": False}])}),
    "mt5": (t5, T5 | {"own_head": flags}),
}
TITLES = {
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "starcoder2": "Starcoder2",
    "smollm3": "SmolLM3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "xlm-roberta": "XLMRoberta",
    "camembert": "Camembert",
    "albert": "Albert",
    "electra": "Electra",
    "mbart": "MBart",
    "marian": "Marian",
    "pegasus": "Pegasus",
    "m2m_100": "M2M100",
    "mt5": "MT5",
}


def public(kind: str, drawn: dict[str, Any]) -> PublicModel:
    build, _ = GRID[kind]
    drawn = {**drawn, **drawn.get("shared", {})}
    drawn.pop("shared", None)
    if "grouped" in drawn:
        drawn["num_attention_heads"], drawn["num_key_value_heads"] = drawn.pop("grouped")
    if drawn.get("head") in ("SequenceClassification", "TokenClassification"):
        drawn |= LABELS
    return build(**drawn, **({"title": TITLES[kind]} if kind in TITLES else {}))


@pytest.mark.parametrize("kind", GRID)
@settings(
    max_examples=FEW if settings.default.max_examples < 100 else 50,
    phases=[Phase.generate],  # a smaller example is not worth the minutes: all fields are shown
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_config(kind: str, data: st.DataObject) -> None:
    drawn = data.draw(st.fixed_dictionaries(GRID[kind][1]))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(public(kind, drawn), Path(folder), writes=False)
    assert found.furthest <= PROMISE
    assert found.back
    assert found.again <= PROMISE  # gelu_new and gelu_pytorch_tanh differ in their last bits


def test_every_family_of_text_is_in_the_grid() -> None:
    assert set(FAMILIES) - set(GRID) == {"vit", "clip", "whisper"}


def test_every_family_is_in_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "interop.md").read_text(encoding="utf-8")
    made = page.partition("<!-- made by make families -->")[2].partition("<!-- end -->")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", made, re.MULTILINE) == list(FAMILIES), "make families"
    assert "differs" not in made

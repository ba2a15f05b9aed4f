"""Fields of config.json, under all their names: read as `transformers` reads them, refused, or ignored."""

import json
from contextlib import suppress
from typing import Any

import pytest
import transformers as hf

from anyformer.config import ConfigError, ModelConfig
from anyformer.interop import transformers_fields
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import FAMILIES
from anyformer.nn.inspection.count import count
from tests.interop.make_transformers_fields import made, names

CLASSES = {kind: hf.CONFIG_MAPPING[kind] for kind in FAMILIES}
ALIASES = [(kind, *pair) for kind, config in CLASSES.items() for pair in config.attribute_map.items()]
ALIASES.remove(("deepseek_v3", "num_mtp_layers", "num_nextn_predict_layers"))  # layers that are not read
ALIASES.remove(("gpt_neo", "num_hidden_layers", "num_layers"))  # attention_types has to change with it
# names that the code of a config class reads beside its fields
ALIASES += [("bloom", "n_embed", "hidden_size"), ("falcon", "n_embed", "hidden_size")]


def read(kind: str, fields: dict[str, Any], name: str | None = None) -> tuple[ModelConfig, list[str]]:
    """The config of a family and the fields that were ignored."""
    given = Fields(fields, "config.json")
    return FAMILIES[kind].config(given, [name or next(iter(FAMILIES[kind].heads))]), given.ignored


def refusal(kind: str, fields: dict[str, Any], name: str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        read(kind, fields, name)
    for line in str(error.value).splitlines():
        assert line.startswith("config.json: ")
    return str(error.value)


def test_the_schema_is_that_of_transformers() -> None:
    """After an upgrade of `transformers`: `python -m tests.interop.make_transformers_fields`."""
    assert json.loads(transformers_fields.FILE.read_text(encoding="utf-8")) == made()


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "alias", "name"), ALIASES)
def test_a_field_is_read_under_each_of_its_names(kind: str, alias: str, name: str) -> None:
    value = getattr(CLASSES[kind](), name) // 2
    changed, usual = read(kind, {name: value}), read(kind, {})
    assert changed != usual
    assert read(kind, {alias: value}) == read(kind, {alias: value, name: value}) == changed
    assert getattr(CLASSES[kind](**{alias: value}), name) == value


@pytest.mark.parametrize(("kind", "alias", "name"), ALIASES)
def test_two_names_with_two_values_are_refused(kind: str, alias: str, name: str) -> None:
    value = getattr(CLASSES[kind](), name)
    said = refusal(kind, {name: value, alias: value // 2})
    assert f"{alias} = {value // 2}: is another name of {name}, which is {value}" in said
    assert f"--ignore-field {alias}" in said


def test_older_names_of_rotary_positions() -> None:
    today = {"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}}
    assert read("gpt_neox", {"rotary_emb_base": 5000, "rotary_pct": 0.5}) == read("gpt_neox", today)
    assert "rotary_pct" in refusal("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25})
    scaled = {"rope_type": "linear", "factor": 2.0}
    assert read("llama", {"rope_scaling": scaled}) == read("llama", {"rope_parameters": scaled})
    assert "rope_scaling" in refusal("llama", {"rope_scaling": scaled, "rope_parameters": {"rope_type": "default"}})


# -- defaults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    """Fields that say what `transformers` assumes without them change nothing, and each of them is accepted."""
    config = CLASSES[kind]()
    fields = {name: getattr(config, name) for name in names(config) if name != "rope_parameters"}
    fields = {
        name: value.to_dict() if isinstance(value, hf.PretrainedConfig) else value
        for name, value in fields.items()
        if value is not None
    }
    if kind == "big_bird":  # whose default is refused
        fields["attention_type"] = "original_full"
    for name in FAMILIES[kind].heads:
        (usual, _), (said, ignored) = read(kind, {}, name), read(kind, fields, name)
        assert said == usual.model_copy(update={"context": said.context})
        assert not ignored


# Declared fields that change nothing here: of heads that are not read, of training alone, of generation, and of files.
EFFECTLESS = {
    *(
        "architectures",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "label2id",
        "output_hidden_states",
        "return_dict",
    ),
    *("transformers_version", "use_cache", "forced_eos_token_id", "output_router_logits", "sparse_prediction"),
    *("sparse_pred_ignore_index", "deterministic_flash_attn", "reorder_and_upcast_attn", "slow_but_exact"),
    *("initializer_range", "initializer_factor", "initializer_cutoff_factor", "init_std", "sinusoidal_pos_embds"),
    *("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "qa_dropout", "encoder_stride"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "summary_last_dropout"),
    *(("modernbert", "cls_token_id"), ("modernbert", "sep_token_id"), ("phi3", "embd_pdrop")),
    *((kind, "classifier_dropout") for kind in ("gpt_neo", "gpt_neox", "t5", "mt5", "mbart")),
    *(("gpt_neox", "is_decoder"), ("mt5", "tie_word_embeddings"), ("bloom", "pretraining_tp")),
    # of layers or variants that the default model does not have
    *(("qwen3_moe", "intermediate_size"), ("qwen3_moe", "sliding_window"), ("falcon", "num_kv_heads")),
    *(("qwen2", "max_window_layers"), ("qwen3", "max_window_layers"), ("phi3", "original_max_position_embeddings")),
    *(("qwen2_moe", name) for name in ("intermediate_size", "sliding_window", "max_window_layers")),
    ("qwen3_next", "intermediate_size"),
    *(("deepseek_v2", "intermediate_size"), ("deepseek_v3", "num_mtp_layers")),
    *(("smollm3", "use_sliding_window"), ("smollm3", "sliding_window")),  # only together
    *(("deberta-v2", "max_relative_positions"), ("deberta-v2", "legacy")),
    *(("longformer", "onnx_export"), ("longformer", "sep_token_id")),
    *(("big_bird", "block_size"), ("big_bird", "num_random_blocks"), ("big_bird", "sep_token_id")),
    ("vit", "pooler_act"),
    ("whisper", "scale_embedding"),
    *("suppress_tokens", "begin_suppress_tokens", "median_filter_width", "classifier_proj_size", "apply_spec_augment"),
    *(f"mask_{axis}_{what}" for axis in ("time", "feature") for what in ("prob", "length", "min_masks")),
    ("clip", "logit_scale_init_value"),  # the weights have the value
    *(("mpt", name) for name in ("emb_pdrop", "resid_pdrop", "embedding_fraction", "init_device", "logit_scale")),
    *(("mpt", "learned_pos_emb"), ("mpt", "no_bias"), ("mpt", "norm_type"), ("xglm", "decoder_start_token_id")),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_declared_field_is_accepted_and_ignored(kind: str) -> None:
    """Another value of a field makes another model, is refused, or is known to change nothing."""
    config, weights = CLASSES[kind](), lambda: ["layers.0.self_attn.q_proj.bias", "pooler.dense.weight"]

    def outcome(fields: dict[str, Any], name: str) -> ModelConfig | None:
        with suppress(ConfigError):
            return FAMILIES[kind].config(Fields(fields, "config.json", weights), [name])
        return None

    for field in names(config) - {one for one in EFFECTLESS if isinstance(one, str)}:
        others = other_values(getattr(config, field))
        changed = any(
            outcome({field: value}, name) != outcome({}, name) for name in FAMILIES[kind].heads for value in others
        )
        assert changed != ((kind, field) in EFFECTLESS), field


def other_values(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int():
            return [max(1, value // 2), value + 1]
        case float():
            return [value + 0.25]
        case str():
            return ["tanh"]
        case _:
            return [0.25, 3, True, "tanh"]


# -- the policy -------------------------------------------------------------------------------------------------------

WILD: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"_num_labels": 5}),
    ("bert", {"directionality": "bidi", "pooler_fc_size": 768, "pooler_num_attention_heads": 12}),
    ("bert", {"pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform"}),
    ("bert", {"name": "Bert", "do_lower_case": True}),
    ("bert", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
    ("bert", {"transformers.js_config": {"dtype": "q8"}}),
    ("bart", {"force_bos_token_to_be_generated": False}),
    ("falcon", {"apply_residual_connection_post_layernorm": False}),
    ("llama", {"is_llama_config": True, "rope_interleaved": False, "eos_token_ids": [1, 2]}),
    ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}),
    ("qwen2", {"use_mrope": False}),
    ("gemma2", {"hidden_act": "gelu", "sliding_window_size": 4096}),
]


@pytest.mark.parametrize(("kind", "fields"), WILD)
def test_fields_that_transformers_does_not_use_are_ignored(kind: str, fields: dict[str, Any]) -> None:
    assert read(kind, fields) == (read(kind, {})[0], sorted(fields))


def test_fields_inside_a_table_are_ignored_by_their_path() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    found, ignored = read("llama", {"rope_parameters": scaling | {"finetuned": True}, "use_mrope": False})
    assert found == read("llama", {"rope_parameters": scaling})[0]
    assert ignored == ["rope_parameters.finetuned", "use_mrope"]


SUPPORTED: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"pruned_heads": {}}),
    ("bert", {"language": "german"}),
    ("modernbert", {"position_embedding_type": "relative_key_query"}),
    ("bloom", {"apply_residual_connection_post_layernorm": False}),
]


@pytest.mark.parametrize(("kind", "fields"), SUPPORTED)
def test_harmless_values_are_no_reason_to_warn(kind: str, fields: dict[str, Any]) -> None:
    assert read(kind, fields) == read(kind, {})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("bert", {"is_decoder": True}, "is_decoder"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
    ("llama", {"sliding_window": 16}, "sliding_window"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "truncate": True}},
        "rope_parameters.truncate",
    ),
    ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets"),
    ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu"}, "conv_kernel_size"),
    ("deberta-v2", {"embedding_size": 12}, "embedding_size"),
    ("deberta-v2", {"attention_head_size": 3}, "attention_head_size"),
    ("phi", {"head_dim": 3}, "head_dim"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
    ("deepseek_v3", {"attention_bias": True, "q_lora_rank": None}, "attention_bias"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3_next", {"attention_bias": True}, "attention_bias"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act"),
    ("gpt_neo", {"attention_layers": ["global"] * 24}, "attention_layers"),
]


@pytest.mark.parametrize(("kind", "fields", "name"), REFUSED)
def test_a_field_that_would_make_another_model_is_refused(kind: str, fields: dict[str, Any], name: str) -> None:
    assert f"--ignore-field {name} " in refusal(kind, fields)


def test_pruned_heads_are_refused() -> None:
    assert "pruned_heads: must be empty" in refusal("bert", {"pruned_heads": {"0": [1]}})


def test_mpnet_counts_positions_from_a_fixed_id() -> None:
    assert "pad_token_id = 0: positions count from the token after padding" in refusal("mpnet", {"pad_token_id": 0})


@pytest.mark.parametrize("fields", [{"pos_att_type": ["c2p"]}, {"relative_attention": True}])
def test_deberta_needs_terms_for_its_distances(fields: dict[str, Any]) -> None:
    assert "the terms of relative_attention; both or neither must be set" in refusal("deberta-v2", fields)


def test_all_faults_of_a_file_are_told_at_once() -> None:
    said = refusal("llama", {"pretraining_tp": 2, "sliding_window": 16, "rope_parameters": {"factor": 2.0}})
    assert [line.split()[1] for line in said.splitlines()] == [
        "pretraining_tp",
        "rope_parameters.factor",
        "sliding_window",
    ]


# -- values -----------------------------------------------------------------------------------------------------------


def test_t5_has_two_fields_for_what_a_third_says() -> None:
    """`dense_act_fn` and `is_gated_act` count where they contradict `feed_forward_proj`, as in `transformers`."""
    for kind in ("t5", "mt5"):
        assert read(kind, {"feed_forward_proj": "gated-silu", "dense_act_fn": "relu"}) == read(
            kind, {"feed_forward_proj": "gated-relu"}
        )
        assert read(kind, {"feed_forward_proj": "relu", "is_gated_act": True}) == read(
            kind, {"feed_forward_proj": "gated-relu"}
        )
        assert hf.CONFIG_MAPPING[kind](feed_forward_proj="relu", is_gated_act=True).is_gated_act


def test_labels_are_counted_once() -> None:
    name, three = "BertForSequenceClassification", {"id2label": {"0": "a", "1": "b", "2": "c"}}
    assert read("bert", {**three, "num_labels": 3}, name) == read("bert", three, name)
    for given in (2, 5):  # `transformers` then has this many labels without names
        with pytest.warns(UserWarning, match=rf"num_labels = {given}: id2label names 3 labels") as said:
            assert read("bert", {**three, "num_labels": given}, name) == read("bert", {"num_labels": given}, name)
        assert len(said) == 1
        assert hf.BertConfig(**three, num_labels=given).id2label == {i: f"LABEL_{i}" for i in range(given)}
    assert "num_labels" in refusal("bert", {"num_labels": 10**12}, name)


def test_default_ids_outside_the_vocabulary_are_dropped() -> None:
    """`transformers` writes GPT-2's default ids beside a smaller vocabulary; other ids outside it are a mistake."""
    for ids in ({}, {"bos_token_id": 50_256, "eos_token_id": 50_256}):
        found, _ = read("gpt2", {"vocab_size": 100, **ids})
        assert (found.special.bos, found.special.eos) == (None, None)
    assert read("gpt2", {})[0].special.eos == 50_256
    assert "special.eos" in refusal("gpt2", {"vocab_size": 100, "eos_token_id": 100})
    assert "eos_token_id = 'x': must be the id of a token" in refusal("gpt2", {"eos_token_id": "x"})


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_size_is_a_number_above_zero(kind: str) -> None:
    """Every field that is a whole number, as zero, below it, a list and a table: refused, or of no effect."""
    config, usual = CLASSES[kind](), read(kind, {})
    sizes = [name for name in names(config) if type(getattr(config, name)) is int and not name.endswith("_id")]
    assert len(sizes) >= (1 if kind == "clip" else 5)  # whose sizes are in two tables
    for name in set(sizes) - {"first_k_dense_replace"}:  # of which there may be none
        for value in (0, -1, [], [[]], {}, "1"):
            with suppress(ConfigError):
                assert read(kind, {name: value}) == usual, f"{name} = {value}"


@pytest.mark.parametrize("kind", FAMILIES)
def test_absurd_sizes_are_counted_or_refused_at_once(kind: str) -> None:
    """Sizes so large that nothing of them could be built."""
    config = CLASSES[kind]()
    for name in names(config):
        if type(getattr(config, name)) is int and not name.endswith("_id"):
            with suppress(ConfigError):
                assert count(read(kind, {name: 10**18})[0]).parameters > 0


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_wrong_value_is_a_fault_for_every_head(kind: str) -> None:
    """Each field that is a fraction, as something else: refused, or of no effect."""
    config = CLASSES[kind]()
    for name in FAMILIES[kind].heads:
        usual = read(kind, {}, name)
        for field in names(config):
            for value in (float("nan"), -1.0, "x", [[]]) if type(getattr(config, field)) is float else ():
                with suppress(ConfigError):
                    assert read(kind, {field: value}, name) == usual

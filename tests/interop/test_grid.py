"""Public models of random configs: whatever a family's config.json may say, the model is the same one here.

Each family draws from the fields that it has: grouped heads, tied or not, biases, every rope scaling, windows, odd head
counts, activations. `HYPOTHESIS_PROFILE=thorough` looks at many more.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from anyformer.interop.families import FAMILIES
from tests.interop.decoder_grid import (
    DECODER_GRID,
    DECODER_TITLES,
    FULL,
    NEAR,
    Fields,
    Grid,
    activations,
    depths,
    eps,
    flags,
)
from tests.interop.measure import measure
from tests.interop.public import LENGTH, PublicModel
from tests.interop.test_encoders import LABELS, bert, big_bird, deberta, distilbert, longformer, modern, mpnet, roberta
from tests.interop.test_pairs import bart, t5

PROMISE = 1e-4
FEW, TEN = 3, 10  # examples of a family, unless a profile asks for more
QUICK = ("deberta-v2", "big_bird", "longformer")  # families of which ten examples take a few seconds
WRITERS = [kind for kind in FAMILIES if "lm" in FAMILIES[kind].heads.values() and kind != "whisper"]

BERT: Fields = {
    "head": st.sampled_from(
        ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "Model"]
    ),
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
DEBERTA: Fields = BERT | {
    "num_hidden_layers": st.integers(1, 2),
    "position_buckets": st.sampled_from([-1, 2, 9, 16]),
    "max_relative_positions": st.sampled_from([-1, 11, 40]),
    "pos_att_type": st.sampled_from([["c2p"], ["p2c"], ["p2c", "c2p"], "c2p|p2c"]),
    "share_att_key": flags,
    "norm_rel_ebd": st.sampled_from(["none", "layer_norm"]),
    "position_biased_input": flags,
    "type_vocab_size": st.integers(0, 2),
    "pooler_hidden_act": activations,
}
BIG_BIRD: Fields = BERT | {
    "head": st.sampled_from(["MaskedLM", "SequenceClassification", "TokenClassification", "Model"]),
    "use_bias": flags,
    "rescale_embeddings": flags,
}
LONGFORMER: Fields = ROBERTA | {
    "head": BIG_BIRD["head"],
    "num_hidden_layers": st.just(2),
    "attention_window": st.sampled_from([4, 6, 128, [4, 12], [30, 6]]),  # transformers has none of 2
}

GRID: Grid = DECODER_GRID | {
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
    "deberta-v2": (deberta, DEBERTA),
    "big_bird": (big_bird, BIG_BIRD),
    "longformer": (longformer, LONGFORMER),
    "bart": (bart, BART),
    "mbart": (bart, BART),
    "marian": (bart, BART),
    "pegasus": (bart, BART),
    "m2m_100": (bart, BART),
    "t5": (t5, T5 | {"shared": st.sampled_from([{}, {"own_head": True, "tie_word_embeddings": False}])}),
    "mt5": (t5, T5 | {"own_head": flags}),
}
TITLES = DECODER_TITLES | {
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


def grid_settings(examples: int) -> settings:
    return settings(
        max_examples=examples if settings.default.max_examples < 100 else 50,
        phases=[Phase.generate],  # a smaller example is not worth the minutes: all fields are shown
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@pytest.mark.parametrize("kind", [kind for kind in GRID if kind not in QUICK])
@grid_settings(FEW)
@given(data=st.data())
def test_any_config(kind: str, data: st.DataObject) -> None:
    check_config(kind, data)


@pytest.mark.parametrize("kind", QUICK)
@grid_settings(TEN)
@given(data=st.data())
def test_ten_configs(kind: str, data: st.DataObject) -> None:
    check_config(kind, data)


def check_config(kind: str, data: st.DataObject) -> None:
    drawn = data.draw(st.fixed_dictionaries(GRID[kind][1]))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(public(kind, drawn), Path(folder), writes=False)
    assert found.furthest <= PROMISE
    assert found.back
    assert found.again <= PROMISE  # gelu_new and gelu_pytorch_tanh differ in their last bits


@pytest.mark.system
@pytest.mark.parametrize("kind", WRITERS)
@settings(
    max_examples=10,
    derandomize=True,  # a tie of two logits in their last bits would be a difference
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_greedy_ids_of_ten_configs(kind: str, data: st.DataObject) -> None:
    drawn = data.draw(st.fixed_dictionaries(GRID[kind][1]))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(public(kind, drawn), Path(folder), writes=True)
    assert found.greedy


def test_every_family_of_text_is_in_the_grid() -> None:
    assert set(FAMILIES) - set(GRID) == {"vit", "clip", "whisper"}


def test_every_family_is_in_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "interop.md").read_text(encoding="utf-8")
    made = page.partition("<!-- made by make families -->")[2].partition("<!-- end -->")[0]
    assert re.findall(r"^\| `([\w-]+)` \|", made, re.MULTILINE) == list(FAMILIES), "make families"
    assert "differs" not in made

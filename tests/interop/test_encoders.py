"""Public encoders: the same hidden states, logits and vectors here and there, and the way back to the byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import anyformer as af
from anyformer.interop import import_model
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

LABELS = {"id2label": {0: "good", 1: "bad", 2: "ugly"}, "label2id": {"good": 0, "bad": 1, "ugly": 2}}
AUTO = {
    "MaskedLM": hf.AutoModelForMaskedLM,
    "SequenceClassification": hf.AutoModelForSequenceClassification,
    "TokenClassification": hf.AutoModelForTokenClassification,
    "QuestionAnswering": hf.AutoModelForQuestionAnswering,
    "Model": hf.AutoModel,
}


def bert(head: str, title: str = "Bert", **settings: Any) -> PublicModel:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "max_position_embeddings": LENGTH,
        "pad_token_id": PAD,
    }
    name = f"{title}Model" if head == "Model" else f"{title}For{head}"
    config = getattr(hf, f"{title}Config")(**{**sizes, **settings})
    return PublicModel(getattr(hf, name), config, ("<s>", "$A", "</s>"))


def roberta(head: str, title: str = "Roberta", **settings: Any) -> PublicModel:
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "max_position_embeddings": LENGTH + 2}
    return bert(head, title, type_vocab_size=1, layer_norm_eps=1e-5, **ids, **settings)


def mpnet(head: str, **settings: Any) -> PublicModel:
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "max_position_embeddings": LENGTH + 2}
    return bert(head, "MPNet", layer_norm_eps=1e-5, **ids, **settings)


def distilbert(head: str, **settings: Any) -> PublicModel:
    sizes = {"dim": WIDTH, "n_layers": 2, "n_heads": 5, "hidden_dim": 40, "max_position_embeddings": LENGTH}
    name = "DistilBertModel" if head == "Model" else f"DistilBertFor{head}"
    config = hf.DistilBertConfig(**{**sizes, "vocab_size": VOCAB, "pad_token_id": PAD, **settings})
    return PublicModel(getattr(hf, name), config, ("<s>", "$A", "</s>"))


def modern(head: str, **settings: Any) -> PublicModel:
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "hidden_size": 40, "num_hidden_layers": 4, "local_attention": 12}
    return bert(head, "ModernBert", **{**ids, **settings})


def deberta(head: str, **settings: Any) -> PublicModel:
    """As v3 has it, with fewer buckets."""
    published = {
        "relative_attention": True,
        "position_buckets": 8,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    }
    return bert(head, "DebertaV2", **{**published, **settings})


def big_bird(head: str, **settings: Any) -> PublicModel:
    """Full attention, and no pooler where the head does not use it."""
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "attention_type": "original_full"}
    public = bert(head, "BigBird", **ids, **settings)
    return public if head == "Model" else public._replace(changed=lambda model: setattr(model.bert, "pooler", None))


def longformer(head: str, **settings: Any) -> PublicModel:
    return roberta(head, "Longformer", **{"attention_window": 8, **settings})


ENCODERS = {
    "bert": bert("MaskedLM"),
    "bert-relu": bert("MaskedLM", hidden_act="relu", layer_norm_eps=1e-5, type_vocab_size=3),
    "bert-pooler": bert("Model"),
    "bert-classifier": bert("SequenceClassification", **LABELS),
    "bert-tagger": bert("TokenClassification", classifier_dropout=0.3, **LABELS),
    "bert-answers": bert("QuestionAnswering"),
    "roberta": roberta("MaskedLM", hidden_act="gelu_new"),
    "roberta-pooler": roberta("Model"),
    "roberta-classifier": roberta("SequenceClassification", **LABELS),
    "xlm-roberta": roberta("MaskedLM", "XLMRoberta"),
    "xlm-roberta-tagger": roberta("TokenClassification", "XLMRoberta", **LABELS),
    "roberta-answers": roberta("QuestionAnswering"),
    "camembert": roberta("MaskedLM", "Camembert"),
    "camembert-classifier": roberta("SequenceClassification", "Camembert", **LABELS),
    "mpnet": mpnet("MaskedLM"),
    "mpnet-pooler": mpnet("Model", hidden_act="relu"),
    "mpnet-classifier": mpnet("SequenceClassification", **LABELS),
    "mpnet-tagger": mpnet("TokenClassification", **LABELS),
    "mpnet-answers": mpnet("QuestionAnswering"),
    "distilbert": distilbert("MaskedLM"),
    "distilbert-body": distilbert("Model", activation="relu"),
    "distilbert-classifier": distilbert("SequenceClassification", **LABELS),
    "distilbert-tagger": distilbert("TokenClassification", **LABELS),
    "distilbert-answers": distilbert("QuestionAnswering"),
    "albert": bert("MaskedLM", "Albert", embedding_size=12, num_hidden_layers=3),
    "albert-groups": bert("Model", "Albert", embedding_size=12, inner_group_num=2, hidden_act="relu"),
    "albert-classifier": bert("SequenceClassification", "Albert", embedding_size=12, **LABELS),
    "albert-tagger": bert("TokenClassification", "Albert", embedding_size=12, **LABELS),
    "albert-answers": bert("QuestionAnswering", "Albert", embedding_size=12),
    "electra": bert("MaskedLM", "Electra", embedding_size=12, hidden_act="relu"),
    "electra-wide": bert("Model", "Electra", embedding_size=WIDTH),
    "electra-classifier": bert("SequenceClassification", "Electra", embedding_size=12, **LABELS),
    "electra-tagger": bert("TokenClassification", "Electra", embedding_size=12, **LABELS),
    "electra-answers": bert("QuestionAnswering", "Electra", embedding_size=12),
    "modernbert": modern("MaskedLM"),
    "modernbert-biases": modern(
        "MaskedLM", norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True, decoder_bias=False
    ),
    "modernbert-near": modern("Model", layer_types=["sliding_attention"] * 4),
    "modernbert-classifier": modern("SequenceClassification", classifier_pooling="mean", **LABELS),
    "modernbert-answers": modern("QuestionAnswering", classifier_bias=True),
    "modernbert-tagger": modern("TokenClassification", hidden_activation="silu", **LABELS),
    "big-bird": big_bird("MaskedLM"),
    "big-bird-pooler": big_bird("Model", use_bias=False, rescale_embeddings=True),
    "big-bird-classifier": big_bird("SequenceClassification", hidden_act="relu", **LABELS),
    "big-bird-tagger": big_bird("TokenClassification", **LABELS),
    "longformer": longformer("MaskedLM"),
    "longformer-windows": longformer("Model", attention_window=[4, 12]),
    "longformer-classifier": longformer("SequenceClassification", hidden_act="relu", **LABELS),
    "longformer-tagger": longformer("TokenClassification", **LABELS),
    "deberta": deberta("MaskedLM"),
    "deberta-distances": deberta("Model", position_buckets=-1, max_relative_positions=12, norm_rel_ebd="none"),
    "deberta-classifier": deberta("SequenceClassification", share_att_key=False, pooler_hidden_act="tanh", **LABELS),
    "deberta-tagger": deberta("TokenClassification", pos_att_type="c2p", share_att_key=False, **LABELS),
    "deberta-answers": deberta("QuestionAnswering", pos_att_type=["p2c"], hidden_act="relu"),
    "deberta-absolute": deberta("MaskedLM", position_biased_input=True, type_vocab_size=2),
    "deberta-plain": deberta(
        "Model", relative_attention=False, pos_att_type=None, norm_rel_ebd="none", position_biased_input=True
    ),
}


@torch.no_grad()
def answers(model: hf.PreTrainedModel, batch: Any, **more: Any) -> tuple[Any, Any]:
    """Hidden states, and what the head makes of them."""
    out = model(batch.ids, attention_mask=batch.mask, output_hidden_states=True, **more)
    last = out.hidden_states[-1]
    if "start_logits" in out:
        return last, torch.stack((out.start_logits, out.end_logits), dim=-1)
    return last, next((out[name] for name in ("pooler_output", "logits", "prediction_logits") if name in out), last)


@pytest.mark.parametrize("name", ENCODERS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    public = ENCODERS[name]
    theirs = public.saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there")
    batch = ragged(44, 40, 17)
    types = batch.ids % 2 if public.config.model_type == "bert" else None
    more = {} if types is None else {"token_type_ids": types}
    with torch.no_grad():
        hidden = run.model.encode(batch.ids, segments=batch.segments, types=types)
        found = run.model(batch.ids, segments=batch.segments, types=types)
    expected_hidden, expected = answers(theirs, batch, **more)
    assert furthest(hidden, expected_hidden, batch.real) <= TOLERANCE
    real = batch.real if expected.dim() == 3 else torch.ones(3, dtype=torch.bool)
    assert furthest(found, expected, real) <= TOLERANCE
    auto = AUTO[next(end for end in AUTO if public.model.__name__.endswith(end))]
    kind = public.config.model_type
    kin = kind if kind in ("electra", "big_bird") else None  # some are a BERT, too
    exported = again(run, tmp_path / "back", auto, kin)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    assert torch.equal(answers(exported, batch, **more)[1][real], expected[real])
    same_tokens(run, tmp_path / "back")


def test_deberta_has_two_forms_of_the_masked_lm_head(tmp_path: Path) -> None:
    """The same layers under two names: both are read, and the older one is written."""
    theirs, batch = deberta("MaskedLM", legacy=False).saved(tmp_path / "there"), ragged(44, 40, 17)
    run = af.from_hf(tmp_path / "there")
    with torch.no_grad():
        found = run.model(batch.ids, segments=batch.segments)
    assert furthest(found, answers(theirs, batch)[1], batch.real) <= TOLERANCE
    exported = again(run, tmp_path / "back", hf.AutoModelForMaskedLM)
    assert furthest(answers(exported, batch)[1], answers(theirs, batch)[1], batch.real) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in ENCODERS if "classifier" in name or "tagger" in name])
def test_labels_travel(name: str, tmp_path: Path) -> None:
    theirs = ENCODERS[name].saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there")
    af.to_hf(run, tmp_path / "back")
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["id2label"] == {"0": "good", "1": "bad", "2": "ugly"}
    tokens, text = hf.AutoTokenizer.from_pretrained(tmp_path / "there"), "abc zebra"
    with torch.no_grad():
        best = theirs(**tokens(text, return_tensors="pt", return_token_type_ids=False)).logits.argmax(-1)[0].tolist()
    best = best[1:-1] if isinstance(best, list) else [best]
    assert run.predict([text, "b"])[0] == " ".join(theirs.config.id2label[i] for i in best)


def test_a_mask_is_filled(tmp_path: Path) -> None:
    theirs = ENCODERS["bert"].saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there")
    tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "there")
    ids = tokens("cab<mask>zebra", return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        best = theirs(**ids).logits.argmax(-1)[0]
    at = ids["input_ids"][0] == tokens.mask_token_id
    assert int(at.sum()) == 1
    said = torch.where(at, best, ids["input_ids"][0])
    assert run.predict(["cab<mask>zebra"]) == [run.tokenizer.decode(said[1:-1].tolist())]


def test_vectors(tmp_path: Path) -> None:
    theirs = ENCODERS["bert-pooler"].saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there")
    tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "there")
    for text, said in zip(["abc zebra", "b"], run.predict(["abc zebra", "b"]), strict=True):
        with torch.no_grad():
            expected = theirs(**tokens(text, return_tensors="pt", return_token_type_ids=False)).pooler_output[0]
        torch.testing.assert_close(torch.tensor(json.loads(said)), expected, atol=1e-5, rtol=0)


# -- images -----------------------------------------------------------------------------------------------------------


def vit(head: str, **settings: Any) -> PublicModel:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 5}
    config = hf.ViTConfig(**{**sizes, "image_size": 24, "patch_size": 4, **settings})
    return PublicModel(getattr(hf, f"ViT{head}"), config)


@pytest.mark.parametrize(
    ("public", "auto"),
    [
        (vit("ForImageClassification", **LABELS), hf.AutoModelForImageClassification),
        (vit("Model", num_channels=1, qkv_bias=False, pooler_act="relu", layer_norm_eps=1e-5), hf.AutoModel),
    ],
    ids=["labels", "pooler"],
)
@torch.no_grad()
def test_images(public: PublicModel, auto: Any, tmp_path: Path) -> None:
    """A run without a text: its model answers images in Python, and it is kept, loaded and exported like others."""
    theirs = public.built()
    theirs.save_pretrained(tmp_path / "there")
    run = import_model(tmp_path / "there", tmp_path / "run")
    images = torch.randn(3, public.config.num_channels, 24, 24, generator=torch.Generator().manual_seed(0))
    everything = torch.ones(3, dtype=torch.bool)
    last, expected = vectors(theirs, images)
    for one in (run, af.load(tmp_path / "run")):
        assert furthest(one.model.encode(images), last, everything) <= TOLERANCE
        assert furthest(one.model(images), expected, everything) <= TOLERANCE
    assert run.spec.labels == tuple(LABELS["id2label"].values()) * (auto is not hf.AutoModel)
    with pytest.raises(af.ConfigError, match=r"source: the model reads patches, not texts: call it in Python"):
        run.predict(["a text"])
    again(run, tmp_path / "back", auto)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    assert torch.equal(vectors(auto.from_pretrained(tmp_path / "back"), images)[1], vectors(theirs, images)[1])


def vectors(model: hf.PreTrainedModel, images: Any) -> tuple[Any, Any]:
    model.set_attn_implementation("eager")
    body = model.vit if hasattr(model, "vit") else model
    out = model(images)
    return body(images).last_hidden_state, out.logits if "logits" in out else out.pooler_output

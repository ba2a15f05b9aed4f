"""Heads of public decoders and encoder–decoders: labels of texts, spans, and bodies without a head."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import anyformer as af
from anyformer.interop.families import FAMILIES
from anyformer.recipe import QuestionAnswering
from tests.interop.public import BOS, EOS, TOLERANCE, PublicModel, Ragged, again, furthest, ragged, tensors
from tests.interop.test_decoders import DECODERS, opt
from tests.interop.test_encoders import LABELS, bert
from tests.interop.test_pairs import bart, t5

FIRST = {public.config.model_type: public for public in reversed(DECODERS.values())}
CLASSES = {
    (kind, head): name
    for kind, family in FAMILIES.items()
    for name, head in family.heads.items()
    if family.shape == "decoder" and head in ("classifier", "span")
}
MULTI = {"problem_type": "multi_label_classification"}


def headed(public: PublicModel, name: str, **settings: Any) -> PublicModel:
    """The same config with the class of another head."""
    config = copy.deepcopy(public.config)
    for field, value in settings.items():
        setattr(config, field, value)
    return public._replace(model=getattr(hf, name), config=config, changed=lambda model: None)


@torch.no_grad()
def output(model: hf.PreTrainedModel, batch: Ragged, **more: Any) -> Tensor:
    if "position_ids" in inspect.signature(model.forward).parameters and "decoder_input_ids" not in more:
        more = {"position_ids": (batch.mask.cumsum(dim=1) - 1).clamp(min=0)}
    out = model(batch.ids, attention_mask=batch.mask, **more)
    if "start_logits" in out:
        return torch.stack((out.start_logits, out.end_logits), dim=-1)
    return out.logits if "logits" in out else out.last_hidden_state


def test_every_class_is_one_of_transformers() -> None:
    assert all(
        hasattr(hf, name) for family in FAMILIES.values() for name in family.heads if name != "T5WithLMHeadModel"
    )


@pytest.mark.parametrize("kind", [kind for kind, head in CLASSES if head == "classifier"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_decoders_label_texts_by_their_last_token(kind: str, side: Any, tmp_path: Path) -> None:
    public = headed(FIRST[kind], CLASSES[kind, "classifier"], **LABELS)
    theirs, batch = public.saved(tmp_path / "there"), ragged(20, 17, 7, side=side)
    run = af.from_hf(tmp_path / "there", device="cpu")
    with torch.no_grad():
        found = run.model(batch.ids, segments=batch.segments)
    everything = torch.ones(3, dtype=torch.bool)
    assert furthest(found, output(theirs, batch), everything) <= TOLERANCE
    exported = again(run, tmp_path / "back", hf.AutoModelForSequenceClassification, kind)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    assert torch.equal(output(exported, batch), output(theirs, batch))
    tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "back") if kind != "qwen2" else None
    if tokens is not None:
        expected = [theirs(**tokens(text, return_tensors="pt")).logits.argmax().item() for text in ("abc", "b a")]
        assert run.predict(["abc", "b a"]) == [LABELS["id2label"][i] for i in expected]


@pytest.mark.parametrize("kind", [kind for kind, head in CLASSES if head == "span"])
def test_decoders_with_spans(kind: str, tmp_path: Path) -> None:
    public = headed(FIRST[kind], CLASSES[kind, "span"])
    theirs, batch = public.saved(tmp_path / "there"), ragged(20, 17, 7)
    run = af.from_hf(tmp_path / "there", device="cpu")
    with torch.no_grad():
        found = run.model(batch.ids, segments=batch.segments)
    assert furthest(found, output(theirs, batch), batch.real) <= TOLERANCE
    assert isinstance(run.spec, QuestionAnswering)
    again(run, tmp_path / "back", hf.AutoModelForQuestionAnswering, kind)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")


def test_a_narrow_table_has_no_labels(tmp_path: Path) -> None:
    headed(opt(word_embed_proj_dim=4), "OPTForSequenceClassification", **LABELS).saved(tmp_path / "there")
    with pytest.raises(af.ConfigError, match="word_embed_proj_dim = 4"):
        af.from_hf(tmp_path / "there")


@pytest.mark.parametrize(
    "public",
    [bert("SequenceClassification", **LABELS), headed(FIRST["llama"], CLASSES["llama", "classifier"], **LABELS)],
)
def test_several_labels_travel(public: PublicModel, tmp_path: Path) -> None:
    public = headed(public, public.model.__name__, **MULTI)
    theirs = public.saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there", device="cpu")
    tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "there")
    for text in ("abc zebra", "b"):
        logits = theirs(**tokens(text, return_tensors="pt", return_token_type_ids=False)).logits[0]
        names = [LABELS["id2label"][i] for i in (logits > 0).nonzero()[:, 0].tolist()]
        assert json.loads(run.predict([text])[0]) == names
    af.to_hf(run, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["problem_type"] == MULTI["problem_type"]


# -- encoder–decoders -------------------------------------------------------------------------------------------------


def texts() -> Ragged:
    """Rows that begin with <s> and end with </s>, which BART's labels are computed from."""
    batch = ragged(20, 17, 7)
    batch.ids[:, 0] = BOS
    for row, real in zip(batch.ids, batch.real, strict=True):
        row[int(real.sum()) - 1] = EOS
    return batch


def shifted(batch: Ragged) -> Ragged:
    """What the decoder reads: the start token, then all but the last token of a text."""
    ids = torch.cat((torch.full((len(batch.ids), 1), EOS), batch.ids[:, :-1]), dim=1)
    return Ragged(ids, batch.real)


@pytest.mark.parametrize("name", ["BartForSequenceClassification", "BartForQuestionAnswering"])
def test_bart_with_labels_and_spans(name: str, tmp_path: Path) -> None:
    public = headed(bart(), name, **(LABELS if "Sequence" in name else {}))
    theirs, source = public.saved(tmp_path / "there"), texts()
    run, read = af.from_hf(tmp_path / "there", device="cpu"), shifted(source)
    with torch.no_grad():
        found = run.model(source.ids, read.ids, source_segments=source.segments, target_segments=read.segments)
    expected = output(theirs, source)
    real = source.real if expected.dim() == 3 else torch.ones(3, dtype=torch.bool)
    assert furthest(found, expected, real) <= TOLERANCE
    auto = hf.AutoModelForSequenceClassification if "Sequence" in name else hf.AutoModelForQuestionAnswering
    again(run, tmp_path / "back", auto)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    if "Sequence" in name:
        tokens = hf.AutoTokenizer.from_pretrained(tmp_path / "there")
        ids = tokens("abc zebra", return_tensors="pt", return_token_type_ids=False)
        assert run.predict(["abc zebra"]) == [LABELS["id2label"][int(theirs(**ids).logits.argmax())]]


BODIES = {
    "bart": (bart(), "BartModel"),
    "mbart": (bart("MBart"), "MBartModel"),
    "marian": (bart("Marian"), "MarianModel"),
    "pegasus": (bart("Pegasus"), "PegasusModel"),
    "m2m": (bart("M2M100"), "M2M100Model"),
    "t5": (t5(), "T5Model"),
    "mt5": (t5("MT5"), "MT5Model"),
}


@pytest.mark.parametrize("kind", BODIES)
def test_bodies_of_encoder_decoders(kind: str, tmp_path: Path) -> None:
    public, name = BODIES[kind]
    theirs, source = headed(public, name).saved(tmp_path / "there"), texts()
    run, read = af.from_hf(tmp_path / "there", device="cpu"), shifted(source)
    with torch.no_grad():
        found = run.model(source.ids, read.ids, source_segments=source.segments, target_segments=read.segments)
    expected = output(theirs, source, decoder_input_ids=read.ids, decoder_attention_mask=read.mask)
    assert furthest(found, expected, source.real) <= TOLERANCE
    again(run, tmp_path / "back", hf.AutoModel, public.config.model_type)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    assert len(json.loads(run.predict(["abc"])[0])) == run.config.width

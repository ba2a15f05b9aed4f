"""Longformer's global tokens: `global_attention_mask` of `transformers` is a mark here."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import anyformer as af
from anyformer.kernels.conventions import PLAIN, SEER
from tests.interop.public import TOLERANCE, furthest, ragged
from tests.interop.test_encoders import LABELS, longformer


@settings(max_examples=5, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([4, 6, 12, [4, 12]]),
    st.lists(st.integers(0, 43), max_size=4),
    st.sampled_from([(44, 40, 17), (24, 12, 1)]),
)
def test_any_token_may_be_global(window: int | list[int], places: list[int], lengths: tuple[int, ...]) -> None:
    """Rows whose lengths are and are not multiples of the window."""
    public, batch = longformer("Model", attention_window=window), ragged(*lengths)
    chosen = torch.isin(torch.arange(batch.ids.shape[1]), torch.tensor(places)) & batch.real
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        theirs = public.saved(Path(folder))
        run = af.from_hf(folder, device="cpu")
        found = run.model.encode(batch.ids, segments=batch.segments, marks=torch.where(chosen, SEER, PLAIN))
        out = theirs(batch.ids, attention_mask=batch.mask, global_attention_mask=chosen.long())
    assert furthest(found, out.last_hidden_state, batch.real) <= TOLERANCE


def test_the_first_token_of_a_classifier_is_global(tmp_path: Path) -> None:
    theirs = longformer("SequenceClassification", **LABELS).saved(tmp_path / "there")
    run, text = af.from_hf(tmp_path / "there", device="cpu"), "abc zebra cab"
    ids = torch.tensor([[0, *run.tokenizer.encode(text), 2]])
    nowhere = torch.zeros_like(ids)
    with torch.no_grad():
        found, expected = run.model(ids), theirs(ids).logits
        without = theirs(ids, global_attention_mask=nowhere).logits
    assert float((found - expected).abs().max()) <= TOLERANCE
    assert float((found - without).abs().max()) > 100 * TOLERANCE


def test_question_answering_is_refused(tmp_path: Path) -> None:
    longformer("QuestionAnswering").saved(tmp_path / "there")
    with pytest.raises(af.ConfigError, match="LongformerForQuestionAnswering"):
        af.from_hf(tmp_path / "there")


@pytest.mark.parametrize("window", [7, 0, [8], ["8", 8]])
def test_windows_are_even_numbers(window: object, tmp_path: Path) -> None:
    longformer("Model").saved(tmp_path / "there")
    path = tmp_path / "there" / "config.json"
    path.write_text(
        path.read_text().replace('"attention_window": [\n    8,\n    8\n  ]', f'"attention_window": {window}')
    )
    text = path.read_text().replace("'", '"')
    path.write_text(text)
    with pytest.raises(af.ConfigError, match="must be an even number above 0, or 2 of them"):
        af.from_hf(tmp_path / "there")

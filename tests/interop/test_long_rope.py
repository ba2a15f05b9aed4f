"""Phi-3 with LongRoPE: one set of factors, equal to `transformers` on its side of the original length."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import anyformer as af
from anyformer.config import ConfigError, LongRopeScaling
from anyformer.interop import import_model
from tests.interop.public import TOLERANCE, again, furthest, ragged, tensors
from tests.interop.test_bad_input import change
from tests.interop.test_decoders import greedy, llama, logits, rope

SHORT, LONG = [1.0, 1.25, 1.5], [2.0, 3.5, 6.0]
ORIGINAL = 16
SETTINGS: dict[str, Any] = {
    **rope(rope_type="longrope", short_factor=SHORT, long_factor=LONG),
    "original_max_position_embeddings": ORIGINAL,
}
SAID = pytest.mark.filterwarnings("ignore:.*its short factors are read:UserWarning")
ONLY_LONG = ["rope_parameters.short_factor"]


def phi3(**settings: Any) -> Any:
    return llama("Phi3", **{"num_attention_heads": 4, "num_key_value_heads": 2, **SETTINGS, **settings})


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.5}])
def test_long_texts(more: dict[str, Any], tmp_path: Path) -> None:
    """Calls of more than the original length use the long factors there, and here a model that has no others."""
    theirs = phi3(rope_parameters={**SETTINGS["rope_parameters"], **more}).saved(tmp_path / "there")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = af.from_hf(tmp_path / "there", device="cpu", ignore_fields=ONLY_LONG)
    scaling = run.config.decoder.position.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert (scaling.factors, scaling.context) == (tuple(LONG), None)
    batch = ragged(44, 40, 17)
    with torch.no_grad():
        found = run.model(batch.ids, segments=batch.segments)
    assert furthest(found, logits(theirs, batch), batch.real) <= TOLERANCE
    greedy(run.model, theirs)
    exported = again(run, tmp_path / "back", hf.AutoModelForCausalLM, "phi3")
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    assert torch.equal(logits(exported, batch)[batch.real], logits(theirs, batch)[batch.real])
    short = ragged(10, 8, 5)  # the export is our model at every length
    with torch.no_grad():
        found = run.model(short.ids, segments=short.segments)
    assert furthest(found, logits(exported, short), short.real) <= TOLERANCE
    assert furthest(found, logits(theirs, short), short.real) > 100 * TOLERANCE


@pytest.mark.parametrize("more", [{}, {"attention_factor": 1.5}])
def test_short_texts(more: dict[str, Any], tmp_path: Path) -> None:
    """Up to the original length a model as it is published equals theirs, with and without a cache; not beyond it."""
    theirs = phi3(rope_parameters={**SETTINGS["rope_parameters"], **more}).saved(tmp_path / "there")
    with pytest.warns(UserWarning, match=r"16 tokens; --ignore-field rope_parameters\.short_factor reads the long"):
        run = import_model(tmp_path / "there", tmp_path / "run")
    scaling = run.config.decoder.position.scaling
    assert (scaling.factors, scaling.context, run.config.context) == (tuple(SHORT), ORIGINAL, ORIGINAL)
    batch = ragged(16, 12, 7)
    with torch.no_grad():
        found = run.model(batch.ids, attention_mask=batch.mask)
    assert furthest(found, logits(theirs, batch), batch.real) <= TOLERANCE
    prompt = ragged(6, 6, 6)
    expected = theirs.generate(prompt.ids, attention_mask=prompt.mask, max_new_tokens=10, do_sample=False)
    found = af.generate(run.model, prompt.ids, max_new_tokens=10, stop=[theirs.config.eos_token_id])
    assert torch.equal(found, expected)
    for call in (lambda: run.model(ragged(17).ids), lambda: af.generate(run.model, prompt.ids, max_new_tokens=12)):
        with pytest.raises(ValueError, match="past the end of 16 rotary positions"):
            call()
    exported = again(run, tmp_path / "back", hf.AutoModelForCausalLM, "phi3")
    assert torch.equal(logits(exported, batch)[batch.real], logits(theirs, batch)[batch.real])


@SAID
def test_older_names(tmp_path: Path) -> None:
    """`su` and `yarn` are longrope in Phi-3's files, in the table `rope_scaling`."""
    phi3().saved(tmp_path / "there")
    expected = af.from_hf(tmp_path / "there", device="cpu").config
    path = tmp_path / "there" / "config.json"
    for name in ("su", "yarn"):
        data = json.loads(path.read_text())
        del data["rope_parameters"]
        lists = {"short_factor": SHORT, "long_factor": LONG}
        path.write_text(json.dumps({**data, "rope_theta": 5e4, "rope_scaling": {"type": name, **lists}}))
        assert af.from_hf(tmp_path / "there", device="cpu").config == expected
        path.write_text(json.dumps({**data, **SETTINGS}))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("long_factor", [1.0, -1.0, 2.0], "long_factor: must be a list of positive numbers"),
        ("long_factor", "4", "long_factor = '4': must be of type list"),
        ("short_factor", [1.0, 2.0], "scaling.factors: has 2 values: there must be one for each of 3 rotated pairs"),
    ],
)
def test_files_that_are_refused(field: str, value: Any, words: str, tmp_path: Path) -> None:
    phi3().saved(tmp_path / "there")
    change(tmp_path / "there" / "config.json", rope_parameters={**SETTINGS["rope_parameters"], field: value})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError) as error:
            af.from_hf(tmp_path / "there", device="cpu")
    assert words in str(error.value)

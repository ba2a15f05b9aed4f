"""generation_config.json: its settings are the defaults of a run, as they are in `transformers`, or they are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from hypothesis import given, strategies as st

import anyformer as af
from anyformer.config import ConfigError
from anyformer.generation.strategy import strategy
from anyformer.interop import import_model
from anyformer.interop.generation_config import FILE, fields, read
from anyformer.tasks.generation_defaults import NO_DEFAULTS, GenerationDefaults
from tests.interop.public import BOS, EOS, PAD, PublicModel
from tests.interop.test_decoders import llama
from tests.interop.test_pairs import t5
from tests.test_cli import run as cli

IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}


def saved(model: PublicModel, folder: Path, **settings: Any) -> Any:
    found = model.saved(folder)
    ids = {**IDS, **({"decoder_start_token_id": PAD} if model.config.is_encoder_decoder else {})}
    (folder / FILE).write_text(json.dumps({**ids, **settings}))
    return found


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (llama(), {"max_new_tokens": 12, "repetition_penalty": 1.4, "suppress_tokens": [7, 8]}),
        (llama(), {"max_new_tokens": 9, "no_repeat_ngram_size": 1, "min_new_tokens": 4, "temperature": 0.5}),
        (llama(), {"max_new_tokens": 6, "num_beams": 3, "length_penalty": 0.2, "early_stopping": True}),
        (t5(), {"max_length": 10, "num_beams": 2, "bad_words_ids": [[9], [11]]}),
    ],
)
def test_answers_are_those_of_transformers(tmp_path: Path, model: PublicModel, settings: dict[str, Any]) -> None:
    saved(model, tmp_path / "model", **settings)
    theirs = hf.AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else hf.AutoModelForCausalLM
    public = theirs.from_pretrained(tmp_path / "model").eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(tmp_path / "model")
    run = af.from_hf(tmp_path / "model")
    for text in ("abc cab", "b a z"):
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = public.generate(input_ids=ids)[0].tolist()
        new = out[1:] if model.config.is_encoder_decoder else out[ids.shape[1] :]
        (found,) = run.generate([text])
        assert found == run.tokenizer.decode([i for i in new if i not in IDS.values()])
        assert run.predict([text])[0].endswith(found)


def test_sampling_is_that_of_transformers(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "model", do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=5)
    run = af.from_hf(tmp_path / "model")
    assert run.defaults == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=50, max_new_tokens=5)
    drawn = run.generate(["abc"], seed=3)
    assert drawn == run.generate(["abc"], seed=3, temperature=0.6, top_p=0.9, top_k=50, max_new_tokens=5)
    greedy = run.generate(["abc"], temperature=0.0)
    assert greedy == af.from_hf(tmp_path / "model").generate(["abc"], temperature=0.0, max_new_tokens=5)
    assert len(run.hypotheses(["abc"], beams=2, n_best=2)[0]) == 2
    assert "".join(run.stream("abc", seed=3)) == drawn[0]


def test_files(tmp_path: Path) -> None:
    """Import, load, merge and export keep the settings, and the command prints them."""
    saved(llama(), tmp_path / "model", do_sample=True, temperature=0.7, top_k=20, repetition_penalty=1.1)
    result = cli("import", tmp_path / "model", "--out", tmp_path / "run")
    assert "defaults: temperature 0.7, top_k 20, repetition_penalty 1.1" in result.stdout.splitlines()
    run = af.load(tmp_path / "run")
    assert run.defaults == GenerationDefaults(temperature=0.7, top_k=20, repetition_penalty=1.1)
    af.to_hf(run, tmp_path / "again")
    assert af.from_hf(tmp_path / "again").defaults == run.defaults
    public = hf.GenerationConfig.from_pretrained(tmp_path / "again")
    assert (public.do_sample, public.temperature, public.top_k) == (True, 0.7, 20)
    assert cli("generate", tmp_path / "run", "--prompt", "abc", "-n", 2, "--max-new-tokens", 3).exit_code == 0
    assert import_model(tmp_path / "model", tmp_path / "other").defaults == run.defaults


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"penalty_alpha": 0.6}, "penalty_alpha = 0.6"),
        ({"max_length": 50}, "max_length = 50"),
        ({"do_sample": True, "num_beams": 2}, "do_sample = True"),
        ({"bad_words_ids": [[5, 6]]}, "bad_words_ids"),
        ({"forced_bos_token_id": 2}, "forced_bos_token_id = 2"),
        ({"encoder_repetition_penalty": 1.2}, "encoder_repetition_penalty = 1.2"),
    ],
)
def test_settings_that_are_not_used_are_named(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    (tmp_path / FILE).write_text(json.dumps(settings))
    with pytest.warns(UserWarning, match="settings that are not used here") as found:
        read(tmp_path, pairs=False)
    assert named in str(found[0].message)


def test_inspect_shows_the_settings(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "model", do_sample=True, temperature=0.6, top_p=0.9, max_new_tokens=5)
    run = import_model(tmp_path / "model", tmp_path / "run")
    shown = cli("inspect", tmp_path / "run").stdout
    assert f"generation: {run.defaults.describe()}" in shown
    assert "temperature 0.6" in shown
    assert f"{run.model.num_parameters():,}" in shown
    saved(llama(), tmp_path / "plain")
    import_model(tmp_path / "plain", tmp_path / "greedy")
    assert "generation: greedy; no defaults" in cli("inspect", tmp_path / "greedy").stdout
    wrong = cli("inspect", tmp_path / "run", "--layer", "0")
    assert wrong.exit_code == 2
    assert "--layer: needs a TEXT" in wrong.stderr


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"repetition_penalty": "high"}))
    with pytest.raises(ConfigError, match=rf"{FILE}: repetition_penalty"):
        read(tmp_path, pairs=False)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_beams": 2, "early_stopping": []}, "early_stopping"),
        ({"num_beams": 2, "early_stopping": 1.5}, "early_stopping"),
        ({"suppress_tokens": [1, "a"]}, "suppressed"),
        ({"suppress_tokens": [[1], {}]}, "suppressed"),
        ({"bad_words_ids": [[{}]]}, "suppressed"),
    ],
)
def test_settings_of_another_type_are_refused(tmp_path: Path, settings: dict[str, Any], field: str) -> None:
    (tmp_path / FILE).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=rf"{FILE}: {field}"):
        read(tmp_path, pairs=False)


def test_settings_without_effect_are_none(tmp_path: Path) -> None:
    usual = hf.GenerationConfig._get_default_generation_params()
    (tmp_path / FILE).write_text(json.dumps({key: value for key, value in usual.items() if key != "max_length"}))
    assert read(tmp_path, pairs=False) == NO_DEFAULTS
    assert read(tmp_path / "nowhere", pairs=True) == NO_DEFAULTS


OWN = st.fixed_dictionaries(
    {},
    optional={
        "max_new_tokens": st.integers(1, 9),
        "repetition_penalty": st.sampled_from([1.1, 2.0]),
        "suppressed": st.just((3, 5)),
    },
)
SAMPLED = st.fixed_dictionaries({"temperature": st.just(0.7)}, optional={"top_k": st.just(4), "top_p": st.just(0.5)})
SEARCHED = st.fixed_dictionaries({"beams": st.just(3)}, optional={"length_penalty": st.just(0.5)})
GREEDY = st.just({"temperature": 0.0})
STRATEGIES = st.one_of(st.just({}), SAMPLED, SEARCHED, GREEDY)


@given(OWN, STRATEGIES, STRATEGIES)
def test_given_options_win_and_never_contradict_defaults(own: Any, default: Any, chosen: Any) -> None:
    defaults = GenerationDefaults(**own, **default)
    merged = defaults.merged(chosen)
    assert merged.items() >= chosen.items()
    found = strategy(**{name: value for name, value in merged.items() if name != "max_new_tokens"})
    if chosen:
        assert type(found) is type(strategy(**chosen))


@given(OWN, st.one_of(st.just({}), SAMPLED, SEARCHED))
def test_fields_read_back(tmp_path_factory: pytest.TempPathFactory, own: Any, default: Any) -> None:
    folder = tmp_path_factory.mktemp("fields")
    defaults = GenerationDefaults(**own, **default)
    (folder / FILE).write_text(json.dumps(fields(defaults)))
    assert read(folder, pairs=False) == defaults

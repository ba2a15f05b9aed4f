"""Initial state of the page: the newest checkpoint, an example text, the position that is shown first."""

import shutil
from pathlib import Path

import pytest

from anyformer.data.tokenizer import train_tokenizer
from anyformer.explore.open_runs import open_runs
from anyformer.recipe import Characters, LanguageModel, Words
from tests.explore import made
from tests.explore.made import TEXT, body, written
from tests.explore.tab import growing

STORIES = "once upon a time , there was a little girl named lily . she saw a big dog in the park ."


def test_the_initial_position(tmp_path: Path) -> None:
    """The first mask, the middle of the answer (whose last token predicts only its end), a word, or the last token."""
    names = ("mlm", "pair", "lm", "tag", "embed")
    workspace = open_runs([written(name, tmp_path) for name in names])
    for name in names:
        result = workspace.answer("read", body(name))
        tokens = result["tokens"]["decoder" if name in ("pair", "lm") else "encoder"]
        if name == "mlm":
            assert tokens[result["at"]] == "<mask>"
        elif name in ("tag", "embed"):
            assert tokens[result["at"]] in TEXT.split()
        elif name == "pair":
            assert result["begins"] - 1 <= result["at"] < len(tokens) - 1
        else:
            assert result["at"] == len(tokens) - 1
        if name in ("mlm", "pair", "lm"):
            assert workspace.answer("next", body(name))["at"] == result["at"]


@pytest.mark.parametrize(
    ("spec", "corpus"),
    [
        (Words(), STORIES),
        (Words(), "a film with a good story and a great actor , but the end is bad"),
        (Characters(), "나는 학교에 갑니다 날씨가 좋다 오늘은 친구"),
    ],
)
def test_an_example_without_data_fits_the_vocabulary(
    spec: Characters | Words, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose data are elsewhere shows a text without unknown words, if it has words enough."""
    tokenizer = train_tokenizer(spec, [corpus])
    monkeypatch.setitem(made.RUNS, "far", (LanguageModel(), made.decoder(made.stack()), tokenizer))
    (about,) = open_runs([written("far", tmp_path)]).about()
    (ids,) = tokenizer.encode_batch([about["example"]])
    assert len(ids) >= 4
    assert tokenizer.unk not in ids


def test_the_example_of_a_pair_has_two_texts(tmp_path: Path) -> None:
    workspace = open_runs([written("entail", tmp_path)])
    (about,) = workspace.about()
    assert about["pair"]
    request = {"run": "entail", "text": about["example"], "target": about["example_target"]}
    assert workspace.answer("answer", request)["answer"] in ("no", "yes")


def test_a_running_training_is_shown_by_its_newest_checkpoint(tmp_path: Path) -> None:
    """Traces of an older checkpoint are dropped when the page is loaded again."""
    folder = growing(tmp_path)
    fresh = open_runs([folder])
    request = {"run": "growing", "text": "the quick fox"}
    (about,), before = fresh.about(), fresh.answer("next", request)
    assert about["step"] == 10
    assert fresh.answer("next", request) == before
    shutil.copytree(folder / "state" / "step-000000005", folder / "state" / "step-000000015")
    (about,), after = fresh.about(), fresh.answer("next", request)
    assert about["step"] == 15
    assert after == fresh.answer("next", {**request, "step": 5}) != before

"""Initial state of the page: the newest checkpoint, an example text, the position that is shown first."""

import shutil
from pathlib import Path

from anyformer.explore.open_runs import open_runs
from tests.explore.made import body, written
from tests.explore.tab import growing


def test_the_initial_position(tmp_path: Path) -> None:
    """The first mask, the middle of the answer (whose last token predicts only its end), or the last token."""
    workspace = open_runs([written(name, tmp_path) for name in ("mlm", "pair", "lm")])
    for name in ("mlm", "pair", "lm"):
        result = workspace.answer("read", body(name))
        tokens = result["tokens"]["encoder" if name == "mlm" else "decoder"]
        if name == "mlm":
            assert tokens[result["at"]] == "<mask>"
        elif name == "pair":
            assert result["begins"] - 1 <= result["at"] < len(tokens) - 1
        else:
            assert result["at"] == len(tokens) - 1
        assert workspace.answer("next", body(name))["at"] == result["at"]


def test_the_example_of_a_pair_has_two_texts(tmp_path: Path) -> None:
    workspace = open_runs([written("entail", tmp_path)])
    (about,) = workspace.about()
    assert about["pair"]
    request = {"run": "entail", "text": about["example"], "target": about["example_target"]}
    assert workspace.answer("read", request)["answer"] in ("no", "yes")


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

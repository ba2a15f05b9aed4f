"""What is looked at first: the newest checkpoint, a text that the run can read, the place that one asks about."""

import shutil
from pathlib import Path

from anyformer.explore.open_runs import open_runs
from tests.explore.made import body, written
from tests.explore.tab import growing


def test_a_mask_is_looked_at_first(tmp_path: Path) -> None:
    explored = open_runs([written(name, tmp_path) for name in ("mlm", "pair", "lm")])
    for name in ("mlm", "pair", "lm"):
        found = explored.answer("read", body(name))
        tokens = found["tokens"]["encoder" if name == "mlm" else "decoder"]
        assert found["at"] == (tokens.index("<mask>") if name == "mlm" else len(tokens) - 1)
        assert explored.answer("next", body(name))["at"] == found["at"]


def test_a_pair_has_a_second_text_to_begin_with(tmp_path: Path) -> None:
    explored = open_runs([written("entail", tmp_path)])
    (about,) = explored.about()
    assert about["pair"]
    asked = {"run": "entail", "text": about["example"], "target": about["example_target"]}
    assert explored.answer("read", asked)["answer"] in ("no", "yes")


def test_a_training_is_looked_at_by_its_newest_checkpoint(tmp_path: Path) -> None:
    """What was seen of an older one is forgotten when the page is loaded again."""
    folder = growing(tmp_path)
    fresh = open_runs([folder])
    asked = {"run": "growing", "text": "the quick fox"}
    (about,), before = fresh.about(), fresh.answer("next", asked)
    assert about["step"] == 10
    assert fresh.answer("next", asked) == before
    shutil.copytree(folder / "state" / "step-000000005", folder / "state" / "step-000000015")
    (about,), after = fresh.about(), fresh.answer("next", asked)
    assert about["step"] == 15
    assert after == fresh.answer("next", {**asked, "step": 5}) != before

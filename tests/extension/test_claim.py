"""A claim from outside is listed, measured and judged as ours are, and the hash of its rule covers its file."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config import ConfigError, import_file
from anyformer.lab import experiment
from anyformer.lab.experiment import Experiment, find

FILE = Path(__file__).with_name("my_claim.py")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")


def lab(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["lab", *map(str, arguments)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.stdout or done.stderr


def test_a_claim_of_a_file(tmp_path: Path) -> None:
    own = "--import", FILE, "--out", tmp_path, "--size", "quick"
    first = lab("ordered", "--jobs", 2, *own)
    assert first.startswith("A decoder sorts digits better with rotary positions than with none.\n| position | loss |")
    assert "\nrule " in first
    assert (tmp_path / "ordered.png").exists()
    results = [json.loads(line) for line in (tmp_path / "ordered.jsonl").read_text().splitlines()]
    assert len(results) == 4
    assert {result["rule"] for result in results} == {find("ordered").rule([])}
    assert lab("ordered", *own) == first  # stored results are not measured again


def test_claims_of_files_are_listed_after_ours() -> None:
    rows = lab("--import", FILE).splitlines()
    own, last = (next(i for i, row in enumerate(rows) if f" {name} " in row) for name in ("ordered", "graph"))
    assert own > last
    assert rows[own].rstrip().endswith("about 5 min")
    assert "'orderd' is not an experiment; did you mean 'ordered'?" in lab("orderd", "--import", FILE, code=2)


def test_a_claim_states_what_is_tested(tmp_path: Path) -> None:
    file = tmp_path / "no_texts.py"
    shutil.copy(FILE, file)
    with pytest.raises(
        ConfigError, match=r"Ordered: lacks claim, prediction, minutes: set it here or in ordered\.toml"
    ):
        import_file(file)


def test_a_claim_may_be_typed_in() -> None:
    names = {"__name__": "a_notebook"}
    exec(
        FILE.read_text().replace('"ordered"\n', '"typed"\n    claim, prediction, minutes = "It is.", "Yes.", (1,)\n'),
        names,
    )
    assert names["Ordered"].claim == "It is."


def test_without_the_package_of_claims_a_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    get = "ours are in the package anyformer-claims (pip install anyformer-claims, or ./claims in the repository)"
    monkeypatch.setattr(experiment, "find_parts", lambda group: None)
    monkeypatch.setattr(experiment, "entry_points", lambda group: ())
    import_file(FILE)
    own = [one for one in Experiment.choices() if one.__module__ == FILE.stem]
    monkeypatch.setattr(Experiment, "choices", classmethod(lambda cls: own))
    assert f"'recall' is not an experiment; known here: ordered; {get}, yours" in lab("recall", code=2)
    own.clear()
    for words in ((), ("recall",), ("all",)):
        assert lab(*words, code=2) == f"there are no experiments here: {get}, yours in a file: --import FILE\n"

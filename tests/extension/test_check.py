"""Laws of parts: ours obey them, mistakes break them, and `anyformer check` says so."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from anyformer import cli
from anyformer.config import Graph, register
from anyformer.config.part import Part, all_parts, families
from anyformer.testing import check_part, run_laws
from anyformer.testing.check import COMPILE, LAWS, SPLIT, example, known_laws
from tests.extension.faulty_parts import LAW

FILE = Path(__file__).with_name("my_parts.py")

OURS = [part for part in all_parts() if any(family in LAWS for family in families(part))]
SLOW = (COMPILE, SPLIT)  # tests/nn/test_compile.py and tests/training/test_tensor_parallel.py have more models


@pytest.mark.parametrize("part", OURS, ids=lambda part: part.__name__)
def test_our_parts_obey_the_laws(part: type[Part]) -> None:
    check_part(
        example(part, {"nodes": 32, "edges": [[i, i // 2] for i in range(32)]} if part is Graph else {}), skip=SLOW
    )


@pytest.mark.parametrize("part", LAW, ids=lambda part: part.__name__)
def test_a_mistake_breaks_its_law(part: type[Part]) -> None:
    register(part)
    (report,) = run_laws([example(part)], skip=[law for law in known_laws() if law != LAW[part]])
    assert [result.law for result in report.broken] == [LAW[part]], str(report)


def check(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["check", *map(str, args)])


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")


@pytest.mark.system
@pytest.mark.usefixtures("mine")
def test_the_parts_of_a_file_are_checked() -> None:
    """All laws of all parts, those of two processes included."""
    done = check(FILE, "--json")
    assert done.exit_code == 0, done.output
    found = {part["kind"]: part["laws"] for part in json.loads(done.output)}
    own = {
        "logarithm",
        "strided",
        "scale",
        "mish",
        "bottleneck",
        "double",
        "mean",
        "average",
        "wide",
        "digits",
        "softmaxes",
    }
    assert found.keys() == own
    assert all(set(laws) == set(known_laws()) - {"steps"} for laws in found.values())  # that of schedules
    assert found["mean"][SPLIT] == {"holds": True, "remark": "each process computes all of it"}
    assert found["logarithm"]["inputs"]["holds"] is None


@pytest.mark.usefixtures("mine")
def test_one_part_is_checked_with_other_fields() -> None:
    skipped = [f"--skip={law}" for law in known_laws() if law not in ("config", "causal")]
    done = check(f"{FILE}:Strided", "step=3", *skipped)
    assert (done.exit_code, done.output.split()) == (0, ["law", "strided", "config", "holds", "causal", "holds"])
    for wrong, what in (
        ([FILE, "step=3"], "is for one part"),
        ([f"{FILE}:nothing"], "there is no 'nothing' in it, but Logarithm, Strided"),
        ([f"{FILE}:Mean", "--skip=speed"], "the laws are config, meta"),
        ([f"{FILE}:Strided", "step=0"], "must be at least 1"),
        (["nowhere_at_all"], "cannot be imported"),
        (["nowhere.py"], "cannot be read"),
    ):
        done = check(*wrong)
        assert (done.exit_code, what in done.output) == (2, True), done.output


@pytest.mark.usefixtures("mine")
def test_a_broken_law_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cosine_part.py"
    file.write_text(COSINE)
    done = check(file, *(f"--skip={law}" for law in known_laws() if law not in ("config", "inputs")))
    assert done.exit_code == 1
    assert "inputs  BROKEN" in done.output
    assert "cosine: inputs: it changes its input in place" in done.output


COSINE = """
from typing import Literal
from anyformer.config import Activation
class Cosine(Activation):
    kind: Literal["cosine"] = "cosine"
    def function(self):
        return lambda x: x.cos_()
"""

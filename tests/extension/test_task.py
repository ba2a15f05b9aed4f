"""A task from outside the package, used by the command alone; and laws of all tasks."""

import json
import shutil
import urllib.request
from pathlib import Path
from typing import get_args

import pytest

from anyformer.config import ConfigError, Head, ModelConfig, Shape, import_file, io
from anyformer.config.part import kind_of
from anyformer.config.spec import alternatives
from anyformer.lab.comparison.compare import compare
from anyformer.recipe import Batches, Recipe, Task, TaskFile
from anyformer.runs.run import load, unfinished
from tests.serve.http.process import started
from tests.test_cli import done, refused

FILE = Path(__file__).with_name("my_task.py")
RECIPE = """
task = { kind = "ordinal", highest = 3, pairs = true }
tokenizer = "bytes"
batches = { kind = "padded", tokens = 256 }
data = { train = DATA, valid = DATA, test = DATA }

[model]
width = 16
head = { kind = "classifier", labels = 3 }
source = {}
encoder = { depth = 1, blocks = { mixer = { heads = 2 } } }

[train]
steps = 6
save_every = 2
evaluate_every = 2
best = "mean_error"
optimizer = { kind = "adamw", lr = 1e-2 }
"""
MODEL = {"width": 8, "head": "lm", "source": {"vocab": 9}, "encoder": {"depth": 1, "blocks": {"mixer": {"heads": 2}}}}
KNOWN = {"head": Head, "batches": Batches}
DATA = '{ kind = "table", path = "rows.tsv", text = 0, pair = 1, label = 2, header = false }'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its data: the number of letters that two strings share."""
    folder = tmp_path_factory.mktemp("ordinal")
    rows = [(f"{a}{b}c", f"{b}{c}a", str(len({a, b} & {b, c}))) for a in "가나ab" for b in "가ab" for c in "나abc"]
    (folder / "rows.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "recipe.toml").write_text(RECIPE.replace("DATA", DATA), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("ANYFORMER_IMPORT", "")


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        done("train", "recipe.toml", "--out", "run", "--import", FILE)
    return home / "run"


@pytest.mark.usefixtures("run")
def test_a_recipe_with_it_is_checked() -> None:
    done("config", "check", "recipe.toml", "--import", FILE)
    for change, what in {
        "task.highest=4": "model.head.labels = 3: set it to task.highest = 4",
        "task.heighest=4": "task.heighest: unknown key; did you mean 'highest'?",
        "model.head=lm": "model.head = 'lm': the task ordinal needs 'classifier'",
        "train.best=accuracy": "train.best = 'accuracy': the metrics of the task are loss, mean_error",
        "train.label_smoothing=0.1": "needs one correct label among several",
        "batches={kind='packed', tokens=64, length=32}": "the task ordinal has one number per row: use 'padded'",
    }.items():
        assert what in "\n".join(refused("train", "recipe.toml", change, "--dry-run"))


def test_it_is_resumed_with_the_same_bits(run: Path, home: Path) -> None:
    half = home / "half"
    shutil.copytree(run, half)
    for file in ("model.safetensors", "manifest.json"):
        (half / file).unlink()
    for state in sorted((half / "state").glob("step-*"))[1:]:
        shutil.rmtree(state)
    assert unfinished(load(half), half) is not None
    done("train", "recipe.toml", "--out", half, "--resume")
    assert (half / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


def test_it_is_measured_predicted_and_served(run: Path, home: Path) -> None:
    found = json.loads(done("evaluate", run, "--json").splitlines()[-1])
    assert (found["task"], found["metrics"].keys()) == ("ordinal", {"loss", "mean_error"})
    (home / "in.txt").write_text("가나\t나가\nab\tcc\n", encoding="utf-8")
    answers = done("predict", run, "in.txt").splitlines()
    assert {*answers} <= {"0", "1", "2", "3"}
    with started(str(run), "--import", str(FILE)) as (_, address):
        body = json.dumps({"text_1": ["가나", "ab"], "text_2": ["나가", "cc"]}).encode()
        request = urllib.request.Request(f"{address}/v1/score", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            assert [one["score"] for one in json.load(reply)["data"]] == list(map(float, answers))


def test_its_runs_are_compared_and_new_drafts_none(run: Path, home: Path) -> None:
    found = json.loads(done("evaluate", run, "--json").splitlines()[-1])["metrics"]["mean_error"]
    shutil.copytree(run, home / "other")
    compared = compare([run, home / "other"])
    assert compared.metrics["mean_error"] == (pytest.approx(found),) * 2
    assert compared.higher_is_better["mean_error"] is False
    assert "mean_error" in done("compare", run, home / "other")
    (line,) = refused("new", "ordinal", "rows.tsv", "--import", FILE)
    assert "`new` drafts no recipe for this task" in line


def test_its_run_names_the_file(run: Path) -> None:
    assert json.loads((run / "parts.json").read_text())["AnyTask ordinal"]["file"] == FILE.name
    assert (run / FILE.name).read_bytes() == FILE.read_bytes()


REQUIRED = {"mixture": {"parts": [{"name": "a"}]}, "actions": {"actions": ["left"]}}


def test_what_all_tasks_say_is_known() -> None:
    import_file(FILE)
    known = {name: {kind_of(one) for one in alternatives(annotation)} for name, annotation in KNOWN.items()}
    for cls in Task.choices():
        task = io.build(TaskFile, {"task": {"kind": kind_of(cls), **REQUIRED.get(kind_of(cls), {})}}).task
        assert task.head_kind in known["head"]
        assert {*task.batches} <= known["batches"]
        assert {*task.shapes} <= {*get_args(Shape)}
        assert task.columns
        assert task.measures[0] == "loss" in task.lower_is_better
        assert not task.unknown_measure("loss")
        assert {kind for kind in known["batches"] if not task.unfit_batches(kind, io.build(ModelConfig, MODEL))}


def test_tasks_of_imported_models_are_not_trained() -> None:
    with pytest.raises(ConfigError, match=r"task\.kind = 'encoder': unknown kind"):
        io.build(Recipe, {"task": "encoder"})

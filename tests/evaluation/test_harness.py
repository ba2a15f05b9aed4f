"""Tasks of lm-evaluation-harness give a run the results of the same model in `transformers`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from anyformer.config import ConfigError
from tests.evaluation.test_likelihood import ROWS, folder as folder, run as run
from tests.test_cli import refused, run as cli

ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_choice": None, "doc_to_target": "text"}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {"metadata": {"version": 1}},
    "perplexity": ROLLING,
    "last": {"output_type": "loglikelihood", "doc_to_choice": None, "doc_to_target": "{{choices[0]}}"},
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and its dependencies


def task(folder: Path, name: str, **changes: Any) -> Path:
    """Write a task file, as JSON, which is YAML."""
    settings = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}:\n",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        **changes,
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return path


@pytest.fixture(scope="module")
def harness() -> Any:
    pytest.importorskip("lm_eval", reason="needs the extra `harness`")
    from anyformer.lab.evaluation import harness

    return harness


@pytest.fixture(scope="module")
def theirs(folder: Path, harness: Any) -> Any:
    """The model of `transformers`, as a model of the harness."""
    from lm_eval.models.huggingface import HFLM

    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "model")
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, device="cpu")


@pytest.fixture(scope="module")
def imported(folder: Path) -> Path:
    assert cli("import", folder / "model", "--out", folder / "run").exit_code == 0
    return folder / "run"


def test_metrics_are_those_of_transformers(folder: Path, run: Any, harness: Any, theirs: Any) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    files = [task(folder, name, **changes) for name, changes in TASKS.items()]
    manager = TaskManager(include_defaults=False)
    options = {"task_manager": manager, "limit": 40, "bootstrap_iters": 0}
    expected = simple_evaluate(theirs, tasks=list(map(str, files)), **options)["results"]
    for ours in harness.evaluate_tasks(run, files, limit=40):
        values = {name: value for name, value in ours.values.items() if not name.endswith("_stderr")}
        assert ours.count == 40
        assert values == pytest.approx({name: expected[ours.task][f"{name},none"] for name in values}, rel=1e-4)
        assert values.keys() >= {"choices": {"acc", "acc_norm"}, "perplexity": {"bits_per_byte"}}.get(
            ours.task, {"acc"}
        )


def test_the_command(folder: Path, imported: Path, run: Any, harness: Any) -> None:
    file = task(folder, "choices", **TASKS["choices"])
    (expected,) = harness.evaluate_tasks(run, [file])
    result = cli("evaluate", imported, "--tasks", file, "--json")
    assert result.exit_code == 0
    printed = json.loads(result.stdout.splitlines()[-1])
    assert (printed["task"], printed["n"], printed["metrics"]) == ("choices", ROWS, expected.values)
    assert printed["notes"] == {"output_type": "multiple_choice", "metadata": {"version": 1}}
    lines = cli("evaluate", imported, "--tasks", file, "--limit", 20).stdout.splitlines()
    assert [line.split() for line in lines[:2]] == [["task", "choices"], ["n", "20"]]


def test_the_command_names_the_package_that_is_missing(imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "anyformer.lab.evaluation.harness"):
        monkeypatch.setitem(sys.modules, name, None)
    (line,) = refused("evaluate", imported, "--tasks", "words.yaml")
    assert line.startswith("--tasks: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_type": "guess"}, "is not read: "),
        ({"dataset_kwargs": {"data_files": {"test": "no/such.jsonl"}}}, "is not read: "),
        ({"doc_to_text": "{{quest}}"}, "is not read: 'quest' is undefined"),
    ],
)
def test_wrong_files_are_refused(folder: Path, run: Any, harness: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        harness.evaluate_tasks(run, [task(folder, "wrong", **changes)])


def test_a_task_that_is_unknown_is_refused(run: Any, harness: Any) -> None:
    with pytest.raises(ConfigError, match=r"--tasks = no/such\.yaml: is not read: "):
        harness.evaluate_tasks(run, ["no/such.yaml"])


def test_generation_is_that_of_transformers(run: Any, harness: Any, theirs: Any) -> None:
    from lm_eval.api.instance import Instance

    options = [
        {"until": ["a b"], "max_gen_toks": 12},
        {"until": [], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
    ]
    requests = [
        Instance("generate_until", {}, (text, options[i % 2]), i)
        for i, text in enumerate(["abc cab", "bé", "zebra a b", "c"])
    ]
    ours, expected = (model.generate_until(requests) for model in (harness.HarnessModel(run), theirs))
    assert [text.strip() for text in ours] == [text.strip() for text in expected]

"""lm-evaluation-harness gives a run the results of the same model in `transformers`, on the same task file."""

from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from anyformer.lab.evaluation import evaluate_file
from tests.evaluation.test_likelihood import ROLLING, folder as folder, run as run, task

lm_eval = pytest.importorskip("lm_eval", reason="needs the package lm-eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and its dependencies


@pytest.fixture(scope="module")
def both(folder: Path, run: Any) -> tuple[Any, Any]:
    """The run and the model of `transformers`, as models of the harness."""
    from lm_eval.models.huggingface import HFLM

    from anyformer.lab.evaluation.harness import HarnessModel

    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder / "model")
    return HarnessModel(run), HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, device="cpu")


def test_task_files_give_the_same_metrics(folder: Path, run: Any, both: tuple[Any, Any], tmp_path: Path) -> None:
    import yaml
    from lm_eval.tasks import TaskManager

    files = [task(folder, task="choices"), task(folder, task="perplexity", **ROLLING)]
    for file in files:
        settings = yaml.safe_load(file.read_text())
        settings.setdefault("doc_to_text", "")
        (tmp_path / f"{settings['task']}.yaml").write_text(yaml.safe_dump(settings))
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = [
        lm_eval.simple_evaluate(
            model=model, tasks=["choices", "perplexity"], task_manager=manager, limit=40, bootstrap_iters=0
        )
        for model in both
    ]
    for file, name in zip(files, ("choices", "perplexity"), strict=True):
        ours = evaluate_file(run, file, limit=40).values
        for metric, value in ours.items():
            if not metric.endswith("_stderr"):
                for results in found:
                    assert results["results"][name][f"{metric},none"] == pytest.approx(value, rel=1e-4), metric


def test_generation_is_that_of_transformers(both: tuple[Any, Any]) -> None:
    from lm_eval.api.instance import Instance

    options = [
        {"until": ["a b"], "max_gen_toks": 12},
        {"until": [], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
    ]
    requests = [
        Instance("generate_until", {}, (text, options[i % 2]), i)
        for i, text in enumerate(["abc cab", "bé", "zebra a b", "c"])
    ]
    ours, theirs = (model.generate_until(requests) for model in both)
    assert [text.strip() for text in ours] == [text.strip() for text in theirs]

"""Log-likelihoods of continuations and texts are those of `transformers`, over 200 rows of a local task."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import anyformer as af
from anyformer.config import ConfigError
from anyformer.lab.evaluation import continuations, evaluate_file, texts
from anyformer.lab.evaluation.task_file import read_task
from anyformer.recipe import Seq2Seq
from anyformer.runs.run import Run
from tests.interop.public import LENGTH, VOCAB, PublicModel
from tests.test_cli import run as cli

ROWS = 200
ROLLING = {"output_type": "loglikelihood_rolling", "doc_to_text": None, "doc_to_choice": None, "doc_to_target": "text"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose texts begin with <s>, and a task of four answers to each question."""
    folder = tmp_path_factory.mktemp("harness")
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=1,
    )
    PublicModel(hf.LlamaForCausalLM, config, ("<s>", "$A")).saved(folder / "model")
    draw = random.Random(0)

    def words(n: int) -> str:
        return " ".join("".join(draw.choices("abcdeé", k=draw.randint(1, 4))) for _ in range(draw.randint(1, n)))

    rows = [
        {"question": words(9), "choices": [words(3) for _ in range(4)], "answer": draw.randrange(4), "text": words(60)}
        for _ in range(ROWS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def task(folder: Path, **changes: Any) -> Path:
    settings = {
        "task": "words",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}:\n",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        **changes,
    }
    path = folder / f"{len(list(folder.glob('*.json')))}.json"
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return path


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(folder: Path) -> Any:
    return af.from_hf(folder / "model")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    model = hf.AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    return model, hf.AutoTokenizer.from_pretrained(folder / "model")


def log_p(theirs: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all tokens but the first, and whether each is the most probable."""
    with torch.no_grad():
        logits = theirs[0](torch.tensor([ids[:-1]])).logits[0].float()
    after = torch.tensor(ids[1:])
    return logits.log_softmax(-1).gather(1, after[:, None])[:, 0], logits.argmax(-1) == after


def test_continuations_equal_transformers(folder: Path, run: Any, theirs: Any) -> None:
    rows = rows_of(folder)
    pairs = [(f"{row['question']}:\n", f" {row['choices'][row['answer']]}") for row in rows]
    for (context, continuation), found in zip(pairs, continuations(run, pairs), strict=True):
        whole = theirs[1].encode(context + continuation)
        n = len(whole) - len(theirs[1].encode(context.rstrip()))
        values, top = log_p(theirs, whole)
        assert found.tokens == n
        assert found.total == pytest.approx(values[-n:].sum().item(), abs=1e-4)
        assert found.greedy == bool(top[-n:].all())


def test_texts_equal_transformers_in_windows(folder: Path, run: Any, theirs: Any) -> None:
    documents = [row["text"] for row in rows_of(folder)]
    lengths = set()
    for document, found in zip(documents, texts(run, documents), strict=True):
        ids = theirs[1].encode(document)
        whole, total = [0, *ids], 0.0
        for done in range(0, len(ids), LENGTH):
            end = min(done + LENGTH, len(ids))
            values, _ = log_p(theirs, whole[max(0, end - LENGTH) : end + 1])
            total += values[done - end :].sum().item()
        lengths.add(len(ids) > LENGTH)
        assert found.tokens == len(ids)
        assert found.total == pytest.approx(total, abs=1e-4 * max(1, len(ids) / 20))
    assert lengths == {True, False}


def test_a_long_context_loses_its_start(run: Any) -> None:
    long, short = continuations(run, [("ab " * 200 + "cab", " abc"), ("ab " * 30 + "cab", " abc")])
    assert long.tokens == short.tokens
    assert math.isfinite(long.total)
    with pytest.raises(ConfigError, match=r"continuation 1: has .* tokens: must have from 1 to 64"):
        continuations(run, [("ab", " abc" * 80)])
    with pytest.raises(ConfigError, match="continuation 2: has 0 tokens"):
        continuations(run, [("ab", "c"), ("ab", "")])


def test_metrics_of_a_task_file(folder: Path, run: Any) -> None:
    rows = rows_of(folder)
    scores = iter(continuations(run, [(f"{row['question']}:\n", f" {c}") for row in rows for c in row["choices"]]))
    totals = [[next(scores).total for _ in row["choices"]] for row in rows]
    right = [max(range(4), key=each.__getitem__) == row["answer"] for row, each in zip(rows, totals, strict=True)]
    found = evaluate_file(run, task(folder))
    assert (found.task, found.count) == ("words", ROWS)
    assert found.values["acc"] == sum(right) / ROWS
    p = sum(right) / ROWS
    assert found.values["acc_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (ROWS - 1)))
    same = [
        task(folder, doc_to_choice="choices", doc_to_target="answer"),
        task(
            folder,
            doc_to_target="{{choices[answer]}}",
            doc_to_text="{{question}}",
            description="",
            target_delimiter=":\n ",
        ),
    ]
    assert evaluate_file(run, same[0]) == found
    assert evaluate_file(run, same[1]).values["acc"] == found.values["acc"]
    only = evaluate_file(run, task(folder, metric_list=[{"metric": "acc_norm", "aggregation": "mean"}]), limit=10)
    assert only.values.keys() == {"acc_norm", "acc_norm_stderr"}
    assert only.count == 10


def test_perplexity_of_a_task_file(folder: Path, run: Any) -> None:
    found = evaluate_file(run, task(folder, **ROLLING)).values
    documents = [row["text"] for row in rows_of(folder)]
    total, size = sum(each.total for each in texts(run, documents)), sum(len(text.encode()) for text in documents)
    assert found["bits_per_byte"] == pytest.approx(-total / size / math.log(2))
    assert found["byte_perplexity"] == pytest.approx(2 ** found["bits_per_byte"])
    assert found["word_perplexity"] > found["byte_perplexity"]
    last = task(folder, output_type="loglikelihood", doc_to_choice=None, doc_to_target="{{choices[0]}}")
    assert evaluate_file(run, last).values.keys() == {"perplexity", "acc", "acc_stderr"}


def test_the_command(folder: Path, run: Any) -> None:
    assert cli("import", folder / "model", "--out", folder / "run").exit_code == 0
    file = folder / "words.yaml"
    file.write_text(
        "task: words\ndataset_kwargs: {data_files: rows.jsonl}\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}:\\n"\ndoc_to_choice: choices\ndoc_to_target: answer\nmetadata: {version: 1}\n'
    )
    result = cli("evaluate", folder / "run", "--tasks", file, "--limit", 20, "--json")
    assert result.exit_code == 0
    printed = json.loads(result.stdout.splitlines()[-1])
    expected = evaluate_file(run, task(folder), limit=20)
    assert (printed["task"], printed["n"]) == ("words", 20)
    assert printed["metrics"] == pytest.approx(expected.values)
    assert printed["notes"]["metadata"] == {"version": 1}
    lines = cli("evaluate", folder / "run", "--tasks", file, "--limit", 20).stdout.splitlines()
    assert lines[0].split() == ["task", "words"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"process_docs": "!function f"}, "process_docs: unknown key"),
        ({"output_type": "generate_until"}, "output_type"),
        ({"num_fewshot": 5}, "num_fewshot"),
        ({"doc_to_choice": None}, "doc_to_choice: is missing"),
        ({"test_split": "dev"}, "data_files: has no file for the split 'dev'"),
        ({"metric_list": [{"metric": "f1"}]}, "metric_list.0.metric = 'f1': multiple_choice has acc, acc_norm"),
        ({"doc_to_text": "{{quest}}"}, "row 1: doc_to_text: fails: 'quest' is undefined"),
        ({"doc_to_text": "{{"}, "row 1: doc_to_text: fails"),
        ({"doc_to_text": "{{''.__class__}}"}, "row 1: doc_to_text: fails"),
        (
            {"doc_to_target": "{{answer + 4}}"},
            "must be one of the 4 choices, or its index",
        ),
        ({"doc_to_choice": "{{question}}"}, "row 1: doc_to_choice"),
        ({"doc_to_text": "questoin"}, "row 1: doc_to_text = 'questoin': is no column; the columns are 'question, "),
        ({"doc_to_choice": "choice"}, "row 1: doc_to_choice = 'choice': is no column"),
        ({"doc_to_target": "answr"}, "row 1: doc_to_target = 'answr': is no column"),
        ({"doc_to_target": "9" * 5000}, "row 1: doc_to_target = '999"),
        (ROLLING | {"doc_to_target": "{{''}}"}, "doc_to_target: every text is empty"),
        ({"dataset_kwargs": {"data_files": "x.csv"}}, "x.csv: is not read: rows are in a .jsonl or .json file"),
    ],
)
def test_wrong_files_are_refused(folder: Path, run: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        evaluate_file(run, task(folder, **changes))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("{a: &a [1], b: *a}", "words.yaml: is not YAML that is read at line 4: aliases (*name) are not read"),
        ("{a: " + "9" * 5000 + "}", "words.yaml: cannot be read: Exceeds the limit"),
        ("{a: 0x" + "f" * 5000 + "}", "words.yaml: holds a value that JSON does not have: "),
        ("{a: .nan}", "words.yaml: holds a value that JSON does not have: "),
        ("{a: !!binary aGk=}", "words.yaml: holds a value that JSON does not have: "),
        ("[" * 5000, "words.yaml: "),
    ],
)
def test_values_of_yaml_that_are_refused(folder: Path, tmp_path: Path, metadata: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_task(yaml_task(tmp_path, metadata))
    assert message in str(error.value)
    assert len(error.value.faults) == 1


def test_a_date_of_yaml_is_a_text(tmp_path: Path) -> None:
    assert read_task(yaml_task(tmp_path, "{version: 2026-01-31}")).metadata == {"version": "2026-01-31"}


def yaml_task(folder: Path, metadata: str) -> Path:
    head = "task: words\ndataset_kwargs: {data_files: rows.jsonl}\noutput_type: loglikelihood\n"
    (folder / "words.yaml").write_text(f"{head}metadata: {metadata}\ndoc_to_target: answer\n")
    return folder / "words.yaml"


def test_only_language_models_are_scored(run: Any) -> None:
    config = af.presets.vaswani(depth=1, width=8, heads=2, vocab=VOCAB)
    spec = Seq2Seq()
    other = Run(af.Transformer(config), spec.build(run.tokenizer), spec, Path("nowhere"))
    with pytest.raises(ConfigError, match="log-likelihoods are of language models"):
        continuations(other, [("a", "b")])

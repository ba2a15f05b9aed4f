"""Decoding options on the command line; a wrong one is one line and exit code 2."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import anyformer as af
from anyformer.cli import app, decoding_options as options, progress
from anyformer.generation.beam_search import Hypotheses, run_beam_search
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam
from anyformer.nn.model import Transformer
from anyformer.runs.run import Run, write_folder, write_model
from anyformer.training.train import evaluate
from tests.test_cli import done, refused, run as invoke
from tests.test_generate import writer
from tests.training.small import pairs, run as train


def saved(run: Run, folder: Path) -> Path:
    weights = {name: x.float() for name, x in run.model.state_dict().items()}
    write_folder(folder, lambda to: write_model(to, weights, run.config, run.spec, run.task))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(writer("bytes", length=64, ends=True), tmp_path_factory.mktemp("runs") / "글 文")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(writer("bpe", "encoder-decoder", ends=True), tmp_path_factory.mktemp("runs") / "pair")


def flags(how: dict[str, Any]) -> list[str]:
    """Options as they are written in a shell."""
    found = []
    for name, value in how.items():
        for one in value if isinstance(value, list) else [value]:
            found += [f"--{name.replace('_', '-')}", json.dumps(one) if isinstance(one, dict) else str(one)]
    return found


SCHEMA = {"type": "array", "items": {"enum": ["개", 1, None]}, "minItems": 2, "maxItems": 4}
WAYS: dict[str, dict[str, Any]] = {
    "beams": {"beams": 3, "length_penalty": 0.5, "early_stopping": "never"},
    "groups": {"beams": 4, "groups": 2, "diversity_penalty": 0.7},
    "contrastive": {"candidates": 4, "alpha": 0.3},
    "lookup": {"lookup": 2, "ahead": 3, "temperature": 0.7, "seed": 1},
    "phrases": {"beams": 3, "phrases": ["개", "dog"], "banned": ["x", "y"]},
    "json": {"json_schema": SCHEMA, "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "regex": {"regex": "[가-힣]+", "beams": 2},
    "choices": {"choices": ["예", "아니요"], "temperature": 1.0, "seed": 2, "typical_p": 0.9},
    "prefix": {"prefix": "안녕", "no_repeat_ngram": 2, "min_new_tokens": 9, "cache": "int8"},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way(folder: Path, pair: Path, way: str, tmp_path: Path) -> None:
    how = {"max_new_tokens": 30} | WAYS[way]
    for place in (folder, pair):
        run = af.load(place, "cpu")
        said = run.generate(["dog"], **how)[0]
        assert done("generate", place, "--prompt", "dog", *flags(how)) == said + "\n"
    (tmp_path / "in.txt").write_text("dog\n개\n", encoding="utf-8")
    assert done("predict", pair, tmp_path / "in.txt", *flags(how)) == "".join(
        f"{answer}\n" for answer in af.load(pair, "cpu").predict(["dog", "개"], **how)
    )
    if "json_schema" in how:
        assert isinstance(json.loads(said), list)
        (tmp_path / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
        assert done("generate", pair, "--prompt", "dog", *flags(how | {"json_schema": tmp_path / "schema.json"})) == (
            said + "\n"
        )


def test_the_best_answers_with_their_scores(folder: Path) -> None:
    lines = done("generate", folder, "--prompt", "dog", "--beams", "4", "--n-best", "3").splitlines()
    found = af.load(folder, "cpu").hypotheses(["dog"], beams=4, n_best=3)[0]
    assert len(lines) == 3
    for line, one in zip(lines, found, strict=True):
        score, text = line.split("\t", 1)
        assert float(score) == pytest.approx(one.score, abs=1e-4)
        assert text == one.text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


@pytest.mark.parametrize("way", [{}, {"lookup": 2}])
def test_an_answer_that_is_cut_off_is_noted(folder: Path, way: dict[str, Any]) -> None:
    cut = invoke("generate", folder, "--prompt", "dog", "--max-new-tokens", "3", *flags(way))
    assert cut.stderr == "stopped at the limit of 3 tokens: --max-new-tokens sets it\n"
    stopped = invoke("generate", folder, "--prompt", "dog", "--max-new-tokens", "1", "--stop", cut.stdout[:1])
    assert (stopped.stdout, stopped.stderr) == ("\n", "")
    limits = list[int]()
    assert "".join(af.load(folder).stream("dog", max_new_tokens=3, at_limit=limits.append)) + "\n" == cut.stdout
    assert limits == [3]


def test_an_answer_that_ends_at_the_last_position_is_noted(folder: Path) -> None:
    for budget in ([], ["--max-new-tokens", "500"]):
        cut = invoke("generate", folder, "--prompt", "a" * 60, *budget)
        positions = "the model has no further positions; use a shorter prompt"
        assert cut.stderr == f"stopped at the limit of 5 tokens: {positions}\n"
    exact = invoke("generate", folder, "--prompt", "a" * 60, "--max-new-tokens", "5")
    assert exact.stderr == "stopped at the limit of 5 tokens: --max-new-tokens sets it\n"


def test_fewer_bits_and_a_draft(folder: Path, tmp_path: Path) -> None:
    plain = done("generate", folder, "--prompt", "dog")
    assert done("generate", folder, "--prompt", "dog", "--draft", folder) == plain
    for bits in ("8", "4"):
        small = af.load(folder, "cpu").quantise(int(bits))  # type: ignore[arg-type]
        assert done("generate", folder, "--prompt", "dog", "--bits", bits) == small.generate(["dog"])[0] + "\n"
    other = saved(writer("chars"), tmp_path / "other")
    (line,) = refused("generate", folder, "--prompt", "dog", "--draft", other)
    assert line == "--draft: has another tokenizer: its tokens are not those of this run"


WRONG = {
    "beams that draw": (["--beams", "3", "--temperature", "0.5"], "--temperature = 0.5: beam search does not sample"),
    "a seed of beams": (["--beams", "3", "--seed", "1"], "--seed = 1: beam search does not sample"),
    "more than beams": (["--beams", "2", "--n-best", "3"], "--n-best = 3: must be from 1 to the number of beams, 2"),
    "best of nothing": (["--n-best", "3"], "--n-best = 3: needs beams"),
    "groups of nothing": (["--groups", "2"], "--groups = 2: needs beams"),
    "groups alike": (["--beams", "4", "--groups", "2"], "--diversity-penalty = 0.0: must be above 0"),
    "two ways": (
        ["--beams", "4", "--alpha", "0.5"],
        "--beams: belongs to beam search, and alpha to contrastive search",
    ),
    "an empty stop": (["--stop", ""], "--stop: an empty string occurs everywhere"),
    "a pattern": (["--regex", "(a"], "--regex: the pattern (a, character 1: a ( without its )"),
    "a keyword": (["--json-schema", '{"type": "string", "format": "date"}'], "--json-schema: format: is not supported"),
    "no JSON": (["--json-schema", "{"], "--json-schema: is not JSON"),
    "no schema": (["--json-schema", "none.json"], "none.json: cannot be read: No such file or directory"),
    "an impossible choice": (["--regex", "a", "--choices", "b"], "--choices: defines the whole answer"),
    "bits": (["--bits", "3"], "--bits = 3: must be 8 or 4"),
    "no draft": (["--draft", "none"], "none: there is no such folder"),
    "ahead of nothing": (["--ahead", "3"], "--ahead = 3: needs a draft, a lookup or self_draft"),
    "too little room": (["--regex", "[ab]{9}", "--max-new-tokens", "3"], "--prompt: no answer of at most 3 tokens"),
    "a long prefix": (["--prefix", "abcd", "--max-new-tokens", "3"], "--prompt: its answer has 3 tokens at most"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(folder: Path, case: str) -> None:
    given, expected = WRONG[case]
    (line,) = refused("generate", folder, "--prompt", "dog", *given)
    assert line.startswith(expected)


def test_prompts_that_cannot_be_read(folder: Path, pair: Path, tmp_path: Path) -> None:
    (line,) = refused("generate", folder, "--prompt", "x" * 65, "--beams", "2")
    assert line == "--prompt: has 65 tokens, and the decoder has 64 learned positions"
    (line,) = refused("generate", pair, "--prompt", " ")
    assert line == "--prompt: is blank: type a text"
    (tmp_path / "in.txt").write_text("a\n" + "x" * 65 + "\n", encoding="utf-8")
    (line,) = refused("predict", folder, tmp_path / "in.txt", "--beams", "2")
    assert line == "line 2: has 65 tokens, and the decoder has 64 learned positions"


def test_predict_keeps_what_did_not_fail(tmp_path: Path) -> None:
    run = writer("chars")
    (id,) = run.tokenizer.encode("x")
    with torch.no_grad():
        run.model.target.table.weight[id] = torch.nan
    place = saved(run, tmp_path / "run")
    found = CliRunner().invoke(
        app, ["predict", str(place), "--banned", "x", "--max-new-tokens", "3"], input="a\nx\nb\n"
    )
    assert found.exit_code == 1
    warning, *lines = found.stderr.splitlines()
    assert "NaN or Inf in 1 of " in warning
    assert lines == ["line 2: the model's logits are not finite"]
    first, failed, last = found.stdout.splitlines()
    assert failed == ""
    assert [first, last] == run.predict(["a", "b"], banned=["x"], max_new_tokens=3)


def test_a_run_searches_as_its_task_says(tmp_path: Path) -> None:
    spec = pairs("encoder-decoder", steps=2, valid=None)
    run = train(spec, tmp_path / "run")
    asked = ["1 2 3", "4 5 6 7"]
    assert run.predict(asked) == run.generate(asked)
    searching = spec.task.model_copy(update={"beams": 4, "length_penalty": 0.5})
    wide = Run(run.model, type(run.task)(searching, run.tokenizer), searching, run.folder)  # type: ignore[call-arg]
    assert wide.predict(asked) == run.generate(asked, beams=4, length_penalty=0.5)
    assert wide.predict(asked, beams=2) == run.generate(asked, beams=2, length_penalty=0.5)
    how = {"temperature": 1.0, "seed": 1}
    assert wide.predict(asked, **how) == run.generate(asked, **how)
    changed = ["task.beams=4", "task.length_penalty=0.5"]
    with pytest.MonkeyPatch.context() as patch:
        strategies: list[Beam] = []

        def search(model: Transformer, request: Request) -> Hypotheses:
            assert isinstance(request.strategy, Beam)
            strategies.append(request.strategy)
            return run_beam_search(model, request)

        patch.setattr("anyformer.tasks.generation.run_beam_search", search)
        evaluate(run.folder, changed, "train")
    assert {(strategy.beams, strategy.length_penalty) for strategy in strategies} == {(4, 0.5)}
    assert refused("evaluate", run.folder, "task.beams=0") == ["task.beams = 0: must be at least 1"]
    (line,) = refused("evaluate", run.folder, "task.length_penalty=0.5")
    assert line == "task.length_penalty = 0.5: applies to beam search only: set beams above 1"
    (line,) = refused("evaluate", run.folder, "train.steps=9")
    assert line == "train: was fixed in training and cannot be changed"


def test_help_has_a_panel_for_each_way() -> None:
    for verb in ("generate", "predict"):
        text = re.sub(r"\s+", " ", invoke(verb, "--help").stdout)
        for panel in (options.SAMPLING, options.BEAM, options.PENALTIES, options.LIMITS, "Contrastive", "Speculation"):
            assert panel in text


def test_progress_of_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    with progress.counting_lines(100) as advance:
        advance.skip(50)
        advance(3, 0)
        advance(0, 25)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"3 lines  [\d.]+ lines/s", first)
    assert re.fullmatch(r"3 lines  [\d.]+ lines/s  75 %  0 s left", second)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool) -> None:
    """A bar that goes again, or plain lines."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(Console, "is_terminal", property(lambda _: terminal))
    with progress.counting(4, "texts") as advance:
        advance(1)
        advance(3)
    told = capsys.readouterr()
    assert told.out == ""
    if not terminal:
        first, second = told.err.splitlines()
        assert re.fullmatch(r"1 of 4 texts  [\d.]+ a second  \d+ s left", first)
        assert second.startswith("4 of 4 texts")

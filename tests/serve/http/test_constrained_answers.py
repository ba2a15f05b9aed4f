"""The delivered text of every answer is what its constraint allows: over tokenizers, constraints and endpoints."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.generation.engine.engine import Engine
from anyformer.runs.run import Run, write_folder, write_model
from tests.serve.http.served import TEMPLATE, Server, serving_engine
from tests.test_generate import KINDS, TOKENIZERS, writer

NEW = 40
CHOICES, PATTERN = ["fox", "안녕"], "(the|dog)( (fox|dog|안녕)){0,3}"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "dog"]}}, "required": ["a"]}
RULES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "choice": ({"choice": CHOICES}, lambda text: text in CHOICES),
    "regex": ({"regex": PATTERN}, lambda text: re.fullmatch(PATTERN, text) is not None),
    "json": ({"json": SCHEMA}, lambda text: json.loads(text)["a"] in (1, "dog")),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "choice": {"choices": CHOICES},
    "regex": {"regex": PATTERN},
    "json": {"json_schema": SCHEMA},
}


def chatty(kind: str) -> Run:
    """A chat model that has learnt nothing."""
    run = writer(kind, ends=True)
    tokenizer = TOKENIZERS[kind].with_chat({"default": TEMPLATE})
    return Run(run.model, run.spec.build(tokenizer), run.spec, Path("nowhere"))


CASES = [(kind, rule) for kind in KINDS for rule in RULES if rule != "json" or kind in ("bytes", "bpe", "unigram")]
each_case = pytest.mark.parametrize(("kind", "rule"), CASES)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    return {kind: chatty(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def server(runs: dict[str, Run]) -> Iterator[Server]:
    with serving_engine(Engine(runs)) as found:
        yield found


def spaced(rules: dict[str, Any], run: Run) -> dict[str, Any]:
    """Return the rules of texts that continue another: words of some tokenizers then begin with a space."""
    match rules:
        case {"choice": choices} if run.tokenizer.lead:
            return {"choice": [" " + choice for choice in choices]}
        case {"regex": pattern} if run.tokenizer.lead:
            return {"regex": f" {pattern}"}
    return rules


@each_case
def test_over_http(server: Server, kind: str, rule: str) -> None:
    rules, holds = RULES[rule]
    chat = {"messages": [{"role": "user", "content": "dog"}], "max_tokens": NEW, "structured_outputs": rules}
    for seed in range(2):
        found = server.ok("/v1/chat/completions", model=kind, seed=seed, n=2, **chat)
        for choice in found["choices"]:
            assert holds(choice["message"]["content"]), choice
            assert choice["finish_reason"] == "stop"
    body = {"model": kind, "stream": True, "seed": 5, **chat}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert holds("".join(delta.get("content", "") for delta in deltas))
    after = spaced(rules, server.run(kind))
    for prompt in ("the dog", [server.run(kind).tokenizer.bos]):
        asked = after if isinstance(prompt, str) else rules  # the beginning of a text is none that is continued
        body = {"prompt": prompt, "max_tokens": NEW, "structured_outputs": asked, "n": 4, "seed": 1}
        for choice in server.ok("/v1/completions", model=kind, **body)["choices"]:
            text = choice["text"]
            assert holds(text.removeprefix(" ") if asked != rules else text), choice


@each_case
def test_in_python(runs: dict[str, Run], kind: str, rule: str) -> None:
    _, holds = RULES[rule]
    how = {**OPTIONS[rule], "max_new_tokens": NEW, "temperature": 1.0}
    for seed in range(2):
        assert holds("".join(runs[kind].chat().reply("dog", seed=seed, **how)))
        assert holds(runs[kind].generate([""], seed=seed, **how)[0])
    assert holds("".join(runs[kind].stream("", seed=5, **how)))


@pytest.mark.parametrize("rule", RULES)
def test_on_the_command_line(tmp_path: Path, rule: str) -> None:
    kind = "unigram"
    run, (_, holds) = chatty(kind), RULES[rule]
    folder = tmp_path / "run"
    weights = run.model.state_dict()
    write_folder(folder, lambda to: write_model(to, weights, run.config, run.spec, run.task))
    options = {"choice": ["--choices", "fox", "--choices", "안녕"], "regex": ["--regex", PATTERN]}
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA), "utf-8")
    how = ["--max-new-tokens", str(NEW), *options.get(rule, ["--json-schema", str(schema)])]
    said = CliRunner().invoke(app, ["chat", str(folder), *how], input="dog\nthe\n")
    assert said.exit_code == 0, said.output
    assert [holds(line) for line in said.stdout.splitlines()] == [True, True]

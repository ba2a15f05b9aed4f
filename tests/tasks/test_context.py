"""The length that a model was trained for bounds what it writes, until an option allows more."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config import ConfigError, Rotary, io
from anyformer.config.position import Llama3Scaling, NoScaling, YarnScaling
from anyformer.generation.engine.engine import Engine
from anyformer.generation.engine.interface import Limits, TooLong
from anyformer.generation.strategy import Sampling
from anyformer.nn.model import Transformer
from anyformer.runs.run import Run, load, write_folder, write_model
from anyformer.tasks.answer_budgets import TrainedLimit
from tests import loop
from tests.serve.http.served import TEMPLATE, serving_engine
from tests.serve.mixed_requests import ask
from tests.test_cli import refused
from tests.test_generate import TOKENIZERS, writer
from tests.training.small import CROPS, PADDED, run as train, text

TRAINED = 24
PROMPT = "the quick"


def trained(kind: str = "lm", context: int | None = TRAINED) -> Run:
    """A run without an end of text, with a limit from its training; its positions have none."""
    run = writer("bytes", "lm" if kind == "chat" else kind)
    tokenizer = TOKENIZERS["bytes"].with_chat({"default": TEMPLATE}) if kind == "chat" else run.tokenizer
    model = Transformer(run.config.model_copy(update={"context": context})).eval()
    model.load_state_dict(run.model.state_dict())
    return Run(model, run.spec.build(tokenizer), run.spec, Path("nowhere"))


@pytest.mark.parametrize("asked", [None, 5, 100])
def test_an_answer_ends_where_the_training_did(asked: int | None) -> None:
    run, free, limits = trained(), trained(context=None), list[int]()
    read = len(run.writer().prompts([PROMPT], run.config)[0])
    for context, longest in ((None, TRAINED), (TRAINED + 30, TRAINED + 30)):
        room = longest - read + 1  # the last token of an answer is not read again
        options = {"max_new_tokens": asked, "context": context}
        expected = free.generate([PROMPT], max_new_tokens=min(room, asked or room))
        assert run.generate([PROMPT], at_limit=limits.append, **options) == expected
        assert isinstance(limits[-1], TrainedLimit) == (asked is None or asked > room)
        assert "".join(run.stream(PROMPT, **options)) == expected[0]


def test_a_prompt_beyond_the_training_is_refused() -> None:
    run = trained()
    long = PROMPT * 4
    with pytest.raises(
        ConfigError, match=rf"^text 2: has \d+ tokens, and the model was trained for {TRAINED}: .*`context`$"
    ):
        run.generate([PROMPT, long])
    assert run.generate([long], context=60, max_new_tokens=4) == trained(context=None).generate(
        [long], max_new_tokens=4
    )
    with pytest.raises(ConfigError, match=r"^context = 0: "):
        run.generate([PROMPT], context=0)
    with pytest.raises(ConfigError, match="was trained for 24"):
        trained("chat").chat("be brief and kind to all").reply(PROMPT)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (NoScaling(), None),
        (YarnScaling(factor=4, original_length=16), 64),
        (Llama3Scaling(factor=8, original_length=16), 128),
    ],
)
def test_scaled_positions_say_how_far_they_reach(
    scaling: NoScaling | YarnScaling | Llama3Scaling, length: int | None
) -> None:
    config = writer("bytes").config
    assert config.decoder is not None
    stack = config.decoder.model_copy(update={"position": Rotary(scaling=scaling)})
    config = config.model_copy(update={"decoder": stack})
    assert config.trained_length == length
    assert config.model_copy(update={"context": 10}).trained_length == 10


def test_a_training_on_rows_of_one_length_sets_it(tmp_path: Path) -> None:
    """Where positions beyond it are new to the model; a run that goes on from another may have longer rows."""
    first = train(text(tmp_path, steps=1), tmp_path / "first")
    assert (load(tmp_path / "first").config.context, first.config.context) == (CROPS.length, CROPS.length)
    longer = io.override(
        text(tmp_path, steps=1), [f"batches.length={2 * CROPS.length}", f"train.init_from={tmp_path / 'first'}"]
    )
    assert train(longer, tmp_path / "longer").config.context == 2 * CROPS.length
    given = io.override(text(tmp_path, steps=1), ["model.context=500"])
    assert train(given, tmp_path / "given").config.context == 500
    for position in ('"none"', '"alibi"', "{kind='learned', length=16}"):
        made = train(io.override(text(tmp_path, steps=1), [f"model.decoder.position={position}"]), tmp_path / "other")
        assert made.config.context is None
        shutil.rmtree(tmp_path / "other")
    assert train(text(tmp_path, PADDED, steps=1), tmp_path / "padded").config.context is None


def test_a_server_publishes_and_keeps_it() -> None:
    for allowed, most in ((None, TRAINED), (60, 60)):
        with serving_engine(Engine({"lm": trained(), "chat": trained("chat")}, Limits(context=allowed))) as server:
            assert [model["max_model_len"] for model in server.client.get("/v1/models").json()["data"]] == [most, most]
            ids = server.run("lm").tokenizer.encode(PROMPT)
            body: dict[str, Any] = {"model": "lm", "prompt": ids, "ignore_eos": True}
            room = most - len(ids) + 1
            found = server.ok("/v1/completions", **body, max_tokens=room)
            assert found["usage"]["completion_tokens"] == room
            error = server.refused("/v1/completions", **body, max_tokens=room + 1)
            assert error["code"] == "context_length_exceeded"
            assert f"the context is {most} tokens" in error["message"]
            error = server.refused("/v1/completions", model="lm", prompt=ids * 9, max_tokens=1)
            assert error["code"] == "context_length_exceeded"
            chat = server.ok("/v1/chat/completions", model="chat", messages=[{"role": "user", "content": "a"}])
            usage = chat["usage"]
            assert usage["prompt_tokens"] + usage["completion_tokens"] <= most + 1


@pytest.mark.parametrize("reproducible", [False, True])
def test_who_lacks_room_says_so(reproducible: bool) -> None:
    """A pool of pages, or the fixed shapes of a reproducible engine."""

    async def run() -> None:
        async with Engine(trained(context=None), Limits(reproducible=reproducible, pages=32)) as engine:
            with pytest.raises(TooLong, match="a reproducible engine has" if reproducible else "pages of the KV cache"):
                engine.submit(ask((1,) * 40_000, 30_000, Sampling()))

    loop.run(run())


def test_on_the_command_line(tmp_path: Path) -> None:
    run = trained()
    write_folder(tmp_path / "run", lambda to: write_model(to, run.model.state_dict(), run.config, run.spec, run.task))
    asked = ("generate", str(tmp_path / "run"), "--prompt", PROMPT, "--max-new-tokens", "99")
    said = CliRunner().invoke(app, asked)
    assert said.exit_code == 0, said.output
    assert "the model was trained for no longer texts; use a shorter prompt, or --context allows more" in said.stderr
    more = CliRunner().invoke(app, [*asked, "--context", "200"])
    assert "stopped at the limit of 99 tokens: --max-new-tokens sets it" in more.stderr
    assert "was trained for 24" in refused("generate", tmp_path / "run", "--prompt", PROMPT * 4)[0]

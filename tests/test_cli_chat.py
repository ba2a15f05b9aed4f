"""`anyformer chat`: lines in, answers out; commands; Ctrl-C stops an answer and not the program."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from anyformer.cli import app
from anyformer.recipe import PrefixLM
from anyformer.runs.run import Run, load
from anyformer.tasks.chat import Conversation
from tests.data.chat_cases import turns
from tests.tasks.test_chat import recipe
from tests.test_cli import refused
from tests.training.small import corrupted, run as train

LIMIT = ("--max-new-tokens", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("chat")
    return train(recipe(here), here / "run").folder


def chat(folder: Path, *options: str, lines: str) -> Result:
    return CliRunner().invoke(app, ["chat", str(folder), *options], input=lines)


def test_lines_of_stdin_are_messages(folder: Path) -> None:
    found = chat(folder, *LIMIT, "--system", "짧게.", lines="Hello\n\n你好\n/undo\n你好\n/clear\nHello\n/exit\nnever\n")
    assert found.exit_code == 0, found.output
    conversation = load(folder).chat("짧게.")
    expected = ["".join(conversation.reply(text, max_new_tokens=8)) for text in ("Hello", "你好")]
    assert found.stdout == "".join(f"{text}\n" for text in [*expected, expected[1], expected[0]])
    assert "undone\n" in found.stderr
    assert "cleared\n" in found.stderr


def test_commands_are_listed(folder: Path) -> None:
    found = chat(folder, lines="/undo\n/what\n")
    assert found.exit_code == 0
    assert found.stdout == ""
    assert found.stderr.startswith("nothing to undo\n/what: no such command\n/help ")


def test_sampling_has_a_seed(folder: Path) -> None:
    hot = (*LIMIT, "--temperature", "1.5", "--seed", "3")
    assert chat(folder, *hot, lines="Hello\n").stdout == chat(folder, *hot, lines="Hello\n").stdout


def test_wrong_input_is_refused(folder: Path, tmp_path: Path) -> None:
    other = train(corrupted(tmp_path, PrefixLM(), steps=1), tmp_path / "other").folder
    (line,) = refused("chat", other)
    assert line.endswith("is no chat model: its tokenizer has no chat template; `anyformer generate` continues texts")
    found = chat(folder, "--top-k", "3", lines="Hello\n")
    assert found.exit_code == 2
    assert found.stderr.startswith("--top-k = 3: needs a temperature above 0")


def test_ctrl_c_stops_the_answer_at_a_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    reply, seen = Conversation.reply, list[list[dict[str, str]]]()

    def interrupted(self: Conversation, text: str, **options: object):  # type: ignore[no-untyped-def]
        for i, piece in enumerate(reply(self, text, **options)):
            if i == 2 and text == "Hello":
                signal.raise_signal(signal.SIGINT)
            yield piece
        seen.append(list(self.messages))

    monkeypatch.setattr(Conversation, "reply", interrupted)
    long = ("--max-new-tokens", "30", "--min-new-tokens", "30", "--temperature", "2", "--seed", "1")
    found = chat(folder, *long, lines="Hello\n안녕\n")
    assert found.exit_code == 0, found.output
    assert found.stderr.startswith("stopped\n")
    assert len(found.stdout.splitlines()) >= 2
    (messages,) = seen  # the first answer was cut, the second one was not
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert messages[1]["content"] == found.stdout[: len(messages[1]["content"])]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.system
def test_a_terminal(folder: Path) -> None:
    """Ctrl-C at the prompt and Ctrl-D, in a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "anyformer", "chat", str(folder), *LIMIT, "--min-new-tokens", "8"]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = ""

    def until(text: str, signal: int = 0) -> None:
        """Read until a text; with `signal`, send that every second: an early one may come before the prompt is read."""
        nonlocal said
        deadline = time.monotonic() + 120
        while text not in said:
            assert time.monotonic() < deadline, said
            process.send_signal(signal)
            if select.select([ours], [], [], 1)[0]:
                said += os.read(ours, 4096).decode(errors="replace")
        said = said.partition(text)[2]

    until("> ")
    os.write(ours, "안녕\n".encode())
    until("stopped at the limit of 8 tokens")
    until("> ")
    until("/exit or Ctrl-D ends", signal.SIGINT)
    until("> ")
    os.write(ours, b"/help\n")
    until("/undo")
    until("> ")
    os.write(ours, b"\x04")
    assert process.wait(60) == 0
    os.close(ours)


def test_a_run_starts_conversations(folder: Path) -> None:
    run: Run = load(folder)
    assert run.chat().messages == []
    assert run.chat("s").messages == turns(system="s")

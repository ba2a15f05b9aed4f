"""The verb `chat`: a conversation in the terminal, or with the lines of stdin."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anyformer.cli.app import app
from anyformer.cli.decoding_options import DecodingCommand, as_options, decoding, limit_note, prepare
from anyformer.cli.runs import Folder
from anyformer.cli.torch_import import import_torch

if TYPE_CHECKING:
    from anyformer.tasks.chat import Conversation

PROMPT = "> "
COMMANDS = {
    "/help": "show these commands",
    "/clear": "forget all messages but that of the system",
    "/undo": "forget the last message and its answer",
    "/exit": "end; also Ctrl-D",
}


class PromptInterrupted(KeyboardInterrupt):
    """Ctrl-C while no answer is being written."""


class Interrupts:
    """SIGINT during a chat: stops the answer that is being written, at its next token."""

    def __init__(self) -> None:
        self.answering = self.stopped = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signal inside the block. SIGTERM ends the program as always."""
        before = signal.signal(signal.SIGINT, self._receive)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def answer(self) -> Iterator[None]:
        """Mark the time in which an answer is written."""
        self.answering, self.stopped = True, False
        try:
            yield
        finally:
            self.answering = False

    def _receive(self, *_: object) -> None:
        if not self.answering:
            raise PromptInterrupted
        self.stopped = True


@app.command("chat", cls=DecodingCommand)
@decoding
def chat_(
    run: Folder,
    system: Annotated[str | None, typer.Option(help="System message: instructions for the whole conversation.")] = None,
    *,
    how: dict[str, Any],
) -> None:
    """Talk with a chat model. Without a terminal, every line of stdin is a message."""
    import_torch()
    with as_options("the message"):
        loaded, how = prepare(run, how)
        conversation = loaded.chat(system)
    terminal, interrupts = sys.stdin.isatty(), Interrupts()
    if terminal:
        typer.echo(f"{run}: type a message; Ctrl-C stops an answer, /help lists commands", err=True)
    with interrupts.handled():
        for line in _lines(terminal):
            if line.strip().startswith("/"):
                if not _command(conversation, line.strip()):
                    return
                continue
            if not line.strip():
                continue
            try:
                _answer(conversation, line, interrupts, how)
            except ValueError as error:
                if not terminal:
                    raise
                typer.echo(str(error), err=True)


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the lines that are typed, or those of stdin. Ctrl-C discards the line that is being typed."""
    if not terminal:
        for number, line in enumerate(sys.stdin.buffer, 1):
            try:
                yield line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                from anyformer.config.spec import ConfigError, Fault

                what = f"is not UTF-8 at byte {error.start}"
                raise ConfigError([Fault(f"line {number} of stdin", what)]) from None
        return
    import readline  # noqa: F401  # `input` then has a history and can be edited

    while True:
        try:
            yield input(PROMPT)
        except PromptInterrupted:
            typer.echo("\n/exit or Ctrl-D ends", err=True)
        except EOFError:
            typer.echo()
            return


def _answer(conversation: "Conversation", text: str, interrupts: Interrupts, how: dict[str, Any]) -> None:
    """Print the answer to a message as it is written."""
    cut = set[int]()
    with interrupts.answer(), as_options("the message"):
        pieces = conversation.reply(text, at_limit=cut.add, **how)
        try:
            for piece in pieces:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
                if interrupts.stopped:
                    break
        finally:
            pieces.close()
            typer.echo()
    if interrupts.stopped:
        typer.echo("stopped", err=True)
    elif cut:
        typer.echo(limit_note(max(cut), "/clear forgets the conversation"), err=True)


def _command(conversation: "Conversation", name: str) -> bool:
    """Carry out a command; return whether the chat continues."""
    match name:
        case "/exit":
            return False
        case "/clear":
            conversation.clear()
            typer.echo("cleared", err=True)
        case "/undo":
            typer.echo("undone" if conversation.undo() else "nothing to undo", err=True)
        case _:
            if name != "/help":
                typer.echo(f"{name}: no such command", err=True)
            for command, what in COMMANDS.items():
                typer.echo(f"{command:<8} {what}", err=True)
    return True

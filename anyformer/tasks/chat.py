"""The task chat: answers in conversations, with a loss on the messages of the assistant only."""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.batch import Example
from anyformer.data.chat_template import ChatTemplate, Messages
from anyformer.data.conversations import MESSAGES, parse_messages
from anyformer.data.loader import ExampleLoader, Loader, longest_first
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import CHAT, FILE, TextTokenizer
from anyformer.generation.strategy import selectors
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Chat, ExampleBatches
from anyformer.tasks.base import (
    MAX_INFERENCE_TOKENS,
    Metrics,
    Progress,
    TokenTask,
    Writer,
    bad_row_notes,
    check_lengths,
    ending_ids,
    example_fault,
    token_values,
)
from anyformer.tasks.generation_defaults import NO_DEFAULTS, GenerationDefaults

NEW_TOKENS = 512  # of an answer, by default


class ChatWriter(Writer):
    """The writer of a chat model: a text is the user's next message after some others."""

    def __init__(self, template: ChatTemplate, before: Sequence[dict[str, str]] = ()):
        self.template, self.tokenizer = template, template.tokenizer
        self.conversation = lambda text: [*before, {"role": "user", "content": text}]

    @property
    def stops(self) -> list[int]:
        """The token that ends a message, if it is not <eos>."""
        end = self.template.end_of_turn
        return [] if end in (None, self.tokenizer.eos) else [end]

    def prompts(self, texts: Sequence[str], config: ModelConfig) -> list[list[int]]:
        """Return the prompts of conversations with these texts at the end; an empty one for a blank text."""
        prompts = [self.template.encode(self.conversation(text)) for text in texts]
        check_lengths(list(map(len, prompts)), config, "decoder")
        return [ids if text.strip() else [] for ids, text in zip(prompts, texts, strict=True)]

    def default_budget(self, read: int, config: ModelConfig) -> int:
        return NEW_TOKENS

    def scored(self, texts: Sequence[str], answers: Sequence[str] | None, config: ModelConfig) -> list[Example]:
        """Return each answer, with its end, after its text."""
        if answers is None:
            raise ConfigError([Fault("answers", "are missing: a chat model scores an answer to each text")])
        examples = []
        for number, (text, answer) in enumerate(zip(texts, answers, strict=True), 1):
            if (example := self.answer_example(self.conversation(text), answer)) is None:
                raise ConfigError([Fault(f"answer {number}", "has no tokens")])
            examples.append(example)
        return examples

    def answer_example(self, messages: Messages, answer: str) -> Example | None:
        """Return an answer, with its end, after the prompt of some messages; None if it has no tokens."""
        ids, spans = self.template.encode_answers([*messages, {"role": "assistant", "content": answer}])
        return _example(ids, spans[-1:]) if spans[-1] else None


def template_of(tokenizer: TextTokenizer) -> ChatTemplate | None:
    """Return the chat template of a tokenizer; None if it has none."""
    return ChatTemplate.of(tokenizer, f"{FILE}: {CHAT}")


class Conversing(ChatWriter, TokenTask):
    """Conversations: only the messages of the assistant have labels, each with the token that ends it."""

    def __init__(self, spec: Chat, template: ChatTemplate | None):
        if template is None:
            what = "has no chat template, which the task chat needs: set task.template, such as 'chatml'"
            raise ConfigError([Fault("tokenizer", what)])
        super().__init__(template)
        self.spec = spec

    def encode(self, cells: Sequence[str]) -> list[Example | str]:
        """Return the example of each conversation, or why there is none."""
        return [self._encode(cell) for cell in cells]

    def _encode(self, cell: str) -> Example | str:
        try:
            ids, answers = self.template.encode_answers(parse_messages(cell))
        except ValueError as error:
            return str(error)
        return _example(ids, answers) if any(answers) else "has no message of the assistant"

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        rows = rows.with_ids({MESSAGES: self.encode})
        faults = (one if isinstance(one, str) else example_fault(one, config, batches) for one in rows.ids[MESSAGES])
        return rows.without({i: why for i, why in enumerate(faults) if why})

    def examples(self, rows: Rows) -> list[Example]:
        """Return the examples of rows that `filter_rows` has returned."""
        return [one for one in rows.encoded(MESSAGES, self.encode) if isinstance(one, Example)]

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        assert isinstance(batches, ExampleBatches)
        return ExampleLoader(self.examples(rows), batches, seed, pad=self.tokenizer.pad or 0, source_pad=0)

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        """Measure loss and accuracy of the tokens of the assistant, each after the true ones before it."""
        pad = self.tokenizer.pad or 0
        values, count = token_values(model, longest_first(self.examples(rows), MAX_INFERENCE_TOKENS, pad, pad))
        return Metrics("chat", count, values, {"conversations": len(rows), **bad_row_notes(rows)})

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return an answer to each text as the first message of a user; a blank text has an empty one."""
        from anyformer.tasks.generation import generate

        return generate(self, model, texts, progress=progress, **options)


class Conversation:
    """A conversation with a chat model: the `messages` so far, and answers to the next one."""

    def __init__(
        self,
        template: ChatTemplate,
        model: Transformer,
        system: str | None = None,
        defaults: GenerationDefaults = NO_DEFAULTS,
    ):
        from anyformer.generation.prefix_cache import Reuse

        self.template, self.model, self.defaults = template, model, defaults
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._system)
        self._reuse = Reuse(texts=1)

    def reply(self, text: str, **options: Any) -> Generator[str]:
        """Yield the answer to a message in pieces, with the options of `tasks.generation.generate`.

        The message and its answer become part of the conversation: if the iteration ends early, its part so far.
        Wrong options raise at the call.
        """
        from anyformer.tasks.generation import generate, stream

        if not text.strip():
            raise ConfigError([Fault("text 1", "is blank: type a message")])
        writer, stops = ChatWriter(self.template, self.messages), ending_ids(self.template.tokenizer, self.model.config)
        end = self.template.end_of_turn
        options = {
            "stop_ids": list(dict.fromkeys([*stops, *([] if end is None else [end])])),
            **self.defaults.merged(options),
        }
        if options.keys() & selectors():  # strategies that find whole answers
            return self._record(text, iter(generate(writer, self.model, [text], **options)))
        return self._record(text, stream(writer, self.model, text, reuse=self._reuse, **options))

    def _record(self, text: str, pieces: Iterator[str]) -> Generator[str]:
        answer = list[str]()
        try:
            for piece in pieces:
                answer.append(piece)
                yield piece
        finally:
            if isinstance(pieces, Generator):
                pieces.close()
            asked = {"role": "user", "content": text}
            self.messages += [asked, {"role": "assistant", "content": "".join(answer)}]

    def undo(self) -> bool:
        """Forget the last message and its answer; return whether there was one."""
        if len(self.messages) == len(self._system):
            return False
        del self.messages[-2:]
        return True

    def clear(self) -> None:
        """Forget all messages but that of the system."""
        self.messages = list(self._system)


def _example(ids: list[int], answers: Sequence[range]) -> Example:
    """Return the example of a conversation whose tokens at some places have labels, up to the last of these."""
    labelled = {place for answer in answers for place in answer}
    length = max(labelled)
    return Example(ids[:length], [ids[i] if i in labelled else IGNORE for i in range(1, length + 1)])

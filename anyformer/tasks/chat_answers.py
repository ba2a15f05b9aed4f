"""Answers of a chat model, in the tasks dpo and grpo: their prompts are those of a chat with the model.

A row is a text, the message of a user, or a conversation, and one answer or more. The prompt of an answer is what
`ChatTemplate.encode` returns, as in `chat` and `serve`, and its labels are those of the task chat.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from anyformer.config import ModelConfig
from anyformer.data.batch import Example
from anyformer.data.chat_template import ChatTemplate
from anyformer.data.conversations import MESSAGES, parse_messages
from anyformer.data.readers import Rows
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.model import Transformer
from anyformer.recipe import Answers, Batches
from anyformer.tasks.base import example_fault
from anyformer.tasks.chat import NEW_TOKENS, ChatWriter
from anyformer.tasks.preferences import Preferring
from anyformer.tasks.rewards import RewardedAnswers
from anyformer.tasks.seq2seq import SequenceToSequence


class ChatAnswers(ChatWriter, SequenceToSequence):
    """Sequence to sequence whose sources are conversations, or texts as the first message of one."""

    prompts_from = ("source", MESSAGES)

    def __init__(self, spec: Answers, template: ChatTemplate):
        super().__init__(template)
        self.spec, self.reader, self.begin = spec, template.tokenizer, []

    def default_budget(self, read: int, config: ModelConfig) -> int:
        return self.spec.max_target or NEW_TOKENS

    def encode(self, rows: Rows, both_sides: bool, role: str = "target") -> list[Example]:
        """Return the examples of rows that `filter_rows` has returned."""
        return [one for one in self.encoded_answers(rows, role) if isinstance(one, Example)]

    def encoded_answers(self, rows: Rows, role: str) -> list[Any]:
        """Return the example of each answer in a column, or why there is none."""
        if role in rows.ids:
            return rows.ids[role]
        parse, cells = self._prompts_of(rows)
        return [self._answer(parse, cell, answer) for cell, answer in zip(cells, rows.columns[role], strict=True)]

    def with_ids(self, rows: Rows) -> Rows:
        return replace(rows, ids={role: self.encoded_answers(rows, role) for role in self.answers})

    def row_faults(
        self, rows: Rows, config: ModelConfig, batches: Batches | None, role: str = "target"
    ) -> Iterator[str]:
        for example in self.encoded_answers(rows, role):
            if isinstance(example, str):
                yield example
                continue
            answer = sum(label != IGNORE for label in example.labels)
            limits = self.limit_fault(len(example.ids) - answer + 1, answer - 1)
            yield limits or example_fault(example, config, batches)

    @property
    def pads(self) -> tuple[int, int]:
        return self.tokenizer.pad or 0, 0

    def predict_rows(self, model: Transformer, rows: Rows) -> list[str]:
        writer, (writer.conversation, cells) = copy.copy(self), self._prompts_of(rows)
        return writer.predict(model, cells)

    def _prompts_of(self, rows: Rows) -> tuple[Any, list[str]]:
        """Return the cells of the prompts, and the function from a cell to messages."""
        if MESSAGES in rows.columns:
            return parse_messages, rows.columns[MESSAGES]
        return self.conversation, rows.columns["source"]

    def _answer(self, parse: Any, cell: str, answer: str) -> Example | str:
        try:
            return self.answer_example(parse(cell), answer) or "the answer has no tokens"
        except ValueError as error:
            return str(error)


class ChatPreferring(Preferring, ChatAnswers):
    """The task dpo of a chat model."""


class ChatRewardedAnswers(RewardedAnswers, ChatAnswers):
    """The task grpo of a chat model."""

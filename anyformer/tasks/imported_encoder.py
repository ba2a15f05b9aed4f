"""What an encoder from elsewhere says of texts: by its head a vector, a label, labels of tokens, or masked words.

It answers, and is neither trained nor measured: it has no data of its own.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from anyformer.config import (
    Classifier,
    ConfigError,
    Embedder,
    Fault,
    MaskedLM,
    ModelConfig,
    NoHead,
    TokenLabels,
    Tokens,
)
from anyformer.data.batch import Example
from anyformer.data.loader import Loader
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches, Encoder
from anyformer.tasks.base import Metrics, Progress, refuse_long
from anyformer.tasks.fill_mask import encode_with, filled
from anyformer.tasks.sequence_level import Frame, as_json, read_rows, refuse_options

Answer = Callable[[Tensor, list[int]], str]


class Encoding:
    """Texts between the special tokens that the tokenizer's file puts around them, or between <bos> and <eos>."""

    source_tokenizer: TextTokenizer | None = None

    def __init__(self, spec: Encoder, tokenizer: TextTokenizer):
        self.spec, self.tokenizer = spec, tokenizer
        frame = Frame(tokenizer)
        self.before, self.after = frame.before, frame.after

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return, by the head: a label, or a JSON list of labels if any number may hold; a label for each token; the
        text with its masked words; or a vector, as JSON."""
        refuse_options(options)
        if not isinstance(model.config.last_input, Tokens):
            what = f"the model reads {model.config.last_input.kind}, not texts: call it in Python, run.model(images)"
            raise ConfigError([Fault("source", what)])
        answer = self._answer(model.config)
        rows = [self._row(text, masked=isinstance(model.config.head, MaskedLM)) for text in texts]
        refuse_long(list(map(len, rows)), model.config, "encoder" if model.config.encoder else "decoder")
        out = [""] * len(texts)
        for i, found in read_rows(model, [Example(row, row) for row in rows], self.tokenizer.pad or 0, progress):
            out[i] = answer(found if found.dim() == 1 else found[: len(rows[i])], rows[i])
        return out

    def masked(self, text: str) -> list[int]:
        """A row of the text, in which the mask stands by its name."""
        return self._row(text, masked=True)

    def _row(self, text: str, masked: bool) -> list[int]:
        """The ids of a text; in a masked LM, the name of the mask stands for it."""
        mask = self.tokenizer.mask
        if masked and mask is not None:
            ids = encode_with(self.tokenizer, text, [mask])
        else:
            ids = self.tokenizer.encode(text)
        return [*self.before, *self._cut(ids), *self.after]

    def _cut(self, ids: list[int]) -> list[int]:
        room = self.spec.max_length
        return ids if room is None else ids[: max(0, room - len(self.before) - len(self.after))]

    def _answer(self, config: ModelConfig) -> Answer:
        match config.head:
            case Embedder():
                return lambda vector, row: as_json(vector)
            case NoHead():
                return lambda hidden, row: as_json(hidden.mean(dim=0))
            case Classifier() if self.spec.multi_label:
                return lambda logits, row: self._holding(logits)
            case Classifier():
                return lambda logits, row: self.spec.labels[int(logits.argmax())]
            case TokenLabels(crf=False):
                return lambda logits, row: " ".join(
                    self.spec.labels[i] for i in self._within(logits).argmax(-1).tolist()
                )
            case MaskedLM():
                return self._filled
            case _:
                raise ConfigError([Fault("head", f"= '{config.head.kind}': an encoder has no answer by it")])

    def _holding(self, logits: Tensor) -> str:
        """The labels with sigmoid(logit) > 1/2, as a JSON list."""
        held = (logits > 0).nonzero()[:, 0].tolist()
        return json.dumps([self.spec.labels[i] for i in held], ensure_ascii=False)

    def _within(self, rows: Tensor) -> Tensor:
        """Of the tokens of the text itself."""
        return rows[len(self.before) : len(rows) - len(self.after)]

    def _filled(self, logits: Tensor, row: list[int]) -> str:
        said = row if self.tokenizer.mask is None else filled(row, self.tokenizer.mask, logits)
        return self.tokenizer.decode(said[len(self.before) : len(said) - len(self.after)])

    # -- what only trained tasks do -----------------------------------------------------------------------------------

    def fitting(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        raise _untrained()

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        raise _untrained()

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        raise _untrained()

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        raise _untrained()


def _untrained() -> ConfigError:
    return ConfigError([Fault("task.kind", "= 'encoder': it answers texts, and has no data to be measured on")])

"""The task of an imported encoder: by its head a vector, a label, labels of tokens, or the tokens at masks.

It predicts only: it has no data to be trained or measured on.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, IdInput, ModelConfig
from anyformer.data.batch import Example
from anyformer.data.tokenizer import TextTokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import Encoder
from anyformer.tasks.base import MAX_INFERENCE_TOKENS, PredictOnly, Progress, check_lengths
from anyformer.tasks.sequence_level import (
    Frame,
    as_json,
    encode_with,
    filled,
    for_shape,
    read_rows,
    refuse_decoding_options,
)

Answer = Callable[[Tensor, list[int]], str]


class Encoding(PredictOnly):
    """Predictions of an imported encoder. Texts are between the special tokens of the tokenizer's file."""

    spec: Encoder
    imported = "encoder"

    def __init__(self, spec: Encoder, tokenizer: TextTokenizer):
        self.spec, self.tokenizer = spec, tokenizer
        self.frame = Frame(tokenizer)
        if not spec.framed:
            self.frame.before, self.frame.after = tokenizer.around

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return, by the head: a label, or a JSON list of labels if any number may hold; a label for each token; the
        text with its masked words; or a vector, as JSON. For a model of patches, texts are paths of pictures.

        `prompt_name` selects a prompt of the model that is read before each text.
        """
        prompt_name = options.pop("prompt_name", None)
        refuse_decoding_options(options)
        answer = self.formatter(model.config)
        if prompt_name is not None:
            self.spec.prompt_text(prompt_name)  # raises if there is no such prompt
        if self.reads_pictures(model.config):
            return [answer(output, []) for output in self._read_pictures(model, texts, progress)]
        if not isinstance(model.config.last_input, IdInput):
            what = f"the model reads {model.config.last_input.kind}, not texts: call it in Python, run.model(images)"
            if model.config.last_input.picture is not None:
                what += ", or import it again with its preprocessor_config.json, to predict from picture files"
            raise ConfigError([Fault("source", what)])
        examples, out = list(self.examples(texts, model.config, prompt_name).values()), [""] * len(texts)
        for i, output in read_rows(model, examples, self.tokenizer, progress):
            row = list(examples[i].ids)
            out[i] = answer(output if output.dim() == 1 else output[: len(row)], row)
        return out

    def reads_pictures(self, config: ModelConfig) -> bool:
        """Return whether texts are paths of pictures."""
        return self.spec.pictures is not None and config.last_input.picture is not None

    def examples(self, texts: Sequence[str], config: ModelConfig, prompt_name: str | None = None) -> dict[int, Example]:
        """Return the examples of texts, by their numbers, each after the prompt of that name."""
        prompt = self.spec.prompt_text(prompt_name)
        rows = [self._row(prompt + text, masked=config.head.output == "masked_lm") for text in texts]
        check_lengths(list(map(len, rows)), config, "encoder" if config.encoder else "decoder")
        return {i: for_shape(Example(row, row), config) for i, row in enumerate(rows)}

    def _read_pictures(self, model: Transformer, names: Sequence[str], progress: Progress | None) -> Iterator[Tensor]:
        """Yield the output of the head for each picture file."""
        media, length = self.tokenizer.media, model.config.last_input.length
        assert media is not None
        assert length is not None
        images, size = media.images(names), max(1, MAX_INFERENCE_TOKENS // length)
        for batch in images.split(size):
            with torch.no_grad():
                yield from model(batch.to(next(model.parameters()).device)).float().cpu()
            if progress:
                progress(len(batch))

    def read(self, text: str, config: ModelConfig, target: str | None = None) -> Example:
        row = self.masked(text)
        return for_shape(Example(row, row), config)

    def words(self, text: str, example: Example) -> tuple[list[int], list[str]]:
        """Return the tokens of a text by name, and their indices."""
        places = range(len(self.frame.before), len(example.ids) - len(self.frame.after))
        return list(places), [self.tokenizer.token(example.ids[at]) for at in places]

    def masked(self, text: str) -> list[int]:
        """Return the row of a text; the name of the mask in it becomes the mask token."""
        return self._row(text, masked=True)

    def _row(self, text: str, masked: bool) -> list[int]:
        """Return the row of a text; with `masked`, the name of the mask in it becomes the mask token."""
        mask = self.tokenizer.mask
        if masked and mask is not None:
            ids = encode_with(self.tokenizer, text, [mask])
        else:
            ids = self.tokenizer.encode(text)
        return [*self.frame.before, *self._cut(ids), *self.frame.after]

    def _cut(self, ids: list[int]) -> list[int]:
        limit = self.spec.max_length
        return ids if limit is None else ids[: max(0, limit - len(self.frame.before) - len(self.frame.after))]

    def formatter(self, config: ModelConfig) -> Answer:
        """Return a function that writes the output of the head for a row as a prediction."""
        match config.head.output:
            case "embedder":
                return lambda vector, row: as_json(vector)
            case "none":
                return lambda hidden, row: as_json(hidden.mean(dim=0))
            case "classifier":
                return lambda logits, row: self.format_prediction(logits)
            case "token_labels" if not config.head.joint:
                return lambda logits, row: " ".join(
                    self.spec.labels[i] for i in self.text_only(logits).argmax(-1).tolist()
                )
            case "masked_lm":
                return self._filled
            case _:
                raise ConfigError(
                    [Fault("head", f"= '{config.head.kind}': an imported encoder has no predictions from this head")]
                )

    def format_prediction(self, logits: Tensor) -> str:
        """Return the most probable label; of several, those with sigmoid(logit) > 1/2, as a JSON list."""
        if not self.spec.multi_label:
            return self.spec.labels[int(logits.argmax())]
        positive = (logits > 0).nonzero()[:, 0].tolist()
        return json.dumps([self.spec.labels[i] for i in positive], ensure_ascii=False)

    def text_only(self, outputs: Tensor) -> Tensor:
        """Return the outputs at tokens of the text, without the special tokens around it."""
        return outputs[len(self.frame.before) : len(outputs) - len(self.frame.after)]

    def _filled(self, logits: Tensor, row: list[int]) -> str:
        ids = row if self.tokenizer.mask is None else filled(row, self.tokenizer.mask, logits)
        return self.tokenizer.decode(ids[len(self.frame.before) : len(ids) - len(self.frame.after)])

"""The task of an imported speech model: the text of a WAV file (Whisper, Radford et al. 2022).

It predicts only: it has no data to be trained or measured on.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig, Spectrogram
from anyformer.config.spec import visible
from anyformer.data.media import REFERENCE
from anyformer.data.media_files import BadFile, log_mel, read_sound
from anyformer.data.tokenizer import TextTokenizer
from anyformer.generation.filters import ban
from anyformer.generation.logit_processors import History
from anyformer.generation.request import Request
from anyformer.generation.strategy import strategy
from anyformer.nn.model import Transformer
from anyformer.recipe import Transcribe
from anyformer.tasks.base import PredictOnly, Progress, before_end, ending_ids

SOUNDS_PER_BATCH = 8


class Transcribing(PredictOnly):
    """Transcriptions by an imported speech model. A text is the path of a WAV file, or a reference `<audio:a.wav>`."""

    spec: Transcribe
    imported = "speech model"

    def __init__(self, spec: Transcribe, tokenizer: TextTokenizer):
        self.spec, self.tokenizer = spec, tokenizer

    def predict(
        self, model: Transformer, texts: Sequence[str], *, progress: Progress | None = None, **options: Any
    ) -> list[str]:
        """Return the text of each sound; the options are `max_new_tokens` and those of `decoding.strategy`."""
        rows = [i for i, text in enumerate(texts) if text.strip()]
        budget = _budget(model.config, options.pop("max_new_tokens", None))
        how, out = strategy(**options), [""] * len(texts)
        sounds = [_read(texts[i], i, model.config) for i in rows]
        for at in range(0, len(rows), SOUNDS_PER_BATCH):
            frames = [log_mel(samples, _audio(model.config)) for samples in sounds[at : at + SOUNDS_PER_BATCH]]
            ids = torch.from_numpy(np.stack(frames)).to(next(model.parameters()).device)
            request = Request(
                ids,
                max_new_tokens=budget,
                stop=ending_ids(self.tokenizer, model.config),
                processors=[Opening(self.spec, model.config.vocab, ids.device)],
            )
            for i, answer in zip(rows[at:], how.run(model, request).tolist(), strict=False):
                spoken = before_end(answer[1 + len(self.spec.opening) :], request.stop_ids)
                out[i] = self.tokenizer.decode(spoken).strip()
            if progress:
                progress(len(frames))
        return out


class Opening:
    """Logit processor: the first tokens are among those of `opening`, and later ones are not suppressed."""

    def __init__(self, spec: Transcribe, vocab: int, device: torch.device):
        first = len(spec.opening)
        banned = torch.zeros(first + 2, vocab, dtype=torch.bool)  # by the number of tokens that an answer has
        for i, ids in enumerate(spec.opening):
            banned[i] = True
            banned[i, list(ids)] = False
        banned[first:, list(spec.suppress)] = True
        banned[first, list(spec.suppress_first)] = True
        self.banned = banned.to(device)

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        step = history.answered().clamp(max=len(self.banned) - 1)
        return ban(logits, self.banned[step])


def _audio(config: ModelConfig) -> Spectrogram:
    if config.source is None or config.source.sound is None:
        raise ConfigError([Fault("source", f"= '{getattr(config.source, 'kind', None)}': transcribing needs 'audio'")])
    return config.source.sound


def _budget(config: ModelConfig, given: int | None) -> int:
    assert config.decoder is not None
    limit = config.decoder.limit or 448
    return limit if given is None else min(given, limit)


def _read(text: str, i: int, config: ModelConfig) -> np.ndarray:
    """Return the samples of a sound, with zeros up to the length that the model was trained with."""
    audio, found = _audio(config), REFERENCE.fullmatch(text.strip())
    name = found[2] if found and found[1] == "audio" else text.strip()
    try:
        samples = read_sound(name, audio)
    except BadFile as error:
        raise ConfigError([Fault(f"text {i + 1}", str(error))]) from None
    length = (config.context or 1500) * audio.stride * audio.hop
    if len(samples) > length:
        seconds, longest = len(samples) / audio.rate, length / audio.rate
        what = f"{visible(name)} has {seconds:.1f} seconds, and the model reads {longest:.0f}: cut it into parts"
        raise ConfigError([Fault(f"text {i + 1}", what)])
    return np.pad(samples, (0, length - len(samples)))

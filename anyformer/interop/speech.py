"""Settings of Whisper's decoding in public folders: special tokens that an answer begins with, and suppressed ones."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anyformer.config import Audio, ModelConfig
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop.weight_files import wrong
from anyformer.recipe import Transcribe

PREPROCESSOR = "preprocessor_config.json"
PLAIN, TASK = "<|notimestamps|>", "<|transcribe|>"
LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")
MULTILINGUAL = 51_865  # smallest vocabulary of a multilingual model; an English one has a token less


def task(text: TextTokenizer, config: ModelConfig, settings: Mapping[str, Any], file: Path) -> Transcribe:
    """Return the task of a model, with `suppress_tokens`, `begin_suppress_tokens` and `is_multilingual` of settings."""
    vocab, many = config.vocab, settings.get("is_multilingual")
    ids = {token: i for token, i in text.inner.get_vocab().items() if i < vocab}
    opening: list[tuple[int, ...]] = []
    if PLAIN in ids:
        opening = [(ids[PLAIN],)]
        if vocab >= MULTILINGUAL if many is None else many:
            languages = sorted(i for token, i in ids.items() if LANGUAGE.fullmatch(token))
            opening = [tuple(languages), *([(ids[TASK],)] if TASK in ids else []), *opening]
    both = (_ids(settings, name, vocab, file) for name in ("suppress_tokens", "begin_suppress_tokens"))
    suppress, first = both
    return Transcribe(opening=tuple(filter(None, opening)), suppress=suppress, suppress_first=first)


def _ids(settings: Mapping[str, Any], name: str, vocab: int, file: Path) -> tuple[int, ...]:
    found = settings.get(name) or []
    if not isinstance(found, list) or not all(type(id) is int and id < vocab for id in found):
        raise wrong(file, f"{name} must be a list of ids below {vocab}")
    return tuple(id for id in found if id >= 0)


def generation_settings(spec: Transcribe, text: TextTokenizer) -> dict[str, Any]:
    """Return the fields of generation_config.json for a task."""
    found: dict[str, Any] = {"suppress_tokens": list(spec.suppress), "begin_suppress_tokens": list(spec.suppress_first)}
    if spec.opening:
        found |= {"is_multilingual": len(spec.opening) > 1, "no_timestamps_token_id": spec.opening[-1][0]}
    if len(spec.opening) > 2:
        found |= {"lang_to_id": {str(text.inner.id_to_token(id)): id for id in spec.opening[0]}}
        found |= {"task_to_id": {"transcribe": spec.opening[1][0]}}
    return found


def preprocessor(config: ModelConfig) -> dict[str, Any]:
    """Return the preprocessor_config.json of a model that reads sounds."""
    audio = config.source
    assert isinstance(audio, Audio)
    samples = (config.context or 1500) * audio.stride * audio.hop
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": audio.mels,
        "sampling_rate": audio.rate,
        "hop_length": audio.hop,
        "n_fft": audio.window,
        "chunk_length": samples // audio.rate,
        "n_samples": samples,
        "nb_max_frames": samples // audio.hop,
    }


def check_preprocessor(data: Mapping[str, Any], config: ModelConfig, file: Path) -> None:
    """Refuse features of sounds that are computed in another way than the model's config says."""
    expected = preprocessor(config)
    for name in ("feature_size", "sampling_rate", "hop_length", "n_fft"):
        if data.get(name, expected[name]) != expected[name]:
            raise wrong(file, f"{name} = {data[name]!r}: only {expected[name]} is supported")

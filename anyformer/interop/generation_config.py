"""The generation_config.json of a public folder: read as defaults of a run, and written.

A field is honoured, or named in a warning: sampling, beam search, penalties and lengths are honoured. The ids in it are
read with config.json. Fields with the value that `transformers` would use anyway have no effect.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Fault
from anyformer.config.parse import build
from anyformer.config.spec import visible
from anyformer.generation.filters import Filter
from anyformer.generation.strategy import options
from anyformer.interop.config_fields import shown
from anyformer.interop.weight_files import read_json
from anyformer.tasks.generation_defaults import NO_DEFAULTS, GenerationDefaults

FILE = "generation_config.json"
TOP_K = 50  # of `transformers`, where a file samples and does not name it
STOPPING = {True: "first", False: "heuristic", "never": "never"}
# Fields of ids, of files, and of what a call returns; and an id that only replaces the last token of an answer that the
# budget cuts off.
# fmt: off
SILENT = (
    "_from_model_config", "bos_token_id", "cache_implementation", "decoder_start_token_id", "do_sample", "eos_token_id",
    "forced_eos_token_id", "output_attentions", "output_hidden_states", "output_scores", "pad_token_id",
    "return_dict_in_generate", "transformers_version", "trust_remote_code", "use_cache",
)
# fmt: on
NEUTRAL = {
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "is_assistant": False,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "remove_invalid_values": False,
    "target_lookbehind": 10,
}


def read(folder: Path, pairs: bool) -> GenerationDefaults:
    """Return the defaults of a folder; `pairs`: the model is an encoder–decoder, whose lengths are of its output."""
    path = folder / FILE
    if not path.is_file():
        return NO_DEFAULTS
    left = {key: value for key, value in read_json(path).items() if value is not None and key not in SILENT}
    samples = read_json(path).get("do_sample") is True
    found = _options(left, samples, pairs)
    unsupported = sorted(key for key, value in left.items() if key not in NEUTRAL or NEUTRAL[key] != value)
    if unsupported:
        named = ", ".join(f"{visible(key)} = {shown(left[key])}" for key in unsupported)
        warnings.warn(f"{visible(str(path))}: settings that are not used here: {named}", stacklevel=3)
    try:
        return build(GenerationDefaults, {key: value for key, value in found.items() if value is not None})
    except ConfigError as error:
        faults = [Fault(f"{visible(str(path))}: {fault.path}", fault.message) for fault in error.faults]
        raise ConfigError(faults) from None


def _options(left: dict[str, Any], samples: bool, pairs: bool) -> dict[str, Any]:
    """Return our options, and take the fields that they use out of `left`."""

    def take(key: str, neutral: Any = None, convert: Callable[[Any], Any] = lambda value: value) -> Any:
        value = left.pop(key, neutral)
        return None if value is None or value == neutral else convert(value)

    budget = take("max_new_tokens")
    filters: dict[str, dict[str, Any]] = {"sample": {}, "change": {}}
    for name, part in _public().items():
        convert = _number if isinstance(part.off, float) else lambda value: value
        filters[part.stage][name] = take(part.public, part.off or 0, convert)
    changes = filters["change"]
    if pairs and (most := take("max_length")) is not None and budget is None:
        budget = most - 1 if type(most) is int else most  # the start id counts there
    if pairs and (least := take("min_length", 0)) is not None and changes["min_new_tokens"] is None:
        changes["min_new_tokens"] = max(least - 1, 0) if type(least) is int else least
    if not pairs and left.get("min_length") == 0:
        del left["min_length"]
    temperature, top_k = take("temperature", convert=_number), left.pop("top_k", None)
    beams, penalty = take("num_beams", 1), take("length_penalty", 1.0, _number)
    stopping = take("early_stopping", False, _stopping)
    found: dict[str, Any] = {"max_new_tokens": budget}
    if samples and beams is None:
        found["temperature"] = 1.0 if temperature is None else temperature
        found["top_k"] = (TOP_K if top_k is None else top_k) or None
        found |= filters["sample"]
    elif samples:
        left["do_sample"] = True  # beam search that samples
    found |= changes
    if beams is not None:
        found |= {"beams": beams, "length_penalty": penalty, "early_stopping": stopping}
    found["suppressed"] = _suppressed(left)
    return found


def _stopping(value: Any) -> Any:
    return STOPPING.get(value, value) if isinstance(value, bool | str) else value


def _number(value: Any) -> Any:
    return float(value) if type(value) is int else value


def _suppressed(left: dict[str, Any]) -> list[Any] | None:
    """Return the ids that are never generated: suppress_tokens, and bad_words_ids of one id each.

    `GenerationDefaults` checks that they are ids.
    """
    words, ids = left.get("bad_words_ids"), left.get("suppress_tokens")
    found: list[Any] = []
    if isinstance(words, list) and all(isinstance(word, list) and len(word) == 1 for word in words):
        found += [word[0] for word in left.pop("bad_words_ids")]
    if isinstance(ids, list):
        found += left.pop("suppress_tokens")
    if not found:
        return None
    return sorted(set(found)) if all(type(id) is int for id in found) else found


def fields(defaults: GenerationDefaults) -> dict[str, Any]:
    """Return the fields of generation_config.json for the defaults of a run."""
    given = defaults.options
    found: dict[str, Any] = {"max_new_tokens": defaults.max_new_tokens}
    found |= {part.public: given.get(name) for name, part in _public().items()}
    if given.get("temperature"):
        found |= {"do_sample": True, "temperature": given["temperature"], "top_k": given.get("top_k", 0)}
    if "beams" in given:
        ours = {name: value for value, name in STOPPING.items()}
        found |= {"num_beams": given["beams"], "length_penalty": given.get("length_penalty")}
        found["early_stopping"] = ours.get(given.get("early_stopping", ""))
    found["bad_words_ids"] = [[id] for id in defaults.suppressed] or None
    return {key: value for key, value in found.items() if value is not None}


def _public() -> dict[str, type[Filter]]:
    """Return the filters that have a field of this file, by our names."""
    return {name: one.filter for name, one in options().items() if one.filter and one.filter.public}

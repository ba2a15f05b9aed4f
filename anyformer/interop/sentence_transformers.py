"""Folders of sentence-transformers (Reimers & Gurevych 2019): a `transformers` folder with pooling settings.

modules.json               the steps: Transformer, Pooling, and maybe Normalize, each with its folder
1_Pooling/config.json      the pooling mode
sentence_bert_config.json  maximum length of a text; newer folders have it in tokenizer_config.json
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from anyformer.config import ConfigError, Embedder, NoTransform, Pool
from anyformer.config.spec import is_file_name, visible
from anyformer.interop.config_fields import Fields
from anyformer.interop.weight_files import read_json, write_json, wrong

MODULES, READING, ABOUT = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
STEPS = ("Transformer", "Pooling", "Normalize")
POOLS: dict[str, Pool] = {"mean": "mean", "cls": "first", "max": "max", "lasttoken": "last"}
OLDER = {  # fields of files without `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
STATES = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


class Sentences(NamedTuple):
    """Settings that turn hidden states into the vector of a text."""

    body: Path  # the folder of the model itself
    head: Embedder
    longest: int | None  # maximum tokens of a text, with special tokens
    lower: bool  # texts are read in lower case, whatever the tokenizer does


def read(folder: Path) -> Sentences | None:
    """Return the settings of a folder; None if it has no modules.json."""
    if not (folder / MODULES).is_file():
        return None
    steps = _steps(folder / MODULES)
    kinds = tuple(kind for kind, _ in steps)
    if kinds not in (STEPS[:2], STEPS):
        what = f"its steps are {', '.join(kinds) or 'none'}: must be {', '.join(STEPS[:2])}, and maybe {STEPS[2]}"
        raise wrong(folder / MODULES, visible(what))
    places = [folder / path for _, path in steps]
    if (folder / ABOUT).is_file():
        about = Fields(read_json(folder / ABOUT), folder / ABOUT)
        about.must("default_prompt_name", None)
        about.must("model_type", "SentenceTransformer")
        about.silent("__version__", "prompts", "similarity_fn_name")
        about.finish()
    return Sentences(places[0], Embedder(pool=_pool(places[1]), normalize=len(kinds) == 3), *_reading(places[0]))


def _steps(path: Path) -> list[tuple[str, str]]:
    """Return the kind of each step, and its folder."""
    try:
        given = json.loads(path.read_bytes().decode("utf-8-sig"))
        steps = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in given]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise wrong(path, "is damaged: it must be a list of steps with their type and path") from None
    if away := next((place for _, place in steps if place and not is_file_name(place)), None):
        raise wrong(path, f"names '{visible(away)}', which is not a folder in this one")
    return steps


def _pool(folder: Path) -> Pool:
    given = read_json(folder / "config.json")
    fields = Fields(given, folder / "config.json")
    fields.silent("word_embedding_dimension", "embedding_dimension", "include_prompt", "pooling_mode", *OLDER)
    fields.finish()
    mode = given.get("pooling_mode") or [mode for field, mode in OLDER.items() if given.get(field)] or "mean"
    modes = mode if isinstance(mode, list) else [mode]
    if len(modes) != 1 or modes[0] not in POOLS:
        known = f"must be one of {', '.join(POOLS)}"
        raise ConfigError([fields.fault("pooling_mode", f"= {' and '.join(map(str, modes))}: {known}")])
    return POOLS[modes[0]]


def _reading(body: Path) -> tuple[int | None, bool]:
    """Return the maximum number of tokens of a text, and whether it is lower-cased."""
    found, lower = None, False
    if (body / READING).is_file():
        fields = Fields(read_json(body / READING), body / READING)
        found = fields.maybe("max_seq_length", int)
        lower = fields("do_lower_case", False)
        fields.must("transformer_task", "feature-extraction")
        fields.must("modality_config", STATES)
        fields.must("module_output_name", "token_embeddings")
        fields.finish()
    if found is None and (body / "tokenizer_config.json").is_file():
        limit = read_json(body / "tokenizer_config.json").get("model_max_length")
        found = limit if type(limit) is int and limit < 10**9 else None  # a huge value means none
    return found, lower


def fits(head: Any) -> bool:
    """Return whether a head is supported by sentence-transformers: pooling without weights."""
    if not isinstance(head, Embedder) or head.projection or head.learned_scale:
        return False
    return isinstance(head.transform, NoTransform)


def write(folder: Path, head: Embedder, width: int, longest: int | None) -> None:
    """Write the pooling settings next to the model, in the form that every version reads."""
    kinds = STEPS if head.normalize else STEPS[:2]
    steps = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / MODULES).write_text(json.dumps(steps, indent=2) + "\n", encoding="utf-8")
    for step in steps[1:]:
        (folder / str(step["path"])).mkdir()
    modes = {field: POOLS.get(mode) == head.pool for field, mode in OLDER.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    write_json(folder / READING, {"max_seq_length": longest, "do_lower_case": False})

"""`model.from`: a recipe whose model is that of a run, except for what the recipe says. Imports no torch."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from anyformer.config import LM, ConfigError, Fault, MaskedLM, ModelConfig, io
from anyformer.config.outside import RECORD, check_record
from anyformer.config.overrides import assignment
from anyformer.runs.atomic_folder import MANIFEST, verify_file

FROM, FIRST = "model.from", "train.init_from"
WITHOUT_OUTPUT = {"output": "none", "all": "inputs"}  # ties that need a head with a vocabulary


def config_of_run(folder: Path) -> ModelConfig:
    """Return the model of a run, or of its newest checkpoint while it is unfinished. A manifest is verified."""
    for home in (folder, *sorted((folder / "state").glob("step-*"), reverse=True)):
        is_listed = os.path.lexists(home / MANIFEST)
        if is_listed or (home / "config.json").is_file():
            path = verify_file(home, "config.json") if is_listed else home / "config.json"
            check_record(home / RECORD)
            return io.load(ModelConfig, path)
    raise ConfigError([Fault(str(folder), "is not the folder of a run: it has no config.json")])


def with_body(data: dict[str, Any], overrides: Iterable[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Return the data of a recipe without `model.from`, and the overrides that remain.

    The model is that of the run, with the settings of the recipe: `head` and parts of another kind are replaced, other
    tables are merged. Weights and tokenizer are those of the run, too, unless the recipe says otherwise. An override
    of `train.init_from` by another run also changes the run of the model.
    """
    remaining, model = list(overrides), data.get("model")
    first = model.get("from") if isinstance(model, dict) else None
    for text in list(remaining):
        path, value = assignment(text)
        if path == FROM:
            first = value
            remaining.remove(text)
        elif path == FIRST and first is not None and value != "none":
            first = value
    if first is None:
        return data, remaining
    if not isinstance(first, str) or not isinstance(model, dict | None):
        raise ConfigError([Fault(FROM, f"= {first!r}: must be the folder of a run")])
    own = {key: value for key, value in (model or {}).items() if key != "from"}
    train = data.get("train")
    train = {**train, "init_from": first} if isinstance(train, dict) and "init_from" not in train else train
    return {"tokenizer": "run", **data, "model": _merged_model(_config(first), own), "train": train}, remaining


def without_body(base: dict[str, Any], tables: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a base without model, weights and tokenizer, if the tables over it have `model.from`."""
    model = tables.get("model")
    if not isinstance(model, dict) or "from" not in model:
        return base
    kept = {key: value for key, value in base.items() if key not in ("model", "tokenizer", "source_tokenizer")}
    return {**kept, "train": {key: value for key, value in base["train"].items() if key != "init_from"}}


def _config(first: str) -> ModelConfig:
    try:
        return config_of_run(Path(first))
    except ConfigError as error:
        if not os.path.isdir(first):
            what = "there is no such run; a public checkpoint becomes one by `anyformer import`"
            raise ConfigError([Fault(FROM, f"= '{first}': {what}")]) from None
        raise ConfigError(Fault(FROM, f"= '{first}': {fault}") for fault in error.faults) from None


def _merged_model(config: ModelConfig, own: dict[str, Any]) -> dict[str, Any]:
    body = io.to_data(config)
    if "head" in own:
        body["head"] = own["head"]
        head = own["head"].get("kind") if isinstance(own["head"], dict) else own["head"]
        if head not in (LM().kind, MaskedLM().kind):
            body["tie"] = WITHOUT_OUTPUT.get(config.tie, config.tie)
    return io.merge(ModelConfig, body, {key: value for key, value in own.items() if key != "head"})

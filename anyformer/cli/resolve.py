"""Names on the command line: a preset, a recipe, the folder of a run, or a config file."""

import inspect
import os
import typing
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anyformer.config.model import ModelConfig
    from anyformer.config.spec import Spec
    from anyformer.recipe import AnyTokenizer, Recipe


def complete(incomplete: str) -> list[str]:
    """Return the presets and recipes with this prefix, for completion in the shell."""
    from anyformer.presets import PRESETS
    from anyformer.recipe import ready as recipes

    return [name for name in (*PRESETS, *recipes.names()) if name.startswith(incomplete)]


def read(name: str, changes: "Iterable[str] | None" = None) -> "ModelConfig | Recipe":
    """Return the model or the recipe of a name, with some changes."""
    from anyformer.config import io
    from anyformer.config.spec import ConfigError, Fault, close_file, close_to
    from anyformer.presets import PRESETS
    from anyformer.recipe import ready as recipes
    from anyformer.recipe.ready.from_run import config_of_run

    changes = list(changes or ())
    if preset := PRESETS.get(name):
        return _resized(preset, changes)
    if name in recipes.names():
        return recipes.read_recipe(name, changes)
    path = Path(name)
    if os.path.isdir(path):  # unlike Path.is_dir, it accepts any string
        return io.override(config_of_run(path), changes)
    if path.suffix.lower() not in io.SUFFIXES and not os.path.exists(path):
        known = [*PRESETS, *recipes.names()]
        close = close_to(name, known) or close_file(name, io.SUFFIXES)
        hint = f"did you mean '{close}'?" if close else f"known: {', '.join(known)}; files end in .toml or .json"
        raise ConfigError([Fault("", f"'{name}' is not a preset, a recipe, a run or a file; {hint}")])
    return load(path, changes)


def load(path: Path, changes: "Iterable[str]" = ()) -> "ModelConfig | Recipe":
    """Read a file of a model or a recipe: only a recipe has a base, a task, data, batches or training settings."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig
    from anyformer.recipe.ready import read_recipe

    if io.read_tables(path).keys() & {"base", "task", "data", "batches", "train"}:
        return read_recipe(str(path), changes)
    return io.override(io.load(ModelConfig, path), changes)


def model_of(config: "ModelConfig | Recipe") -> "ModelConfig":
    """Return a model with its vocabulary sizes: its own, or those of a recipe's tokenizers."""
    from anyformer.config import IdInput, LabelHead
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.recipe import Recipe, Tokenizer

    tokenizers: dict[str, AnyTokenizer] = {}
    if isinstance(config, Recipe):
        model, prefix = config.model, "model."
        tokenizers = {"source": config.source_tokenizer or config.tokenizer, "target": config.tokenizer}
    else:
        model, prefix = config, ""
    faults, changes = [], {}
    for name in ("source", "target"):
        tokens, spec = getattr(model, name), tokenizers.get(name)
        if not isinstance(tokens, IdInput) or tokens.vocab is not None:
            continue
        if isinstance(spec, Tokenizer) and (size := spec.ids()) is not None:
            changes[name] = tokens.model_copy(update={"vocab": size})
        else:
            why = f": the tokenizer {spec.kind} takes it from the data" if spec is not None else ""
            faults.append(Fault(f"{prefix}{name}.vocab", f"is not set{why}; add {prefix}{name}.vocab=8000"))
    if isinstance(model.head, LabelHead) and model.head.labels == "auto":
        faults.append(Fault(f"{prefix}head.labels", f"= 'auto': follows from the data; add {prefix}head.labels=2"))
    if faults:
        raise ConfigError(faults)
    return model.model_copy(update=changes)


def _resized(preset: "Callable[..., ModelConfig]", changes: list[str]) -> "ModelConfig":
    """Call a preset with the changes that are its arguments, and apply the others to the config that it returns."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig

    arguments = _arguments(preset)
    elsewhere = ModelConfig.model_fields.keys() - arguments.model_fields.keys()
    keys = [text.partition("=")[0].strip() for text in changes]
    paths = [text for text, key in zip(changes, keys, strict=True) if "." in key or key in elsewhere]
    given = io.override(arguments(), [text for text in changes if text not in paths])
    return io.override(preset(**{key: value for key, value in given if value is not None}), paths)


def _arguments(preset: "Callable[..., ModelConfig]") -> "type[Spec]":
    """Return a preset's arguments as a spec, so that they are checked and explained like any config."""
    from pydantic import create_model

    from anyformer.config.spec import Number, Size, Spec

    strict = {int: Size, int | None: Size | None, float: Number, float | None: Number | None}
    hints = typing.get_type_hints(preset, include_extras=True)
    fields = {name: (strict.get(hints[name], hints[name]), None) for name in inspect.signature(preset).parameters}
    return create_model("Arguments", __base__=Spec, **fields)  # type: ignore[call-overload]

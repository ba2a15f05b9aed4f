"""What a word on the command line stands for: a preset, a recipe, a run's folder, or a file of either."""

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
    """Names that begin so, for the shell."""
    from anyformer import recipes
    from anyformer.presets import PRESETS

    return [name for name in (*PRESETS, *recipes.names()) if name.startswith(incomplete)]


def read(name: str, changes: "Iterable[str] | None" = None) -> "ModelConfig | Recipe":
    """The model or the recipe that a name stands for, with some changes."""
    from anyformer import recipes
    from anyformer.config import io
    from anyformer.config.spec import ConfigError, Fault, close_to
    from anyformer.presets import PRESETS

    changes = list(changes or ())
    if preset := PRESETS.get(name):
        return _resized(preset, changes)
    if name in recipes.names():
        return recipes.read_recipe(name, changes)
    path = Path(name)
    if os.path.isdir(path):  # which, unlike Path's, answers for any name
        return io.override(_of_run(path), changes)
    if path.suffix.lower() not in io.SUFFIXES and not os.path.exists(path):
        known = [*PRESETS, *recipes.names()]
        close = close_to(name, known)
        hint = f"did you mean '{close}'?" if close else f"known are {', '.join(known)}; a file ends in .toml or .json"
        raise ConfigError([Fault("", f"'{name}' is neither a preset, a recipe, a run nor a file; {hint}")])
    return io.override(load(path), changes)


def load(path: Path) -> "ModelConfig | Recipe":
    """A file of either: only a recipe has a task, batches or a training."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig
    from anyformer.config.spec import ConfigError
    from anyformer.recipe import Recipe

    try:
        keys = io.parse(path.read_bytes().decode("utf-8-sig"), io.format_of(path)).keys()
    except (OSError, UnicodeDecodeError, ConfigError):
        keys = dict[str, None]().keys()  # what is wrong is told below
    if keys & {"task", "data", "batches", "train"}:
        return io.load(Recipe, path)
    return io.load(ModelConfig, path)


def model_of(found: "ModelConfig | Recipe") -> "ModelConfig":
    """A model with its vocabularies: its own, or what the specs of a recipe's tokenizers say."""
    from anyformer.config.inputs_heads import Tokens
    from anyformer.config.spec import ConfigError, Fault
    from anyformer.recipe import Recipe

    tokenizers: dict[str, AnyTokenizer] = {}
    if isinstance(found, Recipe):
        model, at = found.model, "model."
        tokenizers = {"source": found.source_tokenizer or found.tokenizer, "target": found.tokenizer}
    else:
        model, at = found, ""
    faults, changes = [], {}
    for name in ("source", "target"):
        tokens, spec = getattr(model, name), tokenizers.get(name)
        if not isinstance(tokens, Tokens) or tokens.vocab is not None:
            continue
        if spec is not None and (size := _size(spec)) is not None:
            changes[name] = tokens.model_copy(update={"vocab": size})
        else:
            why = f": the tokenizer {spec.kind} finds it in the data" if spec is not None else ""
            faults.append(Fault(f"{at}{name}.vocab", f"is not set{why}; add it, such as {at}{name}.vocab=8000"))
    if faults:
        raise ConfigError(faults)
    return model.model_copy(update=changes)


def _size(spec: "AnyTokenizer") -> int | None:
    """How many ids a tokenizer will have, where its spec tells; `words` has a limit that few texts reach."""
    from anyformer import recipe

    match spec:
        case recipe.BPE() | recipe.Unigram() | recipe.WordPiece():
            return spec.size
        case recipe.Bytes():
            from anyformer.data.vocabulary import BYTES, SPECIAL

            return len(BYTES) + len(SPECIAL)
        case recipe.TokenizerFile():
            from anyformer.data.tokenizer import TextTokenizer

            return TextTokenizer.load(spec.path).size
        case recipe.Characters() | recipe.Words() | recipe.RunTokenizer() | recipe.DataTokenizer():
            return None
        case _:
            typing.assert_never(spec)


def _of_run(folder: Path) -> "ModelConfig":
    """The model of a run, or of its newest checkpoint while it has not finished."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig
    from anyformer.config.spec import ConfigError, Fault

    homes = [folder, *sorted((folder / "state").glob("step-*"), reverse=True)]
    for home in homes:
        if (home / "config.json").is_file():
            return io.load(ModelConfig, home / "config.json")
    raise ConfigError([Fault(str(folder), "is not the folder of a run: it has no config.json")])


def _resized(preset: "Callable[..., ModelConfig]", changes: list[str]) -> "ModelConfig":
    """A preset, called with those of the changes that are its arguments; the others are paths in what it gives."""
    from anyformer.config import io
    from anyformer.config.model import ModelConfig

    arguments = _arguments(preset)
    elsewhere = ModelConfig.model_fields.keys() - arguments.model_fields.keys()
    keys = [text.partition("=")[0].strip() for text in changes]
    paths = [text for text, key in zip(changes, keys, strict=True) if "." in key or key in elsewhere]
    given = io.override(arguments(), [text for text in changes if text not in paths])
    return io.override(preset(**{key: value for key, value in given if value is not None}), paths)


def _arguments(preset: "Callable[..., ModelConfig]") -> "type[Spec]":
    """A preset's arguments as a spec, so that they are checked and explained like any config."""
    from pydantic import create_model

    from anyformer.config.spec import Number, Size, Spec

    strict = {int: Size, int | None: Size | None, float: Number, float | None: Number | None}
    hints = typing.get_type_hints(preset, include_extras=True)
    fields = {name: (strict.get(hints[name], hints[name]), None) for name in inspect.signature(preset).parameters}
    return create_model("Arguments", __base__=Spec, **fields)  # type: ignore[call-overload]

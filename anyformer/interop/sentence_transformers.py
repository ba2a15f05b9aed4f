"""Folders of sentence-transformers (Reimers & Gurevych 2019): a `transformers` folder with pooling settings.

modules.json               the steps: Transformer, Pooling, any number of Dense, and maybe Normalize, each with a folder
1_Pooling/config.json      the pooling mode
2_Dense/                   a layer after pooling: config.json and weights
sentence_bert_config.json  maximum length of a text; newer folders have it in tokenizer_config.json
config_sentence_transformers.json  prompts: texts that are read before a text, by name
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anyformer.config import (
    Activation,
    ConfigError,
    DenseLayer,
    Embedder,
    Fault,
    Gelu,
    Identity,
    ModelConfig,
    NoTransform,
    Pool,
    Relu,
    Sigmoid,
    Silu,
    Tanh,
)
from anyformer.config.spec import is_file_name, visible
from anyformer.interop import weight_files
from anyformer.interop.config_fields import Fields
from anyformer.interop.family import Family
from anyformer.interop.weight_files import StoredTensor, read_json, write_json, wrong
from anyformer.interop.weight_rules import Rule
from anyformer.nn.model import Transformer
from anyformer.recipe import Encoder, Prompt

MODULES, READING, ABOUT = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
FIRST, DENSE, LAST = ("Transformer", "Pooling"), "Dense", "Normalize"
POOLS: dict[str, Pool] = {"mean": "mean", "cls": "first", "max": "max", "lasttoken": "last"}
OLDER = {  # fields of files without `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.activation.Tanh": Tanh(),
    "torch.nn.modules.linear.Identity": Identity(),
    "torch.nn.modules.activation.ReLU": Relu(),
    "torch.nn.modules.activation.GELU": Gelu(),
    "torch.nn.modules.activation.SiLU": Silu(),
    "torch.nn.modules.activation.Sigmoid": Sigmoid(),
}
STATES = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


class Sentences(NamedTuple):
    """Settings that turn hidden states into the vector of a text."""

    body: Path  # the folder of the model itself
    head: Embedder
    layers: tuple[Path, ...]  # the folders of its layers after pooling, the projection last
    prompts: tuple[Prompt, ...]
    default_prompt: str | None
    longest: int | None  # maximum tokens of a text, with special tokens
    lower: bool  # texts are read in lower case, whatever the tokenizer does


def read(folder: Path) -> Sentences | None:
    """Return the settings of a folder; None if it has no modules.json."""
    if not (folder / MODULES).is_file():
        return None
    steps = _steps(folder / MODULES)
    kinds = tuple(kind for kind, _ in steps)
    normalize = kinds[-1:] == (LAST,)
    dense = kinds[2 : len(kinds) - normalize]
    if kinds[:2] != FIRST or set(dense) - {DENSE}:
        known = f"{', '.join(FIRST)}, any number of {DENSE}, and maybe {LAST}"
        raise wrong(folder / MODULES, visible(f"its steps are {', '.join(kinds) or 'none'}: must be {known}"))
    places = [folder / path for _, path in steps]
    prompts, default = _prompts(folder / ABOUT)
    pool = _pool(places[1], bool(prompts))
    layers, projection = [_layer(place) for place in places[2 : 2 + len(dense)]], None
    if layers and layers[-1] == DenseLayer(width=layers[-1].width, activation=Identity(), bias=False):
        projection = layers.pop().width
    head = Embedder(pool=pool, layers=tuple(layers), projection=projection, normalize=normalize)
    return Sentences(places[0], head, tuple(places[2 : 2 + len(dense)]), prompts, default, *_reading(places[0]))


def _prompts(path: Path) -> tuple[tuple[Prompt, ...], str | None]:
    """Return the prompts, and the name of the default one."""
    if not path.is_file():
        return (), None
    fields = Fields(read_json(path), path)
    given, default = fields.maybe("prompts", dict) or {}, fields.maybe("default_prompt_name", str)
    fields.must("model_type", "SentenceTransformer")
    fields.silent("__version__", "similarity_fn_name")
    fields.finish()
    if not all(isinstance(text, str) for text in given.values()):
        raise ConfigError([fields.fault("prompts", "must be texts by name")])
    if default is not None and default not in given:
        known = f"is not one of the prompts: {', '.join(given) or 'there are none'}"
        raise ConfigError([fields.fault("default_prompt_name", f"= '{visible(default)}': {visible(known)}")])
    return tuple(Prompt(name=name, text=text) for name, text in given.items()), default


def _layer(folder: Path) -> DenseLayer:
    """Return a layer after pooling."""
    fields = Fields(read_json(folder / "config.json"), folder / "config.json")
    width, bias = fields.maybe("out_features", int), fields("bias", True)
    function = fields.one_of("activation_function", ACTIVATIONS, next(iter(ACTIVATIONS)))
    fields.must("module_input_name", "sentence_embedding")
    fields.must("module_output_name", "sentence_embedding")
    fields.must("use_residual", False)
    fields.silent("in_features")
    if width is None or width < 1:
        fields.refuse("out_features", "must be a size of 1 or more")
    fields.finish()
    return DenseLayer(width=width or 1, activation=function, bias=bias)


def with_layers(
    family: Family, stored: dict[str, StoredTensor], layers: Sequence[Path], allow_pickle: bool
) -> tuple[Family, dict[str, StoredTensor]]:
    """Return a family and the tensors of a folder, both with the layers after pooling."""
    more = {
        f"{folder.name}.{name}": tensor
        for folder in layers
        for name, tensor in weight_files.stored(folder, allow_pickle).items()
    }

    def rules(config: ModelConfig) -> list[Any]:
        names = zip(_modules(config.head), layers, strict=True)
        return [*family.rules(config), *(Rule(ours, f"{folder.name}.linear") for ours, folder in names)]

    return replace(family, rules=rules), stored | more


def _modules(head: Any) -> list[str]:
    """Return the names of our layers after pooling, in the order of their folders."""
    assert isinstance(head, Embedder)
    names = [f"head.layers.{i}.linear" for i in range(len(head.layers))]
    return names + ["head.project"] * (head.projection is not None)


def without_layers(model: Transformer) -> Transformer:
    """Return the model without its layers after pooling; it shares the other weights."""
    head = model.config.head
    if not isinstance(head, Embedder) or not fits(model.config) or not has_layers(head):
        return model
    plain = model.config.model_copy(update={"head": Embedder(pool=head.pool, normalize=head.normalize)})
    with torch.device("meta"):
        bare = Transformer(plain)
    state = model.state_dict()
    bare.load_state_dict({name: state[name] for name in bare.state_dict()}, assign=True)
    return bare


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


def _pool(folder: Path, prompted: bool) -> Pool:
    given = read_json(folder / "config.json")
    fields = Fields(given, folder / "config.json")
    fields.silent("word_embedding_dimension", "embedding_dimension", "pooling_mode", *OLDER)
    if prompted:
        fields.must("include_prompt", True)
    fields.silent("include_prompt")
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


def fits(config: ModelConfig) -> bool:
    """Return whether a head is supported by sentence-transformers: pooling, and layers of any width."""
    head = config.head
    if not isinstance(head, Embedder) or head.learned_scale or config.image_tower is not None:
        return False
    return isinstance(head.transform, NoTransform)


def has_layers(head: Embedder) -> bool:
    """Return whether a head has layers after pooling."""
    return bool(head.layers or head.projection)


def write(folder: Path, model: Transformer, spec: Any) -> None:
    """Write the settings and layers after the model next to it, in the form that every version reads."""
    head, state = model.config.head, model.state_dict()
    assert isinstance(head, Embedder)
    layers = list(head.layers)
    if head.projection is not None:
        layers.append(DenseLayer(width=head.projection, activation=Identity(), bias=False))
    kinds = [*FIRST, *[DENSE] * len(layers), *[LAST] * head.normalize]
    steps = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    names = {activation: name for name, activation in ACTIVATIONS.items()}
    if other := next((layer.activation for layer in layers if layer.activation not in names), None):
        what = f"has activation '{other.kind}': sentence-transformers has {', '.join(a.kind for a in names)}"
        raise ConfigError([Fault("head.layers", what)])
    (folder / MODULES).write_text(json.dumps(steps, indent=2) + "\n", encoding="utf-8")
    for step in steps[1:]:
        (folder / str(step["path"])).mkdir()
    modes = {field: POOLS.get(mode) == head.pool for field, mode in OLDER.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": model.config.width, **modes})
    inputs = model.config.width
    for i, (ours, layer) in enumerate(zip(_modules(head), layers, strict=True), 2):
        path = folder / f"{i}_{DENSE}"
        sizes = {"in_features": inputs, "out_features": layer.width, "bias": layer.bias}
        write_json(path / "config.json", {**sizes, "activation_function": names[layer.activation]})
        tensors = {f"linear.{name}": state[f"{ours}.{name}"] for name in ("weight", "bias")[: 1 + layer.bias]}
        shapes = {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}
        weight_files.write(path / weight_files.WEIGHTS, shapes, tensors.items())
        inputs = layer.width
    longest = spec.max_length if isinstance(spec, Encoder) else None
    write_json(folder / READING, {"max_seq_length": longest, "do_lower_case": False})
    if isinstance(spec, Encoder) and spec.prompts:
        prompts = {prompt.name: prompt.text for prompt in spec.prompts}
        write_json(folder / ABOUT, {"prompts": prompts, "default_prompt_name": spec.default_prompt})

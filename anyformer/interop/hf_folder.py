"""Read and write folders of `transformers`: config.json, weights, tokenizer. Pickle files only on request."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from anyformer.config import (
    LM,
    Audio,
    ConfigError,
    Embedder,
    Fault,
    LabelHead,
    ModelConfig,
    NoHead,
    Patches,
    Pictures,
    SpanBounds,
    Tokens,
)
from anyformer.config.spec import did_you_mean, visible
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import (
    generation_config,
    pictures,
    public_tokenizers,
    sentence_transformers,
    speech,
    weight_conversion,
    weight_files,
)
from anyformer.interop.config_fields import MULTI_LABEL, Fields, shown
from anyformer.interop.families import FAMILIES, candidates
from anyformer.interop.family import Family, find_family
from anyformer.interop.sentence_transformers import Sentences
from anyformer.interop.weight_files import StoredTensor, must_be_new, wrong
from anyformer.nn.model import Transformer
from anyformer.nn.uncached import check_parts
from anyformer.recipe import (
    AnyTask,
    Classify,
    Embed,
    Encoder,
    LanguageModel,
    QuestionAnswering,
    Seq2Seq,
    Tag,
    Transcribe,
)
from anyformer.runs.run import Run, write_folder
from anyformer.tasks.base import open_media
from anyformer.tasks.generation_defaults import NO_DEFAULTS
from anyformer.tasks.sequence_level import Frame

# Families that are not supported, each with the part that anyformer does not have.
UNSUPPORTED = {
    "deberta": "its keys have no bias, but queries and values have one; versions 2 and 3 are supported",
}


class PublicModel(NamedTuple):
    """A model from a public folder."""

    model: Transformer
    family: Family
    labels: tuple[str, ...]  # names of labels, for tokens or texts
    multi_label: bool  # each label of a text is decided on its own
    longest: int | None  # maximum tokens of a text, for sentence-transformers
    sentence: Sentences | None  # settings of sentence-transformers
    body: Path  # the folder of its config and weights


def from_hf(
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    allow_pickle: bool = False,
    family: str | None = None,
    ignore_fields: Iterable[str] = (),
    device: str | torch.device | None = None,
) -> Run:
    """Load a folder of `transformers` as a run. No code from the folder is executed.

    Args:
        folder: a folder with config.json, weights and tokenizer.
        tokenizer: the file or folder of another tokenizer than its own.
        allow_pickle: also read weights in .bin files, by a reader of tensors alone.
        family: the `model_type` of a config.json that has none or an unknown one.
        ignore_fields: fields of config.json that are read as if they were left out.
        device: such as "cpu" or "cuda:1"; None: a GPU where there is one.

    Returns:
        A run, which predicts, generates, is served and fine-tuned as one that was trained here.

    Raises:
        ConfigError: the family or a field is not supported, or weights are missing.

    Example:
        >>> run = af.from_hf("downloads/SmolLM2-135M")  # doctest: +SKIP
        >>> run.generate(["The capital of France is"], max_new_tokens=1)  # doctest: +SKIP
        [' Paris']
    """
    folder = Path(folder)
    found = read_model(folder, allow_pickle=allow_pickle, family=family, ignore_fields=ignore_fields)
    model, named = found.model, Path(tokenizer or found.body)
    if isinstance(model.config.last_input, Tokens):
        config = weight_files.read_json(found.body / "config.json")
        config |= {"model_type": found.family.kind, "vocab_size": model.config.vocab}
        text, source = (
            public_tokenizers.read(named, found.family.text, config),
            public_tokenizers.read_source(named, config),
        )
        public_tokenizers.check_size(text, model.config, named)
        if found.sentence is not None and found.sentence.lower:
            text = public_tokenizers.lowered(text)
    else:
        text, source = public_tokenizers.nothing(), None
    spec = _task(model.config, found)
    if isinstance(model.config.source, Audio):
        spec = _speech(found, text)
    task = spec.build(text, source)
    open_media(task, model.config)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    written = isinstance(model.config.head, LM) and not isinstance(spec, Transcribe)
    defaults = generation_config.read(found.body, model.encoder is not None) if written else NO_DEFAULTS
    return Run(model, task, spec, folder, defaults)


def read_model(
    folder: str | Path, *, allow_pickle: bool = False, family: str | None = None, ignore_fields: Iterable[str] = ()
) -> PublicModel:
    """Load the model of a folder without its tokenizer, its weights in the precision of the file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise wrong(folder, "is not a folder")
    sentence = sentence_transformers.read(folder)
    folder = sentence.body if sentence else folder
    path = folder / "config.json"
    data = _with_ends(_without(weight_files.read_json(path), ignore_fields, path), folder / generation_config.FILE)
    one = _family(data, family, path)
    stored = weight_conversion.named(one, weight_files.stored(folder, allow_pickle))
    classes = data.get("architectures")
    if sentence:
        classes = [name for name, head in one.heads.items() if head == "body"][:1]
        if not classes:
            what = f"{visible(str(path))}: model_type"
            raise ConfigError([Fault(what, f"= '{one.kind}': it is not read as a model of sentences")])
    elif classes is None:
        classes = [_class_of(one, data, path, stored)]
    fields, config = read_config(one, data, path, stored, classes)
    if fields.ignored:
        names = ", ".join(fields.ignored)
        warnings.warn(f"{path}: ignored fields that {one.kind} does not use: {names}", stacklevel=2)
    if sentence:
        config = config.model_copy(update={"head": sentence.head})
        one, stored = sentence_transformers.with_layers(one, stored, sentence.layers, allow_pickle)
    model = weight_conversion.build(one, config, stored, folder)
    head = config.head
    labels = fields.labels(head.count) if isinstance(head, LabelHead) else ()
    limits = (sentence.longest if sentence else None, *(stack.limit for stack in config.stacks.values()))
    longest = min((n for n in limits if n is not None), default=None) if sentence else None
    return PublicModel(model, one, labels, fields.multi_label, longest, sentence, folder)


def _without(data: dict[str, Any], names: Iterable[str], path: Path) -> dict[str, Any]:
    """Return a config.json without some fields, which may be inside tables: `rope_parameters.factor`."""
    for name in names:
        first, _, rest = name.partition(".")
        inner = data.get(first)
        if first not in data or (rest and not isinstance(inner, dict)):
            raise ConfigError([Fault("--ignore-field", f"= '{visible(name)}': {visible(str(path))} has no such field")])
        data = {key: value for key, value in data.items() if key != first}
        if rest and isinstance(inner, dict):
            data[first] = _without(inner, [rest], path)
    return data


def _family(data: dict[str, Any], named: str | None, path: Path) -> Family:
    """Return the family that config.json or the user names."""
    if named is not None and named not in FAMILIES:
        raise ConfigError([Fault("--family", f"= {shown(named)}: {did_you_mean(named, FAMILIES)}")])
    kind, field = data.get("model_type"), f"{visible(str(path))}: model_type"
    known = isinstance(kind, str) and kind in FAMILIES
    if named is not None and known and kind != named:
        raise ConfigError([Fault(field, f"= '{kind}': --family is '{named}'; leave it out")])
    if named is not None and not known and data.get("auto_map"):
        what = "says that code beside the weights is needed; --ignore-field auto_map reads the file without it"
        raise ConfigError([Fault(f"{visible(str(path))}: auto_map", what)])
    if named is None and not known:
        families = f"one of {', '.join(FAMILIES)}"
        if kind is None:
            raise ConfigError([Fault(field, f"is missing: name the family with --family, {families}")])
        what = did_you_mean(kind, FAMILIES) if isinstance(kind, str) else f"must be {families}"
        if isinstance(kind, str) and kind in UNSUPPORTED:
            what = f"is not supported: {UNSUPPORTED[kind]}"
        raise ConfigError([Fault(field, f"= {shown(kind)}: {what}")])
    return FAMILIES[named or str(kind)]


def read_config(
    family: Family, data: dict[str, Any], path: Path, stored: dict[str, StoredTensor], classes: Any
) -> tuple[Fields, ModelConfig]:
    """Read config.json, and refuse a model that is far too large for its weights."""
    fields = Fields(data, path, stored.keys)
    config = family.config(fields, classes)
    weight_conversion.check_excess(config, stored, path)
    return fields, config


def _class_of(family: Family, data: dict[str, Any], path: Path, stored: dict[str, StoredTensor]) -> str:
    """Return the class that the weights fit best, for a config.json without `architectures`."""
    fits = {}
    for name in family.heads:
        _, config = read_config(family, data, path, stored, [name])
        fit = weight_conversion.fit(family, config, stored)
        fits[name] = (len(fit.missing), len(fit.unused) + len(fit.left))
    best = min(fits, key=lambda name: fits[name])
    warnings.warn(f"{path}: has no architectures: by its weights it is read as {best}", stacklevel=3)
    return best


def _with_ends(data: dict[str, Any], generation: Path) -> dict[str, Any]:
    """Return a config.json with all ids that end a text: some are only in the file beside it."""
    ends = weight_files.read_json(generation).get("eos_token_id") if generation.is_file() else None
    if ends is None:
        return data
    if not all(type(id) is int for id in (ends if isinstance(ends, list) else [ends])):
        raise wrong(generation, f"eos_token_id = {shown(ends)}: must be the id of a token, or a list of ids")
    return data | {"eos_token_id": ends}


def _task(config: ModelConfig, found: PublicModel) -> AnyTask:
    if config.image_tower is not None:
        return Embed(temperature="learned", pictures=pictures.read_clip(found.body, config.image_tower.source.shape))
    if isinstance(config.head, SpanBounds):
        return QuestionAnswering()
    if config.shape == "encoder" or not isinstance(config.head, LM):
        read = config.last_input
        seen = pictures.read(found.body, read.shape) if isinstance(read, Patches) else None
        return Encoder(
            labels=found.labels,
            multi_label=found.multi_label,
            max_length=found.longest,
            pictures=seen,
            framed=config.shape == "encoder" or isinstance(config.head, Embedder),
            prompts=found.sentence.prompts if found.sentence else (),
            default_prompt=found.sentence.default_prompt if found.sentence else None,
        )
    if config.shape == "encoder-decoder":
        return Seq2Seq(framed=True, start=config.special.start)
    return LanguageModel(framed=True)


def _speech(found: PublicModel, text: TextTokenizer) -> Transcribe:
    """Return the task of a speech model; its settings are in generation_config.json, or in config.json."""
    path, settings = found.body / "config.json", weight_files.read_json(found.body / "config.json")
    if (found.body / generation_config.FILE).is_file():
        path = found.body / generation_config.FILE
        settings |= weight_files.read_json(path)
    if (file := found.body / speech.PREPROCESSOR).is_file():
        speech.check_preprocessor(weight_files.read_json(file), found.model.config, file)
    return speech.task(text, found.model.config, settings, path)


def to_hf(run: Run, folder: str | Path, *, family: str | None = None) -> str:
    """Write a run as a folder of `transformers`. Adapters are merged.

    Args:
        run: the run.
        folder: a new folder.
        family: the `model_type`; None: the first that fits.

    Returns:
        The name of the family.

    Raises:
        ConfigError: no family has such a model, each with the reason; or the folder exists.

    Example:
        >>> af.to_hf(af.load("runs/stories"), "exported")  # doctest: +SKIP
        'llama'
    """
    check_parts(run.model, "is written with it:")
    folder, run = Path(folder), run.merge()
    must_be_new(folder)
    families = candidates(family)
    of_sentences = sentence_transformers.fits(run.config)
    config = run.config.model_copy(update={"head": NoHead()}) if of_sentences else run.config
    if config.image_tower is not None:
        _check_end_of_text(run)
    one, data = find_family(families, config)
    if isinstance(run.spec, Encoder | Classify | Tag) and run.spec.labels:
        names = run.spec.labels
        several = isinstance(run.spec, Classify) and run.spec.separator is not None
        several = several or (isinstance(run.spec, Encoder) and run.spec.multi_label)
        data |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        data |= {"problem_type": MULTI_LABEL} if several else {}
    write_folder(folder, lambda path: _fill(path, one, data, run))
    return one.kind


def _check_end_of_text(run: Run) -> None:
    """Refuse a CLIP that `transformers` would pool elsewhere than at the last token of a text.

    It pools at the first token `eos_token_id`; if that is 2, as in old configs, at the largest id of the text.
    """
    last, eos = Frame(run.tokenizer).after[-1:], run.config.special.eos
    if last != ([run.config.vocab - 1] if eos == 2 else [eos]):
        what = f"= {eos}: transformers would not pool at the last token, whose id is {last}"
        raise ConfigError([Fault("special.eos", what)])


def _fill(path: Path, family: Family, data: dict[str, Any], run: Run) -> None:
    dtype = str(next(run.model.parameters()).dtype).removeprefix("torch.")
    weight_files.write_json(path / "config.json", {**data, "dtype": dtype})
    if isinstance(run.config.head, LM):
        ids = {key: id for key, id in data.items() if key.endswith("_token_id") and id is not None}
        more = speech.generation_settings(run.spec, run.tokenizer) if isinstance(run.spec, Transcribe) else {}
        weight_files.write_json(path / generation_config.FILE, ids | more | generation_config.fields(run.defaults))
    if isinstance(run.config.source, Audio):
        weight_files.write_json(path / speech.PREPROCESSOR, speech.preprocessor(run.config))
    weight_conversion.write(path / weight_files.WEIGHTS, family, sentence_transformers.without_layers(run.model))
    if isinstance(run.config.last_input, Tokens):
        public_tokenizers.write(path, run)
    if isinstance(run.config.last_input, Patches) and isinstance(run.spec, Encoder) and run.spec.pictures:
        pictures.write(path, run.spec.pictures, "ViT", run.config.last_input.shape)
    if run.config.image_tower is not None and isinstance(run.spec, Embed):
        pictures.write(path, run.spec.pictures or Pictures(), "CLIP", run.config.image_tower.source.shape)
    if sentence_transformers.fits(run.config):
        sentence_transformers.write(path, run.model, run.spec)

"""Folders as `transformers` writes and reads them: config.json, weights, tokenizer. No pickle is read unasked."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from anyformer.config import LM, ConfigError, Embedder, Fault, ModelConfig, NoHead, Tokens
from anyformer.config.spec import did_you_mean, visible
from anyformer.interop import files, sentences, tokens, weights
from anyformer.interop.families import FAMILIES
from anyformer.interop.family import Family, fitting
from anyformer.interop.fields import Fields
from anyformer.interop.files import wrong
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask as TaskSpec, Encoder, LanguageModel, Seq2Seq
from anyformer.run import Run, build_task, write_folder

GENERATION = "generation_config.json"


class Public(NamedTuple):
    """A model from a public folder."""

    model: Transformer
    family: Family
    labels: tuple[str, ...]  # of tokens or texts
    longest: int | None  # tokens of a text that a model of sentences reads
    body: Path  # the folder of its config and weights


def from_hf(
    folder: str | Path,
    *,
    tokenizer: str | Path | None = None,
    allow_pickle: bool = False,
    device: str | torch.device | None = None,
) -> Run:
    """The run that a public folder is; `tokenizer` names the file or folder of another one than its own."""
    folder = Path(folder)
    found = read_model(folder, allow_pickle=allow_pickle)
    model, named = found.model, Path(tokenizer or found.body)
    if isinstance(model.config.last_input, Tokens):
        text = tokens.read(named, found.family.text, files.read_json(found.body / "config.json"))
        tokens.check_size(text, model.config, named)
    else:
        text = tokens.nothing()
    spec = _task(model.config, found)
    task = build_task(spec, text, None)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Run(model, task, spec, folder)


def read_model(folder: str | Path, *, allow_pickle: bool = False) -> Public:
    """The model of a folder without its tokenizer, its weights in the precision of the file."""
    folder = Path(folder)
    if not folder.is_dir():
        raise wrong(folder, "is not a folder")
    sentence = sentences.read(folder)
    folder = sentence.body if sentence else folder
    path = folder / "config.json"
    given = _with_ends(files.read_json(path), folder / GENERATION)
    kind = given.get("model_type")
    if kind not in FAMILIES:
        known = did_you_mean(kind, FAMILIES) if isinstance(kind, str) else f"known here: {', '.join(FAMILIES)}"
        raise ConfigError([Fault(f"{visible(str(path))}: model_type", f"= {kind!r}: {known}")])
    family = FAMILIES[kind]
    stored = weights.named(family, files.stored(folder, allow_pickle))
    fields = Fields(given, path, stored.keys)
    bodies = [name for name, head in family.heads.items() if head == "body"]
    if sentence and not bodies:
        raise ConfigError([fields.fault("model_type", f"= '{kind}': it is not read as a model of sentences")])
    config = family.config(fields, bodies[:1] if sentence else given.get("architectures"))
    config = config.model_copy(update={"head": sentence.head}) if sentence else config
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights.translated(family, config, stored, folder), assign=True)
    labels = fields.labels() if fields.head in ("classifier", "token_labels") else ()
    limits = (sentence.longest if sentence else None, *(stack.limit for stack in config.stacks.values()))
    longest = min((n for n in limits if n is not None), default=None) if sentence else None
    return Public(model.eval(), family, labels, longest, folder)


def _with_ends(given: dict[str, Any], generation: Path) -> dict[str, Any]:
    """A config.json with all ids that end a text: some are only in the file beside it."""
    ends = files.read_json(generation).get("eos_token_id") if generation.is_file() else None
    return given if ends is None else given | {"eos_token_id": ends}


def _task(config: ModelConfig, found: Public) -> TaskSpec:
    if config.shape == "encoder" or isinstance(config.head, Embedder):
        return Encoder(labels=found.labels, max_length=found.longest)
    if config.shape == "encoder-decoder":
        return Seq2Seq(framed=True, start=config.special.start)
    return LanguageModel(framed=True)


def to_hf(run: Run, folder: str | Path, *, family: str | None = None) -> str:
    """A run as a public folder, of the first family that has such models, or of one by its name; which it is. An
    adapter is merged."""
    folder, run = Path(folder), run.merge()
    if folder.exists():
        raise wrong(folder, "is there already; choose another folder")
    if family is not None and family not in FAMILIES:
        raise ConfigError([Fault("family", f"= {family!r}: {did_you_mean(family, FAMILIES)}")])
    of_sentences = sentences.fits(run.config.head)
    config = run.config.model_copy(update={"head": NoHead()}) if of_sentences else run.config
    one, given = fitting([FAMILIES[family]] if family else FAMILIES.values(), config)
    names = run.spec.labels if isinstance(run.spec, Encoder) else ()
    write_folder(folder, lambda path: _fill(path, one, given, run, names))
    return one.kind


def _fill(path: Path, family: Family, given: dict[str, Any], run: Run, labels: tuple[str, ...]) -> None:
    dtype = str(next(run.model.parameters()).dtype).removeprefix("torch.")
    if labels:
        given = {**given, "id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    files.write_json(path / "config.json", {**given, "dtype": dtype})
    if isinstance(run.config.head, LM):
        ids = {key: id for key, id in given.items() if key.endswith("_token_id") and id is not None}
        files.write_json(path / GENERATION, ids)
    weights.write(path / files.WEIGHTS, family, run.model)
    if isinstance(run.config.last_input, Tokens):
        tokens.write(path, run)
    if isinstance(run.config.head, Embedder) and sentences.fits(run.config.head):
        longest = run.spec.max_length if isinstance(run.spec, Encoder) else None
        sentences.write(path, run.config.head, run.config.width, longest)

"""Import models of other programs as runs, and export runs for other programs.

config_fields             Read the fields of a public config.json
ctranslate2_export        Export to CTranslate2 by its converter
rotary_fields             Read rotary positions from a config.json
ctranslate2               Read Whisper models in CTranslate2's format
families                  One file for each public model family
family                    The class `Family`, and the search for a family that supports a model
generation_config         Read and write generation_config.json
gguf_architectures        Architectures of GGUF files as families: metadata and names of tensors
gguf_export               Write runs as GGUF files: to_gguf
gguf_file                 Headers and tensors of GGUF files, read and written
gguf_import               Read models in GGUF files
gguf_rope                 Rotary positions of GGUF files
gguf_tokenizers           Read the tokenizers of GGUF files
gguf_vocabulary           Write tokenizers as metadata of GGUF files
hf_folder                 Read and write folders of `transformers`: from_hf, to_hf
hub                       Download public models by name: hf:owner/name
language_codes            Language codes of multilingual translation models, in the order of their ids
llama2c                   Read model and tokenizer files of llama2.c
nanochat                  Read checkpoints of nanochat
nanogpt                   Read checkpoints of nanoGPT and minGPT
onnx                      Export to ONNX: export_onnx
peft                      Folders of PEFT: LoRA adapters
pictures                  Read and write the settings of picture files
plain_pickle              Read pickle files that hold plain data
public_tokenizers         Read and write tokenizers of public folders
same_model                Compare two configs by what their models compute
transformers_fields       The config fields that `transformers` reads, as data
sentence_transformers     Folders of sentence-transformers (Reimers & Gurevych 2019)
sentencepiece_conversion  Convert a SentencePiece model to the `tokenizers` library
slow_tokenizers           SentencePiece folders without a tokenizer.json
speech                    Settings of Whisper's decoding: special and suppressed tokens
tokenizer_settings        Read tokenizer_config.json and special_tokens_map.json
weight_conversion         Convert weights to our names, and back, by the rules of a family
weight_files              Read and write .safetensors and .bin files tensor by tensor
weight_rules              Rules that map public weights to ours, in both directions
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.data.tokenizer import TextTokenizer
from anyformer.interop import ctranslate2, gguf_import, hub, llama2c, nanochat, nanogpt, peft
from anyformer.interop.hf_folder import from_hf
from anyformer.interop.weight_files import load_pickle, read_json, wrong
from anyformer.nn.model import Transformer
from anyformer.recipe import AnyTask, LanguageModel
from anyformer.runs.run import Run, load, new_folder, write_model, write_run, writing


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    allow_pickle: bool = False,
    family: str | None = None,
    ignore_fields: Sequence[str] = (),
    base: str | Path | None = None,
) -> Run:
    """Write a model of another program as a run, with its tokenizer.

    `source` is a folder for `from_hf`, one of PEFT with a LoRA adapter of the model `base` (a run, a public folder or
    name), one of CTranslate2 (Whisper only), the name of a public model (`hf:owner/name`), a .gguf file, a .bin file of
    llama2.c, or a .pt file of nanoGPT, minGPT or nanochat.
    """
    out = Path(out)
    if out.exists():
        raise ConfigError([Fault(visible(str(out)), "exists already; choose another --out")])
    source = hub.download(str(source), allow_pickle) if hub.is_hub_name(source) else Path(source)
    if source.is_dir() and peft.is_folder(source):
        with new_folder(out) as temporary:
            run = _read_adapter(source, base, tokenizer, family, ignore_fields, allow_pickle)
            with writing(out):
                write_run(temporary, run)
        return replace(run, folder=out)
    if base is not None:
        raise ConfigError([Fault("--base", "is for adapters of PEFT: a folder with an adapter_config.json")])
    if source.is_dir() and not (source / "config.json").exists() and (files := llama2c.find(source)):
        model_file, its_tokenizer = map(shlex.quote, map(str, files))
        what = f"holds files of llama2.c: anyformer import {model_file} --tokenizer {its_tokenizer}"
        raise ConfigError([Fault(visible(str(source)), what)])
    if source.is_dir() and not (source / "config.json").exists() and (source / nanogpt.FILE).exists():
        command = f"anyformer import {shlex.quote(str(source / nanogpt.FILE))} --allow-pickle"
        raise wrong(source, f"holds a checkpoint of nanoGPT: {command}")
    if source.is_dir() and ctranslate2.is_folder(source):
        _refuse(family, ignore_fields, "CTranslate2's model.bin", allow_pickle)
        with new_folder(out) as temporary:
            found = ctranslate2.read(source, tokenizer)
            _write(temporary, out, found.model, found.tokenizer, found.spec)
        return load(out)
    if source.is_dir():
        with new_folder(out) as temporary:
            run = from_hf(
                source, tokenizer=tokenizer, allow_pickle=allow_pickle, family=family, ignore_fields=ignore_fields
            )
            with writing(out):
                write_run(temporary, run)
        return replace(run, folder=out)
    suffix = source.suffix.lower()
    if suffix == ".gguf":
        _refuse(family, ignore_fields, "GGUF files", allow_pickle)
        with new_folder(out) as temporary:
            imported = gguf_import.read(source, tokenizer)
            _write(temporary, out, imported.model, imported.tokenizer, imported.spec)
        return load(out)
    if suffix not in (".bin", ".pt"):
        single = "a .gguf, llama2.c's .bin, or a .pt of nanoGPT, minGPT or nanochat"
        kinds = f"a folder with a config.json, hf:owner/name, {single}"
        raise wrong(source, f"is of no kind that is read: give {kinds}")
    if suffix == ".pt":
        _refuse(family, ignore_fields, ".pt files")
        with new_folder(out) as temporary:
            checkpoint = _read_checkpoint(source, tokenizer, allow_pickle)
            _write(temporary, out, checkpoint.model, checkpoint.tokenizer, LanguageModel(framed=True))
        return load(out)
    _refuse(family, ignore_fields, "llama2.c's .bin", allow_pickle)
    if tokenizer is None:
        raise ConfigError([Fault("--tokenizer", "is missing: a llama2.c model comes with a tokenizer, a .bin, too")])
    with new_folder(out) as temporary:
        model, text = llama2c.read(source, tokenizer)
        _write(temporary, out, model, text, LanguageModel(framed=True))
    return load(out)


def _write(folder: Path, out: Path, model: Transformer, tokenizer: TextTokenizer, spec: AnyTask) -> None:
    """Write a model that has one tokenizer into a new folder, which becomes `out`."""
    with writing(out):
        write_model(folder, model.state_dict(), model.config, spec, spec.build(tokenizer))


def _read_adapter(
    folder: Path,
    base: str | Path | None,
    tokenizer: str | Path | None,
    family: str | None,
    ignore_fields: Sequence[str],
    allow_pickle: bool,
) -> Run:
    """Return the base model with the adapter of a folder of PEFT."""
    name = peft.base_of(folder)
    if base is None and (name is None or not Path(name).is_dir()):
        trained = f"the adapter was trained on {visible(name)}: " if name else ""
        what = f"is missing: {trained}give that model as a folder, a run, or hf:owner/name"
        raise ConfigError([Fault("--base", what)])
    place = str(base if base is not None else name)
    path = hub.download(place, allow_pickle) if hub.is_hub_name(place) else Path(place)
    if (path / "task.json").exists():
        for option, given in (("--tokenizer", tokenizer), ("--ignore-field", ignore_fields)):
            if given:
                raise ConfigError([Fault(option, "is for public folders: --base is a run, which is read as it is")])
        run = load(path)
    else:
        run = from_hf(path, tokenizer=tokenizer, allow_pickle=allow_pickle, family=family, ignore_fields=ignore_fields)
        family = family or read_json(path / "config.json").get("model_type")
    model = peft.read(folder, run.model.cpu(), family=family, allow_pickle=allow_pickle)
    return replace(run, model=model)


def _read_checkpoint(path: Path, tokenizer: str | Path | None, allow_pickle: bool) -> nanogpt.Checkpoint:
    """Read a .pt file by its layout."""
    if not allow_pickle:
        raise wrong(path, "is a pickle, which can run code: --allow-pickle reads its weights and plain data alone")
    content = load_pickle(path)
    if nanogpt.is_nanogpt(content):
        return nanogpt.read_nanogpt(path, content, tokenizer)
    if nanogpt.is_mingpt(content):
        return nanogpt.read_mingpt(path, content, tokenizer)
    if nanochat.is_nanochat(content):
        return nanochat.read_nanochat(path, content, tokenizer)
    raise wrong(path, "is not a checkpoint of nanoGPT (with model_args), minGPT or nanochat")


def _refuse(family: str | None, ignore_fields: Sequence[str], format: str, allow_pickle: bool = False) -> None:
    """Refuse the options of folders of `transformers` for another format."""
    for option, given in (("--family", family), ("--ignore-field", ignore_fields), ("--allow-pickle", allow_pickle)):
        if given:
            raise ConfigError([Fault(option, f"is for folders with a config.json, not for {format}")])

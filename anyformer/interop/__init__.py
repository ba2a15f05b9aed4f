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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.interop import ctranslate2, gguf_import, hub, llama2c, nanochat, nanogpt, peft
from anyformer.interop.hf_folder import from_hf
from anyformer.interop.weight_conversion import ImportedModel
from anyformer.interop.weight_files import load_pickle, read_json, wrong
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
    public: dict[str, Any] = {
        "tokenizer": tokenizer,
        "family": family,
        "ignore_fields": ignore_fields,
        "allow_pickle": allow_pickle,
    }
    read: Callable[[], Run | ImportedModel]
    if source.is_dir() and peft.is_folder(source):
        read = partial(_read_adapter, source, base, public)
    elif base is not None:
        raise ConfigError([Fault("--base", "is for adapters of PEFT: a folder with an adapter_config.json")])
    elif _is_public(source):
        read = partial(from_hf, source, **public)
    else:
        noun, read = _reader(source, tokenizer, allow_pickle)
        unused = {"--family": family, "--ignore-field": ignore_fields, "--allow-pickle": allow_pickle}
        if option := next((name for name, given in unused.items() if given and (name, noun) != PICKLES), None):
            raise ConfigError([Fault(option, f"is for folders with a config.json, not for {noun}")])
    with new_folder(out) as temporary:
        found = read()
        with writing(out):
            if isinstance(found, Run):
                write_run(temporary, found)
            else:
                task = found.spec.build(found.tokenizer)
                write_model(temporary, found.model.state_dict(), found.model.config, found.spec, task)
    return replace(found, folder=out) if isinstance(found, Run) else load(out)


PICKLES = ("--allow-pickle", ".pt files")  # which are pickles


def _is_public(folder: Path) -> bool:
    """Return whether a path is a folder of `transformers`; refuse one of files that are imported one by one."""
    alone = folder.is_dir() and not (folder / "config.json").exists()
    if alone and (files := llama2c.find(folder)):
        model_file, its_tokenizer = map(shlex.quote, map(str, files))
        what = f"holds files of llama2.c: anyformer import {model_file} --tokenizer {its_tokenizer}"
        raise wrong(folder, what)
    if alone and (folder / nanogpt.FILE).exists():
        command = f"anyformer import {shlex.quote(str(folder / nanogpt.FILE))} --allow-pickle"
        raise wrong(folder, f"holds a checkpoint of nanoGPT: {command}")
    return folder.is_dir() and not ctranslate2.is_folder(folder)


def _reader(source: Path, tokenizer: str | Path | None, allow_pickle: bool) -> tuple[str, Callable[[], ImportedModel]]:
    """Return the name of the format of a file, or of a folder that holds one, and a function that reads it."""
    if source.is_dir():
        return "CTranslate2's model.bin", partial(ctranslate2.read, source, tokenizer)
    match source.suffix.lower():
        case ".gguf":
            return "GGUF files", partial(gguf_import.read, source, tokenizer)
        case ".pt":
            return PICKLES[1], partial(_read_checkpoint, source, tokenizer, allow_pickle)
        case ".bin":
            return "llama2.c's .bin", partial(llama2c.read, source, tokenizer)
    single = "a .gguf, llama2.c's .bin, or a .pt of nanoGPT, minGPT or nanochat"
    raise wrong(source, f"is of no kind that is read: give a folder with a config.json, hf:owner/name, {single}")


def _read_adapter(folder: Path, base: str | Path | None, public: dict[str, Any]) -> Run:
    """Return the base model with the adapter of a folder of PEFT; `public` are the options of `from_hf`."""
    name = peft.base_of(folder)
    if base is None and (name is None or not Path(name).is_dir()):
        trained = f"the adapter was trained on {visible(name)}: " if name else ""
        what = f"is missing: {trained}give that model as a folder, a run, or hf:owner/name"
        raise ConfigError([Fault("--base", what)])
    place = str(base if base is not None else name)
    path = hub.download(place, public["allow_pickle"]) if hub.is_hub_name(place) else Path(place)
    if (path / "task.json").exists():
        for option, name in (("--tokenizer", "tokenizer"), ("--ignore-field", "ignore_fields")):
            if public[name]:
                raise ConfigError([Fault(option, "is for public folders: --base is a run, which is read as it is")])
        run, family = load(path), public["family"]
    else:
        run = from_hf(path, **public)
        family = public["family"] or read_json(path / "config.json").get("model_type")
    model = peft.read(folder, run.model.cpu(), family=family, allow_pickle=public["allow_pickle"])
    return replace(run, model=model)


def _read_checkpoint(path: Path, tokenizer: str | Path | None, allow_pickle: bool) -> ImportedModel:
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

"""Import models of other programs as runs, and export runs for other programs.

config_fields             Read the fields of a public config.json
ctranslate2               Read Whisper models in CTranslate2's format
families                  One file for each public model family
family                    The class `Family`, and the search for a family that supports a model
hf_folder                 Read and write folders of `transformers`: from_hf, to_hf
hub                       Download public models by name: hf:owner/name
language_codes            Language codes of multilingual translation models, in the order of their ids
llama2c                   Read model and tokenizer files of llama2.c
onnx                      Export to ONNX: export_onnx
pictures                  Read and write the settings of picture files
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
from anyformer.interop import ctranslate2, hub, llama2c
from anyformer.interop.hf_folder import from_hf
from anyformer.recipe import LanguageModel
from anyformer.run import Run, load, new_folder, write_model, writing
from anyformer.tasks.build import build_task


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    allow_pickle: bool = False,
    family: str | None = None,
    ignore_fields: Sequence[str] = (),
) -> Run:
    """Write a model of another program as a run, with its tokenizer.

    `source` is a folder for `from_hf`, one of CTranslate2 (Whisper only), the name of a public model
    (`hf:owner/name`), or a .bin file of llama2.c.
    """
    out = Path(out)
    if out.exists():
        raise ConfigError([Fault(visible(str(out)), "exists already; choose another --out")])
    source = hub.download(str(source), allow_pickle) if hub.is_hub_name(source) else Path(source)
    if source.is_dir() and not (source / "config.json").exists() and (files := llama2c.find(source)):
        model_file, its_tokenizer = map(shlex.quote, map(str, files))
        what = f"holds files of llama2.c: anyformer import {model_file} --tokenizer {its_tokenizer}"
        raise ConfigError([Fault(visible(str(source)), what)])
    if source.is_dir() and ctranslate2.is_folder(source):
        _refuse(family, ignore_fields, allow_pickle, "CTranslate2's model.bin")
        with new_folder(out) as temporary:
            found = ctranslate2.read(source, tokenizer)
            task = build_task(found.spec, found.tokenizer, None)
            with writing(out):
                write_model(temporary, found.model.state_dict(), found.model.config, found.spec, task)
        return load(out)
    if source.is_dir():
        with new_folder(out) as temporary:
            run = from_hf(
                source, tokenizer=tokenizer, allow_pickle=allow_pickle, family=family, ignore_fields=ignore_fields
            )
            with writing(out):
                write_model(temporary, run.model.state_dict(), run.config, run.spec, run.task)
        return replace(run, folder=out)
    if source.suffix.lower() != ".bin":
        what = "is of no kind that is read: give a folder with a config.json, hf:owner/name, or llama2.c's .bin"
        raise ConfigError([Fault(visible(str(source)), what)])
    _refuse(family, ignore_fields, allow_pickle, "llama2.c's .bin")
    if tokenizer is None:
        raise ConfigError([Fault("--tokenizer", "is missing: a llama2.c model comes with a tokenizer, a .bin, too")])
    spec = LanguageModel(framed=True)
    with new_folder(out) as temporary:
        model, text = llama2c.read(source, tokenizer)
        with writing(out):
            write_model(temporary, model.state_dict(), model.config, spec, build_task(spec, text, None))
    return load(out)


def _refuse(family: str | None, ignore_fields: Sequence[str], allow_pickle: bool, format: str) -> None:
    """Refuse the options of folders of `transformers` for another format."""
    for option, given in (("--family", family), ("--ignore-field", ignore_fields), ("--allow-pickle", allow_pickle)):
        if given:
            raise ConfigError([Fault(option, f"is for folders with a config.json, not for {format}")])

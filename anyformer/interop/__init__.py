"""Models from elsewhere as runs, and runs as models for elsewhere.

config_fields             The fields of a public config.json
families                  The public families, in the order in which one is looked for that has a model
family                    what a family is, and which one has a model
hf_folder                 Folders as `transformers` writes and reads them
language_codes            Language codes of multilingual translation models, in the order of their ids
llama2c                   llama2.c's files
onnx                      graphs for onnxruntime: export_onnx
public_tokenizers         Tokenizers of public folders, from every set of files that they have had
same_model                Whether two configs are the same model
schema                    which fields `transformers` reads, as data
sentence_transformers     Folders of sentence-transformers (Reimers & Gurevych 2019)
sentencepiece_conversion  The `tokenizers` form of a SentencePiece model
slow_tokenizers           SentencePiece folders without a tokenizer.json, read as the slow tokenizers of `transformers
tokenizer_settings        tokenizer_config.json and special_tokens_map.json of a folder
weight_conversion         The weights of a folder as ours, and ours as theirs, by the rules of a family
weight_files              The weights in a folder, tensor by tensor
weight_rules              The weights of a public model under our names, and back
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.interop import llama2c
from anyformer.interop.hf_folder import from_hf
from anyformer.recipe import LanguageModel
from anyformer.run import Run, load, new_folder, write_model, writing
from anyformer.tasks.build import build_task


def bring_in(
    source: str | Path,
    out: str | Path,
    *,
    tokenizer: str | Path | None = None,
    allow_pickle: bool = False,
    family: str | None = None,
    ignore_fields: Sequence[str] = (),
) -> Run:
    """Write a model of another program as a run, with its tokenizer: a folder for `from_hf`, or llama2.c's .bin."""
    source, out = Path(source), Path(out)
    if out.exists():
        raise ConfigError([Fault(visible(str(out)), "exists already; choose another --out")])
    if source.is_dir():
        with new_folder(out) as temporary:
            run = from_hf(
                source, tokenizer=tokenizer, allow_pickle=allow_pickle, family=family, ignore_fields=ignore_fields
            )
            with writing(out):
                write_model(temporary, run.model.state_dict(), run.config, run.spec, run.task)
        return replace(run, folder=out)
    if source.suffix.lower() != ".bin":
        what = "is of no kind that is read: give a folder with a config.json, or llama2.c's .bin"
        raise ConfigError([Fault(visible(str(source)), what)])
    for option, given in (("--family", family), ("--ignore-field", ignore_fields), ("--allow-pickle", allow_pickle)):
        if given:
            raise ConfigError([Fault(option, "is for folders with a config.json, not for llama2.c's .bin")])
    if tokenizer is None:
        raise ConfigError([Fault("--tokenizer", "is missing: a llama2.c model comes with a tokenizer, a .bin, too")])
    spec = LanguageModel(framed=True)
    with new_folder(out) as temporary:
        model, text = llama2c.read(source, tokenizer)
        with writing(out):
            write_model(temporary, model.state_dict(), model.config, spec, build_task(spec, text, None))
    return load(out)

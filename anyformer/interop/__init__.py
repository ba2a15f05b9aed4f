"""Models from elsewhere as runs, and runs as models for elsewhere.

hub            folders of `transformers`: from_hf, to_hf
families/      one file for each public family: its config and its weights, in both directions
family         what a family is, and which one has a model
fields         config.json: each field is read, refused, or ignored as `transformers` does
schema         which fields `transformers` reads, as data
rules          invertible rules between tensors of theirs and ours
weights        tensors by these rules, one after the other
files          .safetensors, read and written tensor by tensor
sentences      what sentence-transformers writes beside a model
tokens         tokenizers of public folders; slow reads SentencePiece models as the classes of transformers 4.x do
compare        whether two configs are the same model
llama2c        llama2.c's files
onnx           graphs for onnxruntime: export_onnx
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.interop import llama2c
from anyformer.interop.hf_folder import from_hf
from anyformer.recipe.recipe import LanguageModel
from anyformer.run import Run, build_task, load, new_folder, write_model, writing


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
        raise ConfigError([Fault(visible(str(out)), "is there already; choose another --out")])
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

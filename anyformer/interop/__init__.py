"""Models from elsewhere, as runs."""

from pathlib import Path

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.interop import llama2c
from anyformer.recipe import LanguageModel
from anyformer.run import Run, build_task, load, write_folder, write_model


def bring_in(file: str | Path, out: str | Path, *, tokenizer: str | Path | None = None) -> Run:
    """A model file that another program wrote, with its tokenizer's, written as a run and loaded from there.

    Read so far: llama2.c's, a .bin.
    """
    file, out = Path(file), Path(out)
    if out.exists():
        raise ConfigError([Fault(visible(str(out)), "is there already; choose another --out")])
    if file.suffix.lower() != ".bin":
        raise ConfigError([Fault(visible(str(file)), "is of no kind that is read: give llama2.c's .bin")])
    if tokenizer is None:
        raise ConfigError([Fault("--tokenizer", "is missing: a llama2.c model comes with a tokenizer, a .bin, too")])
    model, text = llama2c.read(file, tokenizer)
    spec = LanguageModel()
    task = build_task(spec, text, None)
    write_folder(out, lambda folder: write_model(folder, model.state_dict(), model.config, spec, task))
    return load(out)

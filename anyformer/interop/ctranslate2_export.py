"""Export to CTranslate2 (Klein et al. 2020), by its own converter of folders of `transformers`.

The run is written as a public folder first, so that both must support it. The folder for CTranslate2 holds model.bin,
config.json, its vocabularies, and the tokenizer: CTranslate2 reads and writes tokens, not texts.
"""

import shutil
import tempfile
from pathlib import Path

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.data.tokenizer import FILE
from anyformer.interop.hf_folder import to_hf
from anyformer.interop.tokenizer_settings import SETTINGS, SPECIAL
from anyformer.interop.weight_files import read_json, write_json, wrong
from anyformer.run import Run, write_folder

# Families whose scores are the same there. (Those of mT5 and Pegasus differ, Marian's need another tokenizer.)
FAMILIES = ("t5", "bart")
# Fields of published configs that the converter reads and `transformers` does not.
EXPECTED = {"bart": {"normalize_before": False, "normalize_embedding": True}}


def export_ctranslate2(run: Run, folder: str | Path, *, family: str | None = None) -> str:
    """Write a run for CTranslate2, and return the name of the public family that it was converted from."""
    folder = Path(folder)
    if folder.exists():
        raise wrong(folder, "exists already; choose another folder")
    try:
        from ctranslate2.converters import TransformersConverter
    except ImportError:
        what = "needs the packages ctranslate2 and transformers: pip install 'anyformer[hf]' ctranslate2"
        raise ConfigError([Fault("--format", f"= 'ctranslate2': {what}")]) from None
    if run.task.source_tokenizer is not None:
        raise ConfigError([Fault("source_tokenizer", "models with two tokenizers are not exported to CTranslate2")])
    with tempfile.TemporaryDirectory() as temporary:
        public = Path(temporary) / "public"
        if family is not None and family not in FAMILIES:
            known = " and ".join(FAMILIES)
            raise ConfigError([Fault("family", f"= '{family}': is not exported to CTranslate2, only {known} are")])
        name = to_hf(run, public, family=family)
        if name not in FAMILIES:
            known = " and ".join(FAMILIES)
            raise ConfigError([Fault("model", f"is a {name}: only {known} are exported to CTranslate2")])
        data = read_json(public / "config.json")
        heads = [data.get(f"{side}_attention_heads") for side in ("encoder", "decoder")]
        if heads[0] != heads[1]:
            what = f"= {heads[1]}: CTranslate2 needs as many heads as in the encoder, {heads[0]}"
            raise ConfigError([Fault("decoder.blocks.0.mixer.heads", what)])
        write_json(public / "config.json", data | EXPECTED.get(name, {}))
        files = [file for file in (FILE, SETTINGS, SPECIAL) if (public / file).is_file()]
        converted = Path(temporary) / "converted"
        try:
            TransformersConverter(str(public), copy_files=files).convert(str(converted))
        except (ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
            reason = visible(str(error)).partition("\n")[0]
            raise ConfigError([Fault(name, f"CTranslate2's converter refuses the model: {reason}")]) from None
        write_folder(folder, lambda path: _copy(converted, path))
    return name


def _copy(source: Path, to: Path) -> None:
    for file in source.iterdir():
        shutil.copy(file, to / file.name)

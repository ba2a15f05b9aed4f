"""Export to CTranslate2 (Klein et al. 2020), by its own converter of folders of `transformers`.

The run is written as a public folder first, so that both must support it. The folder for CTranslate2 holds model.bin,
config.json, its vocabularies, and the tokenizer: CTranslate2 reads and writes tokens, not texts.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from anyformer.config import Attention, Causal, ConfigError, Fault, ModelConfig, NoScaling, Rotary, pattern_of
from anyformer.config.spec import visible
from anyformer.data.tokenizer import FILE
from anyformer.interop.hf_folder import to_hf
from anyformer.interop.slow_tokenizers import SOURCE, TARGET, VOCAB
from anyformer.interop.tokenizer_settings import SETTINGS, SPECIAL
from anyformer.interop.weight_files import must_be_new, read_json, write_json
from anyformer.runs.run import Run, write_folder

# Families that give the same scores there, by a test. Those of mT5 and Pegasus differ.
PAIRS = ("t5", "bart", "marian")
DECODERS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gptj", "bloom")
FAMILIES = (*PAIRS, *DECODERS)
# Fields of published configs that the converter reads and `transformers` does not.
EXPECTED = {"bart": {"normalize_before": False, "normalize_embedding": True}}
EXPECTED["marian"] = {"normalize_before": False, "normalize_embedding": False}
NEVER = -1e9  # bias of tokens that are never generated


def export_ctranslate2(run: Run, folder: str | Path, *, family: str | None = None) -> str:
    """Write a run for CTranslate2, and return the name of the public family that it was converted from."""
    folder = Path(folder)
    must_be_new(folder)
    try:
        import ctranslate2.converters  # noqa: F401
    except ImportError:
        what = "needs the packages ctranslate2 and transformers: pip install 'anyformer[hf]' ctranslate2"
        raise ConfigError([Fault("--format", f"= 'ctranslate2': {what}")]) from None
    with tempfile.TemporaryDirectory() as temporary:
        public = Path(temporary) / "public"
        known = f"{', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"
        if family is not None and family not in FAMILIES:
            raise ConfigError([Fault("family", f"= '{family}': is not exported to CTranslate2, only {known} are")])
        name = to_hf(run, public, family=family)
        if name not in FAMILIES:
            raise ConfigError([Fault("model", f"is a {name}: only {known} are exported to CTranslate2")])
        _check_decoder(run.config)
        data = read_json(public / "config.json")
        heads = [data.get(f"{side}_attention_heads") for side in ("encoder", "decoder")]
        if heads[0] != heads[1]:
            what = f"= {heads[1]}: CTranslate2 needs as many heads as in the encoder, {heads[0]}"
            raise ConfigError([Fault("decoder.blocks.0.mixer.heads", what)])
        write_json(public / "config.json", data | EXPECTED.get(name, {}))
        converted = Path(temporary) / "converted"
        try:
            _convert(name, public, converted, run)
        except (ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
            reason = visible(str(error)).partition("\n")[0]
            raise ConfigError([Fault(name, f"CTranslate2's converter refuses the model: {reason}")]) from None
        write_folder(folder, lambda path: _copy(converted, path))
    return name


def _check_decoder(config: ModelConfig) -> None:
    """Refuse what the converter reads otherwise, or drops."""
    stack = config.decoder
    assert stack is not None
    if isinstance(stack.position, Rotary) and not isinstance(stack.position.scaling, NoScaling):
        what = f"= '{stack.position.scaling.kind}': is not exported to CTranslate2, only 'none' is"
        raise ConfigError([Fault("decoder.position.scaling", what)])
    for i, block in enumerate(stack.blocks):
        if not isinstance(block.mixer, Attention):
            continue
        if not isinstance(pattern := pattern_of(block.mixer, "decoder"), Causal):
            what = f"= '{pattern.kind}': is not exported to CTranslate2, only 'causal' is"
            raise ConfigError([Fault(f"decoder.blocks.{i}.mixer.pattern", what)])


def _convert(name: str, public: Path, to: Path, run: Run) -> None:
    from ctranslate2.converters import TransformersConverter
    from ctranslate2.converters.transformers import BartLoader

    files = [file for file in (FILE, SETTINGS, SPECIAL, SOURCE, TARGET, VOCAB) if (public / file).is_file()]
    if name != "marian":
        TransformersConverter(str(public), copy_files=files).convert(str(to))
        return

    class MarianConverter(TransformersConverter):  # type: ignore[misc]  # the package has no types
        """Keep the start token: its loader of Marian assumes a start vector of zeros, and drops the last token."""

        def _load(self) -> Any:
            import transformers

            model = transformers.MarianMTModel.from_pretrained(public)
            model.final_logits_bias[:, list(run.defaults.suppressed)] = NEVER
            with torch.no_grad():
                spec = BartLoader()(model, _Vocabulary(run))
            for file in files:
                spec.register_file(self.get_model_file(file))
            return spec

    MarianConverter(str(public)).convert(str(to))


class _Vocabulary:
    """The methods of a tokenizer that the converter calls."""

    def __init__(self, run: Run):
        self._tokens = {id: token for token, id in run.tokenizer.inner.get_vocab().items()}
        ids, self._rows = run.config.special, run.config.vocab
        assert ids.eos is not None
        self.eos_token = self.convert_ids_to_tokens(ids.eos)
        self.bos_token = self.convert_ids_to_tokens(ids.eos if ids.bos is None else ids.bos)
        unknown = run.tokenizer.unk
        self.unk_token = self.eos_token if unknown is None else self.convert_ids_to_tokens(unknown)

    def get_vocab(self) -> dict[str, int]:
        return {self.convert_ids_to_tokens(id): id for id in range(self._rows)}

    def convert_ids_to_tokens(self, id: int) -> str:
        return self._tokens.get(id, f"<row {id}>")  # a row without a token


def _copy(source: Path, to: Path) -> None:
    for file in source.iterdir():
        shutil.copy(file, to / file.name)

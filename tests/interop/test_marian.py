"""Marian folders: two SentencePiece models with one vocabulary; the source is read by one, the target by the other."""

from pathlib import Path

import pytest
import torch
import transformers as hf

import anyformer as af
from anyformer.interop import import_model
from anyformer.runs.run import Run
from tests.interop.slow_cases import lay_out, load
from tests.interop.slow_lines import lines

CASES, MODELS, _ = load()
CASE = CASES["Marian"]
TEXTS = [text for group, texts in lines().items() if group != "special" for text in texts[::40]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = CASE.settings["vocab.json"]
    sizes = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 1), ("ffn_dim", 8))}
    ids = {"pad_token_id": vocab["<pad>"], "eos_token_id": vocab["</s>"], "decoder_start_token_id": vocab["<pad>"]}
    config = hf.MarianConfig(
        vocab_size=len(vocab), d_model=8, encoder_attention_heads=2, decoder_attention_heads=2, **sizes, **ids
    )
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("marian")
    hf.MarianMTModel(config).save_pretrained(made)
    return lay_out(CASE, MODELS, made)


def ids(run: Run) -> tuple[list[list[int]], list[list[int]]]:
    assert run.task.source_tokenizer is not None
    return run.task.source_tokenizer.encode_batch(TEXTS), run.tokenizer.encode_batch(TEXTS)


def test_source_and_target_have_their_own_models(folder: Path, tmp_path: Path) -> None:
    run = af.from_hf(folder, device="cpu")
    every = [text for group, texts in lines().items() if group != "special" for text in texts]
    at = [every.index(text) for text in TEXTS]
    source, target = ids(run)
    assert source == [CASE.rows[i] for i in at]
    assert target == [CASE.target[i] for i in at]
    assert source != target
    import_model(folder, tmp_path / "run")
    assert ids(af.load(tmp_path / "run", device="cpu")) == (source, target)


def test_what_is_written_is_read_again(folder: Path, tmp_path: Path) -> None:
    run = af.from_hf(folder, device="cpu")
    af.to_hf(run, tmp_path / "back", family="marian")
    for name in ("source.spm", "target.spm"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    again = af.from_hf(tmp_path / "back", device="cpu")
    assert ids(again) == ids(run)
    assert again.tokenizer.around == run.tokenizer.around

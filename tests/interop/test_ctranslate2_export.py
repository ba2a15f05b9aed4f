"""Models trained here give the beams of `run.hypotheses` in CTranslate2, after an export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import anyformer as af
from anyformer.data.tokenizer import TextTokenizer
from anyformer.recipe import Seq2Seq
from anyformer.run import Run, new_folder, write_run
from anyformer.tasks.build import build_task
from tests.interop.public import BOS, EOS, PAD, VOCAB, words
from tests.interop.test_pairs import bart
from tests.test_cli import done, refused

ctranslate2 = pytest.importorskip("ctranslate2", reason="needs the package ctranslate2")
pytestmark = pytest.mark.filterwarnings("ignore")  # of its converter

TEXTS = ["abc cab", "b a z", "cab bac", "za"]


def trained(folder: Path) -> Run:
    """A T5 after some steps of learning to reverse rows."""
    torch.manual_seed(0)
    config = af.presets.t5(depth=2, width=32, heads=4, ff=64, vocab=VOCAB)
    config = config.model_copy(update={"special": {"pad": PAD, "bos": BOS, "eos": EOS, "start": PAD}})
    model, spec = af.Transformer(config), Seq2Seq(framed=True, start=PAD)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        rows = torch.randint(5, VOCAB, (16, 6))
        labels = torch.cat((rows.flip(1), torch.full((16, 1), EOS)), dim=1)
        read = torch.cat((torch.full((16, 1), PAD), labels[:, :-1]), dim=1)
        loss = F.cross_entropy(model(rows, read).flatten(0, 1), labels.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    tokenizer = TextTokenizer(words("$A", "</s>"))
    run = Run(model.eval(), build_task(spec, tokenizer, None), spec, folder)
    with new_folder(folder) as temporary:
        write_run(temporary, run)
    return run


def tokens(run: Run, ids: Any) -> list[str]:
    return [str(run.tokenizer.inner.id_to_token(int(i))) for i in ids]


def test_beams_of_a_model_trained_here(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    done("export", tmp_path / "run", tmp_path / "ct2", "--format", "ctranslate2")
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", inter_threads=1, intra_threads=1)
    sources = [tokens(run, ids) for ids in run.writer().prompts(TEXTS, run.config)]
    found = translator.translate_batch(
        sources,
        beam_size=4,
        num_hypotheses=4,
        length_penalty=0.0,
        min_decoding_length=0,  # 1 would take EOS out of the first distribution
        max_decoding_length=9,
        return_scores=True,
    )
    expected = run.hypotheses(TEXTS, beams=4, n_best=4, length_penalty=0.0, max_new_tokens=9, early_stopping="never")
    for theirs, ours in zip(found, expected, strict=True):
        ids = [[run.tokenizer.inner.token_to_id(token) for token in row] for row in theirs.hypotheses]
        assert [run.tokenizer.decode(row) for row in ids] == [hypothesis.text for hypothesis in ours]
        assert theirs.scores == pytest.approx([hypothesis.score for hypothesis in ours], rel=2e-4)
    scores = translator.score_batch(sources, [tokens(run, run.tokenizer.encode("cab a")) for _ in TEXTS])
    for theirs, ours in zip(scores, run.score(TEXTS, ["cab a"] * len(TEXTS)), strict=True):
        assert theirs.log_probs == pytest.approx(ours.logprobs, abs=1e-3)


def test_scores_of_a_bart(tmp_path: Path) -> None:
    bart(encoder_attention_heads=5, decoder_attention_heads=5).saved(tmp_path / "bart")
    done("import", tmp_path / "bart", "--out", tmp_path / "run")
    done("export", tmp_path / "run", tmp_path / "ct2", "--format", "ctranslate2")
    run = af.load(tmp_path / "run")
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", inter_threads=1, intra_threads=1)
    sources = [tokens(run, ids) for ids in run.writer().prompts(TEXTS, run.config)]
    expected = run.score(TEXTS, ["cab a"] * len(TEXTS))
    found = translator.score_batch(sources, [tokens(run, score.ids[:-1]) for score in expected])
    for theirs, ours in zip(found, expected, strict=True):
        assert theirs.log_probs == pytest.approx(ours.logprobs, abs=1e-3)


def test_models_that_are_refused(tmp_path: Path) -> None:
    bart().saved(tmp_path / "bart")  # 5 heads in the encoder, 3 in the decoder
    done("import", tmp_path / "bart", "--out", tmp_path / "run")
    (line,) = refused("export", tmp_path / "run", tmp_path / "ct2", "--format", "ctranslate2")
    assert line.startswith("decoder.blocks.0.mixer.heads = 3: CTranslate2 needs as many heads as in the encoder, 5")
    (line,) = refused("export", tmp_path / "run", tmp_path / "ct2", "--format", "ctranslate2", "--family", "marian")
    assert line.startswith("family = 'marian': is not exported to CTranslate2")
    assert not (tmp_path / "ct2").exists()

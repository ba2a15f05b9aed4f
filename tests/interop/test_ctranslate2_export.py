"""Models trained here give the beams of `run.hypotheses` in CTranslate2, after an export."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import anyformer as af
from anyformer.config import ConfigError, ModelConfig
from anyformer.data.tokenizer import TextTokenizer
from anyformer.generation.generate import generate
from anyformer.interop.config_fields import Fields
from anyformer.interop.ctranslate2_export import DECODERS, export_ctranslate2
from anyformer.interop.families import FAMILIES
from anyformer.recipe import Seq2Seq
from anyformer.runs.run import Run, new_folder, write_run
from anyformer.tasks.generation_defaults import GenerationDefaults
from tests.interop.public import BOS, EOS, PAD, VOCAB, PublicModel, words
from tests.interop.test_decoders import bloom, gpt2, gptj, llama, rope
from tests.interop.test_pairs import bart
from tests.test_cli import done, refused

ctranslate2 = pytest.importorskip("ctranslate2", reason="needs the package ctranslate2")
pytestmark = pytest.mark.filterwarnings("ignore")  # of its converter

TEXTS = ["abc cab", "b a z", "cab bac", "za"]


def t5_config() -> ModelConfig:
    config = af.presets.t5(depth=2, width=32, heads=4, ff=64, vocab=VOCAB)
    return config.model_copy(update={"special": {"pad": PAD, "bos": BOS, "eos": EOS, "start": PAD}})


def marian_config() -> ModelConfig:
    """Post-norm, sinusoidal positions in halves, tied tables; the decoder starts with <pad>."""
    sizes = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("ffn_dim", 64))}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": PAD}
    names = ["final_logits_bias", "model.encoder.layers.0.self_attn.q_proj.bias"]
    given = {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": 64, **sizes, **heads, **ids}
    return FAMILIES["marian"].config(Fields(given, "config.json", lambda: names), ["MarianMTModel"])


def trained(folder: Path, config: ModelConfig) -> Run:
    """A model after some steps of learning to reverse rows."""
    torch.manual_seed(0)
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
    run = Run(model.eval(), spec.build(tokenizer), spec, folder)
    with new_folder(folder) as temporary:
        write_run(temporary, run)
    return run


def tokens(run: Run, ids: Any) -> list[str]:
    return [str(run.tokenizer.inner.id_to_token(int(i))) for i in ids]


@pytest.mark.parametrize("config", [t5_config(), marian_config()], ids=["t5", "marian"])
def test_beams_of_a_model_trained_here(tmp_path: Path, config: ModelConfig) -> None:
    run = trained(tmp_path / "run", config)
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
    (line,) = refused("export", tmp_path / "run", tmp_path / "ct2", "--format", "ctranslate2", "--family", "mbart")
    assert line.startswith("family = 'mbart': is not exported to CTranslate2")
    assert not (tmp_path / "ct2").exists()


def test_suppressed_tokens_of_a_marian(tmp_path: Path) -> None:
    """Tokens that a run never generates are not generated there either, as in published folders."""
    run = trained(tmp_path / "run", marian_config())
    (best,) = run.hypotheses(TEXTS[:1], beams=2, n_best=1, max_new_tokens=9)[0]
    banned = run.tokenizer.encode(best.text)[0]
    run = replace(run, defaults=GenerationDefaults(suppressed=(banned,)))
    export_ctranslate2(run, tmp_path / "ct2")
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), device="cpu", inter_threads=1, intra_threads=1)
    sources = [tokens(run, ids) for ids in run.writer().prompts(TEXTS[:1], run.config)]
    found = translator.translate_batch(sources, beam_size=2, length_penalty=0.0, max_decoding_length=9)
    ids = [run.tokenizer.inner.token_to_id(token) for token in found[0].hypotheses[0]]
    assert banned not in ids
    (expected,) = run.hypotheses(TEXTS[:1], beams=2, n_best=1, length_penalty=0.0, max_new_tokens=9)[0]
    assert run.tokenizer.decode(ids) == expected.text


DECODER_MODELS = {
    "gpt2": gpt2(),
    "llama": llama(attention_bias=True, tie_word_embeddings=True),
    "mistral": llama("Mistral", sliding_window=None),
    "qwen2": llama("Qwen2"),
    "qwen3": llama("Qwen3", head_dim=6),
    "gemma": llama("Gemma", head_dim=6),
    "gptj": gptj(),
    "bloom": bloom(),
}


@pytest.mark.parametrize("kind", DECODERS)
def test_scores_and_ids_of_decoders(kind: str, tmp_path: Path) -> None:
    DECODER_MODELS[kind].saved(tmp_path / "public")
    run = af.from_hf(tmp_path / "public", device="cpu")
    assert export_ctranslate2(run, tmp_path / "ct2", family=kind) == kind
    theirs = ctranslate2.Generator(str(tmp_path / "ct2"), device="cpu", compute_type="float32", intra_threads=1)
    for row in ([5, 6, 7, 8, 9], [9, 10], [11, 5, 5]):
        found = theirs.score_batch([tokens(run, row)])[0].log_probs
        with torch.no_grad():
            expected = run.model(torch.tensor([row])).log_softmax(-1)[0, :-1]
        assert found[-len(expected) :] == pytest.approx(expected[range(len(row) - 1), row[1:]].tolist(), abs=1e-4)
        new = generate(run.model, torch.tensor([row]), max_new_tokens=12, stop=())[0, len(row) :].tolist()
        options = {"max_length": 12, "include_prompt_in_result": False, "end_token": []}
        assert theirs.generate_batch([tokens(run, row)], **options)[0].sequences_ids == [new]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (llama(**rope(rope_type="linear", factor=2.0)), "decoder.position.scaling = 'linear'"),
        (llama("Mistral", sliding_window=4), "decoder.blocks.0.mixer.pattern = 'window'"),
    ],
)
def test_decoders_that_are_refused(model: PublicModel, words: str, tmp_path: Path) -> None:
    model.saved(tmp_path / "public")
    with pytest.raises(ConfigError, match=words):
        export_ctranslate2(af.from_hf(tmp_path / "public", device="cpu"), tmp_path / "ct2")

"""Public encoder–decoders: the same logits, greedy and beam ids here and there, and the way back to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import anyformer as af
from anyformer.data.tokenizer import TextTokenizer
from anyformer.generation.beam_search import beam_search
from anyformer.generation.generate import generate
from anyformer.recipe import Seq2Seq
from anyformer.runs.run import Run
from tests.interop.public import (
    BOS,
    EOS,
    LENGTH,
    PAD,
    TOLERANCE,
    VOCAB,
    WIDTH,
    PublicModel,
    again,
    furthest,
    ragged,
    same_tokens,
    tensors,
    words,
)


def t5(title: str = "T5", *, own_head: bool = False, **settings: Any) -> PublicModel:
    sizes = {
        "vocab_size": VOCAB,
        "d_model": WIDTH,
        "d_kv": 7,
        "d_ff": 40,
        "num_layers": 2,
        "num_heads": 3,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": PAD,
    }
    config = getattr(hf, f"{title}Config")(**{**sizes, **settings})
    changed = untie if own_head else lambda model: None
    return PublicModel(getattr(hf, f"{title}ForConditionalGeneration"), config, ("$A", "</s>"), changed)


def untie(model: hf.PreTrainedModel) -> None:
    """As in the published files of version 1.1, whose class always ties."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model._tied_weights_keys = {k: v for k, v in model._tied_weights_keys.items() if k != "lm_head.weight"}
    model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k != "lm_head.weight"}


def bart(title: str = "Bart", *, seed: int = 5, **settings: Any) -> PublicModel:
    sizes = {
        "vocab_size": VOCAB,
        "d_model": WIDTH,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 3,
        "encoder_ffn_dim": 40,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": LENGTH,
        "bos_token_id": BOS,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
    }
    config = getattr(hf, f"{title}Config")(**{**sizes, **settings})
    name = "MarianMTModel" if title == "Marian" else f"{title}ForConditionalGeneration"
    return PublicModel(getattr(hf, name), config, ("<s>", "$A", "</s>"), _biased, seed)


def _biased(model: hf.PreTrainedModel) -> None:
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(std=0.05, generator=torch.Generator().manual_seed(0))


PAIRS = {
    "bart": bart(),
    "bart-scaled": bart(scale_embedding=True, activation_function="relu"),
    "mbart": bart("MBart"),
    "marian": bart("Marian", scale_embedding=True, activation_function="swish", decoder_start_token_id=PAD),
    "marian-odd": bart("Marian", d_model=15, seed=1),
    "pegasus": bart("Pegasus", seed=2),
    "m2m": bart("M2M100", seed=4),
    "m2m-odd": bart("M2M100", d_model=15, seed=16, scale_embedding=False),
    "t5": t5(),
    "t5-uneven": t5(num_decoder_layers=3, relative_attention_num_buckets=8, relative_attention_max_distance=20),
    "t5-1.1": t5(own_head=True, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": t5("MT5", own_head=True),
    "mt5-tied": t5("MT5", feed_forward_proj="gated-silu"),
}


@torch.no_grad()
def logits(model: hf.PreTrainedModel, source: Any, read: Any) -> Tensor:
    return model(
        source.ids,
        attention_mask=source.mask,
        decoder_input_ids=read.ids,
        decoder_attention_mask=read.mask,
        use_cache=False,
    ).logits


@pytest.mark.parametrize("name", PAIRS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    theirs = PAIRS[name].saved(tmp_path / "there")
    run = af.from_hf(tmp_path / "there")
    source, read = ragged(44, 40, 17), ragged(17, 44, 40, seed=1)
    with torch.no_grad():
        found = run.model(source.ids, read.ids, source_segments=source.segments, target_segments=read.segments)
        hidden = run.model.encode(source.ids, segments=source.segments)
        expected = theirs.get_encoder()(source.ids, attention_mask=source.mask).last_hidden_state
    assert furthest(hidden, expected, source.real) <= TOLERANCE
    assert furthest(found, logits(theirs, source, read), read.real) <= TOLERANCE
    said = greedy(theirs, source)
    assert torch.equal(generate(run.model, source.ids, segments=source.segments, max_new_tokens=8), said)
    assert said.unique().numel() > 2
    exported = again(run, tmp_path / "back", hf.AutoModelForSeq2SeqLM)
    assert tensors(tmp_path / "back") == tensors(tmp_path / "there")
    assert torch.equal(logits(exported, source, read)[read.real], logits(theirs, source, read)[read.real])
    same_tokens(run, tmp_path / "back")


def greedy(model: hf.PreTrainedModel, source: Any) -> Tensor:
    """By a forward pass for each token: no cache of theirs is trusted."""
    ids = torch.full((len(source.ids), 1), model.config.decoder_start_token_id)
    for _ in range(8):
        read = type(source)(ids, torch.ones_like(ids, dtype=torch.bool))
        ids = torch.cat((ids, logits(model, source, read)[:, -1:].argmax(-1)), 1)
    return ids


@pytest.mark.parametrize("name", ["bart", "mbart", "marian", "pegasus", "m2m", "t5", "mt5"])
@torch.no_grad()
def test_beams(name: str, tmp_path: Path) -> None:
    """The same hypotheses, in the same order, with the same scores."""
    theirs = PAIRS[name].saved(tmp_path)
    theirs.generation_config.forced_eos_token_id = None  # that says how a search ends, not what a model is
    ours, source, stop = af.from_hf(tmp_path).model, ragged(44, 40, 17), tuple(range(5, VOCAB, 7))
    made = theirs.generate(
        source.ids,
        attention_mask=source.mask,
        max_new_tokens=10,
        num_beams=4,
        num_return_sequences=3,
        do_sample=False,
        eos_token_id=list(stop),
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = beam_search(ours, source.ids, segments=source.segments, max_new_tokens=10, beams=4, n_best=3, stop=stop)
    torch.testing.assert_close(found.scores.flatten(), made.sequences_scores, atol=1e-4, rtol=0)
    for mine, n, other in zip(found.ids.flatten(0, 1), found.lengths.flatten(), made.sequences, strict=True):
        assert mine[: 1 + n].tolist() == other[: 1 + n].tolist()
        assert set(other[1 + n :].tolist()) <= {PAD}
    assert found.ids.unique().numel() > 4


@torch.no_grad()
def test_a_model_made_here(tmp_path: Path) -> None:
    """Norms first, waves in halves, no biases of attention: a Pegasus, in which those are zero."""
    waves = {"kind": "sinusoidal", "layout": "halves"}
    block = {"mixer": {"heads": 3}, "feedforward": {"kind": "plain", "width": 40}}
    stack = {"depth": 2, "position": waves, "final_norm": "layer"}
    tokens = {"vocab": VOCAB, "scale": "sqrt_width", "pad": PAD}
    parts = {
        "width": WIDTH,
        "source": tokens,
        "target": tokens,
        "encoder": {**stack, "blocks": block},
        "decoder": {**stack, "blocks": {**block, "cross": {"heads": 3}}},
        "head": "lm",
        "tie": "all",
        "special": {"pad": PAD, "bos": BOS, "eos": EOS, "start": BOS},
    }
    torch.manual_seed(0)
    model, spec = af.Transformer(af.ModelConfig.model_validate(parts)).eval(), Seq2Seq()
    for p in model.parameters():
        p.add_(0.2 * torch.randn_like(p))
    model.source.table.weight[PAD] = 0
    run = Run(model, spec.build(TextTokenizer(words())), spec, tmp_path)
    exported = again(run, tmp_path / "out", hf.AutoModelForSeq2SeqLM)
    assert exported.config.model_type == "pegasus"
    source, read = ragged(44, 40, 17), ragged(17, 44, 40, seed=1)
    found = model(source.ids, read.ids, source_segments=source.segments, target_segments=read.segments)
    assert furthest(found, logits(exported, source, read), read.real) <= TOLERANCE


def generated(model: hf.PreTrainedModel, source: Any, **options: Any) -> Tensor:
    """Eight tokens of theirs, with nothing forced or ended."""
    model.generation_config.forced_eos_token_id = model.generation_config.eos_token_id = None
    return model.generate(source.ids, attention_mask=source.mask, max_new_tokens=8, do_sample=False, **options)


@pytest.mark.parametrize("start", [PAD, EOS])
@pytest.mark.parametrize("title", ["Bart", "MBart", "Marian", "Pegasus", "T5", "MT5"])
@torch.no_grad()
def test_a_start_that_is_padding(title: str, start: int, tmp_path: Path) -> None:
    """Greedy ids are those of their `generate`, whichever id the decoder starts with."""
    made = t5(title, decoder_start_token_id=start) if "T5" in title else bart(title, decoder_start_token_id=start)
    theirs, source = made.saved(tmp_path), ragged(44, 40, 17)
    said = generate(af.from_hf(tmp_path).model, source.ids, segments=source.segments, max_new_tokens=8)
    assert torch.equal(said, generated(theirs, source))


@torch.no_grad()
def test_m2m_with_a_start_that_is_padding(tmp_path: Path) -> None:
    """Theirs says one thing with a cache and another without: it is refused, both ways."""
    theirs, source = bart("M2M100", decoder_start_token_id=PAD).saved(tmp_path / "there"), ragged(44, 40, 17)
    assert not torch.equal(generated(theirs, source), generated(theirs, source, use_cache=False))
    with pytest.raises(af.ConfigError, match=r"config\.json: decoder_start_token_id = .* is pad_token_id"):
        af.from_hf(tmp_path / "there")
    bart("M2M100").saved(tmp_path / "good")
    run = af.from_hf(tmp_path / "good")
    special = run.config.special.model_copy(update={"start": PAD})
    run.model.config = run.config.model_copy(update={"special": special})
    with pytest.raises(af.ConfigError, match="decoder_start_token_id"):
        af.to_hf(run, tmp_path / "back")

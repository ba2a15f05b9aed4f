"""Beam search as `transformers` does it: the same hypotheses in the same order, with the same scores."""

from typing import Any

import pytest
import torch
from torch import Tensor

from anyformer.generation.beam_search import Hypotheses, beam_search
from anyformer.generation.logit_processors import build
from anyformer.generation.strategy import EarlyStopping, Sampling
from tests.parity.families import PAD, VOCAB, built
from tests.parity.test_transformers import Ragged, ragged

THEIRS: dict[EarlyStopping, bool | str] = {"first": True, "heuristic": False, "never": "never"}
NEW = 10
FREQUENT = {"gpt2": 66, "t5": 65}  # ids that these weights like
SOME = tuple(range(5, VOCAB, 6))


def ours(family: str, batch: Ragged, **options: Any) -> Hypotheses:
    return beam_search(built(family)[0], batch.ids, segments=batch.segments, max_new_tokens=NEW, **options)


@torch.no_grad()
def theirs(family: str, batch: Ragged, stop: tuple[int, ...], **options: Any) -> tuple[Tensor, Tensor]:
    """Answers [b, n_best, n] and scores [b, n_best]."""
    model = built(family)[1]
    made = model.generate(
        batch.ids,
        attention_mask=batch.mask,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=list(stop) or None,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    prompt = 1 if model.config.is_encoder_decoder else batch.ids.shape[1]
    rows, scores = (x.view(len(batch.ids), -1, *x.shape[1:]) for x in (made.sequences, made.sequences_scores))
    return rows[..., prompt:], scores


def same(found: Hypotheses, prompt: int, answers: Tensor, scores: Tensor) -> None:
    torch.testing.assert_close(found.scores, scores, rtol=1e-4, atol=1e-4)
    for row, lengths, expected in zip(found.ids[..., prompt:], found.lengths, answers, strict=True):
        for mine, n, other in zip(row.tolist(), lengths.tolist(), expected.tolist(), strict=True):
            assert mine[:n] == other[:n]
            assert set(other[n:]) <= {PAD}


@pytest.mark.parametrize("several", [False, True], ids=["one stop id", "several"])
@pytest.mark.parametrize("early_stopping", THEIRS)
@pytest.mark.parametrize("length_penalty", [-0.5, 1.0, 2.0])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_hypotheses_and_scores(
    family: str, length_penalty: float, early_stopping: EarlyStopping, several: bool
) -> None:
    stop = SOME if several else (FREQUENT[family],)
    batch = ragged(14, 9, 4, 11, side="left")
    options = {"length_penalty": length_penalty, "early_stopping": THEIRS[early_stopping]}
    answers, scores = theirs(family, batch, stop, num_beams=4, num_return_sequences=3, **options)
    for side in ("left", "right"):
        read = ragged(14, 9, 4, 11, side=side)
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        found = ours(family, read, beams=4, n_best=3, stop=stop, **options)
        same(found, 1 if family == "t5" else read.ids.shape[1], answers, scores)
    if length_penalty < 2:
        assert len(found.lengths.unique()) > 2  # or this says little


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama"])
def test_no_stop_id(family: str) -> None:
    batch = ragged(14, 9, 4, side="left")
    found = ours(family, batch, beams=5, n_best=5)
    prompt = 1 if family == "t5" else batch.ids.shape[1]
    same(found, prompt, *theirs(family, batch, (), num_beams=5, num_return_sequences=5))


@pytest.mark.parametrize("family", ["gpt2", "t5"])
@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
        ({"min_new_tokens": 4}, {"min_new_tokens": 4}),
        ({"banned": ((8,), (3, 9))}, {"bad_words_ids": [[8], [3, 9]]}),
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_change_log_probabilities(family: str, mine: dict[str, Any], other: dict[str, Any]) -> None:
    batch = ragged(9, 9, side="left")  # theirs takes pads for text
    answers, scores = theirs(family, batch, SOME, num_beams=3, num_return_sequences=3, **other)
    processors = build(Sampling(**mine), vocab=VOCAB, stop=SOME)
    found = ours(family, batch, beams=3, n_best=3, stop=SOME, processors=processors)
    same(found, 1 if family == "t5" else 9, answers, scores)

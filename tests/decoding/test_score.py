"""Scores are the log-softmax of the logits that the model gives, row by row, whatever stands beside them."""

import pytest
import torch
from hypothesis import given, strategies as st

from anyformer.config import LM, Attention, Block, Learned, MaskedLM, ModelConfig, Rotary, Special, Stack, Tokens
from anyformer.generation import score as scoring
from anyformer.generation.score import fill_mask, score, sliding, top_tokens
from anyformer.nn.model import Transformer
from tests.strategies import VOCAB, build, close, models, seeds, tokens

READ = Tokens(vocab=VOCAB)
STACK = Stack(depth=2, blocks=(Block(mixer=Attention(heads=2), dropout=0.2),), position=Rotary())
BOTH = models(shapes=("decoder", "encoder-decoder"))


def decoder(**fields) -> Transformer:
    return build(ModelConfig(**{"width": 8, "target": READ, "decoder": STACK, "head": LM(), **fields}))


def encoder(**fields) -> Transformer:
    return build(ModelConfig(**{"width": 8, "source": READ, "encoder": STACK, "head": MaskedLM(), **fields}))


def rows_of(seed: int, lengths: list[int]) -> list[list[int]]:
    return [tokens(seed + i, length).tolist() for i, length in enumerate(lengths)]


def logits_of(model: Transformer, row: list[int], source: list[int] | None) -> torch.Tensor:
    """Of one row by itself, unpadded."""
    inputs = [row] if source is None else [source, row]
    with torch.no_grad():
        return model(*(torch.tensor([ids]) for ids in inputs))[0]


@given(BOTH, seeds, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans())
def test_scores_are_the_log_softmax_of_a_row_by_itself(config: ModelConfig, seed: int, lengths: list[int], few: bool):
    """Also where rows of unequal length stand together, in one batch or in many."""
    model, rows = build(config, seed), rows_of(seed, lengths)
    sources = rows_of(seed + 50, lengths[::-1]) if model.encoder else None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scoring, "MAX_LOGITS", VOCAB if few else 2**26)
        found = score(model, rows, sources)
    for i, row in enumerate(rows):
        assert len(found[i]) == len(row) - 1
        if len(row) > 1:
            expected = logits_of(model, row[:-1], sources and sources[i]).log_softmax(dim=-1)
            close(found[i], expected[torch.arange(len(row) - 1), row[1:]])


@given(BOTH, seeds, st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, VOCAB))
def test_top_tokens(config: ModelConfig, seed: int, lengths: list[int], k: int):
    model, rows = build(config, seed), rows_of(seed, lengths)
    sources = rows_of(seed + 50, lengths[::-1]) if model.encoder else None
    found, all_ = top_tokens(model, rows, k, sources), top_tokens(model, rows, VOCAB, sources)
    close(all_.probabilities.sum(dim=-1), torch.ones(len(rows)).double(), 1e-6)
    assert torch.equal(all_.ids.sort(dim=-1).values, torch.arange(VOCAB).expand(len(rows), VOCAB))
    assert torch.equal(found.probabilities, all_.probabilities[:, :k])
    for i, row in enumerate(rows):
        expected = logits_of(model, row, sources and sources[i])[-1].softmax(dim=-1)
        close(all_.probabilities[i], expected[all_.ids[i]])
        assert bool((found.probabilities[i].diff() <= 0).all())


def test_an_alternative_is_as_likely_as_its_score():
    model, row = decoder(), tokens(0, 4).tolist()
    found = top_tokens(model, [row], VOCAB)
    scores = score(model, [[*row, id] for id in found.ids[0].tolist()])
    close(torch.stack([each[-1] for each in scores]).exp(), found.probabilities[0])


# -- by windows -----------------------------------------------------------------------------------------------------


@given(seeds, st.integers(2, 20), st.integers(1, 8), st.integers(1, 8))
def test_a_sliding_window(seed: int, length: int, window: int, stride: int):
    """Each token once, given at least window - stride tokens, or all before it where they are fewer."""
    model, ids = decoder(), tokens(seed, length).tolist()
    stride = min(stride, window)
    found = sliding(model, ids, window, stride)
    assert len(found) == length - 1
    for at in range(1, length):
        # the windows begin at multiples of the stride: the first that holds the token
        begin = max(0, -((window - at) // stride) * stride)
        assert at - begin >= min(at, window - stride)
        expected = logits_of(model, ids[begin:at], None)[-1].log_softmax(dim=-1)[ids[at]]
        close(found[at - 1], expected)


@given(seeds, st.integers(2, 9), st.integers(0, 3))
def test_a_window_that_holds_all_is_none(seed: int, length: int, more: int):
    model, ids = decoder(), tokens(seed, length).tolist()
    close(sliding(model, ids, length + more), score(model, [ids])[0])


def test_a_window_reads_what_the_positions_do_not():
    model = decoder(decoder=STACK.model_copy(update={"position": Learned(length=6)}))
    ids = tokens(0, 30).tolist()
    assert len(sliding(model, ids, 6, 2)) == 29
    with pytest.raises(ValueError, match="past the end of 6 learned positions"):
        score(model, [ids])


# -- masks ----------------------------------------------------------------------------------------------------------


@given(models(shapes=("encoder",)), seeds, st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, VOCAB))
def test_masks_are_filled_by_the_softmax_at_their_places(config: ModelConfig, seed: int, lengths: list[int], k: int):
    model = build(config.model_copy(update={"head": MaskedLM()}), seed)
    rows = [[*row, 3, *row[:2]] for row in rows_of(seed, lengths)]
    for row, found in zip(rows, fill_mask(model, rows, 3, k), strict=True):
        places = [i for i, id in enumerate(row) if id == 3]
        expected = logits_of(model, row, None).softmax(dim=-1)[places]
        assert found.ids.shape == (len(places), k)
        close(found.probabilities, expected.gather(1, found.ids))
        close(found.probabilities, expected.topk(k).values)


# -- manners --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool):
    model, row = decoder().train(training), tokens(0, 5).tolist()
    calm = score(model, [row])[0]
    assert model.training is training
    assert not calm.requires_grad
    assert torch.equal(calm, score(model, [row])[0])  # no dropout


PAIR = ModelConfig(
    width=8,
    source=READ,
    target=READ,
    encoder=STACK,
    decoder=STACK.model_copy(update={"blocks": (Block(mixer=Attention(heads=2), cross=Attention(heads=2)),)}),
    head=LM(),
    special=Special(start=1),
)
WRONG = {
    "no decoder": (lambda: score(encoder(), [[1, 2]]), "scoring needs a decoder with an `lm` head"),
    "no sources": (lambda: score(build(PAIR), [[1, 2]]), "give `sources` to an encoder-decoder"),
    "sources in vain": (lambda: score(decoder(), [[1, 2]], [[1]]), "give `sources` to an encoder-decoder"),
    "too few sources": (lambda: score(build(PAIR), [[1, 2], [3]], [[1]]), "1 sources and 2 rows"),
    "an empty row": (lambda: score(decoder(), [[1], []]), "row 1 is empty"),
    "an empty source": (lambda: score(build(PAIR), [[1]], [[]]), "source 0 is empty"),
    "a stride past the window": (lambda: sliding(decoder(), [1, 2, 3], 2, 3), "stride = 3: must be from 1 to the wind"),
    "no stride": (lambda: sliding(decoder(), [1, 2, 3], 2, 0), "stride = 0: must be at least 1"),
    "windows of pairs": (lambda: sliding(build(PAIR), [1, 2, 3], 2), "only a decoder without an encoder"),
    "a window past the positions": (
        lambda: sliding(decoder(decoder=STACK.model_copy(update={"position": Learned(length=6)})), [1, 2], 7),
        "window = 7: the decoder has 6 learned positions",
    ),
    "more alternatives than tokens": (lambda: top_tokens(decoder(), [[1]], VOCAB + 1), f"k = {VOCAB + 1}: must be"),
    "masks of another head": (lambda: fill_mask(decoder(), [[1]], 1), "needs an encoder with a `masked_lm` head"),
    "no mask": (lambda: fill_mask(encoder(), [[1], [2]], 1), "row 1 has no mask"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_one_clear_line(case: str):
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)

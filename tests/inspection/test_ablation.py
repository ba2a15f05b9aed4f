"""Ablation of attention heads."""

import pytest
import torch
from hypothesis import given

from anyformer.config import LM, Attention, Block, Convolution, ModelConfig, NoFeedForward, Projected, Stack
from anyformer.nn.inspection.ablation import head_scores, log_probability, logit, loss, run_without_heads
from anyformer.nn.inspection.sublayers import attentions
from anyformer.nn.inspection.taps import run_with_taps
from tests.inspection.small_models import BLOCK, FEW_EXAMPLES, PAIR, READ, SOURCE, TARGET, decoder, read
from tests.strategies import build, close, models, seeds, tokens

# -- ablation -------------------------------------------------------------------------------------------------------


@FEW_EXAMPLES
@given(models(mixers=("attention",)), seeds)
def test_switching_heads_off_is_zeroing_columns(config: ModelConfig, seed: int):
    """Tested with the first and last head of every attention; shared layers are changed in all their applications."""
    model, args = build(config, seed), read(config)
    known = {name: a for name, a in attentions(model).items() if isinstance(a.out, torch.nn.Linear)}
    if not known:
        return
    heads = {name: sorted({0, attention.heads - 1}) for name, attention in known.items()}
    with torch.no_grad():
        out = run_without_heads(model, heads, *args)
        for attention in set(known.values()):
            width = attention.out.in_features // attention.heads
            columns = attention.out.weight.unflatten(1, (attention.heads, width))
            columns[:, [0, attention.heads - 1]] = 0.0
        close(out, model(*args))


def test_head_scores():
    """Tables by stack and sublayer hold the change of the measure without each head."""
    model, labels = build(PAIR), tokens(2, 2, 4)
    measure = log_probability(labels)
    tables = head_scores(model, measure, SOURCE, TARGET)
    assert {kind: tuple(table.shape) for kind, table in tables.items()} == {
        "encoder.mixer": (2, 2),
        "decoder.mixer": (3, 2),
        "decoder.cross": (3, 4),
    }
    with torch.no_grad():
        without = run_without_heads(model, {"decoder.1.cross": [3]}, SOURCE, TARGET)
        close(tables["decoder.cross"][1, 3], measure(without) - measure(model(SOURCE, TARGET)))
        mean = head_scores(model, loss(labels), SOURCE, TARGET)
    close(mean["decoder.mixer"], -tables["decoder.mixer"] / 8)


def test_a_head_with_zero_output_weights_has_score_zero():
    model = decoder(BLOCK)
    with torch.no_grad():
        model.decoder.blocks[1]["mixer"].inner.out.weight[:, :4] = 0.0
    table = head_scores(model, logit(3), TARGET)["decoder.mixer"]
    assert float(table[1, 0]) == 0.0
    assert table[[0, 0, 1], [0, 1, 1]].abs().min() > 1e-6


def test_tables_have_nan_where_there_is_no_head():
    blocks = BLOCK.model_copy(update={"mixer": Convolution(width=2)}), Block(mixer=Attention(heads=4))
    config = ModelConfig(width=8, target=READ, decoder=Stack(depth=2, blocks=blocks), head=LM())
    table = head_scores(build(config), logit(0), TARGET)["decoder.mixer"]
    assert table.isnan().tolist() == [[True] * 4, [False] * 4]


def test_wrong_heads():
    model = decoder(BLOCK)
    with pytest.raises(ValueError, match=r"no attention is called 'decoder\.5\.mixer'"):
        run_without_heads(model, {"decoder.5.mixer": [0]}, TARGET)
    with pytest.raises(ValueError, match=r"head 2: decoder\.0\.mixer has heads 0 to 1"):
        run_without_heads(model, {"decoder.0.mixer": [2]}, TARGET)
    with pytest.raises(ValueError, match="leave `cache` out"):
        head_scores(model, logit(0), TARGET, cache=model.new_cache(2, 8))


def test_ignored_labels_do_not_count():
    output, labels = torch.randn(2, 3, 5), torch.tensor([[1, -100, 2], [-100, -100, 4]])
    p = output.log_softmax(dim=-1)
    close(log_probability(labels)(output), p[0, 0, 1] + p[0, 2, 2] + p[1, 2, 4], 1e-6)
    close(loss(labels)(output), -(p[0, 0, 1] + p[0, 2, 2] + p[1, 2, 4]) / 3, 1e-6)


# -- biases ---------------------------------------------------------------------------------------------------------


def test_the_projection_bias_stays_when_all_heads_are_off():
    block = Block(mixer=Attention(heads=2, output=Projected(bias=True)), feedforward=NoFeedForward())
    model = decoder(block, depth=1)
    _, seen = run_with_taps(model, ["decoder.embed"], TARGET)
    bias = model.decoder.blocks[0]["mixer"].inner.out.bias
    expected = model.head(seen["decoder.embed"] + bias, None, None)
    close(run_without_heads(model, {"decoder.0.mixer": [0, 1]}, TARGET), expected)

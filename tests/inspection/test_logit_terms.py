"""Direct logit attribution: for every architecture the terms of an output add up to it, and heads to their layers."""

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from anyformer.config import ModelConfig
from anyformer.nn.inspection.ablation import run_without_heads
from anyformer.nn.inspection.logit_terms import logit_terms, split_logit, term_names
from anyformer.nn.inspection.residual_stream import layer_stream
from anyformer.nn.inspection.sublayers import attentions, stacks_of
from anyformer.nn.inspection.taps import run_with_taps
from tests.inspection.small_models import FEW_EXAMPLES, PAIR, SOURCE, TARGET, read
from tests.strategies import build, close, models, seeds


@FEW_EXAMPLES
@given(models(), seeds)
def test_terms_add_up_to_the_output(config: ModelConfig, seed: int):
    """With every norm, placement, mixer and position, tied tables, soft caps, experts and parallel blocks."""
    model = build(config, seed).eval()
    args = tuple(ids[:1] for ids in read(config))
    with torch.no_grad():
        out = model(*args)
    terms = logit_terms(model, 1, *args, at=-1)
    close(torch.tensor(terms.total, dtype=torch.float64), out[0, -1, 1])
    for name, heads in terms.heads.items():
        total = sum(heads) + terms.biases[name]
        assert total == pytest.approx(terms.terms[name], rel=1e-8, abs=1e-8)


@FEW_EXAMPLES
@given(models(), seeds)
def test_the_stream_is_the_models(config: ModelConfig, seed: int):
    """Rebuilt inside a layer, it ends where the tap after the layer says."""
    model = build(config, seed).eval()
    args = tuple(ids[:1] for ids in read(config))
    with torch.no_grad():
        _, seen = run_with_taps(model, term_names(model), *args)
    for side, (_, layout) in model.read_sides(*args).items():
        for i in range(len(stacks_of(model)[side].runs)):
            out = seen[f"{side}.{i}.out"]
            stream = layer_stream(model, side, seen, i, [0, out.shape[1] - 1], layout)
            close(stream.end, out[0, [0, -1]])


def test_a_head_that_is_off_has_no_term():
    """And the terms of a pass without it add up to the output of that pass."""
    model, off = build(PAIR).eval(), {"decoder.0.cross": [1]}
    args: tuple[Tensor, ...] = (SOURCE[:1], TARGET[:1])
    seen: dict[str, Any] = {}
    with torch.no_grad():
        out = run_without_heads(model, off, *args)
        weight = attentions(model)["decoder.0.cross"].out.weight.unflatten(
            1, (attentions(model)["decoder.0.cross"].heads, -1)
        )
        weight[:, 1] = 0
        _, seen = run_with_taps(model, term_names(model), *args)
    layout = model.read_sides(*args)["decoder"][1]
    terms = split_logit(model, seen, layout, 2, 3, off)
    assert terms.heads["decoder.0.cross"][1] == 0
    assert terms.total == pytest.approx(float(out[0, 3, 2]), abs=1e-5)

"""The state of an optimiser, counted from the config, is that of the optimiser of a built model."""

import pytest
import torch
from hypothesis import given, settings

from anyformer import presets
from anyformer.config import ConfigError, LoRA, ModelConfig, io
from anyformer.kernels.gpu_table import GPUS
from anyformer.nn.inspection.memory import hidden_matrices, trained_weights, training_memory
from anyformer.nn.model import Transformer
from anyformer.recipe import SGD, Adafactor, AdamW, Muon, Optimizer
from anyformer.recipe.ready import read_recipe
from anyformer.training.finetune import freeze
from anyformer.training.forecast.estimate import forecast
from anyformer.training.forecast.split import Split
from anyformer.training.forecast.workload import StepSizes, Workload, recipe_workload
from anyformer.training.optimizers import build_optimizer
from anyformer.training.width_transfer import hidden_matrices as built_matrices
from tests.strategies import models

OPTIMISERS: list[Optimizer] = [
    *(part(lr=1.0) for part in Optimizer.choices()),
    SGD(lr=1.0, momentum=0.0),
]
SMALL = {"depth": 2, "width": 16, "heads": 2, "vocab": 32}
MODELS: dict[str, ModelConfig] = {
    "gpt2": presets.gpt2(**SMALL),
    "vaswani": presets.vaswani(**SMALL),
    "mixtral": presets.mixtral(**SMALL),
    "deepseek": presets.deepseek(**SMALL),
    "bert": presets.bert(**SMALL),
    "shared": io.override(presets.gpt2(**SMALL), ["decoder.share=true"]),
    "adapted": presets.gpt2(**SMALL).model_copy(update={"adapter": LoRA(rank=2)}),
}


def stored(config: ModelConfig, optimizer: Optimizer) -> int:
    """Return the values of the state after a step, without the counts of steps."""
    model = Transformer(config)
    freeze(model, ())
    built = build_optimizer(optimizer, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    built.step()
    return sum(x.numel() for state in built.state.values() for name, x in state.items() if name != "step")


@pytest.mark.parametrize("optimizer", OPTIMISERS, ids=lambda one: one.kind)
@pytest.mark.parametrize("name", MODELS)
def test_the_state_is_that_of_a_built_model(name: str, optimizer: Optimizer) -> None:
    weights, real = trained_weights(MODELS[name]), stored(MODELS[name], optimizer)
    counted = optimizer.state(weights)
    if isinstance(optimizer, Adafactor):
        assert real <= counted < AdamW(lr=1.0).state(weights)
    else:
        assert counted == real


@given(models())
@settings(max_examples=30)
def test_hidden_matrices_are_counted_from_the_config(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(config)
    found = [dict(model.named_parameters())[name] for name in built_matrices(model)]
    counted = [(one.number, one.rows, one.columns) for one in hidden_matrices(config)]
    assert sorted(counted) == sorted((p[..., 0, 0].numel(), *p.shape[-2:]) for p in found)


def test_the_flops_of_muon_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = presets.gpt2(**SMALL)
    model = Transformer(config)
    optimizer = build_optimizer(Muon(lr=1.0), model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    flops = Muon(lr=1.0).update(trained_weights(config), 0, 1).flops
    assert counter.get_total_flops() == pytest.approx(flops, rel=0.15)  # projections are separate


def test_memory_follows_the_optimiser() -> None:
    config = presets.gpt2()
    peaks = [training_memory(config, 128, optimizer=one).peak for one in OPTIMISERS]
    adamw, adam, muon, adafactor, sgd, plain = peaks
    assert adamw == adam > muon > sgd > adafactor > plain


def test_a_forecast_follows_the_optimiser_of_the_recipe() -> None:
    recipe = read_recipe("shakespeare-gpu", ["train.optimizer={kind='muon', lr=1e-3}"])
    work, _ = recipe_workload(recipe, io.override(recipe.model, ["target.vocab=65"]), StepSizes(), GPUS["h100"])
    assert work.optimizer == recipe.train.optimizer


@pytest.mark.parametrize("split", [Split(rows=8), Split(4, sharded=True, rows=2), Split(tensor=2, data=2, rows=4)])
def test_muon_needs_less_memory_and_more_time(split: Split) -> None:
    config = presets.llama(depth=4, width=512, heads=8, kv_heads=4, vocab=4096)
    found = [
        forecast(Workload(config, 8, 256, optimizer=one), GPUS["h100"], split)
        for one in (AdamW(lr=1.0), Muon(lr=1.0), SGD(lr=1.0))
    ]
    adamw, muon, sgd = found
    assert sgd.memory <= muon.memory <= adamw.memory
    assert sgd.seconds < adamw.seconds < muon.seconds


def test_unknown_optimisers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer\.kind"):
        read_recipe("sort", ["train.optimizer={kind='muom', lr=1e-3}"])

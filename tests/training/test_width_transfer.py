"""Width transfer (muP): the base width is unchanged, and neither activations nor the best rate move with the width."""

from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer.config import ConfigError, io
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.recipe import Recipe
from anyformer.training.job import Job
from anyformer.training.step import TrainingStep, set_learning_rate
from tests.training.jobs import assert_equal, parameters
from tests.training.small import assert_same_run, make, run, stop_at, text

BASE = 16
INIT = "model.init={kind='normal', std=0.1}"
EXPERTS = 'model.decoder.blocks.*.feedforward={kind="experts", count=4, top_k=2, expert={kind="gated"}}'


def recipe(folder: Path, width: int, *changes: str, mup: bool = True, kind: str = "adamw", **train: Any) -> Recipe:
    scale = [f"train.scale={{kind='mup', base_width={BASE}}}"] if mup else []
    base = io.override(text(folder, dropout=0.0, **train), [f"train.optimizer={{kind='{kind}', lr=1e-2}}"])
    wide = [f"model.width={width}", "model.decoder.blocks.*.feedforward={kind='plain'}"]
    return io.override(base, [*wide, INIT, *changes, *scale])


def sizes(job: Job, steps: int, lr: float) -> dict[str, float]:
    """Return the mean size of the residual stream and of the logits after some steps on one batch."""
    take_step, (batch, _) = TrainingStep(job), job.loader.read(job.state.cursor)
    for _ in range(steps):
        set_learning_rate(job, lr)
        take_step([batch])
    with torch.no_grad():
        logits, seen = run_with_taps(job.model.eval(), ["decoder.*.out"], batch.ids)
    return {name: float(x.abs().mean()) for name, x in {**seen, "logits": logits}.items()}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("mup", [False, True])
def test_sizes_stay_flat_with_mup_and_grow_without(kind: str, mup: bool, tmp_path: Path) -> None:
    found = []
    for width in (BASE, 16 * BASE):
        job = make(recipe(tmp_path, width, "model.tie=none", mup=mup, kind=kind), tmp_path / str(width))
        found.append(sizes(job, 4, 2e-2))
    growth = [found[1][name] / x for name, x in found[0].items() if name.endswith(".1.out") or name == "logits"]
    assert (max(growth) < 1.6) if mup else (max(growth) > 3)


@pytest.mark.parametrize("init", [INIT, "model.init=xavier"])
@pytest.mark.parametrize("kind", ["adamw", "adam", "muon"])
def test_at_the_base_width_nothing_changes(kind: str, init: str, tmp_path: Path) -> None:
    found = []
    for mup in (False, True):
        job = make(recipe(tmp_path, BASE, init, EXPERTS, mup=mup, kind=kind), tmp_path / f"run {mup}")
        sizes(job, 2, 1e-2)
        found.append(parameters(job))
    assert_equal(*found)


@pytest.mark.parametrize("init", [INIT, "model.init=xavier"])
def test_weights_and_rates_by_shape(init: str, tmp_path: Path) -> None:
    """Four times the base width: the deviation of a hidden matrix is half, its rate a quarter, its decay the same."""
    input_scale = "model.target.scale=sqrt_width"
    jobs = [make(recipe(tmp_path, w, init, EXPERTS, input_scale), tmp_path / str(w)) for w in (BASE, 4 * BASE)]
    narrow, wide = (dict(job.model.requires_grad_(False).named_parameters()) for job in jobs)
    of_weight = [{p: group for group in job.optimizer.param_groups for p in group["params"]} for job in jobs]
    for name, p in wide.items():
        if p.dim() == 1:
            continue
        ratio = 1 / 4 if ".router." in name else 1 / 2 if ".blocks." in name else 1.0
        assert float(p.std()) == pytest.approx(ratio * float(narrow[name].std()), rel=0.25), name
        groups = [of_weight[i][q] for i, q in enumerate((narrow[name], p))]
        assert groups[1]["lr_scale"] == (0.25 if ".blocks." in name else 1.0), name
        decays = [group["lr_scale"] * group["weight_decay"] for group in groups]
        assert decays[0] == pytest.approx(decays[1]), name
    config = jobs[1].model.config
    assert config.head.scale.value == 0.25
    assert config.target.scale.value == BASE**0.5
    mixer = config.decoder.blocks[0].mixer
    base_key = BASE // mixer.heads
    assert mixer.scale.value == pytest.approx(base_key**-0.5 * base_key / (4 * base_key))


def test_a_run_with_mup_resumes_and_loads(tmp_path: Path) -> None:
    spec = recipe(tmp_path, 2 * BASE, save_every=3, steps=8)
    run(spec, tmp_path / "straight")
    assert stop_at(spec, tmp_path / "stopped", 5)
    finished = run(spec, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "stopped")
    assert finished.config.head.scale.value == 0.5


@pytest.mark.parametrize(
    ("change", "at"),
    [
        ("train.optimizer={kind='sgd', lr=1e-2}", "train.scale = 'mup': has no learning rates for 'sgd'"),
        ("train.init_from=runs/x", "train.scale = 'mup': scales new weights"),
        ("model.init=fan_in", "model.init = 'fan_in'"),
        ("model.decoder={depth=1, blocks={mixer='recurrent', feedforward='plain'}}", "blocks.0.mixer = 'recurrent'"),
    ],
)
def test_what_has_no_rule_is_refused_by_name(change: str, at: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        recipe(tmp_path, BASE, change)
    assert at in str(error.value)


def test_the_best_rate_of_a_narrow_model_is_that_of_a_wide_one_with_mup(tmp_path: Path) -> None:
    """At a tiny size: the loss after a few steps on one batch, by learning rate."""

    def best(width: int, mup: bool) -> int:
        losses = {}
        for power in range(-8, -1):
            job = make(recipe(tmp_path, width, mup=mup), tmp_path / f"{width} {mup} {power}")
            take_step, (batch, _) = TrainingStep(job), job.loader.read(job.state.cursor)
            for step in range(16):
                set_learning_rate(job, 2.0**power * min(1, (step + 1) / 4))
                loss = take_step([batch])[1].read()[0]
            losses[power] = loss
        return min(losses, key=lambda power: losses[power])

    narrow = best(BASE, False)
    assert abs(best(8 * BASE, True) - narrow) <= 1
    assert best(8 * BASE, False) <= narrow - 2

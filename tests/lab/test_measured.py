"""What experiments measure, where it takes a moment and is known beforehand."""

import math

import pytest
import torch

from anyformer.config import io
from anyformer.lab.experiment import find
from anyformer.lab.experiments import variants
from anyformer.lab.experiments.common import sorting
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.model import Transformer


def test_the_entropy_of_a_text() -> None:
    from anyformer.lab.experiments.bigram import entropy

    assert entropy("abab" * 10, 1) == 0
    assert entropy("aabb" * 100 + "a", 1) == pytest.approx(math.log(2))
    assert entropy("aabb" * 100 + "a", 2) == pytest.approx(0, abs=1e-9)


def test_the_loss_of_a_reader_blind_to_order() -> None:
    from anyformer.data.readers import Rows
    from anyformer.lab.experiments.positions import blind

    assert blind(Rows({"source": ["1 2 3"]}, "", [1])) == pytest.approx(math.log(6) / 4)
    assert blind(Rows({"source": ["7 7 7"]}, "", [1])) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("kind", "chain", "path"), [("attention", 4, 1), ("recurrent", 9, 9), ("convolution", 1, 4)])
def test_steps_and_paths_of_nine_tokens(kind: str, chain: int, path: int) -> None:
    found = find("layers").measure({"kind": kind, "width": 4, "length": 9, "kernel": 3, "repeats": 1, "seed": 0})
    assert (found["chain"], found["path"]) == (chain, path)


def test_recall_is_measured_for_every_mixer() -> None:
    for cell in {cell["mixer"]: cell for cell in find("recall").cells("quick")}.values():
        found = find("recall").measure({**cell, "pairs": 3, "rows": 2, "steps": 2})
        assert 0 <= found["accuracy"] <= 1
        assert found["flops"][1] >= 4 * found["flops"][0]


def test_the_time_of_a_block() -> None:
    found = find("costs").measure({"width": 16, "length": 8, "timed": True})
    assert all(found[f"{part} seconds"] > 0 for part in ("scores and values", "feed-forward"))


def test_a_convolution_knows_shifts_and_attention_without_positions_no_order() -> None:
    cells = {cell["mixer"]: cell for cell in find("little_data").cells("quick") if cell["part"] == "symmetry"}
    found = {mixer: find("little_data").measure(cell) for mixer, cell in cells.items()}
    assert found["convolution"]["shift"] < 1e-12 < 1e-3 < found["convolution"]["order"]
    assert found["attention without positions"]["order"] < 1e-12
    assert min(found["attention"].values()) > 1e-4


def test_the_first_word_is_the_same_forced_and_free() -> None:
    cell = {**find("forcing").cells("quick")[0], "width": 8, "steps": 2, "rows": 50, "length": 3}
    found = find("forcing").measure(cell)
    assert len(found["free"]) == len(found["forced"]) == 3
    assert found["free"][0] == found["forced"][0]


def test_running_statistics_change_the_loss_of_batch_norm_alone() -> None:
    cell = {**find("batchnorm").cells("quick")[0], "width": 8, "steps": 3, "tokens": 512, "text": 2000}
    gaps = {norm: find("batchnorm").measure({**cell, "norm": norm})["gap"] for norm in ("layer", "batch")}
    assert gaps["layer"] == 0 != gaps["batch"]


def test_two_heads_keep_a_table_more_than_one() -> None:
    one, two = (find("heads").measure({"width": 8, "length": 16, "heads": h, "repeats": 1}) for h in (1, 2))
    assert one["flops"] == two["flops"] == one["predicted"]
    assert two["kept_plain"] - one["kept_plain"] == 4 * 16 * 16
    assert two["kept_fused"] - one["kept_fused"] < 4 * 16 * 16


def test_heads_that_differ() -> None:
    from anyformer.lab.experiments.diversity import divergence

    here, there = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert divergence(here, here) == 0
    assert divergence(here, there) == pytest.approx(1)


def test_a_cache_of_a_few_tokens() -> None:
    found = find("cache").measure({"length": 6, "width": 16, "depth": 2, "repeats": 1})
    assert (found["q"], found["k"], found["v"]) == (0, 6, 6)
    assert found["difference"] < 1e-4
    assert found["bytes"] == found["predicted bytes"]
    assert found["flops without"] > 5 * found["flops with"]


@pytest.mark.parametrize("pattern", ["full", "bigbird"])
def test_the_blocks_of_a_pattern_are_those_that_are_counted(pattern: str) -> None:
    cell = {"pattern": pattern, "length": 4096, "timed": False, "width": 16, "heads": 1, "depth": 1, "repeats": 1}
    found = find("bigbird").measure(cell)
    assert found["pairs"] == found["predicted"]
    assert (found["pairs"] == 4096**2) == (pattern == "full")


@pytest.mark.parametrize("variant", [name for name in variants.VARIANTS if name != "no mixer"])
def test_what_a_variant_holds_has_no_gradient(variant: str) -> None:
    cell = {**find("variants").cells("quick")[0], "variant": variant}
    config = io.override(sorting(cell, variants.VARIANTS[variant]).model, ["target.vocab=16"])
    model = Transformer(config)
    variants.begin(variant)(model)
    model(torch.arange(12)[None]).square().sum().backward()
    weight = next(module for module in model.modules() if isinstance(module, MultiHeadAttention)).qkv.weight
    assert weight.grad is not None
    d, moved = config.width, weight.grad != 0
    held = {"slices": d, "random scores": 2 * d, "random fixed": 2 * d}.get(variant, 0)
    assert not moved[:held].any()
    if variant == "slices projected":
        assert moved.sum() == 3 * d * d // cell["heads"]
        assert (weight != 0).equal(moved)
    else:
        assert moved[held:].all()

"""What experiments measure, where it takes a moment and is known beforehand."""

import math
from typing import get_args

import pytest
import torch

from anyformer.config import Block, ModelConfig, NoMixer, Stack, Tokens, io
from anyformer.lab.experiment import Size, find
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.model import Transformer
from anyformer_claims import layers, variants
from anyformer_claims.common import sorting


def test_the_entropy_of_a_text() -> None:
    from anyformer_claims.bigram import entropy

    assert entropy("abab" * 10, 1) == 0
    assert entropy("aabb" * 100 + "a", 1) == pytest.approx(math.log(2))
    assert entropy("aabb" * 100 + "a", 2) == pytest.approx(0, abs=1e-9)


def test_the_loss_of_a_reader_blind_to_order() -> None:
    from anyformer.data.readers import Rows
    from anyformer_claims.positions import blind

    assert blind(Rows({"source": ["1 2 3"]}, "", [1])) == pytest.approx(math.log(6) / 4)
    assert blind(Rows({"source": ["7 7 7"]}, "", [1])) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("kind", "chain", "path"), [("attention", 4, 1), ("recurrent", 9, 9), ("convolution", 1, 4)])
def test_steps_and_paths_of_nine_tokens(kind: str, chain: int, path: int) -> None:
    found = find("layers").measure({"kind": kind, "width": 4, "length": 9, "kernel": 3, "repeats": 1, "seed": 0})
    assert (found["chain"], found["path"]) == (chain, path)


def test_a_stack_may_be_as_deep_as_the_longest_path() -> None:
    longest = max(cell["length"] for size in get_args(Size) for cell in find("layers").cells(size))
    deepest = layers.DEPTHS[-1]
    assert (
        (longest - 1) / (layers.KERNEL - 1) <= deepest == Stack(depth=deepest, blocks=(Block(mixer=NoMixer()),)).depth
    )


def test_recall_is_measured_for_every_mixer() -> None:
    for cell in {cell["mixer"]: cell for cell in find("recall").cells("quick")}.values():
        found = find("recall").measure({**cell, "pairs": 3, "rows": 2, "steps": 2})
        assert 0 <= found["accuracy"] <= 1
        assert found["flops"][1] >= 4 * found["flops"][0]


def test_active_parameters_and_information_of_experts() -> None:
    import numpy as np

    from anyformer_claims.experts import COUNT, information

    cells = {cell["model"]: {**cell, "rows": 2, "steps": 2} for cell in find("experts").cells("quick")}
    found = {model: find("experts").measure(cell) for model, cell in cells.items()}
    assert 0 <= found["dense"]["active"] - found["experts"]["active"] < COUNT * cells["dense"]["depth"]
    assert found["dense"]["parameters"] < found["dense, all"]["parameters"] < found["experts"]["parameters"]
    assert np.allclose(np.sum(found["experts"]["shares"], axis=1), 1, atol=1e-3)
    assert information(np.eye(8)) == pytest.approx(math.log(8))
    assert information(np.full((4, 8), 1 / 8)) == pytest.approx(0)


def test_sorters_have_their_positions_on_each_side() -> None:
    from anyformer_claims.sort_positions import recipe_of

    for cell in find("sort_positions").cells("quick"):
        model = recipe_of(cell).model
        assert isinstance(model, ModelConfig)
        assert {stack.position.kind for stack in model.stacks.values()} == {cell["position"]}
        assert len(model.stacks) == {"decoder": 1, "encoder-decoder": 2}[cell["shape"]]
        inputs = [x for x in (model.source, model.target) if isinstance(x, Tokens)]
        assert {x.scale.kind for x in inputs} == {cell["scale"]}


def test_a_window_is_a_fully_connected_layer_over_neighbouring_words() -> None:
    from anyformer.attention.layout import make_layout
    from anyformer.nn.context import Context
    from anyformer_claims.tagging import MIXERS

    x, layout = torch.randn(1, 9, 4), make_layout(1, 9, torch.device("cpu"))
    window = MIXERS["window"].model_copy(update={"causal": False}).build(4)
    for parameter in window.parameters():
        torch.nn.init.normal_(parameter)
    y = window(x, Context(layout, layout))
    neighbours = x.unfold(1, 5, 1).flatten(2)  # [b, t - 4, d · 5]
    dense = torch.nn.functional.linear(neighbours, window.conv.weight.flatten(1), window.conv.bias)
    torch.testing.assert_close(y[:, 2:-2], dense)


def test_tags_depend_on_the_word_before_or_on_the_marker() -> None:
    from anyformer_claims.tagging import CLASSES, WORDS, sentences

    torch.manual_seed(0)
    words, tags, distance = sentences({"length": 9}, 400)
    assert ((words >= WORDS).sum(dim=1) == 1).all()
    assert ((tags < 0) == (distance < 0)).all()
    kind, known = (words % CLASSES).tolist(), dict[tuple[int, int], int]()
    marker = words.max(dim=1).values.tolist()
    for i in range(400):
        for t in range(9):
            if distance[i, t] >= 0:
                near = kind[i][t - 1] if distance[i, t] == 0 else marker[i]
                assert known.setdefault((kind[i][t], near), int(tags[i, t])) == tags[i, t]


def test_a_translation_swaps_neighbours() -> None:
    from anyformer_claims.encoder_decoder import translation

    assert translation(torch.tensor([[0, 1, 2, 2]]), torch.tensor([5, 6, 7])).tolist() == [[6, 5, 7, 7]]
    for cell in {cell["model"]: cell for cell in find("encoder_decoder").cells("quick")}.values():
        found = find("encoder_decoder").measure({**cell, "lengths": [2, 4], "steps": 2})
        assert len(found["right"]) == 2
        assert all(0 <= whole <= right <= 1 for right, whole in zip(found["right"], found["whole"], strict=True))


def test_messages_along_edges_are_attention() -> None:
    for cell in (cell for cell in find("graph").cells("quick") if cell["part"] == "exact"):
        found = find("graph").measure(cell)
        assert max(found["outputs"], found["gradients"]) < 1e-12
    cell = find("graph").cells("quick")[-1]
    found = find("graph").measure({**cell, "examples": 4, "steps": 2})
    assert 0 <= found["accuracy"] <= 1


def test_a_random_graph_is_connected_and_goes_both_ways() -> None:
    from anyformer_claims.graph import random_graph

    for seed in range(5):
        edges, seen = {*random_graph(12, seed)}, {0}
        assert edges == {(b, a) for a, b in edges}
        for _ in range(12):
            seen |= {b for a, b in edges if a in seen}
        assert len(seen) == 12


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
    from anyformer_claims.diversity import divergence

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

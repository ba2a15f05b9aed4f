"""Laws of the forecast: one GPU is `training_memory`, parts add up to the whole, more work takes longer."""

from dataclasses import replace

import pytest
from hypothesis import given, settings as budget, strategies as st

from anyformer import presets
from anyformer.config import ConfigError, ModelConfig, io
from anyformer.kernels.gpu_table import GPUS, find_gpu
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.memory import training_memory
from anyformer.recipe.ready import read_recipe
from anyformer.recipe.recipe import context_faults, tensor_faults
from anyformer.training.forecast.estimate import Forecast, Group, NoSplit, TrainingEngine, best_split, forecast
from anyformer.training.forecast.split import Split, can_split_layers, part_weights, step_memory, tensor_part
from anyformer.training.forecast.work import MicroBatch, step_work
from anyformer.training.forecast.workload import StepSizes, Workload, model_workload, recipe_workload

H100 = GPUS["h100"]
LLAMA = presets.llama(depth=4, width=512, heads=8, kv_heads=4, ff=1024, vocab=4096)
MODELS: dict[str, ModelConfig] = {
    "llama": LLAMA,
    "gpt2": presets.gpt2(depth=3, width=256, heads=4, vocab=1024),
    "bert": presets.bert(depth=2, width=256, heads=4, vocab=1024),
    "t5": presets.t5(depth=2, width=256, heads=4, vocab=1024),
    "mixtral": presets.mixtral(depth=2, width=256, heads=4, kv_heads=4, ff=512, vocab=1024),
}


def rows_of(config: ModelConfig, batch: int, length: int, context: int = 1) -> MicroBatch:
    return MicroBatch(batch, length, length if config.shape == "encoder-decoder" else None, context)


# -- one GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", [False, True])
def test_one_gpu_needs_the_memory_of_a_training_step(name: str, recompute: bool) -> None:
    config, rows = MODELS[name], rows_of(MODELS[name], 4, 128)
    expected = training_memory(config, 128, batch=4, source_length=rows.source_length, recompute=recompute)
    assert step_memory(config, rows, Split(rows=4, recompute=recompute), "bf16", True) == expected.peak


@pytest.mark.parametrize("name", MODELS)
def test_matmuls_and_attention_are_those_of_count(name: str) -> None:
    """With full attention in place of causal, whose masked half kernels skip; a masked LM predicts some tokens only."""
    config, rows = MODELS[name], rows_of(MODELS[name], 2, 64)
    work, table = step_work(config, rows), count(config, 64, batch=2, source_length=rows.source_length)
    total = work.forward.matmul + work.forward.attention + work.forward.biased
    assert total <= table.flops
    skipped = sum(row.flops for row in table.rows if "self-attention" in row.part)
    assert total >= table.flops - skipped
    assert work.backward.matmul == pytest.approx(2 * work.forward.matmul)


# -- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_parts_along_tensor_hold_all_weights_once(name: str) -> None:
    """All but norms, routers, position tables and transforms of the head, which every part has."""
    config = MODELS[name]
    whole, halves = count(config), count(tensor_part(config, 2))
    split = {"embeddings", "self-attention", "cross-attention", "feed-forward"}
    for row, half in zip(whole.rows, halves.rows, strict=True):
        if row.part.split(" ")[-1] in split and name != "mixtral":
            assert row.parameters / 2 <= half.parameters <= row.parameters / 2 + 4 * config.width, row.part
        else:
            assert half.parameters <= row.parameters


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_parts_of_a_step_share_its_work(name: str, axis: str) -> None:
    config = MODELS[name]
    whole = step_work(config, rows_of(config, 2, 512)).forward
    if axis == "context":
        part = step_work(config, rows_of(config, 2, 512, context=2)).forward
    else:
        part = step_work(tensor_part(config, 2), rows_of(config, 2, 512)).forward
    assert part.attention == pytest.approx(whole.attention / 2)
    assert part.matmul == pytest.approx(whole.matmul / 2, rel=0.02)  # a router is on every GPU
    assert whole.moved / 2 < part.moved < whole.moved


def test_a_model_that_cannot_be_split_along_tensor() -> None:
    assert can_split_layers(LLAMA, 4)
    assert not can_split_layers(LLAMA, 8)  # it has 4 key/value heads
    assert not can_split_layers(io.override(LLAMA, ["decoder.blocks.*.mixer=none", "decoder.position=none"]), 2)
    for config in (
        presets.gpt2(),  # with a vocabulary of 50257
        presets.mixtral(depth=1, experts=3),
        io.override(LLAMA, ["decoder.blocks.*.mixer.qk_norm=rms", "decoder.blocks.*.mixer.qk_norm_over=projection"]),
        io.override(LLAMA, ["head.multi_token={tokens=1}"]),
    ):
        assert list(tensor_faults(config, 2))
        assert not can_split_layers(config, 2)


@budget(max_examples=30, deadline=None)
@given(data=st.sampled_from([2, 4, 8]), rows=st.integers(1, 8), recompute=st.booleans())
def test_shards_need_less_memory_than_copies(data: int, rows: int, recompute: bool) -> None:
    copies = Split(data, rows=rows, recompute=recompute)
    shards = replace(copies, sharded=True)
    shape = MicroBatch(rows, 256)
    less, more = (step_memory(LLAMA, shape, split, "bf16", True) for split in (shards, copies))
    assert less < more


def test_sharded_state_is_divided() -> None:
    """From 2 to 4 GPUs a quarter of weights and optimiser state is saved; all else is the same."""
    two, four = (step_memory(LLAMA, MicroBatch(1, 256), Split(n, sharded=True), "bf16", True) for n in (2, 4))
    assert two - four == pytest.approx(3 * 4 * part_weights(LLAMA, 1).total / 4)


# -- messages ---------------------------------------------------------------------------------------------------------


def test_a_group_within_a_node_is_faster() -> None:
    inside, outside = Group(H100, 8), Group(H100, 8, stride=8)
    assert (inside.nodes, outside.nodes) == (1, 8)
    assert inside.gather(1e9) < outside.gather(1e9)
    assert Group(H100, 16).bandwidth == pytest.approx(8 * outside.bandwidth)  # all eight GPUs of a node send
    assert Group(H100, 1).gather(1e9) == Group(H100, 1).all_reduce(1e9) == 0


def test_messages_that_hide_behind_computation() -> None:
    slow, fast = H100._replace(link=1e9), H100
    work, split = Workload(LLAMA, 16, 1024), Split(4, sharded=True, rows=4)
    hidden, shown = (forecast(work, gpu, split) for gpu in (fast, slow))
    assert hidden.communication < 0.2 * hidden.hidden + 1e-3
    assert shown.communication > hidden.communication
    assert shown.compute == hidden.compute
    total = (
        one.hidden + one.communication for one in (forecast(work, slow, split, TrainingEngine(gather_bytes=2)), shown)
    )
    assert next(total) < next(total)


@pytest.mark.parametrize("change", [{"tensor": 2}, {"context": 2}, {"sharded": True}, {"accumulate": 2}])
def test_every_axis_is_in_the_forecast(change: dict[str, int]) -> None:
    work = Workload(LLAMA, 8, 1024)
    plain, other = (forecast(work, H100, split) for split in (Split(2, rows=2), replace(Split(2, rows=2), **change)))
    assert other != plain
    assert other.memory != plain.memory


# -- search -----------------------------------------------------------------------------------------------------------


@budget(max_examples=15, deadline=None)
@given(gpus=st.sampled_from([1, 2, 3, 6, 8, 16, 64]), rows=st.sampled_from([6, 48, 192]))
def test_the_best_split_fits_and_uses_all_gpus(gpus: int, rows: int) -> None:
    work = Workload(LLAMA, rows, 1024)
    found = best_split(work, H100, gpus)
    if isinstance(found, NoSplit):
        assert gpus > rows
        return
    split = found.split
    assert split.gpus == gpus
    processed = split.data * split.rows * split.accumulate
    assert processed == rows or (split.accumulate == 1 and processed - rows < split.data)
    assert found.fits(H100)


def test_a_large_model_needs_several_gpus() -> None:
    work = Workload(presets.llama(), 64, 4096)
    one, eight = (best_split(work, H100, n) for n in (1, 8))
    assert isinstance(one, NoSplit)
    assert "GiB" in one.reason
    assert isinstance(eight, Forecast)
    assert eight.split.sharded


def test_every_process_builds_the_whole_model() -> None:
    """So a model whose weights exceed a GPU cannot be trained on any number of them; other engines can."""
    work = Workload(presets.llama(depth=80, width=8192, heads=64, kv_heads=8, ff=28672), 512, 4096)
    ours, other = (best_split(work, H100, 256, TrainingEngine(builds_whole=whole)) for whole in (True, False))
    assert isinstance(ours, NoSplit)
    assert isinstance(other, Forecast)


def test_more_gpus_than_rows() -> None:
    found = best_split(Workload(MODELS["bert"], 1, 128), H100, 64)
    assert isinstance(found, NoSplit)
    assert "--batch" in found.reason


def test_more_gpus_take_less_time_and_cost_more() -> None:
    work = Workload(LLAMA, 512, 1024)
    found = [one for n in (1, 8, 64) if isinstance(one := best_split(work, H100, n), Forecast)]
    days = [one.days(1e9) for one in found]
    assert days == sorted(days, reverse=True)
    assert found[0].price(1e9, 2.0) <= found[-1].price(1e9, 2.0)
    assert found[0].price(1e9, 4.0) == pytest.approx(2 * found[0].price(1e9, 2.0))


# -- workloads and the table ------------------------------------------------------------------------------------------


def test_the_step_of_a_recipe() -> None:
    recipe = read_recipe("shakespeare-gpu", ["model.target.vocab=65", "train.accumulate=3"])
    work, tokens = recipe_workload(recipe, recipe.model, StepSizes(), H100)
    assert work.rows == 3 * recipe.batches.rows  # type: ignore[union-attr]
    assert work.compiled
    assert tokens == recipe.train.steps * work.step_tokens
    again, _ = recipe_workload(recipe, recipe.model, StepSizes(rows=5, length=32), H100)
    assert (again.rows, again.length) == (5, 32)


def test_precision_by_gpu() -> None:
    recipe = read_recipe("shakespeare-gpu", ["model.target.vocab=65", "train.precision=fp8"])
    with pytest.raises(ConfigError, match="fp8"):
        recipe_workload(recipe, recipe.model, StepSizes(), H100)
    assert model_workload(LLAMA, StepSizes(), GPUS["v100"])[0].precision == "fp32"
    assert model_workload(LLAMA, StepSizes(), H100)[0].precision == "bf16"


def test_the_table_of_gpus() -> None:
    for name, gpu in GPUS.items():
        assert find_gpu(f"NVIDIA {gpu.label}") is gpu, name
        assert gpu.source.startswith("https://"), name
        assert gpu.flops["fp32"] < gpu.flops["fp16"] < 1e16
        assert gpu.network < gpu.link < gpu.bandwidth < 1e13
        assert 1e10 < gpu.memory < 1e12


def test_rows_that_cannot_be_split_along_context() -> None:
    assert not list(context_faults(LLAMA))
    for mixer in ("recurrent", "{kind='linear_attention', heads=4}"):
        assert list(context_faults(io.override(MODELS["gpt2"], [f"decoder.blocks.*.mixer={mixer}"])))
    for config in (presets.vit(depth=1), io.override(LLAMA, ["decoder.memory=8"])):
        (why,) = context_faults(config)
        assert "whole" in why

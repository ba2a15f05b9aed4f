"""Sizes beyond the machine's memory are counted in few calls, and refused with both figures before any allocation."""

import contextlib
import inspect
from pathlib import Path

import pytest

from anyformer.cli.resolve import read
from anyformer.config import (
    Attention,
    BigBird,
    Block,
    ConfigError,
    Graph,
    Learned,
    ModelConfig,
    Plain,
    Stack,
    Tokens,
    Window,
)
from anyformer.kernels.hardware import usable_memory
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.memory import ADAMW, check_model, training_memory
from anyformer.presets import PRESETS, gpt2, gpt3
from anyformer.runs.run import load
from anyformer.training.train import train
from tests.calls import CountedCalls

HUGE = 10**12


def decoder(depth: int = 1, width: int = 8, **stack: object) -> ModelConfig:
    layers = Stack(depth=depth, blocks=(Block(mixer=Attention(heads=2)), Block(mixer=Attention(heads=4))))
    return ModelConfig(width=width, target=Tokens(vocab=10), decoder=layers.model_copy(update=stack))


def test_depth_has_a_bound() -> None:
    with pytest.raises(ConfigError, match=r"^depth = 1000000: must be at most 2000$"):
        Stack(depth=10**6, blocks=(Block(mixer=Attention(heads=2)),))


@pytest.mark.parametrize("share", [False, True])
def test_the_deepest_model_is_counted_exactly(share: bool) -> None:
    """After few calls for each layer."""
    with CountedCalls() as counted:
        deep = count(decoder(2_000, share=share))
        training_memory(decoder(2_000, share=share))
    assert counted.count < 50 * 2_000
    one = count(decoder(2, share=share))
    outside = sum(row.flops for row in one.rows if "embeddings" in row.part or row.part == "head")
    assert deep.flops - outside == 1_000 * (one.flops - outside)
    layers = count(decoder(4)).parameters - count(decoder(2)).parameters
    assert deep.parameters == one.parameters + (0 if share else 999 * layers)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_any_size_are_counted_or_refused(name: str) -> None:
    """After as many calls as at their own size."""
    arguments = inspect.signature(PRESETS[name]).parameters

    def calls(*settings: str) -> int:
        with CountedCalls() as counted, contextlib.suppress(ConfigError):
            config = read(name, list(settings))
            assert isinstance(config, ModelConfig)
            count(config)
            training_memory(config)
        return counted.count

    usual = calls()
    for key in ("depth", "width", "vocab", "heads", "kv_heads", "hidden", "length", "experts"):
        if key in arguments:
            assert calls(f"{key}={HUGE}") < 1.2 * usual, key


def test_a_large_graph_without_loops_is_a_config_at_once() -> None:
    graph = Graph(nodes=65_536, edges=((0, 0), (1, 0)), loops=False)
    assert not graph.sees_self
    assert Graph(nodes=2, edges=((0, 0), (1, 1)), loops=False).sees_self
    with pytest.raises(ConfigError, match="nodes = 1000000000000: must be at most 65536"):
        Graph(nodes=HUGE, edges=(), loops=False)


@pytest.mark.parametrize(
    "config",
    [
        decoder(width=HUGE),
        decoder(blocks=(Block(mixer=Attention(heads=2), feedforward=Plain(width=HUGE)),)),
        decoder(position=Learned(length=HUGE)),
        decoder().model_copy(update={"target": Tokens(vocab=HUGE)}),
    ],
)
def test_huge_sizes_are_counted_and_refused_with_the_figure(config: ModelConfig) -> None:
    table = count(config)
    assert table.parameters > HUGE
    with pytest.raises(ConfigError) as error:
        check_model(config, "model")
    assert f"model: {table.parameters:,} parameters need at least" in str(error.value)
    assert f"there are {usable_memory() / 2**30:.1f} GiB" in str(error.value)  # type: ignore[operator]


def test_published_sizes_are_counted_whatever_the_memory() -> None:
    assert 174e9 < count(gpt3()).parameters < 176e9
    check_model(gpt3(), limit=4 * count(gpt3()).parameters)


def test_a_limit_refuses_what_exceeds_it_and_nothing_else() -> None:
    config = gpt2()
    weights = 4 * count(config).parameters
    check_model(config, limit=weights)
    check_model(config, limit=4 * weights, training=ADAMW)
    for limit, training in ((weights - 1, None), (4 * weights - 1, ADAMW)):
        with pytest.raises(ConfigError, match="124,439,808 parameters need at least"):
            check_model(config, limit=limit, training=training)


@pytest.mark.parametrize("pattern", [Window(before=4, after=0), BigBird()])
def test_sparse_patterns_are_counted_up_to_a_length(pattern: Window | BigBird) -> None:
    config = decoder(blocks=(Block(mixer=Attention(heads=2, pattern=pattern)),))
    count(config, 10_000)
    with pytest.raises(ConfigError, match=r"^length = 1,000,000,000,000: "):
        count(config, HUGE)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("model.width=1000000000000", "model: "),
        ("model.decoder.depth=1000000", "model.decoder.depth = 1000000: must be at most 2000"),
        ("data.train.count=1000000000000", "data.train.count = 1000000000000: the rows need at least"),
        ("data.train.longest=1000000000000", "data.train.longest = 1000000000000: must be at most 10000"),
        ('tokenizer={kind="bpe", size=1000000000000}', "tokenizer.size = 1000000000000: must be at most 1e+07"),
    ],
)
def test_training_refuses_huge_sizes_and_writes_nothing(change: str, fault: str, tmp_path: Path) -> None:
    few = ["data.train.count=100", "data.valid=none", "data.test=none", "train.evaluate_every=none"]
    with CountedCalls() as counted, pytest.raises(ConfigError) as error:
        train("sort", tmp_path / "run", [*few, change])
    assert str(error.value).startswith(fault)
    assert counted.count < 200_000
    assert not (tmp_path / "run").exists()


def test_a_run_is_refused_by_name_where_memory_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ["model.width=16", "data.train.count=100", "train.steps=1", "train.schedule=constant"]
    train("sort", tmp_path / "run", [*short, "data.valid=none", "data.test=none", "train.evaluate_every=none"])
    monkeypatch.setattr("anyformer.nn.inspection.memory.usable_memory", lambda: 1000)
    with pytest.raises(ConfigError, match=r"run/config\.json: [0-9,]+ parameters need at least .* there are 1000 B"):
        load(tmp_path / "run")


def test_a_batch_of_crops_beyond_memory_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 100, encoding="utf-8")
    changes = [f"data.train={{kind='text', path='{text}'}}", "data.valid=none", "data.test=none"]
    changes += ["train.evaluate_every=none", "train.patience=none", f"batches={{kind='crops', rows={HUGE}, length=8}}"]
    with pytest.raises(ConfigError, match=r"^batches\.rows = 1000000000000: 8,000,000,000,000 tokens in a batch need"):
        train("shakespeare", tmp_path / "run", changes)
    assert not (tmp_path / "run").exists()

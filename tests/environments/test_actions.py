"""Laws of trajectories, bins and the task actions: round trips, windows, and rows that cannot be read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from anyformer.config import ConfigError
from anyformer.data.readers import Rows, read
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.data.trajectories import Recording
from anyformer.kernels.conventions import IGNORE
from anyformer.recipe import Actions, Bins, Bytes, Data, Trajectories
from anyformer.tasks.actions import ActionPrediction, EncodedEpisode, window_start

NAMES = ("left", "right", "forward")


def task_of(**fields: Any) -> ActionPrediction:
    spec = Actions(**({"actions": NAMES} if "action_bins" not in fields else {}) | fields)
    tokenizer: TextTokenizer = train_tokenizer(Bytes(), [])
    return ActionPrediction(spec, tokenizer.with_special(spec.special_tokens))


def rows_of(path: Path) -> Rows:
    source = Trajectories(path=str(path))
    return read(source, Data(train=source), "train", 0)


@given(st.integers(1, 300), st.floats(-1e3, 1e3), st.floats(1e-3, 1e3), st.floats(0, 1))
def test_bins_round_trip_within_half_a_bin(count: int, low: float, width: float, share: float):
    bins = Bins(count=count, low=low, high=low + width)
    value = low + share * width
    assert abs(bins.centre(bins.index(value)) - value) <= width / count / 2 * (1 + 1e-6) + 1e-9 * abs(low)
    assert all(bins.index(bins.centre(i)) == i for i in (0, count // 2, count - 1))


def test_numbers_outside_of_bins_are_clipped():
    bins = Bins(count=4, low=0.0, high=1.0)
    assert [bins.index(x) for x in (-5.0, 0.0, 1.0, 7.0)] == [0, 0, 3, 3]
    with pytest.raises(ConfigError, match="must be below high"):
        Bins(count=4, low=1.0, high=1.0)


@given(st.integers(1, 9), st.integers(1, 40))
def test_each_action_is_learnt_once_after_half_of_the_history(history: int, steps: int):
    task = task_of(history=history)
    left = task.action_ids[0]
    episode = EncodedEpisode.of([1, 2], [[1000 + i, left] for i in range(steps)], 1)
    learnt = []
    for example in task.windows(episode):
        assert example.ids[:2].tolist() == [1, 2]
        assert len(example.ids) <= 2 + 2 * history
        for i, label in enumerate(example.labels):
            if label != IGNORE:
                step = example.ids[i] - 1000
                learnt.append(step)
                assert window_start(step, history) == example.ids[2] - 1000
                assert step - window_start(step, history) >= min(step, history // 2)
    assert learnt == list(range(steps))


def record(path: Path, observations: np.ndarray, actions: list[int]) -> None:
    recording = Recording()
    for mission in ("go", "stop there"):
        recording.add(mission, observations, np.array(actions, np.uint8), np.arange(len(actions)), 7)
    recording.save(path)


@pytest.mark.parametrize(
    ("shape", "dtype", "kind"),
    [((3, 4), np.uint8, "features"), ((3, 2), np.float32, "features"), ((3, 5, 5, 3), np.uint8, "image")],
)
def test_a_recording_is_read_as_it_was_written(tmp_path: Path, shape: tuple[int, ...], dtype: Any, kind: str):
    observations = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    record(tmp_path / "a.npz", observations, [2, 0, 1])
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["observations"][3:], observations)
        assert arrays["observations"].dtype == dtype
        assert arrays["seeds"].tolist() == [7, 7]
    rows = rows_of(tmp_path / "a.npz")
    assert rows.columns["text"] == ["go", "stop there"]
    assert rows.columns["actions"] == ["2\n0\n1"] * 2
    assert rows.columns["observations"][1].split("\n")[0] == f"<{kind}:{tmp_path}/a.npz#observations/3>"


def test_lines_of_json_are_the_same_episodes(tmp_path: Path):
    episode = {"mission": "go", "observations": [[0, 1], [1, 0]], "actions": ["right", 0], "rewards": [0, 1]}
    (tmp_path / "a.jsonl").write_text(json.dumps(episode) + '\n{"actions": [1]}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: an episode has the lists"):
        rows_of(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text(json.dumps(episode))
    task = task_of(state_bins=Bins(count=2, low=0.0, high=1.0), returns=Bins(count=2, low=0.0, high=1.0))
    (found,) = task.encode(rows_of(tmp_path / "a.jsonl"))
    assert isinstance(found, EncodedEpisode)
    assert found.bounds == [0, 4, 8]
    assert found.ids[[3, 7]].tolist() == [task.action_ids[1], task.action_ids[0]]
    assert found.ids[[0, 4]].tolist() == task.encode_return(1.0) * 2


@pytest.mark.parametrize(
    ("action", "message"),
    [("3", "the action '3' is not one of the 3 of task.actions; they are left"), ("lefd", "did you mean 'left'")],
)
def test_unknown_actions_are_named(action: str, message: str):
    with pytest.raises(ValueError, match=message):
        task_of().encode_action(action)


def test_continuous_actions_are_one_token_for_each_number():
    task = task_of(action_bins=Bins(count=10, low=-1.0, high=1.0), action_size=2)
    assert task.decode_action(task.encode_action("0.05 -0.99")) == pytest.approx([0.1, -0.9])
    with pytest.raises(ValueError, match="has 1 numbers, not 2"):
        task.encode_action("0.5")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"actions": ()}, "set the names of the actions"),
        ({"actions": ("a", "a")}, "'a' occurs twice"),
        ({"actions": ("a",), "action_size": 2}, "is for action_bins"),
    ],
)
def test_wrong_actions_of_a_task(fields: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Actions(**fields)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"actions": np.zeros(2)}, "has no array 'observations'"),
        ({name: np.ones(2) for name in ("observations", "actions", "rewards")} | {"lengths": np.array([3])}, "not 3"),
    ],
)
def test_wrong_files(tmp_path: Path, arrays: dict[str, np.ndarray], message: str):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ConfigError, match=message):
        rows_of(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:100])
    with pytest.raises(ConfigError, match="no readable array file"):
        rows_of(tmp_path / "b.npz")
    with pytest.raises(ConfigError, match=r"\.npz or \.jsonl"):
        rows_of(tmp_path / "c.txt")

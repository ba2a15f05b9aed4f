"""Recorded episodes in files: arrays in a `.npz`, or JSON lines. Imports no torch, and nothing is ever unpickled.

    observations [N, ...]   of all steps of all episodes, one after the other: uint8 images, or vectors of numbers
    actions      [N]        their numbers, or [N, size] if they are continuous
    rewards      [N]        the reward that followed each action
    lengths      [episodes] steps of each episode; their sum is N
    missions     [episodes] instructions, a Unicode array; empty texts if there are none
    seeds        [episodes] with which the environment was reset

A line of a `.jsonl` file is an episode: {"mission": "...", "observations": [[0, 1], ...], "actions": [2, ...],
"rewards": [0, ...]}. Observations may also be references such as "<image:frame.png>"; actions may be names.
"""

import json
import secrets
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.files import read_bytes, regular
from anyformer.data.media_files import BadFile, first_line, load_arrays
from anyformer.data.readers import BadRow, Rows, part_of
from anyformer.recipe import EPISODES, Root, Trajectories

ARRAYS = ("observations", "actions", "rewards", "lengths", "missions", "seeds")


class Episode(NamedTuple):
    """The steps of an episode as texts: references to observations, actions, and the rewards that followed."""

    mission: str
    observations: Sequence[str]
    actions: Sequence[str]
    rewards: Sequence[str]

    def cells(self) -> tuple[str, str, str, str]:
        """Return the cells of a row: lists are separated by line ends."""
        return self.mission, "\n".join(self.observations), "\n".join(self.actions), "\n".join(self.rewards)


Episodes = Iterable[Episode | str]
"""Episodes of a file; a text is the reason why one cannot be read."""


class Recording:
    """Episodes as arrays, in the order in which they were added."""

    def __init__(self) -> None:
        self._parts: dict[str, list[Any]] = {name: [] for name in ARRAYS}

    def __len__(self) -> int:
        return len(self._parts["lengths"])

    def add(
        self, mission: str, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray, seed: int = 0
    ) -> None:
        """Add an episode: arrays of as many steps."""
        assert len(observations) == len(actions) == len(rewards) > 0
        values = observations, actions, rewards.astype(np.float32), len(actions), mission, seed
        for name, value in zip(ARRAYS, values, strict=True):
            self._parts[name].append(value)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of a file."""
        joined = {name: np.concatenate(self._parts[name]) for name in ARRAYS[:3]}
        return joined | {name: np.array(self._parts[name]) for name in ARRAYS[3:]}

    def save(self, path: Path) -> None:
        """Write a `.npz` file, compressed by LZMA; a reader never sees half of it."""
        save_arrays(path, self.arrays())


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a `.npz` file atomically. LZMA halves recordings that deflate has compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".anyformer-{secrets.token_hex(8)}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_LZMA) as file:
            for name, array in arrays.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_episodes(name: str, data: Root) -> tuple[str, Episodes]:
    """Return the path of a file, and its episodes."""
    suffix = Path(name).suffix.lower()
    try:
        if suffix == ".npz":
            path = str(regular(name, data))
            return visible(path), list(_episodes(path))
        if suffix == ".jsonl":
            shown, raw = read_bytes(name, data)
            return shown, map(_parsed, raw.decode("utf-8", "replace").splitlines())
    except BadFile as error:
        raise ConfigError([Fault("path", str(error))]) from None
    except ConfigError as error:
        raise ConfigError(fault.under("path") for fault in error.faults) from None
    raise ConfigError([Fault("path", f"= {name!r}: trajectories are .npz or .jsonl files")])


def recorded_rows(source: Trajectories, data: Root) -> Rows:
    """Return the episodes of a file."""
    name, episodes = read_episodes(source.path, data)
    return episode_rows(name, part_of(source, enumerate(episodes, 1)))


def episode_rows(name: str, numbered: Iterable[tuple[int, Episode | str]]) -> Rows:
    """Return one row per episode."""
    columns: dict[str, list[str]] = {role: [] for role in EPISODES}
    numbers, bad = list[int](), list[BadRow]()
    for number, episode in numbered:
        if isinstance(episode, str):
            bad.append(BadRow(name, number, episode))
            continue
        numbers.append(number)
        for values, cell in zip(columns.values(), episode.cells(), strict=True):
            values.append(cell)
    return Rows(columns, name, numbers, tuple(bad))


def _episodes(path: str) -> Iterator[Episode]:
    arrays = load_arrays(path)
    if missing := [name for name in ARRAYS[:4] if name not in arrays]:
        raise BadFile(f"{visible(path)} has no array {missing[0]!r}: trajectories have {', '.join(ARRAYS)}")
    observations, actions, rewards, lengths = (arrays[name] for name in ARRAYS[:4])
    missions = arrays.get("missions", np.full(len(lengths), ""))
    total = int(lengths.sum())
    for name, n in (("observations", total), ("actions", total), ("rewards", total), ("missions", len(lengths))):
        if len(arrays.get(name, missions)) != n:
            wanted = "the sum of `lengths`" if n == total else "the number of episodes"
            raise BadFile(f"{visible(path)}: {name!r} has {len(arrays[name])} entries, not {n}, {wanted}")
    kind = "image" if observations.ndim > 2 and observations.dtype == np.uint8 else "features"
    end = 0
    for mission, length in zip(missions.tolist(), lengths.tolist(), strict=True):
        start, end = end, end + length
        yield Episode(
            str(mission),
            [f"<{kind}:{path}#observations/{i}>" for i in range(start, end)],
            [_written(action) for action in actions[start:end].tolist()],
            [f"{reward:g}" for reward in rewards[start:end].tolist()],
        )


def _parsed(line: str) -> Episode | str:
    """Return the episode of a line of JSON, or why there is none."""
    try:
        found = json.loads(line)
    except ValueError as error:
        return f"is no JSON ({first_line(error)})"
    if not isinstance(found, dict) or not all(isinstance(found.get(name), list) for name in ARRAYS[:2]):
        return "an episode has the lists `observations` and `actions`, and may have `mission` and `rewards`"
    observations, actions = found["observations"], found["actions"]
    rewards = found.get("rewards", [0] * len(actions))
    if not len(observations) == len(actions) == len(rewards) or not actions:
        counts = f"{len(observations)} observations, {len(actions)} actions and {len(rewards)} rewards"
        return f"{counts}: an episode has as many of each, and at least one"
    written = [x if isinstance(x, str) else f"<features:{_written(x)}>" for x in observations]
    return Episode(str(found.get("mission", "")), written, list(map(_written, actions)), list(map(str, rewards)))


def _written(value: Any) -> str:
    """Return an action or a vector as a text: a number, a name, or several numbers."""
    return " ".join(map(_written, value)) if isinstance(value, list) else str(value)

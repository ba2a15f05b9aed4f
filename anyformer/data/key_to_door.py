"""Key-to-door: three rooms, in which a reward at the end depends on an action at the beginning. Imports no torch.

The first room has a key, the second is empty, the third has a door. A room lasts a fixed number of steps; an episode
ends at the door, or with the time in the third room. The reward is 1 at the door with the key, and nothing in the last
two rooms shows whether it was taken: credit must be assigned across the second room (Mesnard et al. 2020; task of the
decision transformer, Chen et al. 2021).
"""

from collections.abc import Iterator

import numpy as np

from anyformer.data.trajectories import Episode
from anyformer.recipe import Split

SIDE = 4  # cells of a room's side
STEPS = (6, 4, 6)  # in each room
ACTIONS = ("up", "down", "left", "right")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
ABSENT = SIDE  # coordinates of an object that is not there
SPLIT_SEEDS = {"train": 0, "valid": 1, "test": 2}


class KeyToDoor:
    """The environment. An observation is [room, row, column, row of the object, column of the object], uint8."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int | list[int]) -> np.ndarray:
        """Begin an episode; return its first observation."""
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self.room, self.time, self.has_key = 0, 0, False
        self._enter()
        return self.observation()

    def _enter(self) -> None:
        """Place the agent and the object of a room in two different cells."""
        cells = SIDE * SIDE
        agent = int(self._rng.integers(cells))
        thing = (agent + 1 + int(self._rng.integers(cells - 1))) % cells
        self.agent = divmod(agent, SIDE)
        self.thing = (ABSENT, ABSENT) if self.room == 1 else divmod(thing, SIDE)

    def observation(self) -> np.ndarray:
        return np.array([self.room, *self.agent, *self.thing], dtype=np.uint8)

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        """Return the next observation, the reward, and whether the episode has ended."""
        row, column = (min(max(x + d, 0), SIDE - 1) for x, d in zip(self.agent, MOVES[action], strict=True))
        self.agent = row, column
        self.time += 1
        if self.agent == self.thing:
            if self.room == 2:
                return self.observation(), float(self.has_key), True
            self.has_key, self.thing = True, (ABSENT, ABSENT)
        if self.time == sum(STEPS[: self.room + 1]):
            if self.room == 2:
                return self.observation(), 0.0, True
            self.room += 1
            self._enter()
        return self.observation(), 0.0, False


def random_walks(count: int, split: Split, seed: int) -> Iterator[Episode]:
    """Yield episodes of random actions; only those of training depend on the seed."""
    environment = KeyToDoor()
    for i in range(count):
        key = [SPLIT_SEEDS[split], seed if split == "train" else 0, i]
        choices = np.random.Generator(np.random.PCG64([*key, 1])).integers(len(ACTIONS), size=sum(STEPS)).tolist()
        observation, done = environment.reset([*key, 0]), False
        observations, actions, rewards = list[str](), list[str](), list[str]()
        while not done:
            action = choices[len(actions)]
            observations.append(f"<features:{' '.join(map(str, observation.tolist()))}>")
            observation, reward, done = environment.step(action)
            actions.append(str(action))
            rewards.append(f"{reward:g}")
        yield Episode("", observations, actions, rewards)

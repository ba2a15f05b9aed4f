"""Key-to-door: three rooms, in which a reward at the end depends on actions at the beginning. Imports no torch.

The first room has a key, the second is empty, the third has a door, which opens with the key only. The reward is 1 at
the door, and nothing in the last two rooms shows whether the key was taken: credit must be assigned across the second
room. This is the credit task of the decision transformer (Chen et al. 2021, after Mesnard et al. 2020).

The rooms, the places where agent and key begin, 15 steps in the first and the last room and the view of 5 × 5 cells
around the agent are those of Hung et al. 2019, from whom the task descends; there the second room has apples and lasts
90 steps. Chen et al. publish no sizes. Of random walks in these rooms 2.9 % succeed. This module has its own choice of
three things: 3 steps in the second room, cells as integers instead of colours, and an
episode that ends at the door.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np

from anyformer.data.trajectories import Episode
from anyformer.recipe import Split

Cell = tuple[int, int]

ROOMS = (
    ("#######", "#.....#", "#.....#", "##...##", "#.....#", "#.....#", "#######"),
    ("###########", *["#.........#"] * 5, "###########"),
    ("##.##", "#...#", "#...#", "#...#", "#####"),
)
STEPS = (15, 3, 15)  # in each room
ACTIONS = ("up", "down", "left", "right")
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
REACH = 2  # cells that are visible in each direction
WALL, KEY, DOOR = 1, 2, 3  # values of cells; 0: floor
MAPS = [np.array([[cell == "#" for cell in row] for row in room], dtype=np.uint8) for room in ROOMS]
SPLIT_SEEDS = {"train": 0, "valid": 1, "test": 2}


@cache
def view(room: int, agent: Cell, thing: Cell | None) -> np.ndarray:
    """Return the cells around the agent, row by row; those outside of the room are floor."""
    cells = MAPS[room].copy()
    if thing is not None:
        cells[thing] = DOOR if room == 2 else KEY
    row, column = agent
    side = 2 * REACH + 1
    return np.pad(cells, REACH)[row : row + side, column : column + side].flatten()


@cache
def _reference(cells: bytes) -> str:
    return f"<features:{' '.join(map(str, cells))}>"


class KeyToDoor:
    """The environment. An observation is a vector of 25 cells, uint8."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int | list[int]) -> np.ndarray:
        """Begin an episode; return its first observation."""
        draw = np.random.Generator(np.random.PCG64(seed)).integers(1, (3, 6, 3, 6)).tolist()
        self.room, self.time, self.has_key = 0, 0, False
        self.agent: Cell = 3 + draw[2], draw[3]  # in the lower half of the room
        self.thing: Cell | None = (draw[0], draw[1])  # in the upper half
        return self.observation()

    def observation(self) -> np.ndarray:
        return view(self.room, self.agent, self.thing)

    def is_open(self, cell: Cell) -> bool:
        """Return whether the agent can enter a cell of its room; the door needs the key."""
        return MAPS[self.room][cell] != WALL and (self.room < 2 or cell != self.thing or self.has_key)

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        """Return the next observation, the reward, and whether the episode has ended."""
        cell = self.agent[0] + MOVES[action][0], self.agent[1] + MOVES[action][1]
        if self.is_open(cell):
            self.agent = cell
        self.time += 1
        if self.agent == self.thing:
            if self.room == 2:
                return self.observation(), 1.0, True
            self.has_key, self.thing = True, None
        if self.time == sum(STEPS[: self.room + 1]):
            if self.room == 2:
                return self.observation(), 0.0, True
            self.room += 1
            self.agent, self.thing = ((5, 5), None) if self.room == 1 else ((2, 2), (0, 2))
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
            observations.append(_reference(observation.tobytes()))
            observation, reward, done = environment.step(action)
            actions.append(str(action))
            rewards.append(f"{reward:g}")
        yield Episode("", observations, actions, rewards)

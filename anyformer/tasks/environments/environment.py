"""One interface to environments: Gymnasium's, BabyAI's with their expert, and key-to-door. Imports no torch."""

from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, NamedTuple, Protocol

import numpy as np

from anyformer.config.spec import ConfigError, Fault, did_you_mean
from anyformer.data import key_to_door

KEY_TO_DOOR = "key-to-door"
MINIGRID = ("BabyAI-", "MiniGrid-")
TILE = 24  # pixels of a cell in a picture

Act = Callable[[], Any]


class Moment(NamedTuple):
    """Result of an action in an environment."""

    observation: np.ndarray
    reward: float
    done: bool
    success: bool | None  # of an episode that is done; None: the environment does not define it


class Environment(Protocol):
    """An environment that is reset by a seed."""

    actions: tuple[str, ...]  # names; empty if actions are continuous
    action_size: int  # numbers of a continuous action, else 1

    def reset(self, seed: int) -> tuple[np.ndarray, str]:
        """Begin an episode; return the first observation and the instruction, which may be empty."""

    def step(self, action: Any) -> Moment:
        """Take an action: its number, or the numbers of a continuous one."""

    def picture(self) -> np.ndarray | None:
        """Return a picture of the environment as it is, uint8 [h, w, 3]; None if it has none."""

    def random_action(self, rng: np.random.Generator) -> Any:
        """Return a random action."""

    def expert(self) -> Act | None:
        """Return a function that gives the expert's next action in the current episode; None if there is no expert."""


def make(name: str) -> Environment:
    """Return the environment of a name: key-to-door, or one that Gymnasium knows, such as BabyAI-GoToLocal-v0."""
    if name == KEY_TO_DOOR:
        return _KeyToDoor()
    try:
        import gymnasium

        if name.startswith(MINIGRID):
            import minigrid  # noqa: F401  registers its environments
    except ImportError:
        what = f"{name} needs Gymnasium and MiniGrid: pip install 'anyformer[env]'"
        raise ConfigError([Fault("environment", what)]) from None
    try:
        inner = gymnasium.make(name)
    except gymnasium.error.Error as error:
        known = did_you_mean(name, [KEY_TO_DOOR, *gymnasium.registry])
        first = str(error).partition("\n")[0]
        raise ConfigError([Fault("environment", f"= '{name}': {first} ({known})")]) from None
    return _MiniGrid(inner) if name.startswith(MINIGRID) else _Gymnasium(inner)


class _KeyToDoor:
    """The environment of `data/key_to_door.py`."""

    actions: tuple[str, ...] = key_to_door.ACTIONS
    action_size = 1

    def __init__(self) -> None:
        self._inner = key_to_door.KeyToDoor()

    def reset(self, seed: int) -> tuple[np.ndarray, str]:
        return self._inner.reset(seed), ""

    def step(self, action: Any) -> Moment:
        observation, reward, done = self._inner.step(action)
        return Moment(observation, reward, done, reward > 0)

    def picture(self) -> None:
        return None

    def random_action(self, rng: np.random.Generator) -> int:
        return int(rng.integers(len(self.actions)))

    def expert(self) -> Act | None:
        return self._towards_object

    def _towards_object(self) -> int:
        inner = self._inner
        (row, column), (to_row, to_column) = inner.agent, inner.thing or inner.agent
        if to_row < row and not inner.is_open((row - 1, column)):  # beside the passage of the first room
            return 3 if column < 3 else 2
        return (0 if to_row < row else 1) if to_row != row else (2 if to_column < column else 3)


class _Gymnasium:
    """An environment of Gymnasium: observations of one array or one number, actions discrete or of one array."""

    def __init__(self, inner: Any):
        from gymnasium import spaces

        self._inner, space = inner, inner.action_space
        match space:
            case spaces.Discrete():
                self.actions, self.action_size = tuple(f"action {i}" for i in range(int(space.n))), 1
            case spaces.Box():
                self.actions, self.action_size = (), int(np.prod(space.shape))
            case _:
                raise ConfigError([Fault("environment", f"has actions of {type(space).__name__}, not Discrete or Box")])
        self._space = space

    def reset(self, seed: int) -> tuple[np.ndarray, str]:
        observation, _ = self._inner.reset(seed=seed)
        self._total = 0.0  # of the rewards
        return self._read(observation), ""

    def step(self, action: Any) -> Moment:
        if not self.actions:
            action = np.clip(np.reshape(action, self._space.shape), self._space.low, self._space.high)
            action = action.astype(self._space.dtype)
        observation, reward, terminated, truncated, info = self._inner.step(action)
        self._total += float(reward)
        success = info.get("is_success", self._succeeds(float(reward)))
        done = bool(terminated or truncated)
        return Moment(self._read(observation), float(reward), done, None if success is None else bool(success))

    def _succeeds(self, reward: float) -> bool | None:
        """Return whether the episode is a success if it ends with this reward; None where that is not defined."""
        threshold = self._inner.spec.reward_threshold
        return None if threshold is None else self._total >= threshold

    def _read(self, observation: Any) -> np.ndarray:
        found = np.asarray(observation)
        if found.dtype == object:
            raise ConfigError([Fault("environment", "has observations that are not one array")])
        return found.reshape(1) if found.ndim == 0 else found if found.dtype == np.uint8 else found.astype(np.float32)

    def picture(self) -> np.ndarray | None:
        return None

    def random_action(self, rng: np.random.Generator) -> Any:
        if self.actions:
            return int(rng.integers(len(self.actions)))
        return rng.uniform(self._space.low, self._space.high).ravel().tolist()

    def expert(self) -> Act | None:
        return None


class _MiniGrid(_Gymnasium):
    """MiniGrid and BabyAI: 7×7 cells in front of the agent, each its object, colour and state, and an instruction.

    BabyAI has an expert.
    """

    def __init__(self, inner: Any):
        super().__init__(inner)
        self.actions = tuple(action.name for action in inner.unwrapped.actions)
        self._last: int | None = None
        self._bot: Any = None

    def reset(self, seed: int) -> tuple[np.ndarray, str]:
        with redirect_stdout(None):  # BabyAI prints the rooms that it rejects
            observation, _ = self._inner.reset(seed=seed)
        self._last, self._bot, self._total = None, None, 0.0
        return self._read(observation), str(observation["mission"])

    def step(self, action: Any) -> Moment:
        self._last = action
        return super().step(action)

    def _succeeds(self, reward: float) -> bool:
        return reward > 0

    def _read(self, observation: Any) -> np.ndarray:
        return np.asarray(observation["image"], dtype=np.uint8).ravel()

    def picture(self) -> np.ndarray:
        return np.asarray(self._inner.unwrapped.get_frame(highlight=True, tile_size=TILE))

    def expert(self) -> Act | None:
        from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel

        return self._plan if isinstance(self._inner.unwrapped, RoomGridLevel) else None

    def _plan(self) -> int:
        if self._bot is None:
            from minigrid.utils.baby_ai_bot import BabyAIBot

            self._bot = BabyAIBot(self._inner.unwrapped)
        return int(self._bot.replan(self._last))

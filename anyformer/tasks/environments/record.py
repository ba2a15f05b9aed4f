"""Recording of demonstrations to the trajectory format, by several processes. Imports no torch."""

import multiprocessing
import os
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from typing import Literal, NamedTuple

import numpy as np

from anyformer.config.spec import ConfigError, Fault
from anyformer.data.trajectories import Recording
from anyformer.runs.processes import end_with_parent
from anyformer.tasks.environments.environment import Environment, make

CHUNK = 50  # seeds that a process plays before it returns

Policy = Literal["expert", "random"]


class Played(NamedTuple):
    """One episode."""

    seed: int
    mission: str
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    success: bool | None  # None: the environment does not define it


class Recorded(NamedTuple):
    """Episodes, and how many seeds were played for them."""

    recording: Recording
    played: int
    successes: int | None  # None: the environment does not define them


def record(
    name: str,
    episodes: int,
    seed: int = 0,
    *,
    policy: Policy = "expert",
    processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Recorded:
    """Return the episodes of consecutive seeds; those in which an expert fails are left out.

    The result does not depend on the number of processes.
    """
    if make(name).expert() is None and policy == "expert":
        raise ConfigError([Fault("policy", f"= 'expert': {name} has none; use 'random', or record it by yourself")])
    recording, played = Recording(), 0
    successes: int | None = 0
    chunks = _play_all(name, seed, policy, processes)
    try:
        for chunk in chunks:
            for one in chunk:
                played += 1
                successes = None if one.success is None or successes is None else successes + one.success
                if one.success or policy == "random":
                    recording.add(one.mission, one.observations, one.actions, one.rewards, one.seed)
                    if progress is not None:
                        progress(1)
                if len(recording) == episodes:
                    return Recorded(recording, played, successes)
            if not len(recording) and played >= 10 * CHUNK:
                raise ConfigError([Fault("environment", f"= '{name}': the expert failed in all of {played} episodes")])
    finally:
        chunks.close()
    raise AssertionError("seeds have no end")


def _play_all(name: str, seed: int, policy: Policy, processes: int) -> Generator[list[Played], None, None]:
    """Yield the episodes of all seeds from the first on, in order."""
    starts = (seed + i * CHUNK for i in count())
    if processes == 1:
        environment = make(name)
        yield from ([play(environment, start + i, policy) for i in range(CHUNK)] for start in starts)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, partial(end_with_parent, os.getpid())) as pool:
        try:
            waiting = [pool.submit(_play_chunk, name, next(starts), policy) for _ in range(2 * processes)]
            while True:
                yield waiting.pop(0).result()
                waiting.append(pool.submit(_play_chunk, name, next(starts), policy))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _play_chunk(name: str, start: int, policy: Policy) -> list[Played]:
    environment = make(name)
    return [play(environment, start + i, policy) for i in range(CHUNK)]


def play(environment: Environment, seed: int, policy: Policy) -> Played:
    """Return the episode of a seed."""
    observation, mission = environment.reset(seed)
    rng = np.random.Generator(np.random.PCG64([seed, 1]))
    expert = environment.expert()
    observations, actions, rewards = list[np.ndarray](), [], list[float]()
    success: bool | None = False
    done = False
    while not done:
        if policy == "random" or expert is None:
            action = environment.random_action(rng)
        else:
            try:
                action = expert()
            except Exception:  # BabyAI's bot asserts in some rare rooms: such an episode is a failure
                break
        observations.append(observation)
        actions.append(action)
        observation, reward, done, success = environment.step(action)
        rewards.append(reward)
    number = np.uint8 if environment.actions and len(environment.actions) <= 256 else np.float32
    return Played(seed, mission, np.array(observations), np.array(actions, number), np.array(rewards), success)

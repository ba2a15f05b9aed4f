"""Rollouts: episodes that a run plays, many environments at once, with one call of the model for all of them per step.

All episodes begin together, so that at each step they have the same window of history (`tasks/actions.py`). Within a
window the KV cache holds what was read; a new window is read again, for the episodes that have not ended. An action
depends on its own episode only: a batch of environments acts as they do one by one.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyformer.attention.cache.kv_cache import Cache
from anyformer.config.spec import ConfigError, Fault
from anyformer.data.media import MediaStore
from anyformer.data.media_files import BadFile
from anyformer.kernels.conventions import PADDING
from anyformer.nn.model import Transformer
from anyformer.runs.run import Run
from anyformer.tasks.actions import Action, ActionPrediction, window_start
from anyformer.tasks.environments.environment import Environment, make

if TYPE_CHECKING:
    from PIL.Image import Image

Z95 = 1.959964  # of the normal distribution


class FinishedEpisode(NamedTuple):
    """The result of one episode."""

    seed: int
    success: bool | None  # None: the environment does not define it
    total: float  # sum of rewards
    steps: int


class RolloutReport(NamedTuple):
    """Results of all episodes, with intervals of 95 %."""

    environment: str
    episodes: int
    success: float | None  # None: the environment does not define it
    success_interval: tuple[float, float] | None  # Wilson's
    mean_return: float
    return_interval: tuple[float, float]  # mean ± 1.96 standard errors
    mean_steps: float


class Player:
    """One episode in progress: its environment and the tokens read so far."""

    def __init__(self, environment: Environment, seed: int, to_go: float):
        self.environment, self.seed, self.to_go = environment, seed, to_go
        observation, self.mission = environment.reset(seed)
        self.rng = np.random.Generator(np.random.PCG64([seed, 2]))
        self.seen = [observation]
        self.wanted = [to_go]  # return to go at each step
        self.actions: list[list[int]] = []  # in tokens
        self.row: list[int] = []  # ids that the cache has not read yet
        self.total, self.done = 0.0, False
        self.success: bool | None = False

    def act(self, ids: list[int], action: Action) -> None:
        """Take an action, given also as its tokens."""
        observation, reward, self.done, self.success = self.environment.step(action)
        self.actions.append(ids)
        self.total += reward
        self.to_go -= reward
        self.seen.append(observation)
        self.wanted.append(self.to_go)

    def result(self) -> FinishedEpisode:
        return FinishedEpisode(self.seed, self.success, self.total, len(self.actions))


class Policy:
    """The model's actions for many episodes in lockstep."""

    def __init__(self, task: ActionPrediction, model: Transformer, temperature: float = 0.0):
        self.task, self.model, self.temperature = task, model.eval(), temperature
        self.device = next(model.parameters()).device
        self._cache: Cache | None = None
        self._players: list[Player] = []  # of the rows of the cache, also those that have ended

    @torch.no_grad()
    def act(self, players: Sequence[Player], step: int) -> None:
        """Let each player take its action of a step; none of them has ended."""
        start, store = window_start(step, self.task.spec.history), MediaStore.of(self.model.config)
        if step == 0 or start != window_start(step - 1, self.task.spec.history):
            for player in players:
                player.row = self._context(player, start, step, store)
            self._open(list(players), start, step)
        else:
            for player in players:
                player.row = [player.actions[-1][-1], *self._read(player, step, store)]
        chosen: list[list[int]] = [[] for _ in players]
        for _ in range(self.task.spec.action_size):
            logits = self._call(store)
            for player, ids in zip(players, chosen, strict=True):
                player.row = [self._pick(logits[self._players.index(player)], player)]
                ids += player.row
        for player, ids in zip(players, chosen, strict=True):
            player.act(ids, self.task.decode_action(ids))
            player.row = []

    def _context(self, player: Player, start: int, step: int, store: MediaStore | None) -> list[int]:
        """Return the ids of a window up to the observation of a step."""
        ids = self.task.encode_mission(player.mission)
        for i in range(start, step):
            ids = [*ids, *self._read(player, i, store), *player.actions[i]]
        return [*ids, *self._read(player, step, store)]

    def _read(self, player: Player, step: int, store: MediaStore | None) -> list[int]:
        return [*self.task.encode_return(player.wanted[step]), *self.task.encode_state(player.seen[step], store)]

    def _open(self, players: list[Player], start: int, step: int) -> None:
        """Make an empty cache for the players that are left."""
        per_step = len(self._read(players[0], step, MediaStore.of(self.model.config))) + self.task.spec.action_size
        slots = max(len(player.row) for player in players) + (start + self.task.spec.history - step) * per_step
        self._players, self._cache = players, self.model.new_cache(len(players), slots, kind="static")

    def _call(self, store: MediaStore | None) -> np.ndarray:
        """Return the logits of actions after the new ids of each row, [rows, actions]."""
        rows = [player.row for player in self._players]
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.device)
        sizes = torch.tensor([len(row) for row in rows], device=self.device)
        is_token = torch.arange(width, device=self.device) < sizes[:, None]
        media, marks = None, None
        if store is not None:
            ids, media, marks = store.read(ids)
        logits: Tensor = self.model(
            ids,
            segments=torch.where(is_token, 0, PADDING),
            marks=None if marks is None else marks.to(self.device),
            media=media,
            cache=self._cache,
        )
        last = logits[torch.arange(len(rows), device=self.device), (sizes - 1).clamp(min=0)]
        return last[:, self.task.action_ids].float().cpu().numpy()

    def _pick(self, logits: np.ndarray, player: Player) -> int:
        """Return an action token: the most probable one, or one drawn by the player's own random numbers."""
        if self.temperature:
            logits = logits / self.temperature + player.rng.gumbel(size=len(logits))
        return self.task.action_ids[int(logits.argmax())]


def rollout(
    run: Run,
    name: str,
    episodes: int,
    seed: int,
    *,
    parallel: int = 256,
    temperature: float = 0.0,
    target: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[FinishedEpisode]:
    """Return the results of the episodes of consecutive seeds, in the order of these.

    `target` is the return that a run with returns aims at; None: the highest of its bins.
    """
    task, target = check_run(run, name, make(name), target)
    policy, results = Policy(task, run.model, temperature), list[FinishedEpisode]()
    environments = [make(name) for _ in range(min(parallel, episodes))]
    for first in range(seed, seed + episodes, parallel):
        seeds = range(first, min(first + parallel, seed + episodes))
        all_players = [Player(one, number, target) for one, number in zip(environments, seeds, strict=False)]
        players, step = all_players, 0
        while players:
            try:
                policy.act(players, step)
            except BadFile as error:
                raise ConfigError([Fault("environment", f"= '{name}': {error}")]) from None
            ended = sum(player.done for player in players)
            players, step = [player for player in players if not player.done], step + 1
            if progress is not None and ended:
                progress(ended)
        results += [player.result() for player in all_players]
    return results


def check_run(run: Run, name: str, environment: Environment, target: float | None) -> tuple[ActionPrediction, float]:
    """Return the task of a run and the return it aims at; refuse a run that cannot act in the environment."""
    task = run.task
    if not isinstance(task, ActionPrediction):
        raise ConfigError([Fault("task.kind", f"= '{run.spec.kind}': rollouts need a run of the task actions")])
    _check_actions(task, name, environment)
    if target is None:
        return task, 0.0 if task.spec.returns is None else task.spec.returns.high
    if task.spec.returns is None:
        raise ConfigError([Fault("target", f"= {target:g}: this run has no returns: leave it out")])
    return task, target


def _check_actions(task: ActionPrediction, name: str, environment: Environment) -> None:
    """Refuse a run whose actions are not those of the environment."""
    own, its = task.spec.actions, environment.actions
    if bool(own) != bool(its):
        kinds = {True: "names of actions", False: "continuous actions"}
        what = f"has {kinds[bool(its)]}, and the run has {kinds[bool(own)]}"
    elif len(own) != len(its):
        what = f"has {len(its)} actions ({', '.join(its)}), and the run has {len(own)} ({', '.join(own)})"
    elif not own and task.spec.action_size != environment.action_size:
        what = f"has actions of {environment.action_size} numbers, and the run has {task.spec.action_size}"
    else:
        return
    raise ConfigError([Fault("environment", f"= '{name}': {what}")])


def summarise(name: str, results: Sequence[FinishedEpisode]) -> RolloutReport:
    """Return success rate, if the environment defines success, mean return and their intervals."""
    n, known = len(results), [result.success for result in results if result.success is not None]
    share = sum(known) / n if known else None
    totals = np.array([result.total for result in results])
    error = Z95 * float(totals.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    mean, steps = float(totals.mean()), sum(result.steps for result in results) / n
    interval = None if share is None else _wilson(share, n)
    return RolloutReport(name, n, share, interval, mean, (mean - error, mean + error), steps)


def _wilson(share: float, n: int) -> tuple[float, float]:
    """Return Wilson's interval of 95 % for a share of n."""
    spread = Z95**2 / n
    centre = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / n + spread / (4 * n)) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


# -- a film of one episode: a GIF of the environment, with the instruction and the actions below -----------------------


STRIP = 34  # pixels below the picture, for two lines of text
MILLISECONDS = 400  # of a frame
LAST = 1500  # milliseconds of the last frame


def film(run: Run, name: str, seed: int, out: Path, target: float | None = None) -> FinishedEpisode:
    """Play the episode of a seed and write its film; return its result."""
    environment = make(name)
    task, target = check_run(run, name, environment, target)
    player, policy, frames, step = Player(environment, seed, target), Policy(task, run.model), [], 0
    while True:
        picture = environment.picture()
        if picture is None:
            raise ConfigError([Fault("environment", f"= '{name}': has no pictures; MiniGrid and BabyAI have them")])
        done = "success" if player.success else "failure" if player.done else ""
        action = task.decode_action(player.actions[-1]) if player.actions else None
        taken = environment.actions[action] if isinstance(action, int) else ""
        frames.append(_with_text(picture, player.mission, f"{step}  {taken}  {done}"))
        if player.done:
            break
        policy.act([player], step)
        step += 1
    durations = [MILLISECONDS] * (len(frames) - 1) + [LAST]
    frames[0].save(out, save_all=True, append_images=frames[1:], duration=durations, loop=0)
    return player.result()


def _with_text(picture: np.ndarray, *lines: str) -> "Image":
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ConfigError([Fault("out", "films need Pillow: pip install 'anyformer[vision]'")]) from None
    height, width = picture.shape[:2]
    frame = Image.new("RGB", (width, height + STRIP), "white")
    frame.paste(Image.fromarray(picture), (0, 0))
    for i, line in enumerate(lines):
        ImageDraw.Draw(frame).text((4, height + 2 + 15 * i), line, fill="black", font_size=12)
    return frame.quantize(64)

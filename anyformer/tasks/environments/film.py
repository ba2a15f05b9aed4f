"""A film of one episode that a run plays: a GIF of the environment, with the instruction and the actions below."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from anyformer.config.spec import ConfigError, Fault
from anyformer.runs.run import Run
from anyformer.tasks.environments.environment import make
from anyformer.tasks.environments.rollout import FinishedEpisode, Player, Policy, check_run

if TYPE_CHECKING:
    from PIL.Image import Image

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

"""The place of each step in the schedule of a training: its number, or its share of the time that training was given.

With `train.minutes` the schedule has `steps` equal parts, and an update advances by as many of them as it takes of the
time that is left. What takes unusually long, such as compilation or an evaluation, advances nothing: the steps after it
advance faster. Places are recorded in `places.txt`, a line for each update after one with the minutes, so that steps
that are repeated after a crash have the same learning rates, and the same bits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from anyformer.recipe import Train
from anyformer.runs.atomic_folder import must_be_file, writing
from anyformer.runs.run import PLACES

TYPICAL_OF = 32  # newest steps, of whose durations the median is that of a typical step
UNTIMED = 1e-5  # share of the schedule by which a step advances before any was timed


class TimedPace:
    """Places of steps that are taken for `train.minutes`, of which those after step `start` are not saved yet."""

    def __init__(self, folder: Path, spec: Train, start: int, began: float, now: Callable[[], float] = time.monotonic):
        """`began`: when this process began to train, by the clock `now`; the start of a new run is part of its time."""
        assert spec.minutes is not None
        self.steps, self.seconds, self.now = float(spec.steps), 60 * spec.minutes, now
        self.path, self.began = folder / PLACES, began if start == 0 else None
        self.minutes, self.recorded = spec.minutes, _read(self.path, spec.minutes, start) if start else []
        if not start:
            self.path.unlink(missing_ok=True)
        self.end: float | None = None  # when training must be over; None: no step was timed yet
        self.entered: float | None = None  # when the newest step began
        self.durations = deque[float](maxlen=TYPICAL_OF)
        self.paused, self.pause = 0.0, 0.0  # since the newest step began; the longest of all, which the end has, too
        self.is_first = True  # the first step of a process compiles

    def enter(self, number: int, before: float) -> float:
        """Return the place of a step, after that of the step before it."""
        now = self.now()
        if number <= len(self.recorded):
            return self.recorded[number - 1]
        if self.end is None:
            began = now - self.seconds * before / self.steps if self.began is None else self.began
            self.end = began + self.seconds
            lost = [before] * (number - 1 - len(self.recorded))  # places that a crash of the machine took
            self._write("w", self.minutes, *self.recorded, *lost)
        elif self.entered is not None and not self.is_first:
            self.durations.append(now - self.entered - self.paused)
        self.is_first = self.entered is None
        self.entered, self.paused = now, 0.0
        place = self._next(before, self.end - self.pause - now)
        self._write("a", place)
        return place

    def _write(self, mode: str, *places: float) -> None:
        with writing(self.path), self.path.open(mode, encoding="utf-8") as file:
            file.writelines(f"{place!r}\n" for place in places)

    def _next(self, before: float, left: float) -> float:
        """Return the place after another one, given the seconds left."""
        if not self.durations:
            return self.steps if left <= 0 else before + (self.steps - before) * UNTIMED
        # the first steps of each shape are slow: until there are enough, the fastest is the typical one
        typical = median(self.durations) if len(self.durations) == TYPICAL_OF else min(self.durations)
        return self.steps if left <= typical else before + (self.steps - before) * typical / left

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Leave the time of a block, such as an evaluation, out of the durations of steps."""
        began = self.now()
        yield
        seconds = self.now() - began
        self.paused, self.pause = self.paused + seconds, max(self.pause, seconds)


def _read(path: Path, minutes: float, start: int) -> list[float]:
    """Return the recorded places, as far as they are whole; those of another number of minutes only up to `start`."""
    found = list[float]()
    lines = must_be_file(path).read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    for line in lines:
        try:
            found.append(float(line))
        except ValueError:
            break
    before, *places = found or [minutes]
    return places if before == minutes else [place * before / minutes for place in places[:start]]

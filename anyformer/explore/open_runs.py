"""The runs that are looked into: how they are opened, what is said of each, and answers to what is asked of them."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any

from anyformer.config import ConfigError, Fault, Tokens
from anyformer.config.spec import did_you_mean
from anyformer.explore import diagram, prediction as answer, views
from anyformer.explore.example_text import example
from anyformer.explore.generation_stream import write, writer_of
from anyformer.explore.live_run import by_step, newest, rows_since, step_of, training
from anyformer.explore.requests import (
    AboutKind,
    AboutLayer,
    AboutMatrix,
    AboutNext,
    AboutPair,
    AboutText,
    SinceStep,
    ToWrite,
)
from anyformer.explore.trace import Trace, attentions_of, look, says, says_tokens
from anyformer.inspection.sublayers import attentions
from anyformer.processes import is_locked
from anyformer.run import MANIFEST, Run, load
from anyformer.tasks.mixture import MixedTasks
from anyformer.tasks.sequence_level import RowTask

KEPT = 512 * 2**20  # bytes of what was seen of texts

VIEWS: dict[str, tuple[type[AboutText], Callable[[Trace, Any], dict[str, Any]]]] = {
    "read": (AboutText, answer.read),
    "heads": (AboutLayer, views.heads),
    "model": (AboutKind, views.model),
    "matrix": (AboutMatrix, views.matrix),
    "neuron": (AboutPair, views.neuron),
    "next": (AboutNext, views.next_),
    "block": (AboutText, lambda seen, _: diagram.block(seen)),
    "cache": (AboutText, lambda seen, _: diagram.cache(seen)),
}


@dataclass(frozen=True)
class Opened:
    """A run under a name, and the folder in which it is trained."""

    name: str
    run: Run
    folder: Path
    part: str | None = None  # of a mixture

    def at(self, step: int) -> Run:
        """As it was at a step of which the checkpoint is kept."""
        known = by_step(self.folder)
        if step not in known:
            there = f"there are {', '.join(map(str, known))}" if known else "none is kept"
            raise ConfigError([Fault("step", f"= {step}: there is no checkpoint of it; {there}")])
        run = load(known[step])
        return run if self.part is None else run.part(self.part)

    def newer(self) -> "Opened":
        """By what its training has written since; itself where that is nothing."""
        if self.run.folder == self.folder:  # it had ended
            return self
        now = self.folder if (self.folder / MANIFEST).exists() else newest(self.folder)
        if now is None or now == self.run.folder:
            return self
        try:
            run = load(now)
        except ConfigError:  # it was thrown away meanwhile
            return self
        return replace(self, run=run if self.part is None else run.part(self.part))

    @property
    def pair(self) -> bool:
        """Whether it reads two texts in one row."""
        return isinstance(self.run.task, RowTask) and self.run.task.pairs and not self.run.task.apart

    def about(self) -> dict[str, Any]:
        """What the page says of it."""
        config = self.run.config
        kinds = {}
        for kind, layers in attentions_of(self.run).items():
            heads = [attentions(self.run.model)[name].heads for name in layers.values()]
            kinds[kind] = {"layers": list(layers), "heads": heads}
        text, second = example(self.run, self.folder)
        return {
            "name": self.name,
            "folder": str(self.folder),
            "shape": config.shape,
            "task": self.run.spec.kind,
            "parameters": self.run.model.num_parameters(),
            "vocab": config.vocab,
            "limit": {side: stack.limit for side, stack in config.stacks.items()},
            "writes": writer_of(self.run) is not None,
            "tokens": says_tokens(self.run),
            "says": says(self.run),
            "pair": self.pair,
            "kinds": kinds,
            "example": text,
            "example_target": second,
            "live": training(self.folder),
            "step": None if self.run.folder == self.folder else step_of(self.run.folder),
        }


@dataclass
class Explored:
    """All runs, and what was seen of the texts that were asked for last. One request at a time is answered."""

    runs: dict[str, Opened]
    lock: Any = field(default_factory=RLock)
    seen: OrderedDict[AboutText, Trace] = field(default_factory=OrderedDict)
    before: dict[tuple[str, int], Run] = field(default_factory=dict)  # the run at the step that was asked for last

    def about(self) -> list[dict[str, Any]]:
        """What is said of all; a run that is being trained is looked at by its newest checkpoint from here on."""
        with self.lock:
            for name, one in self.runs.items():
                if (now := one.newer()) is not one:
                    self.runs[name] = now
                    self.seen = OrderedDict((asked, seen) for asked, seen in self.seen.items() if asked.run != name)
            return [one.about() for one in self.runs.values()]

    def answer(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Of the views that answer at once, as plain values; a `ConfigError` says what is wrong."""
        if name == "live":
            asked = SinceStep(**request)
            return rows_since(self.opened(asked.run).folder, asked.since)
        spec, view = VIEWS[name]
        about = spec(**request)
        with self.lock:
            return view(self.look(about), about)

    def write(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        asked = ToWrite(**request)
        with self.lock:
            run = self.run_of(asked)
            text = self.look(asked).reading.text if asked.text.strip() else None
            lines = write(run, asked, text)
        while True:
            with self.lock:  # between two tokens others may ask
                line = next(lines, None)
            if line is None:
                return
            yield line

    def look(self, asked: AboutText) -> Trace:
        """A text as its run reads it; the same text is not read again."""
        text, target = asked.text, asked.target or None
        if self.opened(asked.run).pair:
            if target is not None:
                text, target = f"{text}\t{target}", None
            elif text.strip() and "\t" not in text:
                raise ConfigError([Fault("target", "is blank: this run reads two texts, one beside the other")])
        off = tuple(sorted(set(asked.off)))
        about = AboutText(run=asked.run, text=text, target=target, off=off, step=asked.step)
        if about not in self.seen:
            self.seen[about] = look(self.run_of(asked), about)
        self.seen.move_to_end(about)
        while len(self.seen) > 1 and sum(seen.nbytes for seen in self.seen.values()) > KEPT:
            self.seen.popitem(last=False)
        return self.seen[about]

    def run_of(self, asked: AboutText) -> Run:
        one, key = self.opened(asked.run), (asked.run, asked.step or 0)
        if asked.step is None:
            return one.run
        if key not in self.before:
            self.before = {key: one.at(asked.step)}
        return self.before[key]

    def opened(self, name: str) -> Opened:
        if name not in self.runs:
            raise ConfigError([Fault("run", f"= '{name}': is not open; {did_you_mean(name, self.runs)}")])
        return self.runs[name]


# -- opening ----------------------------------------------------------------------------------------------------------


def open_runs(folders: Sequence[Path], wait: Callable[[Path], None] | None = None) -> Explored:
    """Open runs by the names of their folders; each task of a mixture becomes a run.

    `wait` is called with the folder of a training that has nothing to load yet, again and again until it has.
    """
    found: dict[str, Opened] = {}
    for folder in folders:
        while wait and _begins(folder):
            wait(folder)
        run = _load(folder)
        wrong = [side for side in (run.config.source, run.config.target) if side and not isinstance(side, Tokens)]
        if wrong:
            raise ConfigError([Fault(str(folder), f"its model reads {wrong[0].kind}, not texts: call it in Python")])
        parts = list(run.task.parts) if isinstance(run.task, MixedTasks) else [None]
        for part in parts:
            name = free = folder.resolve().name if part is None else f"{folder.resolve().name}:{part}"
            for n in range(2, len(folders) + 1):
                name = f"{free}-{n}" if name in found else name
            found[name] = Opened(name, run if part is None else run.part(part), folder, part)
    return Explored(found)


def _begins(folder: Path) -> bool:
    """Return whether a training runs that has nothing to load yet."""
    return is_locked(folder) and not (folder / MANIFEST).exists() and newest(folder) is None


def _load(folder: Path) -> Run:
    if not folder.is_dir():
        raise ConfigError([Fault(str(folder), "there is no such run")])
    ended, state = (folder / MANIFEST).exists(), newest(folder)
    if not ended and state is None:
        being = "is being written, and has" if training(folder) else "is not a run: it has"
        raise ConfigError([Fault(str(folder), f"{being} neither a manifest.json nor a whole checkpoint yet")])
    try:
        return load(folder if ended or state is None else state)
    except ConfigError as error:  # one line, whatever is missing
        first, *more = error.faults
        rest = f" (and {len(more)} more)" if more else ""
        raise ConfigError([Fault(first.path, first.message + rest)]) from None

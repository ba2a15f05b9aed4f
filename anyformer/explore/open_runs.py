"""Open runs, describe them, cache the traces of their texts, and answer the requests of the page."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any

import torch

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import did_you_mean
from anyformer.explore import (  # noqa: F401 - the modules of our views
    diagram,
    follow,
    head_values,
    lens,
    patch,
    path_outline,
    path_stages,
    prediction,
    rotation,
    salience,
    surprise,
    views as _,
)
from anyformer.explore.example_text import example, media_folders
from anyformer.explore.generation_stream import writer_of
from anyformer.explore.live_run import by_step, is_training, newest, result_step
from anyformer.explore.outputs import has_probabilities
from anyformer.explore.requests import TextRequest
from anyformer.explore.trace import Trace, output_kind, predicts_tokens, trace_text
from anyformer.explore.view import View
from anyformer.nn.inspection.sublayers import attentions, attentions_by_kind
from anyformer.runs.processes import is_locked
from anyformer.runs.run import MANIFEST, Run, load
from anyformer.runs.run_inspection import unreadable
from anyformer.tasks.base import media_of
from anyformer.training.checkpoint import step_of

BUNDLED = Path(__file__).parent / "bundled_runs" / "sort"  # opened if no run is given; see `make_bundled.py`
MAX_TRACES, MAX_TRACE_BYTES = 256, 512 * 2**20  # cached traces, and the bytes of all of them


MAX_STEP_BYTES = 512 * 2**20  # of the weights of all runs at steps; one is always kept
MAX_WIDENED_BYTES = 64 * 2**20  # of weights in half precision that are computed with in fp32

Key = tuple[str, int]  # name of a run, and a step


class StepRuns:
    """Cache of runs at steps, least recently used first."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Key, Run] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._runs

    def get(self, key: Key, load: Callable[[], Run]) -> Run:
        """Return a run at a step; load it, and drop others over the limit, if it is not here."""
        if key not in self._runs:
            self._runs[key] = load()
        self._runs.move_to_end(key)
        while len(self._runs) > 1 and sum(map(_weight_bytes, self._runs.values())) > MAX_STEP_BYTES:
            self._runs.popitem(last=False)
        return self._runs[key]


def widened(run: Run) -> Run:
    """Convert the weights of a small run in half precision to fp32, so that the displayed sums add up."""
    is_half = next(run.model.parameters()).dtype in (torch.float16, torch.bfloat16)
    if is_half and _weight_bytes(run) <= MAX_WIDENED_BYTES:
        run.model.float()
    return run


def _weight_bytes(run: Run) -> int:
    return sum(weight.nbytes for weight in run.model.parameters())


def views() -> dict[str, View]:
    """Return all views by kind, in the order of their tabs."""
    found = sorted((view() for view in View.choices()), key=lambda view: view.order)
    return {view.kind: view for view in found}


@dataclass(frozen=True)
class OpenRun:
    """A run with its name on the page and the folder in which it is trained."""

    name: str
    run: Run
    folder: Path
    part: str | None = None  # of a mixture
    folders: tuple[Path, ...] | None = None  # images and sounds are read from these alone; None: from anywhere

    def at(self, step: int) -> Run:
        """Return the run at a step that has a snapshot or checkpoint."""
        known = by_step(self.folder)
        if step not in known:
            available = f"there are {', '.join(map(str, known))}" if known else "there are none"
            raise ConfigError([Fault("step", f"= {step}: there is no checkpoint of it; {available}")])
        return self._load(known[step])

    def newer(self) -> "OpenRun":
        """Return the run with the newest weights its training has written, or itself if there are none."""
        if self.run.folder == self.folder:  # training had finished
            return self
        now = self.folder if (self.folder / MANIFEST).exists() else newest(self.folder)
        if now is None or now == self.run.folder:
            return self
        try:
            return replace(self, run=self._load(now))
        except ConfigError:  # deleted meanwhile
            return self

    def _load(self, folder: Path) -> Run:
        run = widened(load(folder))
        return run if self.part is None else run.part(self.part)

    @property
    def pair(self) -> bool:
        """Return whether the run reads two texts in one row."""
        return self.run.spec.joins_pairs

    def about(self) -> dict[str, Any]:
        """Return the description of the run for the page."""
        config = self.run.config
        kinds = {}
        for kind, layers in attentions_by_kind(self.run.model).items():
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
            "tokens": predicts_tokens(self.run),
            "says": output_kind(self.run),
            "probabilities": has_probabilities(self.run),
            "pair": self.pair,
            "media": media_of(self.run.task) is not None,
            "kinds": kinds,
            "example": text,
            "example_target": second,
            "live": is_training(self.folder),
            "step": None if self.run.folder == self.folder else step_of(self.run.folder),
            "steps": list(by_step(self.folder)),
            "result": result_step(self.folder),
            "views": [view.tab for view in views().values() if view.group is not None and view.fits(self.run)],
        }


@dataclass
class Workspace:
    """The open runs, and a cache of recent traces. A lock serialises requests."""

    runs: dict[str, OpenRun]
    lock: Any = field(default_factory=RLock)
    traces: OrderedDict[TextRequest, Trace] = field(default_factory=OrderedDict)
    at_step: StepRuns = field(default_factory=StepRuns)

    def about(self) -> list[dict[str, Any]]:
        """Return the descriptions of all runs; runs being trained switch to their newest checkpoint."""
        with self.lock:
            for name, one in self.runs.items():
                if (now := one.newer()) is not one:
                    self.runs[name] = now
                    self.traces = OrderedDict((key, trace) for key, trace in self.traces.items() if key.run != name)
            return [one.about() for one in self.runs.values()]

    def answer(self, name: str, fields: dict[str, Any]) -> Any:
        """Return the answer of a view as plain values, or as a stream; raise `ConfigError` for a wrong request."""
        view = views()[name]
        request = view.request(**fields)
        with self.lock:
            found = view.respond(self, request)
            self._drop_oldest()  # the view may have run the model
            return found

    def trace(self, request: TextRequest) -> Trace:
        """Return the trace of a text, from the cache if it was requested before."""
        text, target = request.text, request.target or None
        if self.opened(request.run).pair:
            if target is not None:
                text, target = f"{text}\t{target}", None
            elif text.strip() and "\t" not in text:
                raise ConfigError([Fault("target", "is blank: this run reads a pair of texts")])
        off = tuple(sorted(set(request.off)))
        key = TextRequest(run=request.run, text=text, target=target, off=off, step=request.step)
        if key not in self.traces:
            self.traces[key] = trace_text(self.run_of(request), key)
            for old in [one for one in self.traces if one.step is not None and (one.run, one.step) not in self.at_step]:
                del self.traces[old]  # it would keep its run in memory
        self.traces.move_to_end(key)
        self._drop_oldest()
        return self.traces[key]

    def _drop_oldest(self) -> None:
        """Drop the oldest traces beyond the limits of bytes and number."""
        while len(self.traces) > 1 and (
            len(self.traces) > MAX_TRACES or sum(trace.nbytes for trace in self.traces.values()) > MAX_TRACE_BYTES
        ):
            self.traces.popitem(last=False)

    def run_of(self, request: TextRequest) -> Run:
        one, step = self.opened(request.run), request.step
        run = one.run if step is None else self.at_step.get((request.run, step), lambda: one.at(step))
        if (store := media_of(run.task)) is not None:
            store.folders = one.folders
        return run

    def opened(self, name: str) -> OpenRun:
        if name not in self.runs:
            raise ConfigError([Fault("run", f"= '{name}': is not open; {did_you_mean(name, self.runs)}")])
        return self.runs[name]


# -- opening ----------------------------------------------------------------------------------------------------------


def open_runs(folders: Sequence[Path], wait: Callable[[Path], None] | None = None) -> Workspace:
    """Open runs by the names of their folders; each task of a mixture becomes a run.

    `wait` is called repeatedly with the folder of a running training until that has something to load.
    """
    opened: dict[str, OpenRun] = {}
    for folder in folders:
        while wait and _has_just_started(folder):
            wait(folder)
        run = _load(folder)
        if why := unreadable(run):
            raise ConfigError([Fault(str(folder), why)])
        parts = [part.name for part in getattr(run.spec, "parts", ())] or [None]
        for part in parts:
            name = base = folder.resolve().name if part is None else f"{folder.resolve().name}:{part}"
            for n in range(2, len(folders) + 1):
                name = f"{base}-{n}" if name in opened else name
            own = run if part is None else run.part(part)
            opened[name] = OpenRun(name, own, folder, part, media_folders(own, folder))
    return Workspace(opened)


def _has_just_started(folder: Path) -> bool:
    """Return whether a running training has nothing to load yet."""
    return is_locked(folder) and not (folder / MANIFEST).exists() and newest(folder) is None


def _load(folder: Path) -> Run:
    if not folder.is_dir():
        raise ConfigError([Fault(str(folder), "there is no such run")])
    finished, state = (folder / MANIFEST).exists(), newest(folder)
    if not finished and state is None:
        problem = "is being written, and has" if is_training(folder) else "is not a run: it has"
        raise ConfigError([Fault(str(folder), f"{problem} neither a manifest.json nor a complete checkpoint yet")])
    try:
        return widened(load(folder if finished or state is None else state))
    except ConfigError as error:  # shorten to one line
        first, *more = error.faults
        rest = f" (and {len(more)} more)" if more else ""
        raise ConfigError([Fault(first.path, first.message + rest)]) from None

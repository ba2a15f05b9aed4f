"""The objects of one training run, built and ready for the loop."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console

from anyformer.data.fingerprint import Fingerprints
from anyformer.data.loader import Loader
from anyformer.data.prefetch import PrefetchLoader, can_fork
from anyformer.data.readers import Rows
from anyformer.nn.aux_outputs import TrackedModule
from anyformer.nn.model import Transformer
from anyformer.recipe import Recipe
from anyformer.tasks.base import BuiltTask
from anyformer.training.checkpoint import START, TrainState
from anyformer.training.compile_cache import CompileCache, find_compile_cache
from anyformer.training.distillation import frozen_loss
from anyformer.training.machine import choose_threads, flops_per_token, may_choose_threads
from anyformer.training.objective import Objective
from anyformer.training.parallel import SINGLE, Ranks
from anyformer.training.ranks.context import ContextGroup
from anyformer.training.signals import Watchdog

MAX_STEPS_IN_FLIGHT = 4  # on a GPU: hides occasional CPU work, such as writing a line of metrics


# -- writing in the background ----------------------------------------------------------------------------------------


class BackgroundWriter:
    """Context in which a thread runs one piece of work at a time. Its errors are raised by `check` and `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def failed(self) -> bool:
        """True after work that ended with an error, until the error is raised."""
        return self._error is not None

    def start(self, work: Callable[[], None]) -> None:
        """Run a function in the thread, after the previous one has ended."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the last work, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until the work has ended, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # raised by the training thread
            self._error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None:  # another error is being raised: only complete the checkpoint
            self._thread.join()


# -- the job -----------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """All objects of one training run."""

    recipe: Recipe
    out: Path
    device: torch.device
    precision: str  # fp32, bf16, fp16, fp8
    compiled: bool  # whether steps are compiled
    task: BuiltTask
    model: Transformer
    optimizer: torch.optim.Optimizer
    loader: Loader
    valid: Rows | None
    state: TrainState
    scaler: torch.amp.GradScaler
    console: Console
    ranks: Ranks = SINGLE
    frozen: Transformer | None = None  # a teacher, or the start of the model; its logits are part of the loss
    data: Fingerprints = field(default_factory=dict)
    writer: BackgroundWriter = field(default_factory=BackgroundWriter)  # of checkpoints
    watchdog: Watchdog = field(default_factory=Watchdog)

    @cached_property
    def objective(self) -> Objective:
        """The training loss, before compilation."""
        train = self.recipe.train
        context = None if self.ranks.context.size == 1 else ContextGroup(*self.ranks.context)
        recompute, smoothing = train.checkpoint_activations, train.label_smoothing
        with_frozen = frozen_loss(self.recipe, self.task)
        return Objective(self.model, self.task, smoothing, recompute, self.ranks.reduce, context, with_frozen)

    @cached_property
    def reader(self) -> Loader:
        """The loader, with prefetching where a GPU would wait for it."""
        return PrefetchLoader(self.loader) if self.device.type == "cuda" and can_fork() else self.loader

    @cached_property
    def threads(self) -> int:
        """CPU threads of a step, by the FLOPs of the first batch in the model and the frozen one."""
        if self.device.type != "cpu" or not may_choose_threads():
            return torch.get_num_threads()
        batch, _ = self.loader.read(START)
        models = [self.model] if self.frozen is None else [self.model, self.frozen]
        return choose_threads(batch.slots * sum(flops_per_token(model.config, batch) for model in models))

    @cached_property
    def steps_in_flight(self) -> int:
        """How many steps may be started before the loss of the first is read.

        It is 0 where the next step depends on that loss: running statistics, segment memory, fp16's loss scale,
        several processes, and an optimiser whose kernel cannot skip a step (`adafactor`).
        """
        tracked = any(isinstance(module, TrackedModule) for module in self.model.modules())
        memory = self.model.decoder is not None and self.model.decoder.segment_memory
        can_skip = bool(self.optimizer.defaults.get("fused"))
        independent = self.ranks.size == 1 and not self.scaler.is_enabled() and not tracked and not memory and can_skip
        return MAX_STEPS_IN_FLIGHT if self.device.type == "cuda" and independent else 0

    @cached_property
    def compile_cache(self) -> CompileCache | None:
        """The folder of compiled code: of compiled steps, unless the user has set one."""
        return find_compile_cache(self.model.config, self.device) if self.compiled else None

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass runs."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.float16 if self.precision == "fp16" else torch.bfloat16)

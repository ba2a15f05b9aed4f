"""`Predictor`: predictions of a run as a picklable function of batches. Importing it imports no torch."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anyformer import __version__
from anyformer.config.spec import ConfigError, Fault

if TYPE_CHECKING:
    from anyformer.generation.engine.offline import OfflineEngine
    from anyformer.runs.run import Run
    from anyformer.tasks.base import Progress

WINDOW = 1024  # texts that are answered together
ENCODER_WINDOW = 4096  # texts that are read together by models that do not write: more of them have similar lengths
MEDIA_WINDOW = 64  # the same for texts that name pictures and sounds, which are in memory meanwhile


class Predicted(NamedTuple):
    """Predictions of a window of texts."""

    answers: list[str]
    failed: list[int]  # numbers of texts, from 1, whose logits were not finite: their answers are empty
    unknown: list[int]  # numbers of texts with tokens that are not in the vocabulary


class Predictor:
    """Predictions of a run, for `map_batches` of Ray Data, `datasets.map(batched=True)` and Spark's pandas UDFs.

        rows.map(Predictor("runs/reviews"), batched=True)              # adds the column "prediction"
        rows.map_batches(Predictor, fn_constructor_args=["runs/reviews"], concurrency=2)

    `options` are those of `run.predict`, and `bits`, `task` and `draft` (a folder) as for `anyformer predict`. The run
    is loaded with the first batch, so that a pickled predictor holds only the name of its folder and its options.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        column: str = "text",
        output: str = "prediction",
        device: str | None = None,
        **options: Any,
    ):
        self.folder, self.column, self.output, self.device, self.options = Path(run), column, output, device, options

    def __getstate__(self) -> dict[str, Any]:
        names = ("folder", "column", "output", "device", "options")
        return {name: self.__dict__[name] for name in names}

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch, and the predictions of one of them as another."""
        if self.column not in batch:
            known = ", ".join(map(str, batch))
            raise ConfigError([Fault("column", f"= '{self.column}': is not in the batch, which has {known}")])
        return {**batch, self.output: self.predict(batch[self.column])}

    def predict(self, texts: Iterable[str]) -> list[str]:
        """Return a prediction for each text. Raise `FloatingPointError` where logits are not finite."""
        from anyformer.tasks.generation import NotFinite

        texts, answers, failed = list(map(str, texts)), list[str](), list[int]()
        for at in range(0, len(texts), self.window):
            found = self.predict_window(texts[at : at + self.window], at)
            answers += found.answers
            failed += found.failed
        if failed:
            raise NotFinite(failed, answers)
        return answers

    @cached_property
    def run(self) -> "Run":
        """The run, with the weights and the task that the options select; loaded when first used."""
        return self._loaded[0]

    @cached_property
    def _loaded(self) -> "tuple[Run, dict[str, Any]]":
        return open_run(self.folder, self.options, self.device)

    @cached_property
    def window(self) -> int:
        """How many texts are predicted together."""
        from anyformer.config import IdInput
        from anyformer.tasks.base import media_of

        reads_ids = all(isinstance(read, IdInput) for read in self.run.config.inputs.values())
        media = media_of(self.run.task) is not None or not reads_ids
        return MEDIA_WINDOW if media else ENCODER_WINDOW if self._engine is None else WINDOW

    @cached_property
    def _engine(self) -> "OfflineEngine | None":
        """Continuous batching, for tasks that write."""
        from anyformer.generation.engine.offline import OfflineEngine

        try:
            self.run.writer()
        except ConfigError:
            return None
        return OfflineEngine(self.run.model)

    def predict_window(self, texts: Sequence[str], first: int = 0, progress: "Progress | None" = None) -> Predicted:
        """Return the predictions of at most `window` texts; `first` texts came before these in the same input."""
        from anyformer.tasks.generation import NotFinite

        run, options = self._loaded
        options = {**options, **({} if self._engine is None else {"backend": self._engine})}
        if first and isinstance(options.get("seed"), int):
            from anyformer.generation.sampling import row_seeds

            options["seed"] = row_seeds(options["seed"], len(texts), first=first)
        unknown = [first + i for i in texts_with_unknown(run, texts)]
        failed: list[int] = []
        try:
            answers: list[str] = run.predict(texts, progress=progress, **options)
        except NotFinite as error:
            answers = [answer or "" for answer in error.answers]
            failed = [first + i for i in error.texts]
        except ConfigError as error:
            raise ConfigError(_renumbered(fault, first) for fault in error.faults) from None
        return Predicted(answers, failed, unknown)

    def identity(self) -> dict[str, Any]:
        """Return what the predictions depend on besides the texts, as JSON; a part that differs has a name."""
        given = {name: value for name, value in self.options.items() if value is not None}
        if "draft" in given:
            given["draft"] = _digest(Path(given["draft"]))
        run = {"run": _digest(self.run.folder), "device": str(next(self.run.model.parameters()).device.type)}
        return {**run, "version": __version__, **dict(sorted(given.items()))}


def open_run(folder: Path, options: Mapping[str, Any], device: str | None = None) -> "tuple[Run, dict[str, Any]]":
    """Load a run as `bits` and `task` say; return it with the other options, `draft` loaded."""
    from anyformer.runs.run import load

    rest = {name: value for name, value in options.items() if value is not None}
    bits, task = rest.pop("bits", None), rest.pop("task", None)
    if bits not in (None, 8, 4):
        raise ConfigError([Fault("bits", f"= {bits}: must be 8 or 4")])
    run = load(folder, device)
    run = run if task is None else run.part(task)
    if "draft" in rest:
        rest["draft"] = load(rest["draft"], device)
    return run if bits is None else run.quantise(bits), rest


def texts_with_unknown(run: "Run", texts: Sequence[str]) -> list[int]:
    """Return the numbers, from 1, of the texts that hold unknown tokens."""
    tokenizer = run.task.source_tokenizer or run.task.tokenizer
    if tokenizer.unk is None:
        return []
    from anyformer.tasks.sequence_level import split_at

    special = [i for i in (tokenizer.mask, *tokenizer.sentinels) if i is not None]  # known by their names
    if special:
        texts = ["".join(split_at(tokenizer, text, special)[::2]) for text in texts]
    return [i for i, ids in enumerate(tokenizer.encode_batch(texts), 1) if tokenizer.unk in ids]


def _renumbered(fault: Fault, first: int) -> Fault:
    name, _, number = fault.path.partition(" ")
    return Fault(f"text {first + int(number)}", fault.message) if name == "text" and number.isdecimal() else fault


def _digest(folder: Path) -> str:
    """Return the hash of a run's manifest, which has the hash of each of its files."""
    from anyformer.runs.run import MANIFEST

    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()

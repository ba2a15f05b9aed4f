"""The run folder: what training leaves and everything else reads.

    config.json              the model
    task.json                the task
    tokenizer.json           (and source_tokenizer.json where the source has its own)
    model.safetensors        the weights
    manifest.json            SHA-256 of each of these, written last

A folder is written under another name, synced and renamed, so that a reader sees all of it or nothing. A file that is
missing, changed or cut short is refused by name. No pickle is read.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from anyformer.config import ConfigError, Fault, MaskedLM, ModelConfig, io
from anyformer.config.spec import visible
from anyformer.data.tokenizer import TextTokenizer
from anyformer.inspection.capacity import check_model
from anyformer.nn.merge import merge
from anyformer.nn.model import Transformer
from anyformer.nn.quantise import Bits, quantise
from anyformer.processes import LOCK, workspace
from anyformer.recipe import (
    AnyTask as TaskSpec,
    Classify,
    Embed,
    Encoder,
    LanguageModel,
    MaskedLanguageModel,
    Mixture,
    PrefixLM,
    Regress,
    Seq2Seq,
    SpanCorruption,
    Tag,
    TaskFile,
)
from anyformer.tasks import generation, scoring
from anyformer.tasks.base import Task
from anyformer.tasks.classify import Classifying
from anyformer.tasks.embed import Embedding
from anyformer.tasks.encoder import Encoding
from anyformer.tasks.lm import LanguageModelling
from anyformer.tasks.mixture import MixedTasks
from anyformer.tasks.mlm import MaskedLanguageModelling
from anyformer.tasks.prefix import PrefixModelling
from anyformer.tasks.regress import Regressing
from anyformer.tasks.seq2seq import SequenceToSequence
from anyformer.tasks.spans import SpanCorrupting
from anyformer.tasks.tag import Tagging

MANIFEST = "manifest.json"
STATE = "state.safetensors"  # beside the weights of a checkpoint
SNAPSHOTS = "snapshots"  # weights at some steps of a training, see `training/snapshots.py`
REQUIRED = frozenset({"config.json", "task.json", "tokenizer.json", "model.safetensors"})


def build_task(spec: TaskSpec, tokenizer: TextTokenizer, source_tokenizer: TextTokenizer | None) -> Task:
    match spec:
        case Seq2Seq():
            return SequenceToSequence(spec, tokenizer, source_tokenizer)
        case Mixture():
            return MixedTasks(spec, tokenizer, source_tokenizer)
        case LanguageModel():
            return LanguageModelling(spec, tokenizer)
        case MaskedLanguageModel():
            return MaskedLanguageModelling(spec, tokenizer)
        case SpanCorruption():
            return SpanCorrupting(spec, tokenizer)
        case PrefixLM():
            return PrefixModelling(spec, tokenizer)
        case Classify():
            return Classifying(spec, tokenizer)
        case Regress():
            return Regressing(spec, tokenizer)
        case Embed():
            return Embedding(spec, tokenizer)
        case Tag():
            return Tagging(spec, tokenizer)
        case Encoder():
            return Encoding(spec, tokenizer)


@dataclass(frozen=True)
class Run:
    """A trained model with what is needed to use it."""

    model: Transformer
    task: Task
    spec: TaskSpec
    folder: Path

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.task.tokenizer

    def predict(self, texts: Sequence[str], **options: Any) -> list[str]:
        """The task's answers: labels, numbers; translations, or texts that go on, with the options of `generate`."""
        return self.task.predict(self.model.eval(), texts, **options)

    def generate(self, texts: Sequence[str], **options: Any) -> list[str]:
        """How texts go on, or their answers, with all the options of decoding: see `tasks/generation.py`."""
        return generation.generate(self._writer(), self.model, texts, **options)

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """The same for one text, in pieces as they come; together they are what `generate` gives."""
        return generation.stream(self._writer(), self.model, text, **options)

    def hypotheses(self, texts: Sequence[str], **options: Any) -> list[list[generation.Hypothesis]]:
        """The `n_best` answers to each text that a search with so many `beams` finds, with their scores."""
        return generation.hypotheses(self._writer(), self.model, texts, **options)

    def score(
        self,
        texts: Sequence[str],
        answers: Sequence[str] | None = None,
        *,
        window: int | None = None,
        stride: int | None = None,
    ) -> list[scoring.Score]:
        """How likely each text is, or an answer to each; long ones by a window: see `tasks/scoring.py`."""
        return scoring.score(self._writer(), self.model, texts, answers, window=window, stride=stride)

    def alternatives(
        self, text: str, k: int = 10, *, answer: str = "", at: int | None = None
    ) -> list[scoring.Alternative]:
        """The k tokens that are likeliest to come next, or `at` an earlier place; of a masked language model, to stand
        in the place of a mask: see `tasks/scoring.py`."""
        if isinstance(self.task, MaskedLanguageModelling | Encoding) and isinstance(self.config.head, MaskedLM):
            if answer:
                raise ConfigError([Fault("answer", "is for models that write: this one fills masks")])
            return scoring.fillings(self.task, self.model, text, k, at=at)
        return scoring.alternatives(self._writer(), self.model, text, k, answer=answer, at=at)

    def part(self, name: str) -> "Run":
        """One task of a mixture, as a run of that task alone, by the same model."""
        if not isinstance(self.task, MixedTasks):
            raise ConfigError([Fault("task", f"= '{name}': the run is of one task, {self.spec.kind}")])
        task = self.task.part(name)
        return replace(self, task=task, spec=task.spec)

    def quantise(self, bits: Bits = 8) -> "Run":
        """The same with weights of 8 or 4 bits, for decoding: see `nn/quantise.py`."""
        return replace(self, model=quantise(self.model, bits))

    def merge(self) -> "Run":
        """The same with its adapter in the weights beside which it stands: see `nn/merge.py`."""
        return replace(self, model=merge(self.model))

    def _writer(self) -> generation.Writer:
        match self.task:
            case LanguageModelling() | SequenceToSequence() | SpanCorrupting():
                return self.task
            case MixedTasks():
                return self.task.part(None)
            case _:
                raise ConfigError([Fault("task.kind", f"= '{self.spec.kind}': its model does not write")])


def load(folder: str | Path, device: str | torch.device | None = None) -> Run:
    """A run from its folder, or from its newest checkpoint while it has not finished, with the weights that are
    evaluated; on a device, or else on a GPU where there is one."""
    folder = Path(folder)
    if not (folder / MANIFEST).exists() and (state := newest(folder)) is not None:
        folder = state
    listed = verify(folder)
    if missing := REQUIRED - listed:  # what no digest vouches for is not read
        raise ConfigError([Fault(str(folder / name), "is not in manifest.json") for name in sorted(missing)])
    config = io.load(ModelConfig, folder / "config.json")
    check_model(config, str(folder / "config.json"), bytes_per_value=1)  # whatever the precision of the weights
    spec, task = _read_task(folder, listed)
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights_at(folder, listed), assign=True)
    model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Run(model.eval(), task, spec, folder)


def weights_at(folder: Path, listed: Iterable[str]) -> dict[str, Tensor]:
    """What is evaluated of a run or checkpoint: the moving average where a checkpoint has one, else the weights."""
    found = read_tensors(folder / "model.safetensors")
    return found | read_tensors(folder / STATE, "ema.") if STATE in listed else found


def load_task(folder: Path) -> Task:
    """The task of a run or checkpoint with its tokenizers, without the model."""
    return _read_task(folder, verify(folder))[1]


def _read_task(folder: Path, listed: Iterable[str]) -> tuple[TaskSpec, Task]:
    spec = io.load(TaskFile, folder / "task.json").task
    other = "source_tokenizer.json"
    source_tokenizer = TextTokenizer.load(folder / other) if other in listed else None
    return spec, build_task(spec, TextTokenizer.load(folder / "tokenizer.json"), source_tokenizer)


def checkpoints(folder: Path) -> list[Path]:
    """Of a run, oldest first."""
    return sorted((folder / "state").glob("step-*"))


def snapshots(folder: Path) -> list[Path]:
    """Return the snapshots of a run, oldest first."""
    return sorted((folder / SNAPSHOTS).glob("step-*"))


def newest(folder: Path) -> Path | None:
    """The newest checkpoint of an unfinished run that is whole."""
    for state in reversed(checkpoints(folder)):
        try:
            verify(state)
        except ConfigError:
            continue
        return state
    return None


def write_model(folder: Path, weights: dict[str, Tensor], config: ModelConfig, spec: TaskSpec, task: Task) -> None:
    """The files that make a folder loadable."""
    io.save(config, folder / "config.json")
    io.save(TaskFile(task=spec), folder / "task.json")
    task.tokenizer.save(folder / "tokenizer.json")
    if task.source_tokenizer is not None:
        task.source_tokenizer.save(folder / "source_tokenizer.json")
    write_tensors(folder / "model.safetensors", weights)


# -- whole or not at all ----------------------------------------------------------------------------------------------


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a new folder with what `fill` writes into it and a manifest: all of it is there, or nothing."""
    with new_folder(folder) as temporary, writing(folder):
        fill(temporary)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. At the end it gets a manifest and is renamed to `folder`, which must be new."""
    with workspace(folder) as temporary:
        if os.path.lexists(folder):
            raise ConfigError([Fault(visible(str(folder)), "is there already; choose another --out")])
        yield temporary
        with writing(folder):
            seal(temporary, (path.name for path in temporary.iterdir() if path.is_file() and path.name != LOCK))
            temporary.rename(folder)
            (folder / LOCK).unlink()
            _sync(folder.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk, and whatever else stops a write, as one `ConfigError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([Fault(str(path), f"cannot be written: {reason}")]) from None


def remove(folder: Path) -> None:
    """Takes a folder away as a whole: what an interrupted removal leaves is swept later."""
    gone = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def seal(folder: Path, names: Iterable[str]) -> None:
    """Sync some files of a folder to disk, then write their manifest."""
    files = sorted(names)
    for name in files:
        _sync(folder / name)
    text = json.dumps({"files": {name: _digest(folder / name) for name in files}}, indent=2)
    temporary = folder / f".{MANIFEST}.tmp"
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(folder / MANIFEST)
    _sync(folder)


def verify(folder: Path) -> frozenset[str]:
    """The files that the manifest vouches for, or a `ConfigError` that names each one that is not what it was."""
    manifest = folder / MANIFEST
    try:
        listed: dict[str, str] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        items = list(listed.items())
    except FileNotFoundError:
        what = "is not a finished run: it has no manifest.json" if folder.is_dir() else "there is no such folder"
        raise ConfigError([Fault(str(folder), what)]) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError([Fault(str(manifest), "cannot be read: it is damaged")]) from None
    found = []
    for name, digest in items:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            found.append(Fault(str(path), "is missing"))
        elif _digest(path) != digest:
            found.append(Fault(str(path), "is not the file that was written: it was changed, swapped or cut short"))
    if found:
        raise ConfigError(found)
    return frozenset(listed)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Into a folder that has its config.json."""
    save_file({name: x.detach().contiguous().cpu() for name, x in tensors.items()}, path)
    shutil.copymode(path.with_name("config.json"), path)  # safetensors lets only the owner read


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Those of a file whose names begin so, by what follows."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  it is no dict
            return {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ConfigError([Fault(str(path), f"cannot be read: {error}")]) from None


def leftovers(folder: Path) -> list[Path]:
    """What a write that was killed left there: a folder or a file under its passing name."""
    return [*folder.glob(".tmp-*"), *folder.glob(".anyformer-*.tmp")]


def sweep(folder: Path) -> None:
    """Removes what an interrupted write left behind."""
    for stale in leftovers(folder):
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

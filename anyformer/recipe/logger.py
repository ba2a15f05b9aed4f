"""Loggers: where training writes its metrics beside metrics.jsonl. Imports no torch."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal

from anyformer.config import Part


class Logger(Part):
    """A reader of the metrics of a training. One that raises an error gets no further lines, and training continues."""

    @abstractmethod
    def open(self, path: Path, step: int) -> Any:
        """Return what `write` writes to; None: nothing is written.

        It is called before the first line after `step`; a run that is resumed repeats the lines after it. What is
        written to the folder of the run has the name of `path`, with or without a suffix.
        """

    @abstractmethod
    def write(self, to: Any, step: int, values: dict[str, Any]) -> None:
        """Write a line: numbers, texts and truth values by their names."""

    def close(self, to: Any) -> None:
        """End the log of a training that is finished or interrupted."""
        to.close()


class TensorBoard(Logger):
    """Numbers for TensorBoard in the folder `tensorboard`, where the package of this name is installed."""

    kind: Literal["tensorboard"] = "tensorboard"

    def open(self, path: Path, step: int) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return None
        return SummaryWriter(str(path), purge_step=step + 1)  # hides what an earlier training wrote of later steps

    def write(self, to: Any, step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, float | int):
                to.add_scalar(name, value, step)

"""Base of tasks of imported models that only predict: they have no data to be trained or measured on."""

from torch import Tensor

from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.loader import Loader
from anyformer.data.readers import Rows
from anyformer.nn.model import Transformer
from anyformer.recipe import Batches
from anyformer.tasks.base import Metrics, Task


class PredictOnly(Task):
    """A task without training; messages call its model "an imported" and the name in `imported`."""

    imported: str

    def filter_rows(self, rows: Rows, config: ModelConfig, batches: Batches | None = None) -> Rows:
        raise self._untrained()

    def loader(self, rows: Rows, batches: Batches, seed: int, model: Transformer) -> Loader:
        raise self._untrained()

    def evaluate(self, model: Transformer, rows: Rows, batches: Batches) -> Metrics:
        raise self._untrained()

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        raise self._untrained()

    def _untrained(self) -> ConfigError:
        what = f"an imported {self.imported} only predicts; choose a task with data"
        return ConfigError([Fault("task.kind", f"= '{self.spec.kind}': {what}")])

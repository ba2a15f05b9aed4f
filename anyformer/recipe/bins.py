"""Numbers as tokens: equal bins between two bounds. Imports no torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from anyformer.config import ConfigError, Fault, Spec
from anyformer.config.spec import Number


class Bins(Spec):
    """`count` equal bins from `low` to `high`, each of them a token (RT-1, Brohan et al. 2022).

    A number becomes the bin that it lies in, and a bin becomes its centre: inside the bounds, the error is at most half
    a bin. Numbers outside of them are clipped to the first or the last bin.
    """

    count: Annotated[int, Field(strict=True, ge=1, le=65_536)]  # number of bins
    low: Number  # lower bound of the first bin
    high: Number  # upper bound of the last bin

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.low >= self.high:
            raise ConfigError([Fault("low", f"= {self.low}: must be below high = {self.high}")])
        return self

    def index(self, value: float) -> int:
        """Return the bin of a number."""
        share = (value - self.low) / (self.high - self.low)
        return min(max(int(min(max(share, 0.0), 1.0) * self.count), 0), self.count - 1)

    def centre(self, index: int) -> float:
        """Return the number at the centre of a bin."""
        return self.low + (index + 0.5) * (self.high - self.low) / self.count

    def tokens(self, name: str) -> list[str]:
        """Return the special tokens of the bins."""
        return [f"<{name}-{i}>" for i in range(self.count)]

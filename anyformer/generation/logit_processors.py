"""Logit processors: pure functions (history, logits [b, v]) -> logits [b, v], applied before a token is chosen.

None changes its inputs, reads a tensor on the host or branches on one: a decode step with them compiles to one graph.
They do what the processors of the same purpose in `transformers` do, with five differences:

- padding is not history: a row is treated as if it were alone and unpadded;
- ties are kept: a token as likely as the last one kept is kept (there, also by top-k and typical, not by top-p);
- a row is never emptied: a ban that would leave it no token does not apply to it. `Allowed` and `Prefix` are forced
  and override earlier bans (as there); only a mask that allows nothing at all is ignored;
- a banned word may be a single `stop` id (there it is ignored);
- NaN stays NaN whatever is banned, so that `sampling.py` can detect it.

The history is prompt and answer for the repetition penalty, n-grams and banned words, as in `transformers`. It is the
answer alone for presence and frequency penalties, as OpenAI defines them ("how often that token was sampled"), and for
the prefix and the minimum length. A decoder's start id belongs to the prompt.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anyformer.config.spec import ConfigError, Fault
from anyformer.generation.filters import Place, ban
from anyformer.generation.strategy import Sampling, Strategy
from anyformer.kernels.runtime import at_least_fp32


class History(NamedTuple):
    """The tokens of each row so far, in order; with gaps at padding, at slots not yet filled and after a row's end."""

    ids: Tensor  # int [b, n], arbitrary at gaps
    present: Tensor  # bool [b, n]: False at gaps
    new: Tensor  # bool [b, n]: True in the slots of the answer

    def answered(self) -> Tensor:
        """Return the number of tokens of each answer, [b]."""
        return (self.present & self.new).sum(dim=1)

    def right_aligned(self) -> tuple[Tensor, Tensor]:
        """Return the ids and `present` with all gaps moved to the left."""
        order = self.present.byte().argsort(dim=1, stable=True)
        return self.ids.gather(1, order), self.present.gather(1, order)


Processor = Callable[[History, Tensor], Tensor]
Mask = Callable[[History], Tensor]
"""The ids that may follow, bool [b, v]; `constraints/rollback.py` makes one from a constraint."""


def process(processors: Iterable[Processor], history: History, logits: Tensor) -> Tensor:
    """Apply processors in order, in at least fp32."""
    logits = at_least_fp32(logits)
    for processor in processors:
        logits = processor(history, logits)
    return logits


@dataclass(frozen=True)
class Allowed:
    """Ban what a mask does not allow; a row in which it allows nothing is not changed.

    Where earlier bans exclude everything it allows, the mask wins, and all it allows is equally likely.
    """

    mask: Mask

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        allowed = self.mask(history)
        overruled = (logits.isneginf() | ~allowed).all(dim=-1, keepdim=True) & allowed
        return ban(torch.where(overruled, 0.0, logits), ~allowed)


@dataclass(frozen=True)
class Temperature:
    """Divide logits by the temperature. Near 0 the maximum is subtracted first, so that no quotient overflows."""

    value: float

    def __call__(self, history: History, logits: Tensor) -> Tensor:
        if self.value > 1e-3:
            return logits / self.value
        return (logits - logits.amax(dim=-1, keepdim=True)) / max(self.value, 1e-30)  # fp32 underflows below


def build(
    spec: Strategy,
    *,
    vocab: int,
    stop: Iterable[int] = (),
    allowed: Mask | None = None,
    device: torch.device | str = "cpu",
) -> tuple[Processor, ...]:
    """Return the processors of a strategy, in the order of `transformers`: penalties and bans, the mask, the prefix,
    the temperature, and the filters of sampling."""
    place = Place(vocab, tuple(stop), device)
    named = [pair for one in spec.filters for pair in one.ids()] + [("stop", id) for id in place.stop]
    wrong = [(path, id) for path, id in named if not 0 <= id < vocab]
    if wrong:
        raise ConfigError(Fault(path, f"= {id}: no such id; the vocabulary has {vocab}") for path, id in wrong)
    made: dict[str, list[Processor]] = {"change": [], "mask": [], "force": [], "temperature": [], "sample": []}
    for one in spec.filters:
        if (processor := one.processor(place)) is not None:
            made[one.stage].append(processor)
    if allowed is not None:
        made["mask"].append(Allowed(allowed))
    if isinstance(spec, Sampling) and spec.temperature not in (0, 1):
        made["temperature"].append(Temperature(spec.temperature))
    return tuple(processor for stage in made.values() for processor in stage)

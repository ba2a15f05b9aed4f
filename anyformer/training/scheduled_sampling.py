"""What a decoder reads while it learns: the target itself (teacher forcing), or in places what the model says there.

Scheduled sampling (Bengio et al. 2015) for all places at once (Mihaylova & Martins 2019; Duckworth et al. 2019): a pass
without gradients says a token at each place, a random share of the targets gives way to these, and the loss is that of
the target after them. After n passes with a share of 1 the first n tokens are what greedy decoding says.
"""

from typing import Any

import torch
from torch import Tensor

from anyformer.conventions import IGNORE
from anyformer.data.batch import Batch
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.recipe import OwnTokens
from anyformer.tasks.base import inputs_of
from anyformer.training.parallel import sum_over_processes


def share_at(spec: OwnTokens, step: int) -> float:
    """The share of targets that give way: it rises in a straight line over the first steps."""
    return spec.share * min(1.0, step / spec.rise) if spec.rise else spec.share


def forced(model: Any, batch: Batch, packed: bool, spec: OwnTokens, step: int) -> Batch:
    """The batch as the decoder reads it at a step. Draws come from torch's generator, as those of dropout do."""
    gives_way = _targets(batch) & (torch.rand(batch.ids.shape, device=batch.ids.device) < share_at(spec, step))
    read = batch
    with torch.no_grad():
        for _ in range(spec.passes):
            said = model(*inputs_of(read, packed), aux=AuxOutputs(sum_over_processes)).argmax(-1)
            own = torch.where(gives_way[:, 1:], said[:, :-1], batch.ids[:, 1:])
            read = read._replace(ids=torch.cat([batch.ids[:, :1], own], dim=1))
    return read


def _targets(batch: Batch) -> Tensor:
    """[b, t]: where a token stands that was asked at the place before it, in the same row of the same document."""
    asked = batch.labels != IGNORE
    follows = (
        asked[:, :-1] if batch.segments is None else asked[:, :-1] & (batch.segments[:, 1:] == batch.segments[:, :-1])
    )
    return torch.nn.functional.pad(follows, (1, 0))

"""Scheduled sampling: the decoder reads some of the model's own tokens in training instead of the targets.

Scheduled sampling (Bengio et al. 2015) for all positions at once (Mihaylova & Martins 2019; Duckworth et al. 2019): a
pass without gradients predicts a token at each position, which replaces a random share of the targets. The labels stay
the targets. After n passes with a share of 1, the first n tokens are those of greedy decoding.
"""

from typing import Any

import torch
from torch import Tensor

from anyformer.data.batch import Batch
from anyformer.kernels.conventions import IGNORE
from anyformer.nn.aux_outputs import AuxOutputs, Reduce, identity
from anyformer.recipe import OwnTokens
from anyformer.tasks.base import inputs_of


def own_token_share(spec: OwnTokens, step: int) -> float:
    """Return the share of targets that are replaced; it rises linearly over the first steps."""
    return spec.share * min(1.0, step / spec.rise) if spec.rise else spec.share


def mix_own_tokens(
    model: Any, batch: Batch, packed: bool, spec: OwnTokens, step: int, reduce: Reduce = identity
) -> Batch:
    """Return the batch as the decoder reads it at a step. Draws come from torch's generator, as those of dropout."""
    share = own_token_share(spec, step)
    replaced = _targets(batch) & (torch.rand(batch.ids.shape, device=batch.ids.device) < share)
    mixed = batch
    with torch.no_grad():
        for _ in range(spec.passes):
            aux = AuxOutputs(reduce)
            predicted = model(*inputs_of(mixed, packed), aux=aux).argmax(-1)
            ids = torch.where(replaced[:, 1:], predicted[:, :-1], batch.ids[:, 1:])
            mixed = mixed._replace(ids=torch.cat([batch.ids[:, :1], ids], dim=1))
    return mixed


def _targets(batch: Batch) -> Tensor:
    """Return where the decoder reads a target, [b, t]: the token before it, of the same document, has it as label."""
    labelled = batch.labels[:, :-1] != IGNORE
    if batch.segments is not None:
        labelled = labelled & (batch.segments[:, 1:] == batch.segments[:, :-1])
    return torch.nn.functional.pad(labelled, (1, 0))

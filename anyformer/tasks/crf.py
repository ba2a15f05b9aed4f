"""Linear-chain conditional random fields (Lafferty et al. 2001): what a row of labels loses, and the best row.

Potentials [b, t, labels + 1, labels] say how well a label fits a token behind each label before it; their last row is
for the first word of a row. Tokens that are no words, by a bool [b, t], are passed over.
"""

import torch
from torch import Tensor


def loss(potentials: Tensor, labels: Tensor, words: Tensor) -> Tensor:
    """-log p of the labels [b, t] of words, summed over rows, in fp32 at least."""
    potentials, labels, there = _together(potentials, labels, words)
    each = log_partition(potentials, there) - score(potentials, labels, there)
    return torch.where(there[:, 0], each, 0).sum()


def best(potentials: Tensor, words: Tensor) -> list[list[int]]:
    """The likeliest labels of the words of each row (Viterbi 1967)."""
    potentials, _, there = _together(potentials, words, words)
    most, before = potentials[:, 0, -1], list[Tensor]()
    for i in range(1, potentials.shape[1]):
        found, at = (most[:, :, None] + potentials[:, i, :-1]).max(dim=1)
        most = torch.where(there[:, i, None], found, most)
        before.append(at)
    last, steps = most.argmax(dim=1).tolist(), [at.tolist() for at in before]
    rows = []
    for row, length in enumerate(there.sum(dim=1).tolist()):
        path = [last[row]] if length else []
        for at in reversed(steps[: max(0, length - 1)]):
            path.append(at[row][path[-1]])
        rows.append(path[::-1])
    return rows


def log_partition(potentials: Tensor, there: Tensor) -> Tensor:
    """log Σ exp(score) over all rows of labels, [b], of words that stand together."""
    total = potentials[:, 0, -1]
    for i in range(1, potentials.shape[1]):
        found = (total[:, :, None] + potentials[:, i, :-1]).logsumexp(dim=1)
        total = torch.where(there[:, i, None], found, total)
    return total.logsumexp(dim=1)


def score(potentials: Tensor, labels: Tensor, there: Tensor) -> Tensor:
    """Of one row of labels, [b]."""
    first = torch.full_like(labels[:, :1], potentials.shape[-1])
    before = torch.cat((first, labels[:, :-1]), dim=1)
    row, place = torch.arange(labels.shape[0], device=labels.device)[:, None], torch.arange(labels.shape[1])
    return torch.where(there, potentials[row, place.to(labels.device), before, labels], 0).sum(dim=1)


def _together(potentials: Tensor, labels: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The words of each row moved to its beginning, their labels, and which places hold one: [b, n]."""
    longest = max(1, int(words.sum(dim=1).max()))
    order = words.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
    there, labels = words.gather(1, order), labels.gather(1, order)
    row = torch.arange(len(words), device=words.device)[:, None]
    moved = potentials[row, order]
    return moved if moved.dtype == torch.float64 else moved.float(), torch.where(there, labels, 0), there

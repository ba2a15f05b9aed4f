"""Linear-chain conditional random fields (Lafferty et al. 2001): loss and decoding.

potentials [b, t, labels + 1, labels] score a label of a token after each previous label; the last row is for the first
word. Tokens that are not words, by a bool mask [b, t], are skipped.
"""

import torch
from torch import Tensor


def loss(potentials: Tensor, labels: Tensor, words: Tensor) -> Tensor:
    """Return -log p of the labels [b, t] of words, summed over rows, in at least fp32."""
    potentials, labels, is_word = _compact(potentials, labels, words)
    each = log_partition(potentials, is_word) - score(potentials, labels, is_word)
    return torch.where(is_word[:, 0], each, 0).sum()


def best(potentials: Tensor, words: Tensor) -> list[list[int]]:
    """Return the most probable labels of the words of each row (Viterbi 1967)."""
    potentials, _, is_word = _compact(potentials, words, words)
    most, before = potentials[:, 0, -1], list[Tensor]()
    for i in range(1, potentials.shape[1]):
        found, at = (most[:, :, None] + potentials[:, i, :-1]).max(dim=1)
        most = torch.where(is_word[:, i, None], found, most)
        before.append(at)
    last, steps = most.argmax(dim=1).tolist(), [at.tolist() for at in before]
    rows = []
    for row, length in enumerate(is_word.sum(dim=1).tolist()):
        path = [last[row]] if length else []
        for at in reversed(steps[: max(0, length - 1)]):
            path.append(at[row][path[-1]])
        rows.append(path[::-1])
    return rows


def log_partition(potentials: Tensor, is_word: Tensor) -> Tensor:
    """Return log Σ exp(score) over all label sequences, [b]; the words are at the beginning of each row."""
    total = potentials[:, 0, -1]
    for i in range(1, potentials.shape[1]):
        found = (total[:, :, None] + potentials[:, i, :-1]).logsumexp(dim=1)
        total = torch.where(is_word[:, i, None], found, total)
    return total.logsumexp(dim=1)


def score(potentials: Tensor, labels: Tensor, is_word: Tensor) -> Tensor:
    """Return the score of the label sequences, [b]."""
    first = torch.full_like(labels[:, :1], potentials.shape[-1])
    before = torch.cat((first, labels[:, :-1]), dim=1)
    row, place = torch.arange(labels.shape[0], device=labels.device)[:, None], torch.arange(labels.shape[1])
    return torch.where(is_word, potentials[row, place.to(labels.device), before, labels], 0).sum(dim=1)


def _compact(potentials: Tensor, labels: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the words of each row to its beginning; return potentials, labels and the mask of words, [b, n]."""
    longest = max(1, int(words.sum(dim=1).max()))
    order = words.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
    is_word, labels = words.gather(1, order), labels.gather(1, order)
    row = torch.arange(len(words), device=words.device)[:, None]
    moved = potentials[row, order]
    return moved if moved.dtype == torch.float64 else moved.float(), torch.where(is_word, labels, 0), is_word

"""Choice of the next tokens of many requests: those with equal options are processed together."""

from collections import defaultdict
from collections.abc import Sequence as List
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from anyformer.generation.engine.interface import Token
from anyformer.generation.engine.sequence import Options, Sequence, on_device
from anyformer.generation.logit_processors import History, Processor, build, process
from anyformer.generation.sampling import TokenChoice, greedy, sample
from anyformer.generation.strategy import Sampling
from anyformer.kernels.runtime import at_least_fp32


@lru_cache(maxsize=256)
def _processors(options: Options, vocab: int, device: torch.device) -> tuple[Processor, ...]:
    return build(options.sampling, vocab=vocab, stop=options.stop, device=device)


def is_greedy(sequences: List[Sequence]) -> bool:
    """Return whether the next token of each request is the most probable one, without any processing."""
    options = _shared_options(sequences)
    return options is not None and options.sampling == Sampling() and not options.constrained


def _shared_options(sequences: List[Sequence]) -> Options | None:
    """Return the options of all requests; None if they differ."""
    first = sequences[0].options
    return first if all(sequence.options is first for sequence in sequences) else None


def choose(sequences: List[Sequence], logits: Tensor, steps: np.ndarray | None = None) -> TokenChoice:
    """Return the next token of each request from logits [n, v].

    `steps`: how many tokens of each answer are chosen, int [n]; None: as many as are known.
    """
    if steps is None:
        steps = np.fromiter((len(sequence.answer) for sequence in sequences), np.int64, len(sequences))
    if (shared := _shared_options(sequences)) is not None:
        return _choose(shared, sequences, logits, steps)
    groups: defaultdict[Options, list[int]] = defaultdict(list)
    for i, sequence in enumerate(sequences):
        assert sequence.options is not None
        groups[sequence.options].append(i)
    ids = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    ok = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for options, rows in groups.items():
        index = on_device(rows, logits.device)
        chosen = _choose(options, [sequences[i] for i in rows], logits[index], steps[rows])
        ids[index], ok[index] = chosen.ids, chosen.ok
    return TokenChoice(ids, ok)


def _choose(options: Options, sequences: List[Sequence], logits: Tensor, steps: np.ndarray) -> TokenChoice:
    vocab, device = logits.shape[-1], logits.device
    logits = at_least_fp32(logits)
    processors = _processors(options, vocab, device)
    if options.constrained:  # the mask has its place between the others
        allowed = torch.cat([_allowed(sequence) for sequence in sequences])
        processors = build(options.sampling, vocab=vocab, stop=options.stop, allowed=lambda _: allowed, device=device)
    if processors:
        logits = process(processors, history(sequences if options.sampling.reads_tokens else (), device), logits)
    if options.sampling.temperature == 0:
        return greedy(logits)
    seeds = np.fromiter((sequence.seed for sequence in sequences), np.int64, len(sequences))
    return sample(logits, *on_device(np.stack((seeds, steps)), device))


def _allowed(sequence: Sequence) -> Tensor:
    constraint, state = sequence.request.constraint, sequence.state
    assert constraint is not None
    assert state is not None
    return constraint.allowed_within(state, torch.full_like(state, sequence.left))


def history(sequences: List[Sequence], device: torch.device) -> History:
    """Return prompts and answers, padded on the right."""
    longest = max((sequence.length for sequence in sequences), default=0)
    rows = [sequence.ids + [0] * (longest - sequence.length) for sequence in sequences]
    lengths = torch.tensor([[sequence.length, len(sequence.prompt)] for sequence in sequences], device=device)
    index = torch.arange(longest, device=device)
    lengths = lengths.view(-1, 2)
    ids = torch.tensor(rows, dtype=torch.long, device=device).view(len(rows), longest)
    return History(ids, index < lengths[:, :1], (index >= lengths[:, 1:]).expand(len(rows), -1))


def score(logits: Tensor, ids: List[int], top: int) -> list[Token]:
    """Return the log-probability of one token per row of [n, v], and of the `top` most probable ones."""
    log_p = at_least_fp32(logits).log_softmax(dim=-1)
    own = log_p.gather(1, torch.tensor(ids, device=logits.device)[:, None])[:, 0].tolist()
    best = log_p.topk(top)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [Token(id, value, tuple(zip(*row, strict=True))) for id, value, row in zip(ids, own, pairs, strict=True)]

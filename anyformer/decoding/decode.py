"""Autoregressive decoding with a cache, token by token, for decoder-only and encoder–decoder models alike."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.decoding.constrain import Constraint, check_fit
from anyformer.decoding.process import Processor, Sampling, build, process
from anyformer.decoding.retrace import Retracing
from anyformer.decoding.reuse import Reuse
from anyformer.decoding.sample import greedy, row_seeds, sample
from anyformer.decoding.session import Session, evaluating
from anyformer.nn.cache import CacheKind
from anyformer.nn.model import Transformer

Said = tuple[Tensor, Tensor]
"""The next token of each row [b], and whether its logits were a distribution, bool [b]."""

PATIENCE = 16  # steps on a device between two looks at whether all rows have ended: each look waits for it


class Spoilt(ValueError):
    """Some rows had logits that are no distribution, such as NaN. They end there; `ids` has what all rows came to."""

    def __init__(self, rows: list[int], ids: Tensor):
        where = f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows))}"
        super().__init__(f"{where}: the model's logits are not finite; the other rows are in the error's `ids`")
        self.rows, self.ids = rows, ids


def generate(
    model: Transformer,
    ids: Tensor,
    *,
    max_new_tokens: int | Sequence[int] = 20,
    stop: Sequence[int] = (),
    segments: Tensor | None = None,
    marks: Tensor | None = None,
    seed: int | Tensor | None = None,
    constraint: Constraint | None = None,
    cache: CacheKind = "auto",
    chunk: int | None = None,
    compile: bool = False,
    reuse: Reuse | None = None,
    **how: Any,
) -> Tensor:
    """Continues prompts [b, t] to [b, t + new], or answers sources [b, s] with [b, 1 + new], the start id first.

    A source may also be images or features, where the encoder reads those. Prompts of unequal length are padded on
    either side, with `segments` -1 there; tokens with `marks` of 1 are seen by their whole prompt. `how` tokens are
    chosen is said by the fields of `Sampling` (`process.py`): temperature, top_k, top_p, ...; without any, the
    likeliest is. Rows draw by seeds of their own: `seed` is one for each [b], or one that they are made from. A row
    ends at its first `stop` id and is padded from there; decoding ends when all rows have. The cache is one of
    `model.new_cache`: with "int8" it is a half to a quarter of the size, and answers may differ a little. Long prompts
    are read `chunk` tokens at a time. Where `max_new_tokens` is one number for each row, a row ends there, too; what a
    `constraint` asks for is whole by then. `compile` makes steps faster after tens of seconds; shapes of the same size
    are compiled once. What a `reuse` remembers of earlier calls is not read again.
    """
    with evaluating(model):
        session, said = _begin(
            model,
            ids,
            max_new_tokens,
            stop=stop,
            segments=segments,
            marks=marks,
            seed=seed,
            constraint=constraint,
            cache=cache,
            chunk=chunk,
            compile=compile,
            reuse=reuse,
            patience=None,
            **how,
        )
        out, spoilt = [session.given], torch.zeros(len(session.ids), dtype=torch.bool, device=session.ids.device)
        for new, ok in said:
            out.append(new[:, None])
            spoilt |= ~ok
    whole = torch.cat(out, dim=1)
    if bool(spoilt.any()):
        raise Spoilt(spoilt.nonzero()[:, 0].tolist(), whole)
    return whole


def stream(
    model: Transformer,
    ids: Tensor,
    *,
    max_new_tokens: int | Sequence[int] = 20,
    patience: int | None = 1,
    **how: Any,
) -> Iterator[Said]:
    """What `generate` would say, token by token: the next one of each row [b], padding where it has ended, and whether
    its logits were a distribution, bool [b]. Given out every `patience` tokens; with None, when it costs least.

    Between two of them the model is as it was: it may be trained, and gradients are kept.
    """
    with evaluating(model):
        _, said = _begin(model, ids, max_new_tokens, patience=patience, **how)
    while True:
        with evaluating(model):  # entered anew: a generator must not sleep inside `no_grad`, its caller would be, too
            found = next(said, None)
        if found is None:
            return
        yield found


def _begin(
    model: Transformer,
    ids: Tensor,
    max_new_tokens: int | Sequence[int],
    *,
    stop: Sequence[int] = (),
    segments: Tensor | None = None,
    marks: Tensor | None = None,
    seed: int | Tensor | None = None,
    constraint: Constraint | None = None,
    cache: CacheKind = "auto",
    chunk: int | None = None,
    compile: bool = False,
    reuse: Reuse | None = None,
    patience: int | None,
    **how: Any,
) -> tuple[Session, Iterator[Said]]:
    rooms = rooms_of(max_new_tokens, len(ids))
    sampling = Sampling(**how)
    room = max(rooms, default=0)
    session = Session(
        model, ids, room, segments=segments, marks=marks, cache=cache, chunk=chunk, compile=compile, reuse=reuse
    )
    vocab, device = session.logits.shape[-1], session.ids.device
    allowed = None
    if constraint is not None:
        check_fit(constraint, vocab, stop)
        allowed = Retracing(constraint, rooms, device)
    processors = build(sampling, vocab=vocab, stop=stop, allowed=allowed, device=device)
    seeds = None if sampling.temperature == 0 else seeds_of(seed, len(session.ids), device)
    patience = patience or (1 if device.type == "cpu" else PATIENCE)
    said = steps(session, rooms, processors, seeds, stop, patience)
    return session, said if reuse is None else _kept(session, said, reuse)


def _kept(session: Session, said: Iterator[Said], reuse: Reuse) -> Iterator[Said]:
    try:
        yield from said
    finally:  # also of what nobody wanted to hear the end of
        reuse.keep(session.cache, session.texts())


def steps(
    session: Session,
    rooms: Sequence[int],
    processors: Sequence[Processor],
    seeds: Tensor | None,
    stop: Sequence[int],
    patience: int,
) -> Iterator[Said]:
    """The next token of each row [b], padding where it has ended, and whether its logits were a distribution."""
    device, filler = session.ids.device, session.filler(stop)
    ending = torch.tensor(list(stop), device=device, dtype=session.ids.dtype)
    most, room = max(rooms, default=0), torch.tensor(list(rooms), device=device)
    ended = room == 0
    held: list[tuple[Tensor, Tensor, Tensor]] = []  # not given out yet: all rows may have ended before
    for step in range(most):
        logits = process(processors, session.history, session.logits)
        choice = greedy(logits) if seeds is None else sample(logits, seeds, torch.full_like(seeds, step))
        before, ok = ended, choice.ok | ended
        token = choice.ids.masked_fill(before | ~ok, filler)
        ended = before | ~ok | torch.isin(token, ending) | (room <= step + 1)
        held.append((token, ok, before))
        if step + 1 == most or (step + 1) % patience == 0:
            over = bool(ended.all())
            yield from ((token, ok) for token, ok, before in held if not over or not bool(before.all()))
            held = []
            if over:
                return
        if step + 1 < most:
            session.read(token[:, None], ~ended[:, None])


def rooms_of(max_new_tokens: int | Sequence[int], rows: int) -> list[int]:
    """How many tokens each row may have."""
    rooms = [max_new_tokens] * rows if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if min(rooms, default=0) < 0:
        raise ValueError(f"max_new_tokens = {max_new_tokens}: must not be negative")
    if len(rooms) != rows:
        raise ValueError(f"max_new_tokens has {len(rooms)} numbers, expected one for each of {rows} rows")
    return rooms


def seeds_of(seed: int | Tensor | None, rows: int, device: torch.device) -> Tensor:
    if isinstance(seed, Tensor):
        if seed.shape != (rows,) or seed.is_floating_point():
            raise ValueError(f"seed has shape {list(seed.shape)}, expected a whole number for each of {rows} rows")
        return seed.to(device)
    return row_seeds(int(torch.randint(2**62, ())) if seed is None else seed, rows, device)

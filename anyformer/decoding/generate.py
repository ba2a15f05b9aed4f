"""Autoregressive decoding with a cache, token by token, for decoder-only and encoder–decoder models alike."""

import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.cache.kv_cache import CacheKind
from anyformer.decoding.check import check_call
from anyformer.decoding.constraints.constraint import Constraint, check_fit
from anyformer.decoding.constraints.rollback import Retracing
from anyformer.decoding.logit_processors import Processor, Sampling, build, process
from anyformer.decoding.prefix_cache import Reuse
from anyformer.decoding.sampling import greedy, row_seeds, sample
from anyformer.decoding.session import Read, Session, evaluating
from anyformer.decoding.step import compiled
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.model import Transformer

Said = tuple[Tensor, Tensor]
"""The next token of each row [b], or some of them [b, n], and whether logits were a distribution, bool likewise."""

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
            out.append(new)
            spoilt |= ~ok.all(dim=1)
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
        yield from zip(found[0].unbind(dim=1), found[1].unbind(dim=1), strict=True)


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
    sampling = Sampling(**how)
    rooms, stop = check_call(
        model,
        ids,
        max_new_tokens,
        stop,
        segments=segments,
        marks=marks,
        seed=seed,
        temperature=sampling.temperature,
        constraint=constraint,
        cache=cache,
        chunk=chunk,
        compile=compile,
        reuse=reuse,
        patience=patience,
    )
    room = max(rooms, default=0)
    session = Session(
        model, ids, room, segments=segments, marks=marks, cache=cache, chunk=chunk, compile=compile, reuse=reuse
    )
    vocab, device = session.logits.shape[-1], session.ids.device
    allowed = None
    if constraint is not None:
        check_fit(constraint, vocab, stop)
        allowed = Retracing(constraint, rooms, device)
    seeds = None if sampling.temperature == 0 else seeds_of(seed, len(session.ids), device)
    filler = session.filler(stop)
    key = None if constraint is not None else ("say", sampling, tuple(stop), filler)  # a constraint asks the host

    def make() -> DecodeState:
        processors = build(sampling, vocab=vocab, stop=stop, allowed=allowed, device=device)
        return DecodeState(len(session.ids), room, processors, seeds is not None, stop, filler, device)

    saying = make() if key is None else session.place.keep(key, make)
    saying.begin(rooms, seeds)
    patience = patience or patience_of(device, ends=bool(stop) or constraint is not None)
    return session, _closing(session, steps(session, saying, patience, key), reuse)


def _closing(session: Session, said: Iterator[Said], reuse: Reuse | None) -> Iterator[Said]:
    try:
        yield from said
    finally:  # also of what nobody wanted to hear the end of
        if reuse is not None:
            reuse.keep(session.model, session.since, session.cache, session.texts())
        session.close()


class DecodeState:
    """What rows have said, and how they go on: tensors that stay where they are, so that a step can be captured."""

    def __init__(
        self,
        rows: int,
        most: int,
        processors: Sequence[Processor],
        drawn: bool,
        stop: Sequence[int],
        filler: int,
        device: torch.device,
    ):
        self.most, self.processors, self.filler = most, processors, filler
        self.ending = torch.tensor(list(stop), device=device, dtype=torch.long)
        self.room = torch.zeros(rows, dtype=torch.long, device=device)
        self.seeds = torch.zeros_like(self.room) if drawn else None
        self.ids = torch.zeros(rows, most, dtype=torch.long, device=device)
        self.ok = torch.zeros_like(self.ids, dtype=torch.bool)  # whether logits were a distribution
        self.count = torch.zeros_like(self.room)  # tokens of each row, up to its end
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.newest, self.going = torch.zeros_like(self.room)[:, None], torch.zeros_like(self.ended)[:, None]

    def begin(self, rooms: Sequence[int], seeds: Tensor | None) -> None:
        self.room.copy_(torch.tensor(list(rooms), dtype=torch.long))
        if self.seeds is not None and seeds is not None:
            self.seeds.copy_(seeds)
        self.step.zero_()
        self.count.zero_()
        self.ended.copy_(self.room == 0)

    def choose(self, session: Session, logits: Tensor) -> None:
        """The next token of each row, after logits [rows, v]."""
        if self.processors:
            logits = process(self.processors, session.history, logits)
        fused = session.compile and self.seeds is None  # compilers take minutes for the hash behind noise
        (compiled(say, id(session.model), len(logits)) if fused else say)(self, logits)


def say(saying: DecodeState, logits: Tensor) -> None:
    """What follows from logits, the end of rows included."""
    logits, seeds, step = at_least_fp32(logits), saying.seeds, saying.step
    choice = greedy(logits) if seeds is None else sample(logits, seeds, step.expand_as(seeds))
    before = saying.ended.clone()
    ok = choice.ok | before
    token = choice.ids.masked_fill(before | ~ok, saying.filler)
    ended = before | ~ok | torch.isin(token, saying.ending) | (saying.room <= step + 1)
    saying.ids.index_copy_(1, step, token[:, None])
    saying.ok.index_copy_(1, step, ok[:, None])
    saying.count += ~before
    saying.ended.copy_(ended)
    saying.newest.copy_(token[:, None])
    saying.going.copy_(~ended[:, None])
    saying.step += 1


def steps(session: Session, saying: DecodeState, patience: int, key: Hashable | None) -> Iterator[Said]:
    """The next tokens of each row, up to `patience` of them at a time; with a key, by steps that may be captured."""

    def move(read: Read) -> None:
        saying.choose(session, read(saying.newest, saying.going))

    if saying.most:
        session.first(lambda logits: saying.choose(session, logits), key)
    given = 0
    for step in range(1, saying.most + 1):
        if step == saying.most or step % patience == 0:
            over = bool(saying.ended.all())
            last = int(saying.count.amax()) if over else step  # rows may have ended before
            if last > given:
                yield saying.ids[:, given:last].clone(), saying.ok[:, given:last].clone()
            given = step
            if over:
                return
        session.go(move, key)


def patience_of(device: torch.device, ends: bool) -> int:
    """How many steps to go between two looks at the device; where nothing ends early there is nothing to see."""
    if device.type == "cpu":
        return 1
    return PATIENCE if ends else sys.maxsize


def seeds_of(seed: int | Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Return a seed for each row: those given, or made from one."""
    if isinstance(seed, Tensor):
        return seed.to(device)
    return row_seeds(int(torch.randint(2**62, ())) if seed is None else seed, rows, device)

"""Greedy decoding and sampling, token by token, for decoder-only and encoder–decoder models."""

import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anyformer.attention.cache.kv_cache import CacheKind
from anyformer.config import ConfigError
from anyformer.generation.check import integer_faults
from anyformer.generation.constraints.constraint import Constraint
from anyformer.generation.logit_processors import process
from anyformer.generation.prefix_cache import Reuse
from anyformer.generation.request import Request, check_request
from anyformer.generation.sampling import greedy, row_seeds, sample
from anyformer.generation.session import Session
from anyformer.generation.step import compiled
from anyformer.generation.strategy import Sampling
from anyformer.kernels.runtime import at_least_fp32
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.model import Transformer

Picked = tuple[Tensor, Tensor]
"""The next token of each row [b], or several [b, n], and whether their logits were finite, bool of the same shape."""

STEPS_BETWEEN_CHECKS = 16  # on a device, of whether all rows have ended: each check synchronises with the host


class NonFiniteLogits(ValueError):
    """Some rows had logits without a distribution, such as NaN, and end there. `ids` holds the result of all rows."""

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
    attention_mask: Tensor | None = None,
    marks: Tensor | None = None,
    seed: int | Tensor | None = None,
    constraint: Constraint | None = None,
    cache: CacheKind = "auto",
    chunk: int | None = None,
    compile: bool = False,
    reuse: Reuse | None = None,
    **how: Any,
) -> Tensor:
    """Continue prompts, or answer sources.

    A row ends at its first `stop` id or at its budget and is padded from there; decoding ends when all rows have ended.
    A row's result does not depend on the other rows.

    Args:
        model: a decoder or an encoder-decoder.
        ids: prompts [b, t], or sources [b, s]; images or features, if the encoder reads those.
        max_new_tokens: budget of all rows, or one for each.
        stop: ids that end a row.
        segments: int [b, t], -1 at the padding of prompts of unequal length, on either side.
        attention_mask: bool [b, t] in place of segments, 0 at padding.
        marks: 1 at tokens that the whole prompt sees [b, t]; such a prompt is read at once.
        seed: of the random numbers of sampling; None: another one in each call.
        constraint: an automaton that every answer meets within its budget (`Run.generate` makes it of a regex, a JSON
            schema or choices).
        cache: "auto", "static", "int8" (a half to a quarter of the memory; answers may change a little), or "none":
            the whole text is read again for each token.
        chunk: tokens of a prompt that are read at once; None: all.
        compile: steps are faster after tens of seconds.
        reuse: earlier texts whose beginnings are not read again.
        how: options of `Sampling`: temperature, top_k, top_p, ...; without any, decoding is greedy.

    Returns:
        int [b, t + new], prompts with their continuations; of an encoder-decoder [b, 1 + new], the start id first.

    Raises:
        ConfigError: an option does not fit the model or another option.
        NonFiniteLogits: logits of some rows were not finite; the error has the other rows.

    Example:
        >>> model = af.Transformer(af.presets.gpt2(depth=2, width=64, heads=4, vocab=97))
        >>> af.generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=4, temperature=0.8, seed=0).shape
        torch.Size([1, 7])
    """
    request = Request(
        ids,
        max_new_tokens=max_new_tokens,
        stop=stop,
        segments=segments,
        attention_mask=attention_mask,
        marks=marks,
        seed=seed,
        constraint=constraint,
        cache=cache,
        chunk=chunk,
        compile=compile,
        reuse=reuse,
        strategy=Sampling(**how),
    )
    return run_sampling(model, request)


def run_sampling(model: Transformer, request: Request) -> Tensor:
    """Return prompts and answers [b, t + new]; raise `NonFiniteLogits` if rows failed."""
    check_request(model, request)
    with evaluating(model):
        session, picked = _start(model, request, None)
        parts, failed = [session.prompt_ids], torch.zeros(len(session.ids), dtype=torch.bool, device=session.ids.device)
        for new, ok in picked:
            parts.append(new)
            failed |= ~ok.all(dim=1)
    out = torch.cat(parts, dim=1)
    if bool(failed.any()):
        raise NonFiniteLogits(failed.nonzero()[:, 0].tolist(), out)
    return out


def stream(model: Transformer, ids: Tensor, *, patience: int | None = 1, **options: Any) -> Iterator[Picked]:
    """Yield what `generate` returns token by token; `options` are the same.

    Each item is the next token of each row [b], padding where it has ended, and whether its logits were finite, bool
    [b]. Tokens are yielded every `patience` steps; with None, as rarely as is fastest.
    """
    return decode(model, Request.of(Sampling, ids, options), patience)


def decode(model: Transformer, request: Request, patience: int | None = 1) -> Iterator[Picked]:
    """Yield the tokens of a request; between two of them the model is as before, and may be trained.

    A strategy that finds whole answers yields them at their end; beam search the best ones.
    """
    check_request(model, request)
    if patience is not None and (faults := integer_faults("patience", patience, 1)):
        raise ConfigError(faults)
    return _stream(model, request, patience)


def _stream(model: Transformer, request: Request, patience: int | None) -> Iterator[Picked]:
    found = chunks(model, request, patience)
    while True:
        with evaluating(model):  # entered for each item: a suspended generator would leave its caller in `no_grad`
            tokens = next(found, None)
        if tokens is None:
            return
        yield from zip(tokens[0].unbind(dim=1), tokens[1].unbind(dim=1), strict=True)


def chunks(model: Transformer, request: Request, patience: int | None) -> Iterator[Picked]:
    """Yield new tokens of all rows within `evaluating(model)`; none where a strategy has not found its answers yet."""
    if request.strategy.streams:
        yield from _start(model, request, patience)[1]
        return
    failed: list[int] = []
    steps = request.strategy.steps(model, request)
    try:
        while True:
            next(steps)
            yield torch.empty(len(request.ids), 0), torch.empty(len(request.ids), 0)
    except StopIteration as end:
        ids = end.value
    except NonFiniteLogits as error:
        ids, failed = error.ids, error.rows
    new = ids[:, 1 if model.encoder is not None else request.ids.shape[1] :]
    ok = torch.ones_like(new, dtype=torch.bool)
    ok[failed] = False
    yield new, ok


def _start(model: Transformer, request: Request, patience: int | None) -> tuple[Session, Iterator[Picked]]:
    session, sampling = Session(model, request), request.strategy
    assert isinstance(sampling, Sampling)
    stop = request.stop_ids
    # constraints and the caller's processors may synchronise with the host
    captured = request.constraint is None and not request.processors
    key = ("say", sampling, stop, session.fill_id(stop)) if captured else None

    state = session.buffers.keep(key, lambda: DecodeState(session, request, request.longest))
    state.begin(request)
    can_end = bool(stop) or request.constraint is not None
    return session, _steps(session, state, patience or steps_between_checks(session.ids.device, can_end), key)


class AnswerRows:
    """The answers of all rows: tensors with fixed addresses, so that steps are captured."""

    def __init__(self, session: Session, request: Request, slots: int):
        """`slots`: of tokens, as many as any answer may have."""
        device, strategy = session.ids.device, request.strategy
        self.processors, self.fill = session.processors(request), session.fill_id(request.stop_ids)
        self.stop = torch.tensor(request.stop_ids, device=device, dtype=torch.long)
        self.budgets = torch.zeros(len(session.ids), dtype=torch.long, device=device)
        samples = isinstance(strategy, Sampling) and strategy.temperature
        self.seeds = torch.zeros_like(self.budgets) if samples else None
        self.ids = torch.zeros(len(session.ids), slots, dtype=torch.long, device=device)
        self.count = torch.zeros_like(self.budgets)  # tokens of each row, up to its end

    def begin(self, request: Request) -> None:
        """Start new answers."""
        self.budgets.copy_(torch.tensor(request.budgets, dtype=torch.long))
        if self.seeds is not None:
            self.seeds.copy_(seeds_of(request.seed, len(self.seeds), self.seeds.device))
        self.count.zero_()


class DecodeState(AnswerRows):
    """Answers that grow by one token a step, and whether they have ended."""

    def __init__(self, session: Session, request: Request, slots: int):
        super().__init__(session, request, slots)
        self.ok = torch.zeros_like(self.ids, dtype=torch.bool)  # whether logits were finite
        self.step = torch.zeros(1, dtype=torch.long, device=self.budgets.device)
        self.ended = torch.zeros_like(self.budgets, dtype=torch.bool)
        self.newest, self.running = torch.zeros_like(self.budgets)[:, None], torch.zeros_like(self.ended)[:, None]

    def begin(self, request: Request) -> None:
        super().begin(request)
        self.step.zero_()
        self.ended.copy_(self.budgets == 0)

    def choose(self, session: Session, logits: Tensor) -> None:
        """Choose the next token of each row from logits [rows, v]."""
        if self.processors:
            logits = process(self.processors, session.history, logits)
        fused = session.compile and self.seeds is None  # compiling the hash of the noise takes minutes
        (compiled(pick, id(session.model), len(logits)) if fused else pick)(self, logits)


def pick(state: DecodeState, logits: Tensor) -> None:
    """Pick the next token of each row, and end rows."""
    logits, seeds, step = at_least_fp32(logits), state.seeds, state.step
    choice = greedy(logits) if seeds is None else sample(logits, seeds, step.expand_as(seeds))
    before = state.ended.clone()
    ok = choice.ok | before
    token = choice.ids.masked_fill(before | ~ok, state.fill)
    ended = before | ~ok | torch.isin(token, state.stop) | (state.budgets <= step + 1)
    state.ids.index_copy_(1, step, token[:, None])
    state.ok.index_copy_(1, step, ok[:, None])
    state.count += ~before
    state.ended.copy_(ended)
    state.newest.copy_(token[:, None])
    state.running.copy_(~ended[:, None])
    state.step += 1


def _steps(session: Session, state: DecodeState, patience: int, key: Hashable | None) -> Iterator[Picked]:
    """Yield the next tokens of each row, up to `patience` at a time; with a key, by steps that may be captured."""

    def move() -> None:
        state.choose(session, session.read(state.newest, state.running)[:, -1])

    yielded, longest = 0, state.ids.shape[1]
    try:
        if longest:
            session.run_first(lambda logits: state.choose(session, logits), key)
        for step in range(1, longest + 1):
            if step == longest or step % patience == 0:
                over = bool(state.ended.all())
                last = int(state.count.amax()) if over else step  # rows may have ended earlier
                if last > yielded:
                    yield state.ids[:, yielded:last].clone(), state.ok[:, yielded:last].clone()
                yielded = step
                if over:
                    return
            session.run_step(move, key)
    finally:  # also when the caller stops iterating
        session.close()


def steps_between_checks(device: torch.device, can_end: bool) -> int:
    """Return after how many steps to check on the host whether all rows have ended."""
    if device.type == "cpu":
        return 1
    return STEPS_BETWEEN_CHECKS if can_end else sys.maxsize


def seeds_of(seed: int | Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Return a seed for each row: those given, or derived from one."""
    if isinstance(seed, Tensor):
        return seed.to(device)
    return row_seeds(int(torch.randint(2**62, ())) if seed is None else seed, rows, device)

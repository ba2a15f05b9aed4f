"""A request: prompts and all options of how to continue them, from the caller to the model, and their checks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor

from anyformer.attention.cache.kv_cache import CacheKind
from anyformer.attention.layout import real
from anyformer.attention.media_batch import MediaBatch
from anyformer.config import ConfigError, Fault
from anyformer.generation.check import integer_faults, parse_ids
from anyformer.generation.constraints.constraint import Constraint
from anyformer.generation.constraints.phrases import Phrase, shortest
from anyformer.generation.logit_processors import Processor
from anyformer.generation.prefix_cache import Reuse
from anyformer.generation.strategy import Beam, Contrastive, OwnHead, Sampling, Speculation, Strategy, seed_fault
from anyformer.nn.model import Transformer

CACHE_KINDS = get_args(CacheKind)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Request:
    """Prompts [b, t], or sources of an encoder–decoder, and how to continue them. The engine takes one prompt each.

    max_new_tokens: the budget of all rows, or of each; in the engine 0 only scores the prompt.
    strategy: how tokens are chosen, with its options.
    stop: ids that end a row.
    segments: -1 at padding [b, t]; it may be on either side.
    attention_mask: the same as 0 at padding and 1 at real tokens [b, t], bool or integer.
    marks: 1 at tokens that the whole prompt sees [b, t]; such a prompt is read at once.
    media: images, sounds and feature vectors of the prompts, which are then read at once.
    seed: one for each row [b], or one from which these are derived (sampling).
    constraint: an automaton that every answer meets within its budget.
    phrases: sequences of ids that every answer contains (beam search).
    processors: functions (history, logits) -> logits, called before those of the strategy.
    cache: a kind of `model.new_cache`; "int8" takes a half to a quarter of the memory and is inexact.
    chunk: read prompts this many tokens at a time.
    compile: compile steps of one token, once for each number of rows; it takes tens of seconds.
    reuse: skip what earlier calls have read of a prompt.

    In the engine:
    top: log-probabilities. None: none; 0: of the tokens of the answer; n: also of the n most probable tokens.
    prompt_logprobs: also return the log-probabilities of the prompt's tokens.
    adapter: name of the LoRA adapter; None: the model itself.
    """

    ids: Tensor
    max_new_tokens: int | Sequence[int] = 20
    strategy: Strategy = field(default_factory=Sampling)
    stop: Sequence[int] = ()
    segments: Tensor | None = None
    attention_mask: Tensor | None = None
    marks: Tensor | None = None
    media: MediaBatch | None = None
    seed: int | Tensor | None = None
    constraint: Constraint | None = None
    phrases: Sequence[Phrase] = ()
    processors: Sequence[Processor] = ()
    cache: CacheKind = "auto"
    chunk: int | None = None
    compile: bool = False
    reuse: Reuse | None = None
    top: int | None = None
    prompt_logprobs: bool = False
    adapter: str | None = None

    @classmethod
    def of(cls, kind: type[Strategy], ids: Tensor, options: dict[str, Any]) -> "Request":
        """Return the request with its fields among some options; the others are those of the strategy."""
        own = {one.name for one in fields(cls)} & options.keys()
        strategy = kind(**{name: value for name, value in options.items() if name not in own})
        return cls(ids, strategy=strategy, **{name: options[name] for name in own})

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """The maximum number of new tokens of each row."""
        most = self.max_new_tokens
        return (most,) * len(self.ids) if isinstance(most, int) else tuple(most)

    @property
    def longest(self) -> int:
        """The largest budget."""
        return max(self.budgets, default=0)

    @cached_property
    def present(self) -> Tensor | None:
        """Which of the ids are not padding, bool [b, t]; None: all."""
        if self.attention_mask is not None:
            return self.attention_mask == 1
        return None if self.segments is None else real(self.segments)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        return parse_ids("stop", self.stop, None)[0]


def check_request(model: Transformer, request: Request) -> None:
    """Raise a `ConfigError` that names every wrong option of a request."""
    if not isinstance(request.ids, Tensor):
        raise ConfigError([Fault("ids", f"must be a tensor [batch, length], got {type(request.ids).__name__}")])
    target = model.config.target
    faults = _budget_faults(request)
    faults += parse_ids("stop", request.stop, (target and target.rows) or None)[1]
    faults += _seed_faults(request)
    faults += _type_faults(request)
    if faults:
        raise ConfigError(faults)
    if faults := list(_strategy_faults(model, request)):
        raise ConfigError(faults)


def _budget_faults(request: Request) -> list[Fault]:
    most: Any = request.max_new_tokens
    rows = len(request.ids) if request.ids.dim() else 0
    if not isinstance(most, Sequence) or isinstance(most, str):
        return integer_faults("max_new_tokens", most, 0)
    if len(most) != rows:
        return [Fault("max_new_tokens", f"has {len(most)} numbers, expected one for each of {rows} rows")]
    return [fault for n in most for fault in integer_faults("max_new_tokens", n, 0)][:1]


def _seed_faults(request: Request) -> list[Fault]:
    seed: Any = request.seed
    rows = len(request.ids) if request.ids.dim() else 0
    if seed is None:
        return []
    if isinstance(seed, Tensor):
        if seed.shape != (rows,) or seed.dtype not in INTEGERS:
            what = f"has shape {list(seed.shape)} of {seed.dtype}, expected a whole number for each of {rows} rows"
            return [Fault("seed", what)]
    elif not isinstance(seed, int) or isinstance(seed, bool):
        return [Fault("seed", f"= {seed!r}: must be a whole number, or a tensor with one for each row")]
    fault = seed_fault(seed, request.strategy)
    return [] if fault is None else [fault]


def _type_faults(request: Any) -> Iterator[Fault]:
    if request.cache not in CACHE_KINDS:
        kinds = f"{', '.join(map(repr, CACHE_KINDS[:-1]))} or {CACHE_KINDS[-1]!r}"
        yield Fault("cache", f"= {request.cache!r}: must be {kinds}")
    if request.chunk is not None:
        yield from integer_faults("chunk", request.chunk, 1)
    if not isinstance(request.compile, bool):
        yield Fault("compile", f"= {request.compile!r}: must be true or false")
    if request.constraint is not None and not isinstance(request.constraint, Constraint):
        yield Fault("constraint", f"must be a Constraint, such as a Regex, got {type(request.constraint).__name__}")
    if request.reuse is not None and not isinstance(request.reuse, Reuse):
        yield Fault("reuse", f"must be a Reuse, got {type(request.reuse).__name__}")
    for name in ("segments", "attention_mask", "marks"):
        value = getattr(request, name)
        if value is not None and not isinstance(value, Tensor):
            yield Fault(name, f"must be a tensor [batch, length], got {type(value).__name__}")
    if not isinstance(request.processors, Sequence) or not all(map(callable, request.processors)):
        yield Fault("processors", "must be a list of functions (history, logits) -> logits")
    if not isinstance(request.phrases, Sequence) or isinstance(request.phrases, str):
        yield Fault("phrases", f"= {request.phrases!r}: must be a list of phrases, each a sequence of ids")


def _strategy_faults(model: Transformer, request: Request) -> Iterator[Fault]:
    """Yield the faults of options that do not fit the strategy, and of a strategy that does not fit the model."""
    strategy, head = request.strategy, model.config.head
    if request.seed is not None and not isinstance(strategy, Sampling):
        yield Fault("seed", f"{strategy.title} does not sample: leave it out")
    if isinstance(strategy, Contrastive) and request.reuse is not None:
        yield Fault("reuse", "contrastive search needs the hidden states of whole prompts: leave it out")
    if isinstance(strategy, Contrastive) and head.predicts_tokens and strategy.candidates > model.config.vocab:
        yield Fault("candidates", f"= {strategy.candidates}: the vocabulary has {model.config.vocab}")
    if isinstance(strategy, Speculation) and isinstance(strategy.draft, OwnHead) and not head.further:
        what = "the model has no layers for further tokens: train it with model.head.multi_token, or use lookup"
        yield Fault("self_draft", what)
    if not isinstance(strategy, Beam):
        if request.phrases:
            yield Fault("phrases", "needs beam search")
        return
    budget = min(request.budgets, default=1)
    if budget < 1:
        yield Fault("max_new_tokens", f"= {budget}: must be at least 1")
    if strategy.groups > 1 and request.phrases:
        yield Fault("phrases", "are allocated within one group of beams: leave groups at 1")
    if (tokens := sum(map(shortest, request.phrases))) > budget:
        yield Fault("phrases", f"have {tokens} tokens, more than max_new_tokens = {budget}")

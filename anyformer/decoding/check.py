"""Checks of the options of a decoding call, before anything is read: each wrong one is named, all of them at once."""

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from anyformer.cache.kv_cache import CacheKind
from anyformer.config import ConfigError, Fault, Tokens
from anyformer.decoding.constraints.constraint import Constraint
from anyformer.decoding.prefix_cache import Reuse
from anyformer.nn.model import Transformer

KINDS = get_args(CacheKind)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_call(
    model: Transformer, ids: Tensor, max_new_tokens: int | Sequence[int], stop: Sequence[int], **options: Any
) -> tuple[list[int], tuple[int, ...]]:
    """Return the token budget of each row, and the stop ids; raise a `ConfigError` that names every wrong option.

    `options` are checked by name; a `seed` needs its `temperature` beside it.
    """
    if not isinstance(ids, Tensor):
        raise ConfigError([Fault("ids", f"must be a tensor [batch, length], got {type(ids).__name__}")])
    rows = len(ids) if ids.dim() else 0
    target = model.config.target
    budgets, faults = _budgets(max_new_tokens, rows)
    stops, wrong = ids_of("stop", stop, target.rows if isinstance(target, Tokens) else None)
    faults += wrong
    if options.get("seed") is not None:
        faults += _seed(options["seed"], rows, options.get("temperature"))
    for name, value in options.items():
        faults += _fault(name, value)
    if faults:
        raise ConfigError(faults)
    return budgets, stops


def whole(name: str, value: object, least: int) -> list[Fault]:
    """Return the fault of an option that is no whole number from `least` on."""
    if not isinstance(value, int) or isinstance(value, bool):
        return [Fault(name, f"= {value!r}: must be a whole number")]
    if value < least:
        return [Fault(name, f"= {value}: must {f'be at least {least}' if least else 'not be negative'}")]
    return []


def ids_of(name: str, ids: object, vocab: int | None) -> tuple[tuple[int, ...], list[Fault]]:
    """Return token ids as a tuple, and the faults of the wrong ones."""
    found = ids.tolist() if isinstance(ids, Tensor) and ids.dim() == 1 else ids
    if not isinstance(found, Sequence) or isinstance(found, str):
        return (), [Fault(name, f"= {ids!r}: must be a list of ids")]
    if wrong := [i for i in found if not isinstance(i, int) or isinstance(i, bool)]:
        return (), [Fault(name, f"= {wrong[0]!r}: must be whole numbers")]
    outside = [i for i in found if i < 0 or (vocab is not None and i >= vocab)]
    return tuple(found), [Fault(name, f"= {i}: no such id; the vocabulary has {vocab}") for i in outside]


def _budgets(max_new_tokens: object, rows: int) -> tuple[list[int], list[Fault]]:
    if isinstance(max_new_tokens, Sequence) and not isinstance(max_new_tokens, str):
        if len(max_new_tokens) != rows:
            what = f"has {len(max_new_tokens)} numbers, expected one for each of {rows} rows"
            return [], [Fault("max_new_tokens", what)]
        faults = [fault for n in max_new_tokens for fault in whole("max_new_tokens", n, 0)]
        return list(max_new_tokens), faults[:1]
    faults = whole("max_new_tokens", max_new_tokens, 0)
    return [] if faults or not isinstance(max_new_tokens, int) else [max_new_tokens] * rows, faults


def _seed(seed: object, rows: int, temperature: float | None) -> list[Fault]:
    if isinstance(seed, Tensor):
        if seed.shape != (rows,) or seed.dtype not in INTEGERS:
            what = f"has shape {list(seed.shape)} of {seed.dtype}, expected a whole number for each of {rows} rows"
            return [Fault("seed", what)]
    elif not isinstance(seed, int) or isinstance(seed, bool):
        return [Fault("seed", f"= {seed!r}: must be a whole number, or a tensor with one for each row")]
    if temperature == 0:
        shown = f"= {seed}: " if isinstance(seed, int) else ""
        return [Fault("seed", f"{shown}needs a temperature above 0: at 0 nothing is drawn")]
    return []


def _fault(name: str, value: Any) -> list[Fault]:
    match name:
        case "cache" if value not in KINDS:
            return [Fault(name, f"= {value!r}: must be {', '.join(map(repr, KINDS[:-1]))} or {KINDS[-1]!r}")]
        case "chunk" | "patience" if value is not None:
            return whole(name, value, 1)
        case "ahead":
            return whole(name, value, 1)
        case "compile" if not isinstance(value, bool):
            return [Fault(name, f"= {value!r}: must be true or false")]
        case "constraint" if value is not None and not isinstance(value, Constraint):
            return [Fault(name, f"must be a Constraint, such as a Regex, got {type(value).__name__}")]
        case "reuse" if value is not None and not isinstance(value, Reuse):
            return [Fault(name, f"must be a Reuse, got {type(value).__name__}")]
        case "segments" | "marks" if value is not None and not isinstance(value, Tensor):
            return [Fault(name, f"must be a tensor [batch, length], got {type(value).__name__}")]
        case "processors" if not isinstance(value, Sequence) or not all(map(callable, value)):
            return [Fault(name, "must be a list of functions (history, logits) -> logits")]
        case "phrases" if not isinstance(value, Sequence) or isinstance(value, str):
            return [Fault(name, f"= {value!r}: must be a list of phrases, each a sequence of ids")]
    return []

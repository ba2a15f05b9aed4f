"""Checks of a request before it enters the queue, so that its caller gets the error at once."""

import torch
from torch import Tensor

from anyformer.config import IdInput
from anyformer.generation.check import parse_ids
from anyformer.generation.constraints.constraint import check_fit
from anyformer.generation.engine.request import Generation, Limits, Model, TooLong, UnknownModel, Unsupported
from anyformer.generation.request import Request, check_request
from anyformer.generation.strategy import Beam
from anyformer.nn.model import Transformer

ANY_IDS = torch.zeros(1, 1, dtype=torch.long)  # of a request that is checked: ids are checked without a tensor


def limits_of(model: Transformer) -> tuple[int | None, int | None]:
    """Return how many positions the decoder has, and how many tokens a source may have; None: no limit."""
    if model.decoder is None:
        return None, None
    decoder = [limit for limit, _ in model.decoder.ends]
    source = [limit for limit, _ in model.encoder.ends] if model.encoder else []
    source += [pattern.limit for pattern, _ in model.decoder.cross_plans if pattern.limit is not None]
    return min(decoder, default=None), min(source, default=None)


def longest_text(model: Transformer, limits: Limits) -> int | None:
    """Return how many tokens of prompt and answer a model may read, or of the answer of an encoder-decoder."""
    if model.decoder is None:
        return None
    positions, trained = limits_of(model)[0], limits.context or model.config.trained_length
    return min((limit for limit in (positions, trained) if limit is not None), default=None)


def check_generation(info: Model, model: Transformer, limits: Limits, generation: Generation) -> None:
    """Raise the error of a request that this model cannot answer."""
    if not model.config.generates:
        raise Unsupported(
            f"{info.name}: this model does not generate text; it can {', '.join(info.kinds) or 'nothing'}"
        )
    if generation.adapter is not None and generation.adapter not in info.adapters:
        known = f"known: {', '.join(info.adapters)}" if info.adapters else "the model is served without any"
        raise UnknownModel(f"adapter {generation.adapter!r}: not served with {info.name}; {known}")
    strategy = generation.strategy
    check_request(model, _request(generation, ANY_IDS), strategy)
    if generation.constraint is not None:
        assert info.vocabulary is not None
        check_fit(generation.constraint, info.vocabulary, generation.stop)
    _check_ids(info, model, generation)
    _check_lengths(info, model, limits, generation)
    if isinstance(strategy, Beam):
        if strategy.beams > min(limits.max_beams, limits.max_rows):
            most = min(limits.max_beams, limits.max_rows)
            raise Unsupported(f"beams = {strategy.beams}: the engine allows at most {most}")
        if generation.top is not None or generation.prompt_logprobs:
            raise Unsupported("log-probabilities are of sampled answers: leave them out of a beam search")
    if generation.prompt_logprobs and model.encoder is not None:
        raise Unsupported("prompt_logprobs: an encoder-decoder reads a source, which has no log-probabilities")
    if generation.top is not None and not 0 <= generation.top <= (info.vocabulary or 0):
        raise Unsupported(f"top = {generation.top}: must be from 0 to the size of the vocabulary, {info.vocabulary}")


def as_request(generation: Generation, device: torch.device | None = None) -> Request:
    """Return the request of `decoding` that asks for the same."""
    return _request(generation, torch.tensor([generation.ids], dtype=torch.long, device=device))


def _request(generation: Generation, ids: Tensor) -> Request:
    return Request(
        ids,
        max_new_tokens=generation.max_new_tokens,
        stop=generation.stop,
        seed=generation.seed,
        constraint=generation.constraint,
    )


def _check_ids(info: Model, model: Transformer, generation: Generation) -> None:
    tokens = model.config.source or model.config.target
    if not isinstance(tokens, IdInput):
        raise Unsupported(f"{info.name}: its encoder does not read tokens")
    if not generation.ids:
        raise Unsupported("the prompt is empty: give it at least one token, such as the start of a text")
    if faults := parse_ids("ids", generation.ids, tokens.rows)[1]:
        raise Unsupported(str(faults[0]))


def _check_lengths(info: Model, model: Transformer, limits: Limits, generation: Generation) -> None:
    read, new, pair = len(generation.ids), generation.max_new_tokens, model.encoder is not None
    what = "source" if pair else "prompt"
    if limits.max_prompt is not None and read > limits.max_prompt:
        raise TooLong(f"the {what} has {read} tokens, and the limit is {limits.max_prompt}")
    if limits.max_new_tokens is not None and new > limits.max_new_tokens:
        raise TooLong(f"max_new_tokens = {new}: the limit is {limits.max_new_tokens}")
    if pair and info.max_source is not None and read > info.max_source:
        raise TooLong(f"the source has {read} tokens, and the model reads at most {info.max_source}")
    last = (1 if pair else read) + max(new, 1) - 1  # the last token of an answer is not read again
    if info.max_length is not None and last > info.max_length:
        before = "" if pair else f"the prompt has {read} tokens and "
        why = f"the model has {info.max_length} positions"
        if info.max_length != limits_of(model)[0]:
            why = f"the context is {info.max_length} tokens (option context of the server)"
        raise TooLong(f"{before}max_new_tokens = {new}: {why}")

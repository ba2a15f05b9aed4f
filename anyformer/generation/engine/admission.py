"""Checks of a request before it enters the queue, so that its caller gets the error at once."""

from dataclasses import fields

from anyformer.config import IdInput
from anyformer.generation.check import parse_ids
from anyformer.generation.constraints.constraint import check_fit
from anyformer.generation.engine.interface import Limits, Model, TooLong, UnknownModel, Unsupported
from anyformer.generation.request import Request, check_request
from anyformer.generation.strategy import Speculation
from anyformer.nn.model import Transformer

SERVED = ("ids", "max_new_tokens", "strategy", "stop", "seed", "constraint", "top", "prompt_logprobs", "adapter")


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


def check_served(info: Model, model: Transformer, limits: Limits, request: Request) -> None:
    """Raise the error of a request that this model cannot answer."""
    if not model.config.generates:
        raise Unsupported(
            f"{info.name}: this model does not generate text; it can {', '.join(info.kinds) or 'nothing'}"
        )
    if request.adapter is not None and request.adapter not in info.adapters:
        known = f"known: {', '.join(info.adapters)}" if info.adapters else "the model is served without any"
        raise UnknownModel(f"adapter {request.adapter!r}: not served with {info.name}; {known}")
    strategy = request.strategy
    check_request(model, request)
    if request.ids.dim() != 2 or len(request.ids) != 1:
        raise Unsupported(f"ids have the shape {list(request.ids.shape)}: give [1, length], one prompt each")
    for one in fields(request):
        if one.name not in SERVED and getattr(request, one.name) != one.default:
            raise Unsupported(f"{one.name} is not served: use `run.generate`")
    if request.constraint is not None:
        assert info.vocabulary is not None
        check_fit(request.constraint, info.vocabulary, request.stop)
    _check_ids(info, model, request)
    _check_lengths(info, model, limits, request)
    if strategy.copies > (most := min(limits.max_beams, limits.max_rows)):
        raise Unsupported(f"{strategy.selected_by[0]} = {strategy.copies}: the engine allows at most {most}")
    if isinstance(strategy, Speculation) and strategy.ahead > most:
        raise Unsupported(f"ahead = {strategy.ahead}: the engine allows at most {most}")
    if not strategy.streams and (request.top is not None or request.prompt_logprobs):
        raise Unsupported(f"log-probabilities are of sampled answers: leave them out of a {strategy.title}")
    if request.prompt_logprobs and model.encoder is not None:
        raise Unsupported("prompt_logprobs: an encoder-decoder reads a source, which has no log-probabilities")
    if request.top is not None and not 0 <= request.top <= (info.vocabulary or 0):
        raise Unsupported(f"top = {request.top}: must be from 0 to the size of the vocabulary, {info.vocabulary}")


def _check_ids(info: Model, model: Transformer, request: Request) -> None:
    tokens = model.config.source or model.config.target
    if not isinstance(tokens, IdInput):
        raise Unsupported(f"{info.name}: its encoder does not read tokens")
    if not request.ids.numel():
        raise Unsupported("the prompt is empty: give it at least one token, such as the start of a text")
    if faults := parse_ids("ids", request.ids[0].tolist(), tokens.rows)[1]:
        raise Unsupported(str(faults[0]))


def _check_lengths(info: Model, model: Transformer, limits: Limits, request: Request) -> None:
    read, new, pair = request.ids.numel(), request.longest, model.encoder is not None
    what = "source" if pair else "prompt"
    if limits.max_prompt is not None and read > limits.max_prompt:
        raise TooLong(f"the {what} has {read} tokens, and the limit is {limits.max_prompt}")
    if limits.max_new_tokens is not None and new > limits.max_new_tokens:
        raise TooLong(f"max_new_tokens = {new}: the limit is {limits.max_new_tokens}")
    if pair and info.max_source is not None and read > info.max_source:
        raise TooLong(f"the source has {read} tokens, and the model reads at most {info.max_source}")
    last = (1 if pair else read) + max(new, 1) - (not request.strategy.reads_last)  # most do not read the last token
    if info.max_length is not None and last > info.max_length:
        before = "" if pair else f"the prompt has {read} tokens and "
        why = f"the model has {info.max_length} positions"
        if info.max_length != limits_of(model)[0]:
            why = f"the context is {info.max_length} tokens (option context of the server)"
        raise TooLong(f"{before}max_new_tokens = {new}: {why}")

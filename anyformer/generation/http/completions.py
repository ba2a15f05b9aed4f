"""/v1/completions and /v1/chat/completions: answers at once, or as server-sent events."""

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from typing import Any

import torch
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from anyformer.config import ConfigError
from anyformer.generation.http import replies
from anyformer.generation.http.answers import AnswerGroup, GrowingAnswer, Piece, Spelled
from anyformer.generation.http.bodies import ChatBody, CompletionBody, GenerationBody, http_names, with_options
from anyformer.generation.http.errors import ApiError, dump, json_response, of_exception
from anyformer.generation.http.service import ServedRun, Service, unless_gone
from anyformer.generation.request import Request
from anyformer.generation.strategy import Sampling, Strategy, owner_of, selectors, strategy
from anyformer.tasks.answer_budgets import stop_faults
from anyformer.tasks.generation import stands_alone
from anyformer.tasks.generation_defaults import NEVER
from anyformer.tasks.output_constraints import OutputConstraints

MAX_TOKENS = 16  # of a completion, by default
MAX_CHAT_TOKENS = 4096  # of a message, by default, if the model has no limit
LOWEST_LOGPROB = -9999.0  # in place of -inf, which JSON cannot write


class Format(ABC):
    """The JSON of one kind of completion."""

    prefix: str  # of ids
    object: str
    chunk: str  # object of a chunk

    def __init__(self, run: ServedRun, body: GenerationBody):
        self.run, self.body = run, body
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    @abstractmethod
    def choice(self, index: int, text: str, tokens: Sequence[Spelled], finish: str) -> dict[str, Any]:
        """Return a whole choice."""

    @abstractmethod
    def delta(self, index: int, text: str, tokens: Sequence[Spelled], finish: str | None) -> dict[str, Any]:
        """Return a choice of a chunk."""

    def first(self, choice: GrowingAnswer, index: int) -> dict[str, Any] | None:
        """Return the choice of the first chunk, if there is one before the first token."""
        return self.delta(index, choice.echoed, (), None) if choice.echoed else None

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return self._frame(self.object, choices) | {"usage": usage}

    def chunk_of(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        frame = self._frame(self.chunk, choices)
        wanted = self.body.stream_options is not None and self.body.stream_options.include_usage
        return frame | {"usage": usage} if wanted else frame

    def _frame(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        named = {"id": self.id, "object": kind, "created": self.created, "model": self.run.name}
        return {**named, "choices": list(choices)}


class TextFormat(Format):
    prefix, object, chunk = "cmpl", "text_completion", "text_completion"
    body: CompletionBody

    def choice(self, index: int, text: str, tokens: Sequence[Spelled], finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    delta = choice

    def _logprobs(self, tokens: Sequence[Spelled]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        best = [
            None if token.logprob is None else {self.run.text_of(id): _finite(p) for id, p in reversed(token.top)}
            for token, _ in tokens
        ]
        return {
            "tokens": [self.run.text_of(one.token.id) for one in tokens],
            "token_logprobs": [None if p is None else _finite(p) for p in (one.token.logprob for one in tokens)],
            "top_logprobs": best if self.body.logprobs else None,
            "text_offset": [one.offset for one in tokens],
        }


class ChatFormat(Format):
    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body: ChatBody

    def choice(self, index: int, text: str, tokens: Sequence[Spelled], finish: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def delta(self, index: int, text: str, tokens: Sequence[Spelled], finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text or finish is None else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def first(self, choice: GrowingAnswer, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[Spelled]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        return {
            "content": [
                self._token(token.id, token.logprob or 0.0) | {"top_logprobs": [self._token(*one) for one in token.top]}
                for token, _ in tokens
            ]
        }

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.run.text_of(id), "logprob": _finite(logprob), "bytes": list(self.run.bytes_of(id))}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


# -- from a body to requests of the engine ----------------------------------------------------------------------------


async def text_choices(service: Service, run: ServedRun, body: CompletionBody) -> list[GrowingAnswer]:
    """Return the answers to all prompts, `n` for each."""
    if body.echo and run.answers_sources:
        raise ApiError(400, "echo: is for models that continue a text; this one answers a source", param="echo")
    if body.echo and body.stream and body.logprobs is not None:
        raise ApiError(400, "echo: log-probabilities of a prompt cannot be streamed: set stream to false", param="echo")
    prompts = await _prompts(service, run, body)
    stop = () if body.ignore_eos else run.stop
    alone = [stands_alone(run.writer, ids) for ids in prompts]
    constraints = {kind: await service.constraint(run, body, stop, kind) for kind in set(alone)}
    choices = []
    for ids, kind in zip(prompts, alone, strict=True):
        most = _budget(service, run, len(ids), MAX_TOKENS) if body.max_tokens is None else body.max_tokens
        chosen = _strategy(run, body, most)
        scored = body.echo and body.logprobs is not None
        for i in range(body.n):
            request = Request(
                torch.tensor([ids]),
                most,
                chosen,
                stop,
                seed=_seed(body, chosen, i),
                constraint=constraints[kind],
                top=body.logprobs,
                prompt_logprobs=scored,
                adapter=run.adapter,
            )
            choices.append(GrowingAnswer(run, request, _stops(body), alone=kind, echo=body.echo))
    return choices


async def chat_choices(service: Service, run: ServedRun, body: ChatBody) -> list[GrowingAnswer]:
    """Return the answers to a conversation."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens is the old name of max_completion_tokens: give one of them", param="max_tokens")
    ids = await asyncio.to_thread(run.chat_ids, [_message(message) for message in body.messages])
    longest = run.run.defaults.max_new_tokens or MAX_CHAT_TOKENS
    most = body.max_completion_tokens or body.max_tokens or _budget(service, run, len(ids), longest)
    stop = () if body.ignore_eos else run.chat_stop
    constraint = await service.constraint(run, body, stop, alone=True)
    top = (body.top_logprobs or 0) if body.logprobs else None
    chosen = _strategy(run, body, most)
    request = Request(torch.tensor([ids]), most, chosen, stop, constraint=constraint, top=top, adapter=run.adapter)
    requests = (replace(request, seed=_seed(body, chosen, i)) for i in range(body.n))
    return [GrowingAnswer(run, one, _stops(body), alone=True) for one in requests]


async def _prompts(service: Service, run: ServedRun, body: CompletionBody) -> Sequence[Sequence[int]]:
    given = body.prompt
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if len(several) * body.n > service.limits.texts:
        what = f"{len(several)} prompts × n = {body.n} is more than the limit, {service.limits.texts}"
        raise ApiError(400, what, param="prompt")
    texts = [one for one in several if isinstance(one, str)]
    if not texts:
        return several  # type: ignore[return-value]  # lists of ids
    run.check_texts(texts, "prompt", blank=not run.answers_sources)
    return await asyncio.to_thread(run.writer.prompts, texts, run.config)


def _message(message: Any) -> dict[str, str]:
    content = message.content
    return {
        "role": message.role,
        "content": content if isinstance(content, str) else "".join(part.text for part in content),
    }


def _strategy(run: ServedRun, body: GenerationBody, most: int) -> Strategy:
    """Return the strategy of a request, with the run's defaults for options that it does not have; null: off."""
    bias = {int(id): value for id, value in (body.logit_bias or {}).items()}
    if wrong := [id for id in bias if id >= (run.model.vocabulary or 0)]:
        raise ApiError(400, f"logit_bias: the vocabulary has no id {wrong[0]}", param="logit_bias")
    defaults, asked = run.run.defaults, body.model_fields_set
    given = {name: getattr(body, field) for field, (name, _) in http_names().items() if field in asked}
    if (least := given.get("min_new_tokens") or 0) > most:
        raise ApiError(400, f"min_tokens = {least}: is more than max_tokens = {most}", param="min_tokens")
    kinds = [kind for name, kind in selectors().items() if given.get(name)]
    usual = body.temperature if "temperature" in asked else defaults.options.get("temperature", body.temperature)
    if "temperature" in asked or all(issubclass(kind, Sampling) for kind in kinds):
        given["temperature"] = usual
    used = defaults.merged(given) | given
    used["bias"] = tuple(sorted((dict.fromkeys(defaults.suppressed, NEVER) | bias).items()))
    if not usual and "temperature" in given:  # greedy decoding takes the top token, which no filter drops
        used = {name: value for name, value in used.items() if owner_of(name) is not Sampling}
    chosen = strategy(**{name: value for name, value in used.items() if name != "max_new_tokens"})
    if faults := stop_faults(_stops(body), chosen, OutputConstraints()):
        raise ConfigError(faults)
    for field, value in (("stream", body.stream), ("n", body.n > 1)):
        if value and not (chosen.streams if field == "stream" else chosen.copies == 1):
            raise ApiError(400, f"{field}: {chosen.title} finds one whole answer: leave it out", param=field)
    return chosen


def _seed(body: GenerationBody, chosen: Strategy, i: int) -> int | None:
    """Return the seed of choice i; what does not sample needs none."""
    samples = isinstance(chosen, Sampling) and chosen.temperature
    return None if body.seed is None or not samples else (body.seed + i) % 2**63


def _stops(body: GenerationBody) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _budget(service: Service, run: ServedRun, read: int, default: int) -> int:
    """Return the largest budget that fits after a prompt, at most the default."""
    limits = [default]
    if service.engine.limits.max_new_tokens is not None:
        limits.append(service.engine.limits.max_new_tokens)
    if run.model.max_length is not None:
        limits.append(run.model.max_length if run.answers_sources else run.model.max_length - read + 1)
    return max(1, min(limits))


# -- responses --------------------------------------------------------------------------------------------------------


async def at_once(service: Service, choices: Sequence[GrowingAnswer], form: Format) -> Response:
    """Return all answers when they are complete."""
    texts = [choice.echoed for choice in choices]
    tokens: list[list[Spelled]] = [[] for _ in choices]
    reasons = ["stop"] * len(choices)
    async with AnswerGroup(service, choices) as answers, aclosing(answers.pieces()) as pieces:
        async for piece in pieces:
            texts[piece.choice] += piece.text
            tokens[piece.choice] += piece.tokens
            reasons[piece.choice] = piece.finished or "stop"
    made = []
    for i, choice in enumerate(choices):
        before = choice.prompt_tokens() if choice.request.prompt_logprobs else ()
        made.append(form.choice(i, texts[i], (*before, *tokens[i]), reasons[i]))
    return json_response(form.whole(made, usage_of(choices, form.body.n)))


def usage_of(choices: Sequence[GrowingAnswer], n: int) -> dict[str, Any]:
    """Return the numbers of tokens; a prompt counts once for its `n` answers."""
    prompt = sum(len(choice.ids) for choice in choices[::n])
    new = sum(choice.tokens for choice in choices)
    cached = sum(choice.end.cached_tokens for choice in choices[::n] if choice.end)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class EventStream(Response):
    """Server-sent events of answers that grow; they are cancelled when the client closes the connection."""

    media_type = "text/event-stream"

    def __init__(self, stack: AsyncExitStack, answers: AnswerGroup, form: Format):
        """`stack` is closed at the end."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._stack, self._answers, self._form = stack, answers, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientDisconnect):
                await unless_gone(HttpRequest(scope, receive), self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await _event(send, dump(chunk))
        except Exception as error:
            known = of_exception(error)
            if known is None:
                raise
            await _event(send, dump(known.body()))
        await _event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        form, choices = self._form, self._answers.choices
        for i, choice in enumerate(choices):
            if (first := form.first(choice, i)) is not None:
                yield form.chunk_of([first])
        async with aclosing(self._answers.pieces()) as pieces:
            async for piece in pieces:
                for delta in _deltas(form, piece):
                    yield form.chunk_of([delta])
        if form.body.stream_options is not None and form.body.stream_options.include_usage:
            yield form.chunk_of([], usage_of(choices, form.body.n))


def _deltas(form: Format, piece: Piece) -> list[dict[str, Any]]:
    made = []
    if piece.text or piece.tokens:
        made.append(form.delta(piece.choice, piece.text, piece.tokens, None))
    if piece.finished:
        made.append(form.delta(piece.choice, "", (), piece.finished))
    return made


async def _event(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


def add_completions(app: FastAPI, service: Service) -> None:
    """Add the endpoints of both kinds of completion."""
    events: dict[int | str, dict[str, Any]] = {
        200: {"content": {"text/event-stream": {}}, "description": "The answers; with `stream`, as events."}
    }

    async def answer(request: HttpRequest, choices: Sequence[GrowingAnswer], form: Format) -> Response:
        if form.body.stream_options is not None and not form.body.stream:
            raise ApiError(400, "stream_options: needs stream: true", param="stream_options")
        if not form.body.stream:
            return await unless_gone(request, at_once(service, choices, form))
        async with AsyncExitStack() as stack:
            stack.enter_context(service.streaming())
            answers = await stack.enter_async_context(AnswerGroup(service, choices))
            return EventStream(stack.pop_all(), answers, form)

    def post(path: str, body: type[GenerationBody], reply: type) -> Callable[[Any], Any]:
        """Return a decorator for the endpoint of a body with the fields of all options."""

        def add(function: Any) -> Any:
            function.__annotations__["body"] = with_options(body)
            return app.post(path, response_model=reply, responses=events, tags=["OpenAI"])(function)

        return add

    @post("/v1/completions", CompletionBody, replies.Completion)
    async def completions(body: CompletionBody, request: HttpRequest) -> Response:
        """Continue prompts; an encoder–decoder answers them."""
        run = service.find(body.model, "generate")
        choices = await unless_gone(request, text_choices(service, run, body))
        return await answer(request, choices, TextFormat(run, body))

    @post("/v1/chat/completions", ChatBody, replies.ChatCompletion)
    async def chat(body: ChatBody, request: HttpRequest) -> Response:
        """Answer a conversation, by a model whose tokenizer has a chat template."""
        run = service.find(body.model, "generate")
        choices = await unless_gone(request, chat_choices(service, run, body))
        return await answer(request, choices, ChatFormat(run, body))

"""Endpoints about the server and its models: lists, tokens, health, version, metrics and the page."""

import asyncio
import secrets
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from anyformer import __version__
from anyformer.generation.http import replies
from anyformer.generation.http.bodies import DetokenizeBody, TokenizeBody
from anyformer.generation.http.errors import ApiError, json_response, unknown_model
from anyformer.generation.http.metrics import MEDIA_TYPE, metrics_text
from anyformer.generation.http.service import ServedRun, Service

POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_info(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    def about(run: ServedRun) -> dict[str, Any]:
        return {
            "id": run.name,
            "object": "model",
            "created": service.started,
            "owned_by": "anyformer",
            "kinds": list(run.kinds),
            "max_model_len": run.model.max_length or run.model.max_source,
        }

    @app.get("/v1/models", response_model=replies.ServedModels, tags=["OpenAI"])
    async def models() -> Response:
        """List the served models."""
        return json_response({"object": "list", "data": [about(run) for run in service.runs.values()]})

    @app.get("/v1/models/{model}", response_model=replies.ServedModel, tags=["OpenAI"])
    async def model(model: str) -> Response:
        """Describe one model."""
        if model not in service.runs:
            raise unknown_model(model, list(service.runs))
        return json_response(about(service.runs[model]))

    @app.post("/tokenize", response_model=replies.Tokenized, tags=["Tokens"])
    async def tokenize(body: TokenizeBody) -> Response:
        """Return the tokens of a text."""
        run = service.find(body.model)
        run.check_texts([body.prompt], "prompt", blank=True)
        reader = run.run.task.source_tokenizer or run.tokenizer
        if body.add_special_tokens and run.model.vocabulary is not None:
            ids = (await asyncio.to_thread(run.writer.prompts, [body.prompt], run.config))[0]
        else:
            ids = (await asyncio.to_thread(reader.encode_batch, [body.prompt]))[0]
        texts = [reader.token(id) for id in ids]
        length = run.model.max_length or run.model.max_source
        return json_response(
            {"model": run.name, "tokens": ids, "texts": texts, "count": len(ids), "max_model_len": length}
        )

    @app.post("/detokenize", response_model=replies.Detokenized, tags=["Tokens"])
    async def detokenize(body: DetokenizeBody) -> Response:
        """Return the text of tokens."""
        run = service.find(body.model)
        text = await asyncio.to_thread(run.tokenizer.decode, body.tokens)
        return json_response({"model": run.name, "prompt": text})

    @app.get("/health", response_model=replies.State, tags=["Server"])
    async def health() -> Response:
        """Return 200 while the process runs."""
        return json_response({"status": "ok"})

    @app.get("/ready", response_model=replies.State, tags=["Server"])
    async def ready() -> Response:
        """Return 200 while new requests are accepted, else 503."""
        if service.closing:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        return json_response({"status": "ready"})

    @app.get("/version", response_model=replies.Version, tags=["Server"])
    async def version() -> Response:
        """Return the version of anyformer."""
        return json_response({"version": __version__})

    @app.get("/metrics", response_class=Response, tags=["Server"], responses=_text("text/plain"))
    async def metrics() -> Response:
        """Return metrics in the text format of Prometheus."""
        return Response(metrics_text(service), media_type=MEDIA_TYPE)

    @app.get("/", response_class=Response, tags=["Server"], responses=_text("text/html"))
    async def page() -> Response:
        """Return the page for the browser."""
        nonce = secrets.token_urlsafe(16)
        text = (resources.files("anyformer.generation.http") / "page.html").read_text(encoding="utf-8")
        headers = {"Content-Security-Policy": POLICY.format(nonce=nonce), "Referrer-Policy": "no-referrer"}
        return Response(text.replace("{nonce}", nonce), media_type="text/html", headers=headers)


def _text(kind: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"content": {kind: {"schema": {"type": "string"}}}, "description": "Text."}}

"""The application: all endpoints, their errors and their description in /openapi.json."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from anyformer import __version__
from anyformer.config.spec import ConfigError
from anyformer.generation.engine.interface import ServingError
from anyformer.generation.http.completions import add_completions
from anyformer.generation.http.encoders import add_encoders
from anyformer.generation.http.errors import ApiError, ErrorResponse, of_exception
from anyformer.generation.http.gate import Gate
from anyformer.generation.http.info import add_info
from anyformer.generation.http.service import Service

# The bodies of requests to models of one kind.
KINDS = {
    "CompletionBody": "completions",
    "ChatBody": "chat",
    "EmbeddingBody": "embeddings",
    "InputBody": "classify",
    "TagBody": "tag",
    "FillMaskBody": "fill-mask",
    "ScoreBody": "score",
    "RerankBody": "rerank",
    "TranslateBody": "translate",
}
STATUSES = {
    400: "Wrong input.",
    401: "The key is missing or wrong.",
    403: "The request comes from another site.",
    404: "There is no such model or path.",
    405: "The path has no such method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait: try again later.",
    500: "The model failed, such as by output that is not finite.",
    503: "The server is shutting down.",
}


def make_app(service: Service) -> FastAPI:
    """Return the application; it starts the engine and closes it."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        async with service.engine:
            yield

    declared: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": what} for status, what in STATUSES.items()
    }
    app = FastAPI(
        title="anyformer",
        version=__version__,
        lifespan=life,
        docs_url=None,  # its page loads scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        responses=declared,
    )
    for kind in (ApiError, ServingError, ConfigError, RequestValidationError):
        app.add_exception_handler(kind, _answer_known)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    add_completions(app, service)
    add_encoders(app, service)
    add_info(app, service)
    app.add_middleware(Gate, service=service)
    described = app.openapi

    def openapi() -> dict[str, Any]:
        found = described()
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # wrong input is 400
        for body, schema in found["components"]["schemas"].items():
            if (model := schema["properties"].get("model")) and "anyOf" in model:  # of a request
                kind = KINDS.get(body)
                able = [name for name, run in service.runs.items() if kind is None or kind in run.kinds]
                model["anyOf"][0]["enum"] = able or list(service.runs)
        return found

    app.openapi = openapi  # type: ignore[method-assign]
    return app


async def _answer_known(_: Request, error: Exception) -> Response:
    known = of_exception(error)
    assert known is not None
    return known.response()


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not supported here"}
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message).response(error.headers)


async def _answer_nobody(_: Request, error: Exception) -> Response:
    return ApiError(400, "the client closed the connection").response()

"""Errors in the shape of OpenAI's interface: {"error": {message, type, param, code}}."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from anyformer.config.spec import ConfigError, Fault, did_you_mean, sentence, shorten
from anyformer.generation.engine.interface import Closing, Failed, QueueFull, ServingError, TooLong, UnknownModel
from anyformer.generation.strategy import options

MAX_MESSAGE = 1000  # characters
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
}
# Fields of OpenAI's interface that clients may send and this server does not support.
UNSUPPORTED = {
    "suffix": "this server does not fill gaps in a text: end the prompt where the text should continue",
    "best_of": "is not supported: use n and choose by logprobs",
    "tools": "is not supported: constrain the answer by response_format",
    "tool_choice": "is not supported",
    "functions": "is not supported: constrain the answer by response_format",
    "function_call": "is not supported",
    "parallel_tool_calls": "is not supported",
    "user": "is not supported: requests are not attributed to users",
    "metadata": "is not supported: nothing is stored",
    "store": "is not supported: nothing is stored",
    "modalities": "is not supported: answers are text",
    "audio": "is not supported: answers are text",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every response with a status of 400 or more."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


class ApiError(Exception):
    """A refused or failed request: its status, message, the field that is wrong, and a code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        message = shorten(str(self), MAX_MESSAGE)
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        return json_response(self.body(), self.status, headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON in ASCII, which has no half characters."""
    return Response(dump(value), status, headers, media_type="application/json")


def dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def of_exception(error: Exception) -> ApiError | None:
    """Return the response to an error of the engine or of wrong input; None for any other error."""
    line = "; ".join(str(error).splitlines())
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, line, code="queue_full")
        case TooLong():
            return ApiError(400, line, code="context_length_exceeded")
        case UnknownModel():
            return ApiError(404, line, param="model", code="model_not_found")
        case Closing():
            return ApiError(503, line, code="shutting_down")
        case Failed():
            return ApiError(500, line)
        case ServingError():
            return ApiError(400, line)
        case ConfigError():
            return ApiError(400, line, param=error.faults[0].path or None)
        case RequestValidationError():
            return _of_validation(error.errors())
        case _:
            return None


def _of_validation(found: Sequence[Any]) -> ApiError:
    first = found[0]
    where = [str(part) for part in first["loc"][1:]]
    path = shorten(".".join(where), 100) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        name = where[-1]
        option = options().get(name)
        other = "" if option is None else f"belongs to {option.owner.title}, and is not a field of this request"
        what = UNSUPPORTED.get(name) or other or "is not a field of this request"
        return ApiError(400, f"{shorten(name, 100)}: {what}", param=path, code="unknown_field")
    if first["type"] == "missing" and not where:
        return ApiError(400, "the body is missing: send JSON with Content-Type: application/json")
    return ApiError(400, str(Fault(path or "body", sentence(first))), param=path)


def unknown_model(name: str, known: Sequence[str]) -> ApiError:
    what = f"model {shorten(name, 100)!r} is not served; {did_you_mean(name, known)}"
    return ApiError(404, what, param="model", code="model_not_found")

"""Limits of the HTTP server; those of the engine are `anyformer.generation.engine.interface.Limits`."""

from anyformer.config.spec import Positive, Size, Spec


class HttpLimits(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """Limits on what one request, or all at once, may take."""

    body: Size = 2**21  # bytes of a request
    requests: Size = 1024  # requests that are being answered
    streams: Size = 256  # answers that are being streamed
    texts: Size = 256  # texts or prompts of a request, times `n`
    header_seconds: Positive = 10.0  # until the header of a request has arrived
    body_seconds: Positive = 30.0  # until its body has arrived
    write_seconds: Positive = 30.0  # for the client to take a piece of a response

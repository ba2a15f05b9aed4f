"""Interface of the engine: the events that answer a `Request`, limits and errors."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from anyformer.config.spec import Flag, Fraction, Size, Spec
from anyformer.data.tokenizer import TextTokenizer
from anyformer.runs.run import Run

Reason = Literal["stop", "length", "cancelled", "error"]
NOT_FINITE = "the model's logits are not finite"  # messages of errors
NOT_FOUND = "no answer was found that meets the constraint"
EncodeKind = Literal["embed", "classify", "tag", "score", "fill_mask", "number"]


class Limits(Spec):  # type: ignore[metaclass]  # derives from type(BaseModel), which mypy cannot follow
    """Limits of an engine, for each of its models."""

    max_rows: Size = 256  # rows that decode together
    page_size: Size = 16  # tokens of a page of the KV cache
    pages: Size | None = None  # of the KV cache; None: as many as `memory` holds
    memory: Fraction = 0.6  # share of the device's free memory for pages, if their number is not given
    prefill_tokens: Size = 2048  # tokens read in one prefill call, padding included
    chunk: Size = 512  # tokens of a prompt that one prefill call reads at most
    queue: Size = 1024  # requests that wait
    context: Size | None = None  # tokens of prompt and answer; None: what the model was trained for
    max_prompt: Size | None = None  # tokens of a prompt or source; None: as many as the model reads
    max_new_tokens: Size | None = None  # largest budget of a request; None: as many as the model writes
    max_beams: Size = 16
    encode_tokens: Size = 8192  # of a batch of texts that are encoded together
    reuse: Flag = True  # skip the beginning of a prompt that earlier requests have read
    # same tensor shapes in every call, by max_rows, max_prompt and max_new_tokens: bit-equal for any other requests
    reproducible: Flag = False
    int8: Flag = False  # store keys and values as 8-bit integers
    # none: nothing is stored, and texts are read again with each token, one request after the other
    cache: Literal["auto", "none"] = "auto"


class Token(NamedTuple):
    """One token of an answer, or of a prompt."""

    id: int
    logprob: float | None = None  # natural logarithm, by the model's own distribution
    top: tuple[tuple[int, float], ...] = ()  # the most probable ids with their log-probabilities, best first


class BeamHypothesis(NamedTuple):
    """An answer of beam search, and the sum of its log-probabilities / its number of tokens ^ length_penalty."""

    ids: tuple[int, ...]  # with its stop id
    score: float


class Finished(NamedTuple):
    """The last event of a request."""

    reason: Reason
    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt, read by earlier requests
    prompt_logprobs: tuple[Token, ...] = ()  # of the prompt's tokens after the first, if requested
    message: str = ""  # of an error
    hypotheses: tuple[BeamHypothesis, ...] = ()  # of beam search, best first


Event = Token | Finished


class WholeAnswer(NamedTuple):
    """An answer at its end."""

    ids: list[int]
    end: Finished
    tokens: list[Token]  # with log-probabilities, if they are requested


@dataclass(frozen=True)
class Model:
    """A model that an engine serves."""

    name: str
    run: Run | None  # None: a bare model, which reads and writes ids only
    tokenizer: TextTokenizer | None
    max_length: int | None  # tokens of prompt and answer, or of the answer of an encoder-decoder; None: unlimited
    max_source: int | None  # tokens of a source; None: unlimited, or no encoder
    vocabulary: int | None  # ids that it writes; None if it does not write
    kinds: tuple[str, ...]  # "generate", "search", and those of `EncodeKind`
    adapters: tuple[str, ...] = ()


class ServingError(Exception):
    """A request that the engine refuses. The message is one line for the caller."""


class QueueFull(ServingError):
    """Too many requests wait: try again later."""


class TooLong(ServingError):
    """Prompt and answer are longer than the model or a limit allows."""


class UnknownModel(ServingError):
    """No model or adapter of this name is served."""


class Unsupported(ServingError):
    """The model or the engine does not support the request."""


class Closing(ServingError):
    """The engine is shutting down, or has not been started."""


class Failed(ServingError):
    """The request was accepted and failed, such as by logits that are not finite."""

"""Request bodies: fields, types and limits. Unknown fields are refused."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, create_model, model_validator

from anyformer.generation.strategy import Option, Temperature, options

MAX_INPUTS = 2048  # texts of a request
MAX_CHOICES = 1000  # of a constraint
MAX_PATTERN = 4096  # characters of a regular expression
MAX_TOP = 20  # alternatives of a token
MAX_KEYS = 1024  # of a table
# options that are no fields: a draft is a run, answers are not n-best lists, and temperature has a default of its own
ELSEWHERE = ("draft", "n_best", "temperature")

# Lists end at their first fault: a list of a million faults would take seconds to report.
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Flag = StrictBool


def _few(value: Any) -> Any:
    """Refuse a table with many keys before each of them is checked."""
    if isinstance(value, dict) and len(value) > MAX_KEYS:
        raise ValueError(f"has {len(value):,} fields, and the limit is {MAX_KEYS:,}")
    return value


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        return _few(value)


class ModelBody(Body):
    model: str | None = Field(None, description="Name of the model; not needed where one model is served.")


class StreamOptions(Body):
    include_usage: Flag = Field(False, description="Send the numbers of tokens in a last chunk.")


class PlainText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    schema_: dict[str, Any] = Field(alias="schema", description="A JSON schema.")
    description: str | None = None
    strict: Flag | None = Field(None, description="Answers always follow the schema.")


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """Constraint on an answer: exactly one of the three."""

    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    regex: Annotated[str, Field(max_length=MAX_PATTERN)] | None = None
    json_: dict[str, Any] | None = Field(None, alias="json", description="A JSON schema.")


BiasId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
BiasValue = Annotated[float, Field(ge=-100, le=100)]


class GenerationBody(ModelBody):
    """Fields of both kinds of completion; `with_options` adds those of filters and strategies."""

    n: int = Field(1, ge=1, le=16, description="Answers to each prompt.")
    temperature: Temperature = Field(1.0, description="0 is greedy.")
    logit_bias: Annotated[dict[BiasId, BiasValue] | None, BeforeValidator(_few)] = Field(
        None, max_length=MAX_KEYS, description="Values added to logits, by token id."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Choice i of a prompt has the seed + i.")
    stop: str | Annotated[list[str], Field(max_length=16, fail_fast=True)] | None = None
    ignore_eos: Flag = Field(False, description="Write max_tokens tokens, whatever they are.")
    stream: Flag = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(GenerationBody):
    prompt: str | Texts | Ids | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="16 if not given.")
    echo: Flag = False
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)


def http_names() -> dict[str, tuple[str, Option]]:
    """Return the fields of filters and strategies: the option of each, and its name."""
    given = ((name, one) for name, one in options().items() if name not in ELSEWHERE)
    return {
        (one.filter and one.filter.http) or name: (name, one)
        for name, one in given
        if not (one.filter and one.filter.in_ids)
    }


def with_options(body: type[Body]) -> type[Body]:
    """Return a body that has a field for each option of decoding, also for those from outside."""
    fields: dict[str, Any] = {
        name: (one.type | None, Field(None, description=one.help)) for name, (_, one) in http_names().items()
    }
    return create_model(body.__name__, __base__=body, __doc__=body.__doc__, **fields)


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="The newer name of max_tokens.")
    logprobs: Flag = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)


class InputBody(ModelBody):
    input: str | Texts


class EmbeddingBody(InputBody):
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, lt=2**31, description="Must be the model's own, if given.")
    prompt_name: str | None = Field(None, description="A prompt of the model that is read before each text.")


class TranslateBody(InputBody):
    beams: int = Field(4, ge=1, le=64, description="1 is greedy.")
    n_best: int = Field(1, ge=1, le=64, description="Translations of each text; at most as many as beams.")
    length_penalty: float = Field(1.0, ge=-5, le=5)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)


class TagBody(ModelBody):
    input: str | Texts | Annotated[list[Texts], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)] = Field(
        description="Texts, or lists of words."
    )


class FillMaskBody(InputBody):
    top_k: int = Field(5, ge=1, le=100)


class RerankBody(ModelBody):
    query: str
    documents: Texts
    top_n: int | None = Field(None, ge=1, lt=2**31)
    return_documents: Flag = True
    label: str | None = Field(None, description="Of a classifier of pairs: the label whose probability is the score.")


class ScoreBody(ModelBody):
    text_1: str | Texts
    text_2: str | Texts
    label: str | None = Field(None, description="Of a classifier of pairs: the label whose probability is the score.")


class TokenizeBody(ModelBody):
    prompt: str
    add_special_tokens: Flag = Field(True, description="As the model reads a prompt; false: the text's tokens alone.")


class DetokenizeBody(ModelBody):
    tokens: Annotated[list[Id], Field(fail_fast=True)]

"""Response bodies, as /openapi.json describes them."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CachedTokens(Reply):
    cached_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class TextUsage(Reply):
    texts: int


Finish = Literal["stop", "length"]


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob]


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Embedding(Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Reply):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Usage


class LabelScore(Reply):
    label: str
    score: float


class Classification(Reply):
    index: int
    label: str | None  # None: a model of several labels predicts none of them
    labels: list[str]  # the predicted ones
    scores: list[LabelScore]


class Classifications(Reply):
    object: Literal["list"]
    model: str
    data: list[Classification]
    usage: TextUsage


class Translation(Reply):
    text: str
    score: float


class Translations(Reply):
    index: int
    text: str
    hypotheses: list[Translation]


class TranslationList(Reply):
    object: Literal["list"]
    model: str
    data: list[Translations]
    usage: Usage


class TaggedWord(Reply):
    word: str
    label: str
    score: float | None


class TaggedSpan(Reply):
    label: str
    text: str
    start: int  # first word
    end: int  # after the last word


class Tagging(Reply):
    index: int
    words: list[TaggedWord]
    spans: list[TaggedSpan]


class Taggings(Reply):
    object: Literal["list"]
    model: str
    data: list[Tagging]
    usage: TextUsage


class Filling(Reply):
    token: int
    text: str
    probability: float


class FilledText(Reply):
    index: int
    masks: list[list[Filling]]


class FilledTexts(Reply):
    object: Literal["list"]
    model: str
    data: list[FilledText]
    usage: TextUsage


class Score(Reply):
    index: int
    score: float


class Scores(Reply):
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: TextUsage


class Document(Reply):
    text: str


class Ranked(Reply):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(Reply):
    id: str
    model: str
    results: list[Ranked]
    usage: TextUsage


class ServedModel(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kinds: list[str]
    max_model_len: int | None


class ServedModels(Reply):
    object: Literal["list"]
    data: list[ServedModel]


class Tokenized(Reply):
    model: str
    tokens: list[int]
    texts: list[str]
    count: int
    max_model_len: int | None


class Detokenized(Reply):
    model: str
    prompt: str


class State(Reply):
    status: Literal["ok", "ready"]


class Version(Reply):
    version: str

"""Endpoints of encoders and translators: vectors, labels, tags, masks, scores of pairs, and translations."""

import asyncio
import base64
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from anyformer.generation.http import replies
from anyformer.generation.http.bodies import (
    EmbeddingBody,
    FillMaskBody,
    InputBody,
    RerankBody,
    ScoreBody,
    TagBody,
    TranslateBody,
)
from anyformer.generation.http.errors import ApiError, json_response
from anyformer.generation.http.service import ServedRun, Service, unless_gone
from anyformer.generation.request import Request
from anyformer.generation.strategy import Beam
from anyformer.tasks.answer_budgets import answer_budget
from anyformer.tasks.metrics import spans

PAIR_KINDS = ("embed", "number", "classify")


def as_list(given: "str | Sequence[str]") -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def listed(run: ServedRun, data: list[dict[str, Any]], usage: dict[str, Any]) -> Response:
    return json_response({"object": "list", "model": run.name, "data": data, "usage": usage})


# -- pairs of texts ---------------------------------------------------------------------------------------------------


async def pair_scores(
    service: Service, run: ServedRun, pairs: Sequence[tuple[str, str]], label: str | None
) -> list[float]:
    """Return the score of each pair: by a model of pairs, or the cosine of two vectors."""
    if "embed" in run.model.kinds:
        if label is not None:
            raise ApiError(400, f"label: {run.name} compares vectors, and has no labels", param="label")
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = dict(zip(texts, map(_unit, await service.encode("embed", texts, run)), strict=True))
        return [float(vectors[a] @ vectors[b]) for a, b in pairs]
    if not getattr(run.run.spec, "pairs", False):
        raise ApiError(400, f"{run.name} reads single texts: scores need a model of pairs or of vectors", param="model")
    if any("\t" in text for pair in pairs for text in pair):
        raise ApiError(400, "a text of a pair may not contain a tab")
    texts = [f"{a}\t{b}" for a, b in pairs]
    if "number" in run.model.kinds:
        return [float(value) for value in await service.encode("number", texts, run)]
    found = await service.encode("classify", texts, run)
    known = [name for name, _ in found[0]]
    if label not in known:
        raise ApiError(400, f"label: name the label whose probability is the score: {', '.join(known)}", param="label")
    return [float(dict(item)[label]) for item in found]


def _unit(vector: Any) -> Any:
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector


# -- translations -----------------------------------------------------------------------------------------------------


async def translate(service: Service, run: ServedRun, body: TranslateBody) -> Response:
    texts = as_list(body.input)
    run.check_texts(texts, "input", blank=True)
    if body.n_best > body.beams:
        raise ApiError(400, f"n_best = {body.n_best}: must be at most beams = {body.beams}", param="n_best")
    if len(texts) > service.limits.texts:
        raise ApiError(400, f"there are {len(texts)} texts, and the limit is {service.limits.texts}", param="input")
    prompts = await asyncio.to_thread(run.writer.prompts, texts, run.config)
    strategy = Beam(beams=body.beams, n_best=body.n_best, length_penalty=body.length_penalty)
    tokens = 0

    async def one(ids: list[int]) -> list[dict[str, Any]]:
        nonlocal tokens
        if not ids:
            return []  # a blank text
        context = service.engine.limits.context
        budget = answer_budget(run.writer, run.run.model, len(ids), body.max_tokens, strategy, context)
        request = Request(torch.tensor([ids]), budget, strategy, run.stop, adapter=run.adapter)
        found = await service.engine.search(request, body.n_best, run.model.name)
        tokens += sum(len(hypothesis.ids) for hypothesis in found)
        return [{"text": run.tokenizer.decode(h.ids), "score": h.score} for h in found]

    tasks = [asyncio.create_task(one(ids)) for ids in prompts]
    try:
        every = await asyncio.gather(*tasks)
    finally:
        for task in tasks:  # no effect on finished ones
            task.cancel()
    data = [
        {"index": i, "text": found[0]["text"] if found else "", "hypotheses": found} for i, found in enumerate(every)
    ]
    read = sum(map(len, prompts))
    return listed(run, data, {"prompt_tokens": read, "completion_tokens": tokens, "total_tokens": read + tokens})


# -- tags -------------------------------------------------------------------------------------------------------------


def _sentence(given: str | list[str], field: str) -> str:
    """Return a text, or words joined by tabs, as the task reads them."""
    if isinstance(given, str):
        return given
    if any("\t" in word or not word.strip() for word in given) or (len(given) == 1 and " " in given[0]):
        raise ApiError(400, f"{field}: a word may not be blank or contain a tab", param="input")
    return "\t".join(given)


def _tagging(run: ServedRun, index: int, item: Sequence[tuple[str, str, float | None]]) -> dict[str, Any]:
    words = [{"word": word, "label": label, "score": score} for word, label, score in item]
    found: list[dict[str, Any]] = []
    if getattr(run.run.spec, "spans", False):
        names = [word for word, _, _ in item]
        for label, start, end in sorted(spans([label for _, label, _ in item]), key=lambda span: span[1]):
            found.append({"label": label, "text": " ".join(names[start:end]), "start": start, "end": end})
    return {"index": index, "words": words, "spans": found}


def add_encoders(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.post("/v1/embeddings", response_model=replies.Embeddings, tags=["OpenAI"])
    async def embeddings(body: EmbeddingBody, request: HttpRequest) -> Response:
        """Return a vector of each text."""
        run, texts = service.find(body.model, "embed"), as_list(body.input)
        run.check_texts(texts, "input")
        prompt = {"prompt_name": body.prompt_name}
        vectors, count = await unless_gone(request, service.encode_counted("embed", texts, run, **prompt))
        size = len(vectors[0])
        if body.dimensions not in (None, size):
            what = f"= {body.dimensions}: the vectors of {run.name} have {size} values and cannot be shortened"
            raise ApiError(400, f"dimensions {what}", param="dimensions")
        data = []
        for i, vector in enumerate(vectors):
            vector = np.asarray(vector, dtype="<f4")
            in_bytes = body.encoding_format == "base64"
            value: Any = base64.b64encode(vector.tobytes()).decode() if in_bytes else vector.tolist()
            data.append({"object": "embedding", "index": i, "embedding": value})
        return listed(run, data, {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count})

    @app.post("/v1/classify", response_model=replies.Classifications, tags=["Encoders"])
    async def classify(body: InputBody, request: HttpRequest) -> Response:
        """Return the label of each text, and the probability of every label."""
        run, texts = service.find(body.model, "classify"), as_list(body.input)
        run.check_texts(texts, "input")
        found = await unless_gone(request, service.encode("classify", texts, run))
        several = run.several_labels
        data = []
        for i, item in enumerate(found):
            best = max(item, key=lambda one: one[1])[0]
            chosen = [label for label, p in item if p > 0.5] if several else [best]
            scores = [{"label": label, "score": float(p)} for label, p in item]
            data.append({"index": i, "label": best if chosen else None, "labels": chosen, "scores": scores})
        return listed(run, data, {"texts": len(texts)})

    @app.post("/v1/tag", response_model=replies.Taggings, tags=["Encoders"])
    async def tag(body: TagBody, request: HttpRequest) -> Response:
        """Return the label of each word, and spans where labels are B-x, I-x and O."""
        run = service.find(body.model, "tag")
        given: Sequence[str | list[str]] = [body.input] if isinstance(body.input, str) else body.input
        texts = [_sentence(one, f"input.{i}") for i, one in enumerate(given)]
        run.check_texts(texts, "input")
        found = await unless_gone(request, service.encode("tag", texts, run))
        return listed(run, [_tagging(run, i, item) for i, item in enumerate(found)], {"texts": len(texts)})

    @app.post("/v1/fill-mask", response_model=replies.FilledTexts, tags=["Encoders"])
    async def fill_mask(body: FillMaskBody, request: HttpRequest) -> Response:
        """Return the most probable tokens at each mask of a text."""
        run, texts = service.find(body.model, "fill_mask"), as_list(body.input)
        run.check_texts(texts, "input")
        top = min(body.top_k, run.tokenizer.size)
        found = await unless_gone(request, service.encode("fill_mask", texts, run, k=top))
        data = [
            {
                "index": i,
                "masks": [
                    [{"token": int(id), "text": text, "probability": float(p)} for id, text, p in mask] for mask in item
                ],
            }
            for i, item in enumerate(found)
        ]
        return listed(run, data, {"texts": len(texts)})

    @app.post("/v1/score", response_model=replies.Scores, tags=["Encoders"])
    async def score(body: ScoreBody, request: HttpRequest) -> Response:
        """Return a score of each pair of texts; one text is compared with all of several."""
        run = service.find(body.model, *PAIR_KINDS)
        left, right = as_list(body.text_1), as_list(body.text_2)
        run.check_texts([*left, *right], "text")
        if len(left) == 1:
            left = left * len(right)
        if len(left) != len(right):
            raise ApiError(400, f"text_1 has {len(left)} texts and text_2 {len(right)}: give one, or equal numbers")
        pairs = list(zip(left, right, strict=True))
        scores = await unless_gone(request, pair_scores(service, run, pairs, body.label))
        data = [{"index": i, "score": value} for i, value in enumerate(scores)]
        return listed(run, data, {"texts": len(pairs)})

    @app.post("/v1/rerank", response_model=replies.Ranking, tags=["Encoders"])
    async def rerank(body: RerankBody, request: HttpRequest) -> Response:
        """Return the documents in the order of their scores with a query."""
        run = service.find(body.model, *PAIR_KINDS)
        run.check_texts([body.query, *body.documents], "documents")
        pairs = [(body.query, document) for document in body.documents]
        scores = await unless_gone(request, pair_scores(service, run, pairs, body.label))
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results = [
            {"index": i, "relevance_score": scores[i]}
            | ({"document": {"text": body.documents[i]}} if body.return_documents else {})
            for i in order
        ]
        named = {"id": f"rerank-{secrets.token_hex(12)}", "model": run.name}
        return json_response({**named, "results": results, "usage": {"texts": len(pairs)}})

    @app.post("/v1/translate", response_model=replies.TranslationList, tags=["Translation"])
    async def translate_texts(body: TranslateBody, request: HttpRequest) -> Response:
        """Return the n-best translations of each text by beam search, with their scores."""
        run = service.find(body.model, "search")
        if run.writer.continues:
            raise ApiError(400, f"{run.name} continues texts: use /v1/completions", param="model", code="unsupported")
        return await unless_gone(request, translate(service, run, body))

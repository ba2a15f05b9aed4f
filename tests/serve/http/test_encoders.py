"""Endpoints of encoders and translators, by the predictions of the run."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from tests.serve.http.served import Server

TEXTS = ["the quick fox", "over the lazy dog", "fox"]


def vectors(server: Server, texts: list[str]) -> np.ndarray:
    return np.array([json.loads(line) for line in server.run("embed").predict(texts)], dtype=np.float32)


def test_embeddings(server: Server) -> None:
    expected = vectors(server, TEXTS)
    plain = server.ok("/v1/embeddings", model="embed", input=TEXTS)
    packed = server.ok("/v1/embeddings", model="embed", input=TEXTS, encoding_format="base64")
    np.testing.assert_allclose([one["embedding"] for one in plain["data"]], expected, atol=1e-6)
    read = [np.frombuffer(base64.b64decode(one["embedding"]), dtype="<f4") for one in packed["data"]]
    np.testing.assert_allclose(read, expected, atol=1e-6)
    run = server.run("embed")
    assert plain["usage"]["prompt_tokens"] == sum(e.length for e in run.task.examples(TEXTS, run.config).values())
    size = expected.shape[1]
    server.ok("/v1/embeddings", model="embed", input="fox", dimensions=size)
    refused = server.refused("/v1/embeddings", model="embed", input="fox", prompt_name="query")
    assert "the model has no prompts" in refused["message"]
    assert "dimensions" in server.refused("/v1/embeddings", model="embed", input="fox", dimensions=size - 1)["message"]


def test_the_openai_client_reads_vectors(server: Server) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
        found = client.embeddings.create(model="embed", input=TEXTS)
    np.testing.assert_allclose([one.embedding for one in found.data], vectors(server, TEXTS), atol=1e-6)


def test_scores_of_vectors_are_cosines(server: Server) -> None:
    unit = vectors(server, TEXTS)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    found = server.ok("/v1/score", model="embed", text_1=TEXTS[0], text_2=TEXTS)["data"]
    np.testing.assert_allclose([one["score"] for one in found], unit @ unit[0], atol=1e-5)
    ranked = server.ok("/v1/rerank", model="embed", query=TEXTS[0], documents=TEXTS[1:], top_n=1)["results"]
    best = int(np.argmax(unit[1:] @ unit[0]))
    assert [(one["index"], one["document"]["text"]) for one in ranked] == [(best, TEXTS[1 + best])]
    assert (
        "document"
        not in server.ok("/v1/rerank", model="embed", query="fox", documents=["a"], return_documents=False)["results"][
            0
        ]
    )


def test_scores_of_pairs(server: Server) -> None:
    probability = server.ok("/v1/score", model="entail", text_1="fox", text_2="dog", label="yes")["data"][0]["score"]
    assert 0 <= probability <= 1
    assert "yes" in server.refused("/v1/score", model="entail", text_1="fox", text_2="dog")["message"]
    server.refused("/v1/score", model="entail", text_1="a\tb", text_2="dog", label="yes")
    server.refused("/v1/score", model="classify", text_1="fox", text_2="dog")
    server.refused("/v1/score", model="embed", text_1=["a", "b"], text_2=["a", "b", "c"])


def test_labels(server: Server) -> None:
    found = server.ok("/v1/classify", model="classify", input=TEXTS)["data"]
    assert [one["label"] for one in found] == server.run("classify").predict(TEXTS)
    assert [one["label"] for one in found[0]["scores"]] == ["no", "yes"]
    several = server.ok("/v1/classify", model="several", input=TEXTS)["data"]
    assert [",".join(one["labels"]) for one in several] == server.run("several").predict(TEXTS)


def test_tags(server: Server) -> None:
    found = server.ok("/v1/tag", model="tag", input=TEXTS)["data"]
    assert [" ".join(word["label"] for word in one["words"]) for one in found] == server.run("tag").predict(TEXTS)
    by_words = server.ok("/v1/tag", model="tag", input=[text.split() for text in TEXTS])["data"]
    assert by_words == found
    for wrong in ([["a\tb", "c"]], [["a", ""]], [["a b"]], " "):
        server.refused("/v1/tag", model="tag", input=wrong)


def test_masks(server: Server) -> None:
    expected = server.run("mlm").alternatives("the <mask> fox", 3)
    (found,) = server.ok("/v1/fill-mask", model="mlm", input="the <mask> fox", top_k=3)["data"][0]["masks"]
    assert [one["text"] for one in found] == [one.token for one in expected]


@pytest.mark.parametrize("options", [{"beams": 1}, {"beams": 3, "n_best": 3}, {"beams": 2, "length_penalty": 0.0}])
def test_translations(server: Server, options: dict[str, Any]) -> None:
    expected = server.run("pair").hypotheses(TEXTS, **options)
    found = server.ok("/v1/translate", model="pair", input=TEXTS, **options)["data"]
    assert [[x["text"] for x in one["hypotheses"]] for one in found] == [[h.text for h in row] for row in expected]
    for one, row in zip(found, expected, strict=True):
        np.testing.assert_allclose([x["score"] for x in one["hypotheses"]], [h.score for h in row], atol=1e-5)
        assert one["text"] == row[0].text


def test_translations_of_blank_texts(server: Server) -> None:
    found = server.ok("/v1/translate", model="pair", input=["", "fox"])["data"]
    assert (found[0]["text"], found[0]["hypotheses"]) == ("", [])
    assert found[1]["hypotheses"]
    server.refused("/v1/translate", model="pair", input="fox", beams=2, n_best=3)
    server.refused("/v1/translate", model="pair", input="fox", length_penalty=-10)  # scores would overflow
    server.refused("/v1/translate", model="lm", input="fox")


def test_tokens(server: Server) -> None:
    found = server.ok("/tokenize", model="lm", prompt="the fox")
    assert found["tokens"] == server.run("lm").tokenizer.encode("the fox")
    assert server.ok("/detokenize", model="lm", tokens=found["tokens"])["prompt"] == "the fox"
    assert server.ok("/tokenize", model="pair", prompt="the fox", add_special_tokens=False)["count"] == 2


def test_blank_texts_and_other_models_are_refused(server: Server) -> None:
    assert "blank" in server.refused("/v1/embeddings", model="embed", input=["fox", " "])["message"]
    assert "completions" not in server.refused("/v1/tag", model="embed", input="fox")["message"]


def test_metrics(server: Server) -> None:
    server.ok("/v1/completions", model="lm", prompt="the", max_tokens=2)
    text = server.client.get("/metrics").text
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds_bucket"):
        assert f'anyformer:{name}{{model_name="lm"' in text
    assert 'anyformer:http_responses_total{path="/v1/completions",status="200"}' in text
    for line in text.splitlines():
        assert line.startswith("#") or float(line.rsplit(" ", 1)[1]) >= 0

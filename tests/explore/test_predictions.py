"""Views about predictions, compared with the Python functions: the lens grid and the log-probability of a text."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from anyformer.config import ConfigError
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.explore.requests import TextRequest
from anyformer.nn.inspection.logit_terms import logit_lens
from anyformer.runs.run_inspection import Reading
from tests.explore.made import RUNS, TEXT, body, made

WITH_LENS = ["pair", "sort", "lm", "window", "latent", "prefix", "spans", "cells", "mlm", "tag", "classify", "several"]


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace({name: OpenRun(name, run, run.folder) for name in RUNS for run in [made(name)]})


def reading_of(workspace: Workspace, request: dict[str, Any]) -> Reading:
    return workspace.trace(TextRequest(**request)).reading


def lens_of(workspace: Workspace, name: str) -> torch.Tensor:
    """Return the probabilities [1 + layers, positions, outputs] of `logit_lens`."""
    reading = reading_of(workspace, body(name))
    logits = logit_lens(workspace.runs[name].run.model, *reading.inputs, **reading.options)
    logits = logits if logits.dim() == 3 else logits[:, 0]
    return logits.sigmoid() if name == "several" else logits.softmax(dim=-1)


@pytest.mark.parametrize("name", WITH_LENS)
def test_the_lens_grid_is_the_logit_lens(workspace: Workspace, name: str) -> None:
    result, expected = workspace.answer("lens", body(name)), lens_of(workspace, name)
    best = expected.max(dim=-1)
    assert result["layers"] == list(range(-1, len(expected) - 1))
    assert len(result["columns"]) == result["count"] == expected.shape[1]
    np.testing.assert_allclose([[p for _, p, _ in row] for row in result["rows"]], best.values, atol=1e-5)
    assert [[id for _, _, id in row] for row in result["rows"]] == best.indices.tolist()
    for layer, at in ((-1, 0), (len(expected) - 2, result["count"] - 1)):
        listed = workspace.answer("cell", body(name, layer=layer, at=at))
        top = expected[layer + 1, at].topk(len(listed["top"]))
        np.testing.assert_allclose([p for _, p in listed["top"]], top.values, atol=1e-5)
        assert listed["top"][0][0] == result["rows"][layer + 1][at][0]
        assert listed["count"] == expected.shape[-1]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_a_long_text_has_pages(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = workspace.answer("lens", body("window"))
    monkeypatch.setattr("anyformer.explore.lens.PAGE", 10)
    pages = [workspace.answer("lens", body("window", first=first)) for first in range(0, whole["count"], 10)]
    assert len(pages[0]["columns"]) == 10
    assert [token for page in pages for token in page["columns"]] == whole["columns"]
    for layer, row in enumerate(whole["rows"]):
        joined = [one for page in pages for one in page["rows"][layer]]
        assert [one[2] for one in joined] == [one[2] for one in row]
    with pytest.raises(ConfigError, match=f"there are {whole['count']} tokens"):
        workspace.answer("lens", body("window", first=whole["count"]))


def test_runs_without_a_lens_are_refused(workspace: Workspace) -> None:
    for name, reason in {"embed": "no probabilities", "regress": "no probabilities", "pooled": "pools tokens"}.items():
        with pytest.raises(ConfigError, match=reason):
            workspace.answer("lens", body(name))
    with pytest.raises(ConfigError, match="layer = 2: must be -1 to 1"):
        workspace.answer("cell", body("window", layer=2, at=0))


@pytest.mark.parametrize("name", ["lm", "window", "latent", "pair", "sort", "spans", "prefix"])
def test_each_token_has_its_log_probability(workspace: Workspace, name: str) -> None:
    """It is that of the model's logits; of a model that answers, the tokens of the answer alone."""
    request = body(name, target="the dog")
    result, reading, run = (
        workspace.answer("surprise", request),
        reading_of(workspace, request),
        workspace.runs[name].run,
    )
    with torch.no_grad():
        log_p = run.model(*reading.inputs, **reading.options)[0].log_softmax(dim=-1)
    ids = reading.inputs[-1][0]
    first = 1 if name in ("lm", "window", "latent") else reading.begins
    assert first is not None
    expected = log_p[first - 1 : -1].gather(1, ids[first:, None])[:, 0]
    assert [row is None for row in result["rows"]] == [i < first for i in range(len(ids))]
    shown = [row["logp"] for row in result["rows"] if row is not None]
    np.testing.assert_allclose(shown, expected, atol=1e-5)
    assert result["perplexity"] == pytest.approx(float((-expected.mean()).exp()), rel=1e-5)
    for row, logits in zip(result["rows"][first:], log_p[first - 1 : -1], strict=True):
        assert row["best"] == run.tokenizer.token(int(logits.argmax()))
        assert (row["rank"] == 1) == (row["logp"] == pytest.approx(float(logits.max()), abs=1e-6))


def test_the_perplexity_is_that_of_the_evaluation(workspace: Workspace) -> None:
    """The mean log-probability equals the run's loss over the same tokens."""
    run, reading = workspace.runs["window"].run, reading_of(workspace, body("window"))
    result = workspace.answer("surprise", body("window"))
    ids = reading.inputs[0]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(run.model(ids)[0, :-1], ids[0, 1:])
    assert result["count"] == len(TEXT) - 1
    assert result["mean"] == pytest.approx(-float(loss), abs=1e-5)


def test_a_text_that_is_not_predicted(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match="no next token"):
        workspace.answer("surprise", body("classify"))
    assert workspace.answer("surprise", body("window", text="t"))["perplexity"] is None

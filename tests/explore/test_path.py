"""Laws of the path and of following a number: stages continue one another, equal the model, and sums add up."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from anyformer.config import ConfigError
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.explore.requests import TextRequest
from anyformer.nn.inspection.ablation import run_without_heads
from tests.explore.made import RUNS, body, made
from tests.explore.test_views import tapped

ATTENTION = ["qkv", "scores", "mask", "softmax", "values", "out"]
EXACT = 1e-5


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace({name: OpenRun(name, run, run.folder) for name in RUNS for run in [made(name)]})


def every_stage(outline: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for side in outline["sides"]:
        for layer, stages in enumerate(side["layers"]):
            yield from ((stage, layer) for stage in (*side["begin"], *stages, *side["end"]))
    yield from ((stage, 0) for stage in outline["head"])


@pytest.mark.parametrize("name", RUNS)
def test_every_stage_equals_the_model(workspace: Workspace, name: str) -> None:
    """The numbers that end a stage, recomputed from those before, are the model's; and they are JSON."""
    checked = set()
    for stage, layer in every_stage(workspace.answer("path", body(name))):
        found = workspace.answer("stage", body(name, stage=stage, layer=layer, head=1))
        json.dumps(found, allow_nan=False)
        if found.get("check") is not None:
            assert found["check"] < EXACT, stage
            checked.add(stage.partition(".")[2])
    assert {"add"} <= checked
    assert name == "cells" or {"softmax", "values", "add"} <= checked


@pytest.mark.parametrize("name", ["pair", "lm", "classify", "window", "latent", "sort", "lora"])
def test_stages_continue_one_another(workspace: Workspace, name: str) -> None:
    """Scores make weights, weights and values make outputs, and the stream of a layer is where the next begins."""
    for side in workspace.answer("path", body(name))["sides"]:
        kinds = {stage.partition(".")[0] for stage in side["layers"][0]}
        for kind in sorted(kinds):

            def ask(stage: str, layer: int = 0, kind: str = kind) -> dict[str, Any]:
                return workspace.answer("stage", body(name, stage=f"{kind}.{stage}", layer=layer, head=1, at=1, key=1))

            scores, mask, softmax, values = (ask(stage) for stage in ("scores", "mask", "softmax", "values"))
            seen = np.array(mask["visible"], bool)
            np.testing.assert_allclose(
                np.array(scores["dots"])[seen] * scores["scale"]
                + (np.array(scores["bias"])[seen] if scores["bias"] else 0),
                np.array(scores["scores"])[seen]
                if scores["cap"] is None
                else np.arctanh(np.array(scores["scores"])[seen] / scores["cap"]) * scores["cap"],
                atol=EXACT,
            )
            assert [score is not None for score in softmax["scores"]] == list(seen)
            made_of = np.exp(np.array(scores["scores"])[seen])
            made_of /= made_of.sum() + (0 if softmax["sink"] is None else np.exp(softmax["sink"]))
            np.testing.assert_allclose(np.array(softmax["weights"])[seen], made_of, atol=EXACT)
            summed = (
                np.sum([weight * np.array(v) for _, weight, v in values["terms"]], axis=0) + values["rest"]["vector"]
            )
            np.testing.assert_allclose(summed, values["result"], atol=EXACT)
            out = ask("out")
            np.testing.assert_allclose(out["output"], values["result"], atol=EXACT)
            if kind == side["side"]:
                real = tapped(workspace, name, f"{kind}.0.mixer.out")[0, 1]
                np.testing.assert_allclose(out["result"], real, atol=EXACT)


@pytest.mark.parametrize("name", RUNS)
def test_the_vector_that_is_projected_is_named_by_its_norm(workspace: Workspace, name: str) -> None:
    """It is the result of the step before where a norm stands there, and the vector of the stream where none does."""
    for side in workspace.answer("path", body(name))["sides"]:
        for stage in (stage for stage in side["layers"][0] if stage.endswith(".qkv")):
            found, kind = (
                workspace.answer("stage", body(name, stage=stage, head=0, at=1, key=1)),
                stage.partition(".")[0],
            )
            assert bool(found["before"]) == (f"{kind}.norm" in side["layers"][0])
            if found["before"]:
                norm = workspace.answer("stage", body(name, stage=f"{kind}.norm", head=0, at=1, key=1))
                assert (norm["norm"], norm["result"]) == (found["before"], found["read"])


@pytest.mark.parametrize("name", RUNS)
def test_sums_add_up_on_every_level(workspace: Workspace, name: str) -> None:
    """From the output to positions, parts, heads, tokens or neurons, and dimensions."""
    outline = workspace.answer("path", body(name))
    parts = workspace.answer("follow", body(name, level="parts"))
    assert parts["total"] == pytest.approx(parts["value"], abs=EXACT)
    assert sum(term["value"] for term in parts["terms"]) + parts["constant"] == pytest.approx(parts["total"], abs=1e-9)
    assert ("follow.positions" in outline["follow"]) == parts["pooled"]
    if parts["pooled"]:
        positions = workspace.answer("follow", body(name, level="positions"))
        assert positions["total"] == pytest.approx(positions["value"], abs=EXACT)
        assert dict(positions["terms"])[positions["place"]] == pytest.approx(parts["value"], abs=EXACT)
    for term in parts["terms"]:
        if not term["heads"]:
            found = workspace.answer("follow", body(name, level="tokens", part=term["name"]))
            assert found["value"] == term["value"]
            assert found["total"] == pytest.approx(found["value"], abs=EXACT)
            continue
        assert sum(term["heads"]) + term["bias"] == pytest.approx(term["value"], abs=EXACT)
        for head, value in enumerate(term["heads"]):
            request = body(name, part=f"{term['name']}.{head}")
            tokens = workspace.answer("follow", {**request, "level": "tokens"})
            assert tokens["value"] == value
            assert sum(tokens["terms"]) == pytest.approx(value, abs=EXACT)
            inside = workspace.answer("follow", {**request, "level": "dimensions"})
            assert inside["value"] == pytest.approx(tokens["terms"][inside["key"]], abs=EXACT)
            assert sum(inside["terms"]) * inside["weight"] == pytest.approx(inside["value"], abs=EXACT)
            assert sum(inside["scored"]) == pytest.approx(inside["dot"], abs=EXACT)
            score = inside["capped"] + (inside["bias"] or 0)
            assert inside["score"] == pytest.approx(score, abs=EXACT)
            if inside["sum"] is not None:
                assert np.exp(inside["score"] - inside["sum"]) == pytest.approx(inside["weight"], abs=EXACT)


@pytest.mark.parametrize("name", ["pair", "sort", "mlm", "tag", "classify"])
def test_the_followed_number_is_the_models(workspace: Workspace, name: str) -> None:
    """Any output at any position, also with a head off: then the head has no term."""
    run, reading = workspace.runs[name].run, workspace.trace(TextRequest(**body(name))).reading
    with torch.no_grad():
        out = run.model(*reading.inputs, **reading.options)
    for at, index in ((0, 1), (1, 0)):
        found = workspace.answer("follow", body(name, level="parts", at=at, output=index))
        value = float(out[0, at, index] if out.dim() == 3 else out[0, index])
        assert found["output"][2] == pytest.approx(value, abs=EXACT)
        first = next(term for term in found["terms"] if term["heads"])
        kind, layer, part = first["name"].split(".")
        off = (f"{'cross' if part == 'cross' else kind}.{layer}.0",)
        without = workspace.answer("follow", body(name, level="parts", at=at, output=index, without=off))
        with torch.no_grad():
            alone = run_without_heads(run.model, {first["name"]: [0]}, *reading.inputs, **reading.options)
        value = float(alone[0, at, index] if alone.dim() == 3 else alone[0, index])
        assert without["output"][2] == pytest.approx(value, abs=EXACT)
        assert without["total"] == pytest.approx(without["value"], abs=EXACT)
        again = next(term for term in without["terms"] if term["name"] == first["name"])
        assert again["heads"][0] == 0


def test_layers_without_attention_are_one_stage(workspace: Workspace) -> None:
    (encoder, decoder) = workspace.answer("path", body("cells"))["sides"]
    assert all("encoder.mix" in stages for stages in encoder["layers"])
    assert decoder["layers"][0] == ["decoder.norm", "decoder.mix", "decoder.add"]
    found = workspace.answer("stage", body("cells", stage="decoder.mix", at=1))
    np.testing.assert_allclose(found["result"], tapped(workspace, "cells", "decoder.0.mixer.out")[0, 1], atol=EXACT)


@pytest.mark.parametrize(
    ("name", "request_", "message"),
    [
        ("lm", {"stage": "cross.qkv"}, "no such stage"),
        ("lm", {"stage": "nothing"}, "no such stage"),
        ("cells", {"stage": "decoder.qkv"}, "no such stage"),
        ("lm", {"stage": "decoder.qkv", "at": 99}, "tokens, from 0"),
        ("pair", {"stage": "encoder.qkv", "key": 99}, "tokens, from 0"),
        ("lm", {"level": "parts", "output": 999}, "outputs, from 0"),
        ("lm", {"level": "tokens", "part": "decoder.9.mixer.0"}, "no such head or sublayer"),
        ("lm", {"level": "positions"}, "reads one position"),
    ],
)
def test_wrong_requests_are_refused(workspace: Workspace, name: str, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workspace.answer("stage" if "stage" in request_ else "follow", body(name, **request_))

"""Views about causes, compared with the Python functions: salience, scores and effects of heads, patching."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from anyformer.config import ConfigError, TokenLabels
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.explore.requests import TextRequest
from anyformer.nn.inspection.ablation import head_scores, logit, run_without_heads
from anyformer.nn.inspection.attribution import attribute, integrated_gradients
from anyformer.nn.inspection.head_patterns import head_statistics
from anyformer.nn.inspection.sublayers import attentions
from anyformer.nn.inspection.taps import run_with_patches, run_with_taps
from anyformer.nn.model import Transformer
from anyformer.recipe import Tag
from anyformer.runs.run_inspection import Reading, read
from tests.explore import made as making
from tests.explore.made import RUNS, TEXT, body, made

NAMES = ["pair", "sort", "lm", "window", "latent", "prefix", "classify", "several", "regress", "mlm", "tag", "embed"]
OTHER = "the quick fox jumps over the fox"  # of the same number of words as TEXT


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace({name: OpenRun(name, run, run.folder) for name in (*RUNS,) for run in [made(name)]})


def reading_of(workspace: Workspace, request: dict[str, Any]) -> Reading:
    return workspace.trace(TextRequest(**request)).reading


def model_of(workspace: Workspace, name: str) -> Transformer:
    return workspace.runs[name].run.model


@pytest.mark.parametrize("name", NAMES)
def test_salience_is_that_of_the_attributions(workspace: Workspace, name: str) -> None:
    """By default of the most probable output; both methods, and the sum over all tokens."""
    reading, model = reading_of(workspace, body(name)), model_of(workspace, name)
    for method, function in (("gradient", attribute), ("integrated", integrated_gradients)):
        result = workspace.answer("salience", body(name, method=method))
        expected = function(model, logit(result["output"]["id"], result["at"]), *reading.inputs, **reading.options)
        assert list(result["sides"]) == list(reading.tokens)
        for side, values in result["sides"].items():
            np.testing.assert_allclose(values, expected.tokens[side][0], atol=1e-5, rtol=1e-4)
        assert result["value"] == pytest.approx(result["output"]["value"], abs=1e-5)
        total = sum(sum(values) for values in result["sides"].values())
        assert result["total"] == pytest.approx(total, rel=1e-4, abs=1e-4)
        assert (result["baseline"] is None) == (method == "gradient")
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_salience_of_another_output_with_a_head_off(workspace: Workspace) -> None:
    result = workspace.answer("salience", body("lm", at=4, output=7, off=["decoder.0.0"]))
    reading, model = reading_of(workspace, body("lm")), model_of(workspace, "lm")
    off = run_without_heads(model, {"decoder.0.mixer": [0]}, *reading.inputs).detach()
    assert result["value"] == pytest.approx(float(off[0, 4, 7]), abs=1e-5)
    assert not any(result["sides"]["decoder"][5:])  # later tokens are not seen
    with pytest.raises(ConfigError, match=r"there are \d+ outputs"):
        workspace.answer("salience", body("lm", output=10**6))


def test_outputs_of_a_crf_do_not_stand_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    joint = making.encoder(making.stack(), TokenLabels(labels=3, crf=True))
    monkeypatch.setitem(RUNS, "joint", (Tag(labels=("a", "b", "c")), joint, making.WORDS))
    run = made("joint")
    workspace = Workspace({"joint": OpenRun("joint", run, run.folder)})
    for view, more in (("salience", {}), ("lens", {}), ("patch", {"donor": OTHER})):
        with pytest.raises(ConfigError, match=r"jointly|probabilities|answers"):
            workspace.answer(view, body("joint", **more))


@pytest.mark.parametrize("name", ["pair", "sort", "lm", "classify"])
def test_scores_are_the_statistics_of_the_maps(workspace: Workspace, name: str) -> None:
    heads, reading = workspace.answer("scores", body(name))["heads"], reading_of(workspace, body(name))
    known = attentions(model_of(workspace, name))
    assert len(heads) == sum(attention.heads for attention in known.values())
    for layer_name in known:
        side, layer, sublayer = layer_name.split(".")
        _, seen = run_with_taps(model_of(workspace, name), [f"{layer_name}.weights"], *reading.inputs)
        cross = sublayer == "cross"
        ids = None if cross else reading.distinct_ids(side)  # type: ignore[arg-type]
        expected = head_statistics(seen[f"{layer_name}.weights"][None], ids, cross=cross)
        for head, pattern in enumerate(expected.names()[0]):
            found = heads[f"{'cross' if cross else side}.{layer}.{head}"]
            assert found["name"] == pattern
            for score in ("previous", "induction", "spread", "distance"):
                value = float(getattr(expected, score)[0, head])
                assert (found[score] is None) == np.isnan(value)
                assert found[score] is None or found[score] == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("name", ["pair", "lm", "classify", "several", "regress"])
def test_effects_are_those_of_the_ablation(workspace: Workspace, name: str) -> None:
    """The change of the log-probability of the most probable output; of one without, of the output itself."""
    result, reading = workspace.answer("effects", body(name)), reading_of(workspace, body(name))
    at, id, model = result["at"], result["output"]["id"], model_of(workspace, name)
    assert result["of"] == ("value" if name in ("several", "regress") else "logp")

    def measure(output: torch.Tensor) -> torch.Tensor:
        values = output[0, at] if output.dim() == 3 else output[0]
        return values[id] if result["of"] == "value" else values.log_softmax(-1)[id]

    tables = head_scores(model, measure, *reading.inputs, **reading.options)
    for key, change in result["heads"].items():
        kind, layer, head = key.split(".")
        table = tables["decoder.cross" if kind == "cross" else f"{kind}.mixer"]
        assert change == pytest.approx(float(table[int(layer), int(head)]), abs=1e-5)


def test_effects_and_patches_are_limited(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyformer.explore.trace.MAX_PASSES", 9)
    with pytest.raises(ConfigError, match="16 forward passes, and 9 of this text are allowed: shorten"):
        workspace.answer("effects", body("pair"))
    request = body("lm", donor=f"x{TEXT[1:]}")
    last = workspace.answer("patch", request)["differ"][-1]
    patched = workspace.answer("patch", {**request, "at": last})
    assert patched["limited"]
    assert len(patched["positions"]) == len(patched["cells"][0]) == 2  # four rows: the embeddings and three layers


def donor_of(workspace: Workspace, name: str, reading: Reading) -> Reading:
    """Return the donor as the model reads it, with the decoder's tokens of the first text."""
    found = read(workspace.runs[name].run, OTHER)
    if len(found.inputs) == 2:
        return Reading((found.inputs[0], reading.inputs[1]), found.options, found.tokens)
    return found


@pytest.mark.parametrize(
    ("name", "side"), [("pair", "encoder"), ("pair", "decoder"), ("lm", "decoder"), ("window", "decoder")]
)
def test_patches_are_those_of_the_model(workspace: Workspace, name: str, side: str) -> None:
    """Each cell equals one call of `run_with_patches`; the effect is 0 at A's output and 1 at B's."""
    check_patches(workspace, name, side)


@pytest.mark.parametrize("name", ["classify", "tag", "mlm"])
def test_patches_of_encoders(workspace: Workspace, name: str) -> None:
    check_patches(workspace, name, "encoder")


def check_patches(workspace: Workspace, name: str, side: str) -> None:
    text = {"mlm": "the <mask> fox jumps over the dog"}.get(name, TEXT)
    request = body(name, text=text, donor=OTHER, side=side)
    at = next(
        at for at in (-1, *range(7)) if (result := workspace.answer("patch", {**request, "at": at}))["cells"] or at == 6
    )
    assert result["fits"], at
    a, model = reading_of(workspace, body(name, text=text)), model_of(workspace, name)
    b, at = donor_of(workspace, name, a), result["at"]
    with torch.no_grad():
        before, after = model(*a.inputs, **a.options), model(*b.inputs, **b.options)

    def values(output: torch.Tensor) -> torch.Tensor:
        return (output[0, at] if output.dim() == 3 else output[0]).double()

    first, second = int(values(before).argmax()), int(values(after).argmax())
    assert (result["a"]["id"], result["b"]["id"]) == (first, second)
    assert result["a"]["pa"] == pytest.approx(float(values(before).softmax(-1)[first]), abs=1e-5)
    assert result["b"]["pb"] == pytest.approx(float(values(after).softmax(-1)[second]), abs=1e-5)
    if first == second:
        assert not result["cells"]
        return
    low, high = (float(values(x)[second] - values(x)[first]) for x in (before, after))
    names = [f"{side}.embed", *(f"{side}.{i}.out" for i in result["layers"][1:])]
    for row, tap in enumerate(names):
        with torch.no_grad():
            donor = run_with_taps(model, [tap], *b.inputs, **b.options)[1][tap]
        for column in {0, len(result["positions"]) - 1}:
            position, cell = result["positions"][column], result["cells"][row][column]

            def change(x: torch.Tensor, donor: torch.Tensor = donor, position: int = position) -> torch.Tensor:
                return torch.cat((x[:, :position], donor[:, position : position + 1], x[:, position + 1 :]), dim=1)

            with torch.no_grad():
                found = values(run_with_patches(model, {tap: change}, *a.inputs, **a.options))
            assert cell["pa"] == pytest.approx(float(found.softmax(-1)[first]), abs=1e-5)
            assert cell["pb"] == pytest.approx(float(found.softmax(-1)[second]), abs=1e-5)
            moved = (float(found[second] - found[first]) - low) / (high - low)
            assert cell["effect"] == pytest.approx(moved, abs=1e-4)


def test_all_of_the_last_layer_is_the_other_text(workspace: Workspace) -> None:
    """Patching the position itself after the last layer gives B's answer: its effect is 1."""
    result = workspace.answer("patch", body("window", donor=TEXT[:-1] + "x"))
    row = result["cells"][-1]
    assert row[result["positions"].index(result["at"])]["effect"] == pytest.approx(1, abs=1e-5)
    assert result["positions"][0] == len(TEXT) - 1  # tokens before the first difference are equal


def test_texts_of_different_lengths_do_not_fit(workspace: Workspace) -> None:
    result = workspace.answer("patch", body("classify", donor="the dog"))
    assert result["fits"] is False
    ((first, second),) = result["counts"].values()
    assert first - second == 5
    same = workspace.answer("patch", body("lm", donor=TEXT))
    assert same["cells"] == same["differ"] == []
    with pytest.raises(ConfigError, match="the stacks are decoder"):
        workspace.answer("patch", body("lm", donor=TEXT, side="encoder"))
    for name in ("embed", "regress"):
        with pytest.raises(ConfigError, match="no answers"):
            workspace.answer("patch", body(name, donor=OTHER))


@pytest.mark.parametrize("name", ["lm", "pair", "classify", "several", "tag", "mlm"])
def test_probabilities_before_and_after_are_of_the_same_tokens(workspace: Workspace, name: str) -> None:
    kind = "decoder" if name in ("lm", "pair") else "encoder"
    request = body(name, off=[f"{kind}.0.0", f"{kind}.1.1"])
    result, reading, model = (
        workspace.answer("ablated", request),
        reading_of(workspace, request),
        model_of(workspace, name),
    )
    with torch.no_grad():
        on = model(*reading.inputs, **reading.options)
        off = run_without_heads(model, {f"{kind}.0.mixer": [0], f"{kind}.1.mixer": [1]}, *reading.inputs)
    values = [(x[0, result["at"]] if x.dim() == 3 else x[0]).double() for x in (on, off)]
    before, after = [x.sigmoid() for x in values] if name == "several" else [x.softmax(-1) for x in values]
    best = int(before.argmax())
    assert result["rows"][0][1:] == pytest.approx([float(before[best]), float(after[best])], abs=1e-5)
    moved = (after - before).clamp(min=0).sum() if name != "several" else (after - before).abs().max()
    assert result["moved"] == pytest.approx(float(moved), abs=1e-5)
    assert result["logp"] == pytest.approx(float(after[best].log() - before[best].log()), abs=1e-4)
    changes = [abs(after - before) for _, before, after in result["rows"][1:]]
    assert changes == sorted(changes, reverse=True)


def test_the_highest_weight_of_each_query(workspace: Workspace) -> None:
    shown = workspace.answer("heads", body("window", kind="decoder", layer=1))
    reading = reading_of(workspace, body("window"))
    with torch.no_grad():
        taps = run_with_taps(model_of(workspace, "window"), ["decoder.1.mixer.weights"], *reading.inputs)[1]
    np.testing.assert_allclose(shown["highest"], taps["decoder.1.mixer.weights"][0].amax(dim=-1), atol=2e-6)

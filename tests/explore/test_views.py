"""Laws of the views: the page shows what the model computes, for every shape and task."""

import json
from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import anyformer as af
from anyformer.config import ConfigError
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.explore.requests import TextRequest
from anyformer.nn.inspection.ablation import run_without_heads
from anyformer.nn.inspection.cache_growth import cache_growth
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.logit_terms import logit_lens
from anyformer.nn.inspection.sublayers import attentions
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.runs.run_inspection import Reading, read
from tests.explore.made import RUNS, TARGETS, TEXT, body, made

ATTENDING = [name for name in RUNS if name != "cells"]
WRITING = ["pair", "sort", "lm", "window", "latent", "relu", "prefix", "spans", "cells"]
PREDICTING_TOKENS = [*WRITING, "mlm", "lora"]


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace({name: OpenRun(name, run, run.folder) for name in RUNS for run in [made(name)]})


def layers_of(workspace: Workspace, name: str) -> list[tuple[str, int, int]]:
    """Return every kind and layer of a run with its number of heads."""
    kinds = workspace.runs[name].about()["kinds"]
    return [
        (kind, layer, heads)
        for kind, result in kinds.items()
        for layer, heads in zip(result["layers"], result["heads"], strict=True)
    ]


def attention(kind: str, layer: int) -> str:
    return f"decoder.{layer}.cross" if kind == "cross" else f"{kind}.{layer}.mixer"


def numbers(result: dict[str, Any]) -> NDArray[np.float32]:
    return np.frombuffer(b64decode(result["values"]), "<f4").reshape(result["shape"])


def reading_of(workspace: Workspace, name: str) -> Reading:
    return workspace.trace(TextRequest(**body(name))).reading


def tapped(workspace: Workspace, name: str, tap: str) -> Tensor:
    """Return an activation of the model for the same text."""
    run, reading = workspace.runs[name].run, reading_of(workspace, name)
    with torch.no_grad():
        return run_with_taps(run.model, [tap], *reading.inputs, **reading.options)[1][tap]


@pytest.mark.parametrize("name", ATTENDING)
def test_maps_are_those_of_the_model(workspace: Workspace, name: str) -> None:
    """Weights equal the model's; rows sum to one unless there is a sink; names and links follow from them."""
    for kind, layer, heads in layers_of(workspace, name):
        real = tapped(workspace, name, f"{attention(kind, layer)}.weights")[0].numpy()
        shown = workspace.answer("heads", body(name, kind=kind, layer=layer))
        small = workspace.answer("model", body(name, kind=kind))
        for head in range(heads):
            result = workspace.answer("matrix", body(name, kind=kind, layer=layer, head=head))
            weights = numbers(result)
            np.testing.assert_allclose(weights, real[head], atol=1e-6)
            if name not in ("relu", "window"):
                np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-5)
            links = shown["links"][head]
            assert all(abs(weights[query, key] - weight) < 1e-4 for query, key, weight in links)
            assert [link[2] for link in links] == sorted((link[2] for link in links), reverse=True)
            firsts = {query: key for query, key, _ in reversed(links)}
            assert all(weights[query, key] >= weights[query].max() - 1e-4 for query, key in firsts.items())
            pooled = np.frombuffer(b64decode(small["maps"][f"{layer}.{head}"]), "u1").reshape(
                small["sizes"][str(layer)]
            )
            assert pooled.max() in (0, 255)
            assert small["peaks"][f"{layer}.{head}"] == pytest.approx(float(weights.max()), abs=1e-6)
            assert result["rows"] == shown["rows"]
            assert result["columns"] == shown["columns"]
        assert shown["names"] == [small["names"][f"{layer}.{head}"] for head in range(heads)]


@pytest.mark.parametrize("name", ATTENDING)
def test_scores_masks_and_biases_make_the_weights(workspace: Workspace, name: str) -> None:
    run = workspace.runs[name].run
    for kind, layer, heads in layers_of(workspace, name):
        inner = attentions(run.model)[attention(kind, layer)]
        for head in range(heads):
            place = body(name, kind=kind, layer=layer, head=head)
            result = {
                what: workspace.answer("matrix", {**place, "what": what}) for what in ("weights", "mask", "scores")
            }
            weights, mask, scores = (numbers(one).astype("f8") for one in result.values())
            assert set(np.unique(mask)) <= {0, 1}
            assert ((scores > -1e29) == (mask == 1)).all()
            assert (weights[mask == 0] == 0).all()
            sink = 0.0 if inner.sinks is None else np.exp(float(inner.sinks[head].detach()))
            if result["weights"]["normalizer"] == "relu":
                made_of = np.maximum(scores, 0) / mask.sum(axis=1, keepdims=True)
            else:
                made_of = np.exp(scores) / (np.exp(scores).sum(axis=1, keepdims=True) + sink)
            np.testing.assert_allclose(made_of, weights, atol=1e-5)
            bias = workspace.answer("matrix", {**place, "what": "bias"})
            assert (bias["values"] is not None) == (name in ("pair", "sort", "entail", "distances") and kind != "cross")
            if bias["values"] is not None:
                assert ((numbers(bias) > -1e29) == (mask == 1)).all()


@pytest.mark.parametrize("name", ATTENDING)
def test_the_numbers_behind_a_link_add_up(workspace: Workspace, name: str) -> None:
    for kind, layer, heads in layers_of(workspace, name):
        for head in {0, heads - 1}:
            place = body(name, kind=kind, layer=layer, head=head)
            scores, weights = (numbers(workspace.answer("matrix", {**place, "what": w})) for w in ("scores", "weights"))
            t, s = scores.shape
            for query, key in {(t - 1, 0), (t // 2, s // 2), (0, s - 1)}:
                result = workspace.answer("neuron", {**place, "query": query, "key": key})
                product = np.array(result["q"]) * np.array(result["k"])
                np.testing.assert_allclose(result["product"], product, atol=1e-5)
                assert result["dot"] == pytest.approx(product.sum(), abs=1e-4)
                score = result["dot"] * result["scale"]
                score = score if result["cap"] is None else result["cap"] * np.tanh(score / result["cap"])
                assert result["visible"] == bool(scores[query, key] > -1e29)
                if result["visible"]:
                    assert result["score"] == pytest.approx(score + (result["bias"] or 0), abs=1e-4)
                    assert result["score"] == pytest.approx(float(scores[query, key]), abs=1e-4)
                else:
                    assert result["score"] is None
                assert result["weight"] == pytest.approx(float(weights[query, key]), abs=1e-6)
                np.testing.assert_allclose(result["row"], weights[query], atol=1e-6)


@pytest.mark.parametrize("name", ATTENDING)
def test_heads_that_are_off(workspace: Workspace, name: str) -> None:
    """With one head off, the output equals that of `run_without_heads`; afterwards the model is unchanged."""
    run, (kind, layer, heads) = workspace.runs[name].run, layers_of(workspace, name)[-1]
    target = "the dog" if name in WRITING else TARGETS.get(name)
    request = body(name, target=target, off=[f"{kind}.{layer}.{heads - 1}"])
    trace = workspace.trace(TextRequest(**request))
    reading = trace.reading
    with torch.no_grad():
        off = run_without_heads(run.model, {attention(kind, layer): [heads - 1]}, *reading.inputs, **reading.options)
        on = run.model(*reading.inputs, **reading.options)
    if trace.output.numel():
        torch.testing.assert_close(trace.output, off)
        assert not torch.equal(off, on)
    else:
        side = "decoder" if run.config.decoder else "encoder"
        result = workspace.answer("next", {**request, "at": -1})
        best = off[0, result["at"]].topk(len(result["logits"])).values
        np.testing.assert_allclose([logit for _, logit in result["logits"]], best, atol=1e-5)
        assert not torch.equal(off, on)
        assert result["token"] == reading.tokens[side][result["at"]]
    again = workspace.trace(TextRequest(**{**request, "off": []})).reading
    with torch.no_grad():
        assert torch.equal(on, run.model(*again.inputs, **again.options))
    with pytest.raises(ConfigError, match="there is no such head"):
        workspace.answer("read", {**request, "off": [f"{kind}.{layer}.{heads}"]})


def test_heads_of_layers_with_shared_weights_are_switched_separately(workspace: Workspace) -> None:
    """One module runs in three layers; a head is disabled in one of them."""
    run = workspace.runs["lm"].run
    outs = {}
    for layer in range(3):
        result = workspace.answer("next", body("lm", off=[f"decoder.{layer}.0"], at=-1))
        reading = read(run, TEXT)
        off = run_without_heads(run.model, {f"decoder.{layer}.mixer": [0]}, *reading.inputs)
        outs[layer] = [logit for _, logit in result["logits"]]
        np.testing.assert_allclose(outs[layer], off[0, -1].detach().topk(len(outs[layer])).values, atol=1e-5)
    assert outs[0] != outs[1] != outs[2]


@pytest.mark.parametrize("name", [*WRITING, "lora"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "seed": 3}])
def test_the_stream_equals_generate(workspace: Workspace, name: str, options: dict[str, Any]) -> None:
    run = workspace.runs[name].run
    lines = list(workspace.answer("write", body(name, max_new_tokens=5, **options)))
    (expected,) = run.generate([body(name)["text"]], max_new_tokens=5, **options)
    *tokens, last = lines
    assert last == {"done": True, "text": expected}
    assert all(line["top"] == sorted(line["top"], key=lambda pair: -pair[1]) for line in tokens)
    assert all(line["p"] <= line["top"][0][1] + 1e-6 for line in tokens)
    if not options:
        assert all(line["token"] == line["top"][0][0] for line in tokens)
        answer = workspace.answer("read", body(name))
        begins = answer["begins"]
        if name not in ("lm", "window", "latent", "relu", "lora", "prefix"):
            side = answer["tokens"]["decoder"][begins:]
            assert [line["token"] for line in tokens][: len(side)] == side[: len(tokens)]
    assert [line["cache"] for line in tokens] == sorted(line["cache"] for line in tokens)


def test_disabled_heads_change_the_generated_text(workspace: Workspace) -> None:
    """It equals that of a run with zeros in its output projection; between two tokens all heads are enabled."""
    request, off = (
        body("window", max_new_tokens=6),
        [f"decoder.{layer}.{head}" for layer in (0, 1) for head in range(4)],
    )
    before, run = list(workspace.answer("write", request)), workspace.runs["window"].run
    streamed = workspace.answer("write", {**request, "off": off})
    first = next(streamed)
    assert list(workspace.answer("write", request)) == before
    silenced = made("window")
    with torch.no_grad():
        for block in silenced.model.decoder.blocks:
            block.mixer.inner.out.weight.zero_()
    assert [first, *streamed][-1]["text"] == silenced.generate([TEXT], max_new_tokens=6)[0]
    assert before[-1]["text"] == run.generate([TEXT], max_new_tokens=6)[0]
    assert before[-1]["text"] != silenced.generate([TEXT], max_new_tokens=6)[0]


@pytest.mark.parametrize("name", PREDICTING_TOKENS)
def test_next_token_and_logit_lens(workspace: Workspace, name: str) -> None:
    """At the first and last position: the model's logits, the number of the others, and the result of `logit_lens`."""
    run = workspace.runs[name].run
    reading = reading_of(workspace, name)
    layers = logit_lens(run.model, *reading.inputs, **reading.options)[:, 0]  # [1 + layers, t, v]
    for at in (0, layers.shape[1] - 1):
        result = workspace.answer("next", body(name, at=at))
        logits = layers[-1, at]
        shown = [logit for _, logit in result["logits"]]
        np.testing.assert_allclose(shown, logits.topk(len(shown)).values, atol=1e-5)
        assert result["rest"] is None or result["rest"]["count"] == len(logits) - len(shown)
        for layer, one in enumerate(result["lens"]):
            assert one["layer"] == layer - 1
            p = layers[layer, at].softmax(-1)
            np.testing.assert_allclose([value for _, value in one["top"]], p.topk(5).values, atol=1e-5)
            assert one["entropy"] == pytest.approx(float(torch.special.entr(p).sum()), abs=1e-4)


def test_next_token_with_pooled_tokens(workspace: Workspace) -> None:
    run, reading = workspace.runs["pooled"].run, reading_of(workspace, "pooled")
    with torch.no_grad():
        logits = run.model(*reading.inputs)[0]
    for at in range(len(logits)):
        result = workspace.answer("next", body("pooled", at=at))
        np.testing.assert_allclose([x for _, x in result["logits"]], logits[at].sort(descending=True).values, atol=1e-5)
        assert [one["layer"] for one in result["lens"]] == [1]


def test_tokens_that_are_not_listed_count(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their log-sum-exp is exact at every temperature of the slider."""
    whole = workspace.answer("next", body("pair", at=-1))
    assert whole["rest"] is None
    monkeypatch.setattr("anyformer.explore.views.TOP_LOGITS", 3)
    part = workspace.answer("next", body("pair", at=-1))
    logits = torch.tensor([logit for _, logit in whole["logits"]], dtype=torch.float64)
    for temperature, lse in zip(part["rest"]["temperatures"], part["rest"]["lse"], strict=True):
        listed = torch.tensor([logit for _, logit in part["logits"]], dtype=torch.float64) / temperature
        both = torch.cat((listed, torch.tensor([lse], dtype=torch.float64))).logsumexp(0)
        torch.testing.assert_close(both, (logits / temperature).logsumexp(0))


@pytest.mark.parametrize("name", RUNS)
def test_the_parts_of_the_diagram_add_up(workspace: Workspace, name: str) -> None:
    run = workspace.runs[name].run
    result = workspace.answer("block", body(name))
    tokens = workspace.answer("read", body(name))["tokens"]
    length = len(tokens["decoder" if run.config.decoder else "encoder"])
    source = len(tokens["encoder"]) if run.config.shape == "encoder-decoder" else None
    table = count(run.config, length, source_length=source)
    assert result["total"] == {"parameters": table.parameters, "flops": table.flops}
    for what in ("parameters", "flops"):
        total = result["head"][what] + sum(one[what] for one in result["input"].values())
        for stack in result["stacks"]:
            total += stack["position"][what] + stack["final_norm"][what]
            for layer in stack["layers"]:
                parts = [*layer["sublayers"], layer["norms"], layer["adapters"]]
                total += (layer["to"] - layer["from"] + 1) * sum(part[what] for part in parts)
        assert total == result["total"][what]
    assert result["total"]["parameters"] == run.model.num_parameters()
    for stack, of in zip(result["stacks"], run.config.stacks.values(), strict=True):
        assert [n for one in stack["layers"] for n in range(one["from"], one["to"] + 1)] == list(range(of.depth))
    assert json.loads(json.dumps(result, allow_nan=False)) == result


@pytest.mark.parametrize("name", [*WRITING, "lora"])
def test_the_cache_view_equals_cache_growth(workspace: Workspace, name: str) -> None:
    run, result = workspace.runs[name].run, workspace.answer("cache", body(name))
    reading = reading_of(workspace, name)
    source = reading.inputs[0] if run.config.encoder else None
    grown = cache_growth(run.model, result["now"], source)
    both = [own + across for own, across in zip(result["kinds"]["self"], result["kinds"]["cross"], strict=True)]
    assert both == [grown[step - 1] for step in result["steps"]]
    assert result["steps"][-1] == result["now"] == len(reading.tokens["decoder"])
    each = [min(result["now"], one["slots"] or result["now"]) * one["bytes"] for one in result["layers"]]
    assert sum(each) == result["kinds"]["self"][-1]


@pytest.mark.parametrize("name", [name for name in RUNS if name not in WRITING])
def test_the_answer_equals_predict(workspace: Workspace, name: str) -> None:
    run, result = workspace.runs[name].run, workspace.answer("answer", body(name))
    if name in ("lora", "apart", "embed"):
        assert result["answer"] == {"lora": "", "apart": "", "embed": "16 numbers"}[name]
        return
    text = "\t".join(filter(None, [body(name)["text"], TARGETS.get(name)]))
    assert [result["answer"]] == run.predict([text])
    if result["probabilities"] is not None:
        labels = dict(result["probabilities"])
        assert max(labels, key=lambda label: labels[label]) in result["answer"]
        assert name == "several" or sum(labels.values()) == pytest.approx(1)


def test_traces_are_cached(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is read once for all its views; the oldest traces are dropped."""
    fresh = Workspace(dict(workspace.runs))
    fresh.answer("heads", body("sort", kind="decoder", layer=0))
    (first,) = fresh.traces.values()
    fresh.answer("model", body("sort", kind="decoder"))
    fresh.answer("next", body("sort"))
    assert list(fresh.traces.values()) == [first]
    monkeypatch.setattr("anyformer.explore.open_runs.MAX_TRACE_BYTES", first.nbytes * 2)
    for text in ("1", "1 2", "1 2 3", "1 2 3 4"):
        fresh.answer("heads", body("sort", text=text, kind="decoder", layer=0))
    assert 1 <= len(fresh.traces) < 5
    assert sum(one.nbytes for one in fresh.traces.values()) <= first.nbytes * 2


def test_wrong_requests(workspace: Workspace) -> None:
    def line(name: str, of: str = "pair", **more: Any) -> str:
        with pytest.raises(ConfigError) as error:
            workspace.answer(name, body(of, **more))
        return str(error.value)

    assert line("read", run="nobody").startswith("run = 'nobody': is not open; known here: ")
    assert line("read", text=" ") == "text: is blank: there is nothing to look into"
    assert line("read", colour=1) == "colour: unknown key; known here: off, run, step, target, text"
    assert line("heads", kind="cross", layer=2) == "layer = 2: must be 0 to 1, where cross attention is"
    assert line("heads", "lm", kind="cross", layer=0) == "kind = 'cross': there is attention in decoder"
    assert line("model", "cells", kind="decoder") == "kind = 'decoder': there is attention in no stack"
    assert line("matrix", kind="cross", layer=0, head=4) == "head = 4: decoder.0.cross has heads 0 to 3"
    assert line("matrix", kind="cross", layer=0, head=-1) == "head = -1: must be at least 0"
    assert line("neuron", kind="cross", layer=0, head=0, query=0, key=99) == "key = 99: there are 8 of them, from 0"
    assert line("next", at=99) == "at = 99: there are 7 tokens, from 0"
    assert line("next", "tag") == "run: its head token_labels does not predict tokens"
    assert line("cache", "tag") == "run: its model has no decoder: only a decoder has a KV cache"
    assert line("read", "entail", target=None) == "target: is blank: this run reads a pair of texts"
    assert line("read", step=3) == "step = 3: there is no checkpoint of it; there are none"
    with pytest.raises(ConfigError, match="does not generate text"):
        next(workspace.answer("write", body("tag")))
    with pytest.raises(ConfigError, match="text: is blank"):
        next(workspace.answer("write", body("pair", text="")))
    with pytest.raises(ConfigError, match="top_p = 3"):
        next(workspace.answer("write", body("pair", temperature=1, top_p=3)))


def test_a_long_text_is_cut_with_a_note(workspace: Workspace) -> None:
    """Views show the beginning, and generation continues from it."""
    request = body("lm", text="the quick fox " * 9)
    result = workspace.answer("read", request)
    assert len(result["tokens"]["decoder"]) == 48
    assert result["notes"] == [
        "text has 126 tokens, and the decoder has 48 learned positions: only its first 48 of 126 characters are read"
    ]
    assert workspace.answer("matrix", {**request, "kind": "decoder", "layer": 0, "head": 0})["shape"] == [48, 48]
    *tokens, last = workspace.answer("write", request)
    assert len(tokens) == 1
    assert last["text"] == workspace.runs["lm"].run.generate([request["text"][:48]])[0]


def test_invisible_characters_are_escaped(workspace: Workspace) -> None:
    """Markup is text; invisible characters and direction marks are escaped."""
    result = workspace.answer("read", body("window", text="<script>\u202eok\x00"))
    assert result["tokens"]["decoder"][:9] == [*"<script>", "\\u202e"]
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_show(workspace: Workspace, tmp_path: Any) -> None:
    run = workspace.runs["pair"].run
    shown = af.show(run, "the fox", "the dog", view="model", off=["cross.0.1"])
    frame = shown._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts"')
    assert shown.save(tmp_path / "view.html").read_text(encoding="utf-8") == shown.document
    saved = shown.document.partition('id="saved">')[2].partition("</script>")[0]
    assert "<" not in saved
    result = json.loads(saved)
    assert result["hash"] == "#run=pair&text=the+fox&target=the+dog&off=cross.0.1&view=model"
    request = body("pair", text="the fox", target="the dog", off=["cross.0.1"], kind="cross", layer=1)
    key = json.dumps({k: request[k] for k in sorted(request) if request[k] is not None}, separators=(",", ":"))
    assert result["answers"][f"heads {key}"] == workspace.answer("heads", request)
    assert {key.split()[0] for key in result["answers"]} == {
        *("runs", "read", "answer", "heads", "model", "matrix", "neuron", "next", "block", "cache"),
        *("path", "stage", "follow", "lens", "cell", "surprise", "scores", "salience", "write", "live"),
    }
    with pytest.raises(ConfigError, match="is blank"):
        af.show(run, " ")

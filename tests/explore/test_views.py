"""Laws of the views: what the page shows is what the model does, on every shape and task."""

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
from anyformer.explore.open_runs import Explored, Opened
from anyformer.explore.requests import AboutText
from anyformer.inspection.ablation import run_without_heads
from anyformer.inspection.cache_growth import cache_growth
from anyformer.inspection.count import count
from anyformer.inspection.logit_lens import logit_lens
from anyformer.inspection.sublayers import attentions
from anyformer.inspection.taps import run_with_taps
from anyformer.run_inspection import Reading, read
from tests.explore.made import RUNS, TARGETS, TEXT, body, made

ATTENDING = [name for name in RUNS if name != "cells"]
WRITING = ["pair", "sort", "lm", "window", "latent", "relu", "prefix", "spans", "cells"]
SAYING = [*WRITING, "mlm", "lora"]


@pytest.fixture(scope="module")
def explored() -> Explored:
    return Explored({name: Opened(name, run, run.folder) for name in RUNS for run in [made(name)]})


def places(explored: Explored, name: str) -> list[tuple[str, int, int]]:
    """Every kind and layer of a run, and how many heads it has there."""
    kinds = explored.runs[name].about()["kinds"]
    return [
        (kind, layer, heads)
        for kind, found in kinds.items()
        for layer, heads in zip(found["layers"], found["heads"], strict=True)
    ]


def attention(kind: str, layer: int) -> str:
    return f"decoder.{layer}.cross" if kind == "cross" else f"{kind}.{layer}.mixer"


def numbers(found: dict[str, Any]) -> NDArray[np.float32]:
    return np.frombuffer(b64decode(found["values"]), "<f4").reshape(found["shape"])


def reading_of(explored: Explored, name: str) -> Reading:
    return explored.look(AboutText(**body(name))).reading


def tapped(explored: Explored, name: str, tap: str) -> Tensor:
    """An activation of the same text, read by the model itself."""
    run, reading = explored.runs[name].run, reading_of(explored, name)
    with torch.no_grad():
        return run_with_taps(run.model, [tap], *reading.inputs, **reading.options)[1][tap]


@pytest.mark.parametrize("name", ATTENDING)
def test_maps_are_those_of_the_model(explored: Explored, name: str) -> None:
    """Weights are the real ones; rows sum to one where nothing takes weight away; names and links are of them."""
    for kind, layer, heads in places(explored, name):
        real = tapped(explored, name, f"{attention(kind, layer)}.weights")[0].numpy()
        shown = explored.answer("heads", body(name, kind=kind, layer=layer))
        small = explored.answer("model", body(name, kind=kind))
        for head in range(heads):
            found = explored.answer("matrix", body(name, kind=kind, layer=layer, head=head))
            weights = numbers(found)
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
            assert abs(pooled.max() / 255 - weights.max()) < 1 / 255
            assert found["rows"] == shown["rows"]
            assert found["columns"] == shown["columns"]
        assert shown["names"] == [small["names"][f"{layer}.{head}"] for head in range(heads)]


@pytest.mark.parametrize("name", ATTENDING)
def test_scores_masks_and_biases_make_the_weights(explored: Explored, name: str) -> None:
    run = explored.runs[name].run
    for kind, layer, heads in places(explored, name):
        inner = attentions(run.model)[attention(kind, layer)]
        for head in range(heads):
            place = body(name, kind=kind, layer=layer, head=head)
            found = {what: explored.answer("matrix", {**place, "what": what}) for what in ("weights", "mask", "scores")}
            weights, mask, scores = (numbers(one).astype("f8") for one in found.values())
            assert set(np.unique(mask)) <= {0, 1}
            assert ((scores > -1e29) == (mask == 1)).all()
            assert (weights[mask == 0] == 0).all()
            sink = 0.0 if inner.sinks is None else np.exp(float(inner.sinks[head].detach()))
            if found["weights"]["normalizer"] == "relu":
                made_of = np.maximum(scores, 0) / mask.sum(axis=1, keepdims=True)
            else:
                made_of = np.exp(scores) / (np.exp(scores).sum(axis=1, keepdims=True) + sink)
            np.testing.assert_allclose(made_of, weights, atol=1e-5)
            bias = explored.answer("matrix", {**place, "what": "bias"})
            assert (bias["values"] is not None) == (name in ("pair", "sort", "entail") and kind != "cross")
            if bias["values"] is not None:
                assert ((numbers(bias) > -1e29) == (mask == 1)).all()


@pytest.mark.parametrize("name", ATTENDING)
def test_the_numbers_behind_a_link_add_up(explored: Explored, name: str) -> None:
    for kind, layer, heads in places(explored, name):
        for head in {0, heads - 1}:
            place = body(name, kind=kind, layer=layer, head=head)
            scores, weights = (numbers(explored.answer("matrix", {**place, "what": w})) for w in ("scores", "weights"))
            t, s = scores.shape
            for query, key in {(t - 1, 0), (t // 2, s // 2), (0, s - 1)}:
                found = explored.answer("neuron", {**place, "query": query, "key": key})
                product = np.array(found["q"]) * np.array(found["k"])
                np.testing.assert_allclose(found["product"], product, atol=1e-5)
                assert found["dot"] == pytest.approx(product.sum(), abs=1e-4)
                score = found["dot"] * found["scale"]
                score = score if found["cap"] is None else found["cap"] * np.tanh(score / found["cap"])
                assert found["visible"] == bool(scores[query, key] > -1e29)
                if found["visible"]:
                    assert found["score"] == pytest.approx(score + (found["bias"] or 0), abs=1e-4)
                    assert found["score"] == pytest.approx(float(scores[query, key]), abs=1e-4)
                else:
                    assert found["score"] is None
                assert found["weight"] == pytest.approx(float(weights[query, key]), abs=1e-6)
                np.testing.assert_allclose(found["row"], weights[query], atol=1e-6)


@pytest.mark.parametrize("name", ATTENDING)
def test_heads_that_are_off(explored: Explored, name: str) -> None:
    """One head of one layer: the model is that of `run_without_heads`, and afterwards as it was."""
    run, (kind, layer, heads) = explored.runs[name].run, places(explored, name)[-1]
    target = "the dog" if name in WRITING else TARGETS.get(name)
    asked = body(name, target=target, off=[f"{kind}.{layer}.{heads - 1}"])
    seen = explored.look(AboutText(**asked))
    reading = seen.reading
    with torch.no_grad():
        off = run_without_heads(run.model, {attention(kind, layer): [heads - 1]}, *reading.inputs, **reading.options)
        on = run.model(*reading.inputs, **reading.options)
    if seen.output.numel():
        torch.testing.assert_close(seen.output, off)
        assert not torch.equal(off, on)
    else:
        side = "decoder" if run.config.decoder else "encoder"
        found = explored.answer("next", {**asked, "at": -1})
        best = off[0, found["at"]].topk(len(found["logits"])).values
        np.testing.assert_allclose([logit for _, logit in found["logits"]], best, atol=1e-5)
        assert not torch.equal(off, on)
        assert found["token"] == reading.tokens[side][found["at"]]
    again = explored.look(AboutText(**{**asked, "off": []})).reading
    with torch.no_grad():
        assert torch.equal(on, run.model(*again.inputs, **again.options))
    with pytest.raises(ConfigError, match="there is no such head"):
        explored.answer("read", {**asked, "off": [f"{kind}.{layer}.{heads}"]})


def test_layers_with_shared_weights_are_told_apart(explored: Explored) -> None:
    """One module runs in three layers; a head is off in one of them."""
    run = explored.runs["lm"].run
    outs = {}
    for layer in range(3):
        found = explored.answer("next", body("lm", off=[f"decoder.{layer}.0"], at=-1))
        reading = read(run, TEXT)
        off = run_without_heads(run.model, {f"decoder.{layer}.mixer": [0]}, *reading.inputs)
        outs[layer] = [logit for _, logit in found["logits"]]
        np.testing.assert_allclose(outs[layer], off[0, -1].detach().topk(len(outs[layer])).values, atol=1e-5)
    assert outs[0] != outs[1] != outs[2]


@pytest.mark.parametrize("name", [*WRITING, "lora"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "seed": 3}])
def test_what_is_streamed_is_what_the_run_says(explored: Explored, name: str, options: dict[str, Any]) -> None:
    run = explored.runs[name].run
    lines = list(explored.write(body(name, max_new_tokens=5, **options)))
    (said,) = run.generate([body(name)["text"]], max_new_tokens=5, **options)
    *tokens, last = lines
    assert last == {"done": True, "text": said}
    assert all(line["top"] == sorted(line["top"], key=lambda pair: -pair[1]) for line in tokens)
    assert all(line["p"] <= line["top"][0][1] + 1e-6 for line in tokens)
    if not options:
        assert all(line["token"] == line["top"][0][0] for line in tokens)
        answer = explored.answer("read", body(name))
        begins = answer["begins"]
        if name not in ("lm", "window", "latent", "relu", "lora", "prefix"):
            side = answer["tokens"]["decoder"][begins:]
            assert [line["token"] for line in tokens][: len(side)] == side[: len(tokens)]
    assert [line["cache"] for line in tokens] == sorted(line["cache"] for line in tokens)


def test_heads_that_are_off_write_something_else(explored: Explored) -> None:
    """As a run does whose output projection has zeros there; between two tokens the model has all its heads."""
    asked, off = body("window", max_new_tokens=6), [f"decoder.{layer}.{head}" for layer in (0, 1) for head in range(4)]
    before, run = list(explored.write(asked)), explored.runs["window"].run
    streamed = explored.write({**asked, "off": off})
    first = next(streamed)
    assert list(explored.write(asked)) == before
    silenced = made("window")
    with torch.no_grad():
        for block in silenced.model.decoder.blocks:
            block.mixer.inner.out.weight.zero_()
    assert [first, *streamed][-1]["text"] == silenced.generate([TEXT], max_new_tokens=6)[0]
    assert before[-1]["text"] == run.generate([TEXT], max_new_tokens=6)[0]
    assert before[-1]["text"] != silenced.generate([TEXT], max_new_tokens=6)[0]


@pytest.mark.parametrize("name", SAYING)
def test_what_comes_next_and_the_lens(explored: Explored, name: str) -> None:
    """At every place: the logits of the model, all of the rest of them, and what `logit_lens` says of each layer."""
    run = explored.runs[name].run
    reading = reading_of(explored, name)
    layers = logit_lens(run.model, *reading.inputs, **reading.options)[:, 0]  # [1 + layers, t, v]
    for at in (0, layers.shape[1] - 1):
        found = explored.answer("next", body(name, at=at))
        logits = layers[-1, at]
        shown = [logit for _, logit in found["logits"]]
        np.testing.assert_allclose(shown, logits.topk(len(shown)).values, atol=1e-5)
        assert found["rest"] is None or found["rest"]["count"] == len(logits) - len(shown)
        for layer, one in enumerate(found["lens"]):
            assert one["layer"] == layer - 1
            p = layers[layer, at].softmax(-1)
            np.testing.assert_allclose([value for _, value in one["top"]], p.topk(5).values, atol=1e-5)
            assert one["entropy"] == pytest.approx(float(torch.special.entr(p).sum()), abs=1e-4)


def test_what_stands_in_a_place_of_pooled_tokens(explored: Explored) -> None:
    run, reading = explored.runs["pooled"].run, reading_of(explored, "pooled")
    with torch.no_grad():
        logits = run.model(*reading.inputs)[0]
    for at in range(len(logits)):
        found = explored.answer("next", body("pooled", at=at))
        np.testing.assert_allclose([x for _, x in found["logits"]], logits[at].sort(descending=True).values, atol=1e-5)
        assert [one["layer"] for one in found["lens"]] == [1]


def test_the_rest_of_many_tokens(explored: Explored, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not named counts, at every temperature of the slider."""
    whole = explored.answer("next", body("pair", at=-1))
    assert whole["rest"] is None
    monkeypatch.setattr("anyformer.explore.views.LIKELIEST", 3)
    part = explored.answer("next", body("pair", at=-1))
    logits = torch.tensor([logit for _, logit in whole["logits"]], dtype=torch.float64)
    for temperature, lse in zip(part["rest"]["temperatures"], part["rest"]["lse"], strict=True):
        kept = torch.tensor([logit for _, logit in part["logits"]], dtype=torch.float64) / temperature
        both = torch.cat((kept, torch.tensor([lse], dtype=torch.float64))).logsumexp(0)
        torch.testing.assert_close(both, (logits / temperature).logsumexp(0))


@pytest.mark.parametrize("name", RUNS)
def test_the_parts_of_the_diagram_are_the_whole(explored: Explored, name: str) -> None:
    run = explored.runs[name].run
    found = explored.answer("block", body(name))
    tokens = explored.answer("read", body(name))["tokens"]
    length = len(tokens["decoder" if run.config.decoder else "encoder"])
    source = len(tokens["encoder"]) if run.config.shape == "encoder-decoder" else None
    table = count(run.config, length, source_length=source)
    assert found["total"] == {"parameters": table.parameters, "flops": table.flops}
    for what in ("parameters", "flops"):
        total = found["head"][what] + sum(one[what] for one in found["input"].values())
        for stack in found["stacks"]:
            total += stack["position"][what] + stack["final_norm"][what]
            for layer in stack["layers"]:
                parts = [*layer["sublayers"], layer["norms"], layer["adapters"]]
                total += (layer["to"] - layer["from"] + 1) * sum(part[what] for part in parts)
        assert total == found["total"][what]
    assert found["total"]["parameters"] == run.model.num_parameters()
    for stack, of in zip(found["stacks"], run.config.stacks.values(), strict=True):
        assert [n for one in stack["layers"] for n in range(one["from"], one["to"] + 1)] == list(range(of.depth))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("name", [*WRITING, "lora"])
def test_the_cache_grows_as_it_does(explored: Explored, name: str) -> None:
    run, found = explored.runs[name].run, explored.answer("cache", body(name))
    reading = reading_of(explored, name)
    source = reading.inputs[0] if run.config.encoder else None
    grown = cache_growth(run.model, found["now"], source)
    both = [own + across for own, across in zip(found["kinds"]["self"], found["kinds"]["cross"], strict=True)]
    assert both == [grown[step - 1] for step in found["steps"]]
    assert found["steps"][-1] == found["now"] == len(reading.tokens["decoder"])
    each = [min(found["now"], one["slots"] or found["now"]) * one["bytes"] for one in found["layers"]]
    assert sum(each) == found["kinds"]["self"][-1]


@pytest.mark.parametrize("name", [name for name in RUNS if name not in WRITING])
def test_the_answer_is_what_the_run_predicts(explored: Explored, name: str) -> None:
    run, found = explored.runs[name].run, explored.answer("read", body(name))
    if name in ("lora", "apart", "embed"):
        assert found["answer"] == {"lora": "", "apart": "", "embed": "16 numbers"}[name]
        return
    text = "\t".join(filter(None, [body(name)["text"], TARGETS.get(name)]))
    assert [found["answer"]] == run.predict([text])
    if found["probabilities"] is not None:
        labels = dict(found["probabilities"])
        assert max(labels, key=lambda label: labels[label]) in found["answer"]
        assert name == "several" or sum(labels.values()) == pytest.approx(1)


def test_answers_are_kept(explored: Explored, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is read once for all its views; of many, the last ones are kept."""
    fresh = Explored(dict(explored.runs))
    fresh.answer("heads", body("sort", kind="decoder", layer=0))
    (first,) = fresh.seen.values()
    fresh.answer("model", body("sort", kind="decoder"))
    fresh.answer("next", body("sort"))
    assert list(fresh.seen.values()) == [first]
    monkeypatch.setattr("anyformer.explore.open_runs.KEPT", first.nbytes * 2)
    for text in ("1", "1 2", "1 2 3", "1 2 3 4"):
        fresh.answer("read", body("sort", text=text))
    assert 1 <= len(fresh.seen) < 5
    assert sum(one.nbytes for one in fresh.seen.values()) <= first.nbytes * 2


def test_wrong_requests(explored: Explored) -> None:
    def line(name: str, of: str = "pair", **more: Any) -> str:
        with pytest.raises(ConfigError) as error:
            explored.answer(name, body(of, **more))
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
    assert line("next", "tag") == "run: its model says token_labels, not how likely tokens are"
    assert line("cache", "tag") == "run: its model reads its text at once: only a decoder has a cache"
    assert line("read", "entail", target=None) == "target: is blank: this run reads two texts, one beside the other"
    assert line("read", step=3) == "step = 3: there is no checkpoint of it; none is kept"
    with pytest.raises(ConfigError, match="its model does not write"):
        next(explored.write(body("tag")))
    with pytest.raises(ConfigError, match="text: is blank"):
        next(explored.write(body("pair", text="")))
    with pytest.raises(ConfigError, match="top_p = 3"):
        next(explored.write(body("pair", temperature=1, top_p=3)))


def test_a_long_text_is_cut_and_said(explored: Explored) -> None:
    """Its views are of what is read, and what is written goes on from there."""
    asked = body("lm", text="the quick fox " * 9)
    found = explored.answer("read", asked)
    assert len(found["tokens"]["decoder"]) == 48
    assert found["notes"] == [
        "text has 126 tokens, and the decoder has 48 learned positions: only its first 48 of 126 characters are read"
    ]
    assert explored.answer("matrix", {**asked, "kind": "decoder", "layer": 0, "head": 0})["shape"] == [48, 48]
    *tokens, last = explored.write(asked)
    assert len(tokens) == 1
    assert last["text"] == explored.runs["lm"].run.generate([asked["text"][:48]])[0]


def test_tokens_without_a_shape(explored: Explored) -> None:
    """Markup is text, and what has no shape or turns the text around is spelled."""
    found = explored.answer("read", body("window", text="<script>\u202eok\x00"))
    assert found["tokens"]["decoder"][:9] == [*"<script>", "\\u202e"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_show(explored: Explored, tmp_path: Any) -> None:
    run = explored.runs["pair"].run
    shown = af.show(run, "the fox", "the dog", view="model", off=["cross.0.1"])
    frame = shown._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts"')
    assert shown.save(tmp_path / "view.html").read_text(encoding="utf-8") == shown.document
    saved = shown.document.partition('id="saved">')[2].partition("</script>")[0]
    assert "<" not in saved
    found = json.loads(saved)
    assert found["hash"] == "#run=pair&text=the+fox&target=the+dog&off=cross.0.1&view=model"
    asked = body("pair", text="the fox", target="the dog", off=["cross.0.1"], kind="cross", layer=1)
    key = json.dumps({k: asked[k] for k in sorted(asked) if asked[k] is not None}, separators=(",", ":"))
    assert found["answers"][f"heads {key}"] == explored.answer("heads", asked)
    assert {key.split()[0] for key in found["answers"]} == {
        *("runs", "read", "heads", "model", "matrix", "neuron", "next", "block", "cache", "write", "live")
    }
    with pytest.raises(ConfigError, match="is blank"):
        af.show(run, " ")

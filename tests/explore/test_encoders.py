"""Predictions of encoders in the views and on the page: tags, labels, vectors, masked tokens."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer.config import ByteSpelling, TokenLabels, Tokens
from anyformer.explore.open_runs import OpenRun, Workspace, open_runs
from anyformer.explore.server import ExploreServer
from anyformer.recipe import Encoder, Tag
from tests.explore import made
from tests.explore.made import TEXT, body
from tests.explore.tab import Opener, Page

LABELS = ("a", "b", "c")
SPELLED = made.encoder(made.stack(), TokenLabels(labels=3)).model_copy(
    update={"source": Tokens(vocab=1, spelling=ByteSpelling())}
)
JOINT = made.encoder(made.stack(), TokenLabels(labels=3, crf=True))
MORE = {
    "spelled": (Tag(labels=LABELS), SPELLED, made.WORDS),
    "joint": (Tag(labels=LABELS), JOINT, made.WORDS),
    "tokens": (Encoder(labels=LABELS), made.encoder(made.stack(), TokenLabels(labels=3)), made.WORDS),
}
NAMES = ("tag", "spelled", "joint", "tokens", "embed", "classify", "regress", "mlm", "lm")


@pytest.fixture(scope="module")
def workspace() -> Iterator[Workspace]:
    with pytest.MonkeyPatch.context() as patch:
        for name, parts in MORE.items():
            patch.setitem(made.RUNS, name, parts)
        yield Workspace({name: OpenRun(name, run, run.folder) for name in NAMES for run in [made.made(name)]})


def test_the_output_kind_of_each_run(workspace: Workspace) -> None:
    kinds = ("tags", "tags", "tags", "tags", "vector", "labels", "number", "masked", "tokens")
    assert {one["name"]: one["says"] for one in workspace.about()} == dict(zip(NAMES, kinds, strict=True))


@pytest.mark.parametrize("name", ["tag", "spelled", "joint", "tokens"])
def test_each_word_has_its_tag_and_probabilities(workspace: Workspace, name: str) -> None:
    """They are the tags of `predict`, each at the first token of its word; a CRF has no probabilities per word."""
    tokens = workspace.answer("read", body(name))["tokens"]["encoder"]
    result, run = workspace.answer("answer", body(name)), workspace.runs[name].run
    tags = result["tags"]
    assert [one["word"] for one in tags] == TEXT.split()
    assert [" ".join(one["label"] for one in tags)] == run.predict([TEXT])
    assert [tokens[one["at"]] for one in tags] == TEXT.split()
    for one in tags:
        if name == "joint":
            assert one["probabilities"] is None
            continue
        shares = dict(one["probabilities"])
        assert max(shares, key=lambda label: shares[label]) == one["label"]
        assert sum(shares.values()) == pytest.approx(1)
    assert json.loads(json.dumps(result, allow_nan=False)) == json.loads(json.dumps(result))


def test_an_unknown_word_that_is_read_by_spelling_is_shown_as_text(workspace: Workspace) -> None:
    text = "the xylophone \u202e 나비"
    tokens = {name: workspace.answer("read", body(name, text=text))["tokens"]["encoder"] for name in ("tag", "spelled")}
    assert tokens["tag"].count("<unk>") == 3
    assert [one for one in tokens["spelled"] if one not in tokens["tag"]] == ["xylophone", "\\u202e", "나비"]


def test_the_vector_equals_that_of_predict(workspace: Workspace) -> None:
    result = workspace.answer("answer", body("embed"))["vector"]
    assert result == pytest.approx(json.loads(workspace.runs["embed"].run.predict([TEXT])[0]), rel=1e-4)
    assert workspace.answer("answer", body("lm"))["vector"] is None


# -- on the page ------------------------------------------------------------------------------------------------------


@pytest.fixture
def encoders(server: ExploreServer, tmp_path: Path) -> Iterator[None]:
    """Add runs of encoders to the server."""
    with pytest.MonkeyPatch.context() as patch:
        for name, parts in MORE.items():
            patch.setitem(made.RUNS, name, parts)
        names = ("spelled", "embed", "mlm", "regress", "tokens", "joint")
        opened = open_runs([made.written(name, tmp_path) for name in names])
    server.workspace.runs.update(opened.runs)
    yield
    for name in names:
        del server.workspace.runs[name]


@pytest.mark.usefixtures("encoders")
def test_a_tagger_shows_each_word_with_its_tag(page: Opener) -> None:
    one = page(run="spelled", view="next", text="the xylophone jumps")
    assert one.text("#tab-next") == "Tags"
    assert [text.split("\n")[0].split("\t")[0] for text in one.texts(".tags tbody tr")] == ["the", "xylophone", "jumps"]
    assert all("%" in text for text in one.texts(".tags tbody tr"))
    assert [text.split("\n")[0] for text in one.texts(".output .tagged")] == ["the", "xylophone", "jumps"]
    assert all("%" in text for text in one.texts(".output .tagged small"))
    assert "<unk>" not in one.text("body")
    assert page(run="tokens").text("#about").startswith("encoder · tagger")


@pytest.mark.usefixtures("encoders")
def test_two_texts_of_an_embedder_are_compared_by_cosine(page: Opener, server: ExploreServer) -> None:
    one = page(run="embed", view="compare", both="next", text="the quick fox", run2="embed", text2="the lazy dog")
    requests = [{"run": "embed", "text": text} for text in ("the quick fox", "the lazy dog")]
    a, b = (torch.tensor(server.workspace.answer("answer", request)["vector"]) for request in requests)
    (shown,) = one.texts(".cosine b")
    assert float(shown.replace("−", "-")) == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), abs=6e-4)
    assert one.tab.locator(".view-next .signs rect").count() == 2 * len(a)
    assert "16 values" in one.text(".output >> nth=0")
    assert f"{math.hypot(*a.tolist()):.2f}" in one.text(".output >> nth=0")


@pytest.mark.usefixtures("encoders")
def test_views_without_meaning_are_left_out(page: Opener) -> None:
    """An encoder has no cache; a key or a link to that view leads to the first view. Other keys stay the same."""
    one = page(run="embed", view="cache")
    one.see("path")
    assert one.tab.locator("#tab-cache").count() == 0
    one.press("8").see("path")
    one.press("7").see("block")
    one.tab.select_option("#run", "lm")
    one.settled().press("8").see("cache")
    assert "cache" in one.tab.evaluate("[...document.querySelectorAll('#tabs button')].map(e => e.id).join()")


@pytest.mark.usefixtures("encoders")
def test_other_encoders_have_no_empty_view(page: Opener) -> None:
    """In both languages: labels, a number, masked tokens."""
    names = {"classify": ("Labels", "레이블"), "regress": ("Number", "수치"), "mlm": ("Masked tokens", "마스킹된 토큰")}
    for locale, which in (("en-US", 0), ("ko-KR", 1)):
        one = page(locale=locale)
        for run, name in names.items():
            target = made.TARGETS.get(run, "")
            one.open(run=run, view="next", text=made.TEXTS.get(run, TEXT), target=target)
            assert one.text("#tab-next") == name[which]
            assert one.tab.locator("#view .empty").count() == 0
            assert one.tab.locator("#view .bar-row, #view .figure").count() > 0


def test_the_answer_is_written_after_the_first_view(page: Opener) -> None:
    """The view does not wait for the forward pass of the answer."""
    one, held = page(run="classify", view="block"), list[Any]()
    one.tab.route("**/api/answer", lambda route: held.append(route))
    one.tab.fill("#text", "the lazy dog")
    one.tab.press("#text", "Enter")
    one.until("document.querySelector('.output[aria-busy]') !== null")
    assert [text.split("\n")[0] for text in one.texts(".chip")][1:-1] == ["the", "lazy", "dog"]
    assert "Computing" in one.text(".output")
    for _ in range(400):
        if held:
            break
        one.tab.wait_for_timeout(25)
    assert one.tab.get_attribute("#view", "aria-busy") is None  # it is drawn
    for route in held:
        route.continue_()
    assert one.settled().text(".output .said-row").count("%") == 2


@pytest.mark.usefixtures("encoders")
def test_a_tagger_whose_labels_are_chosen_together_has_no_tabs_that_need_probabilities(page: Opener) -> None:
    both = [page(run=run) for run in ("tokens", "joint")]
    first, second = ({tab.removeprefix("tab-") for tab in ids(one)} for one in both)
    assert first - second == {"lens", "salience", "patch"}
    for view in second - {"compare", "live"}:
        both[1].click(f"#tab-{view}")
        assert both[1].tab.locator("#view .error").count() == 0


def ids(one: Page) -> list[str]:
    return [str(tab.get_attribute("id")) for tab in one.tab.locator("#tabs [role=tab]").all()]

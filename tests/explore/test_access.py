"""Access to everything: by keyboard, by screen reader, in Korean, on a projector and on a phone."""

import re
from itertools import pairwise

import pytest

from anyformer.explore.open_runs import OpenRun, Workspace
from tests.explore import made
from tests.explore.made import body
from tests.explore.tab import Opener


def test_an_empty_text_of_a_language_model_begins_at_bos(page: Opener) -> None:
    run = made.made("lm")
    workspace = Workspace({"lm": OpenRun("lm", run, run.folder)})
    assert workspace.answer("read", body("lm", text=""))["tokens"]["decoder"] == ["<bos>"]
    one = page(run="lm", view="next")
    one.type("")
    assert one.texts(".chip .token") == ["<bos>"]
    assert one.tab.locator(".bar-row").count() > 1


def test_layer_switches_by_keyboard(page: Opener) -> None:
    one = page(run="lm")
    one.tab.focus("[id='switch-0-decoder.0.0']")
    one.tab.keyboard.press("ArrowLeft")
    assert one.tab.evaluate("document.activeElement.id") == "layer-0-decoder-0"
    one.press("Enter")
    assert one.tab.locator(".switch[aria-checked=false]").count() == 2
    one.tab.focus("#layer-0-decoder-0")
    one.tab.keyboard.press("ArrowDown")
    assert one.tab.evaluate("document.activeElement.id") == "layer-0-decoder-1"


def test_generated_tokens_by_keyboard_and_beside_those_of_other_settings(page: Opener) -> None:
    one = page(run="lm", view="next", write="1", most="6", temperature="1")
    one.until("document.querySelectorAll('.written .piece').length >= 2")
    one.tab.wait_for_timeout(1000)  # the rest, of which the page shows no end
    one.tab.focus(".written .piece >> nth=0")
    assert one.text(".alternatives").count("%") >= 10
    one.tab.keyboard.press("ArrowRight")
    assert one.tab.evaluate("[...document.activeElement.parentElement.children].indexOf(document.activeElement)") == 1
    first = one.text(".written >> nth=0")
    one.tab.focus("#temperature")
    one.press("ArrowRight")
    assert one.text(".written >> nth=0") == first  # the text at temperature 1 stays
    assert "T 1.00" in one.text(".said-rows")
    one.click("#write-0")
    one.until("document.querySelectorAll('.written').length === 2")


@pytest.mark.parametrize("run", ["pair", "lm"])
def test_links_have_a_text(page: Opener, run: str) -> None:
    """A screen reader hears the strongest links of a query with their weights, and the range of values of q."""
    one = page(run=run, view="heads", layer="0")
    label = str(one.tab.get_attribute("#query-0-1", "aria-label"))
    assert re.search(r"→ .+ \d+ \(Head \d\): 0\.\d\d", label)
    one.press("5")
    assert "values, " in str(one.tab.get_attribute(".signs svg >> nth=0", "aria-label"))


def test_headings_and_landmarks_have_an_order(page: Opener) -> None:
    one = page(run="lm", view="next")
    levels = one.tab.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(e => Number(e.tagName[1]))")
    assert levels[0] == 1
    assert all(later - level <= 1 for level, later in pairwise(levels))
    for selector in ("#strips", ".bar", "#side", "#view-title"):
        found = one.tab.locator(selector)
        assert found.get_attribute("aria-label") or found.inner_text()


def test_notes_of_the_server_in_korean(page: Opener) -> None:
    one = page(run="lm", locale="ko-KR")
    one.type("the quick fox " * 10)
    assert "처음" in one.text("#strips .note")
    assert not re.search("[a-z]", one.text("#strips .note"))
    one.type(" ")
    assert not re.search("[a-z]", one.text("#strips .error"))
    one.errors.clear()


def test_a_projector_gets_larger_text_and_a_phone_an_early_view(page: Opener) -> None:
    sizes = {}
    for width in (400, 1280, 1920):
        one = page(width=width, run="lm", view="heads", text="the quick fox jumps over the lazy dog")
        sizes[width] = one.tab.evaluate("parseFloat(getComputedStyle(document.querySelector('.explained')).fontSize)")
        if width == 400:
            assert one.tab.evaluate("document.querySelector('#view').getBoundingClientRect().top") < 600
        if width == 1920:
            assert one.tab.evaluate("document.querySelector('.links').getBoundingClientRect().width") > 960
    assert sizes[1920] > 1.15 * sizes[1280]


@pytest.mark.parametrize("view", ["cache", "live"])
def test_chart_labels_are_within_the_chart(page: Opener, view: str) -> None:
    one = page(width=400, run="growing", view=view)
    outside = """[...document.querySelectorAll('.chart text')].filter((e) => {
      const a = e.getBoundingClientRect(), b = e.ownerSVGElement.getBoundingClientRect();
      return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1;
    }).map((e) => e.textContent)"""
    assert one.tab.evaluate(outside) == []

"""A saved page holds all layers and tokens; controls without saved data are disabled, with a reason."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anyformer.explore.show import show
from tests.explore import made
from tests.explore.tab import Opener, Page

REASON = "Not in this saved page"
Saved = Callable[..., Page]


@pytest.fixture
def saved(page: Opener, chromium: Any, tmp_path: Path) -> Iterator[Saved]:
    """Save the page of a state and open the file without a network."""
    contexts = []

    def open_(**state: str) -> Page:
        one = page(**state)
        with one.tab.expect_download() as waiting:
            one.tab.click("#save-html")
        waiting.value.save_as(tmp_path / "saved.html")
        return opened(tmp_path / "saved.html")

    def opened(file: Path) -> Page:
        contexts.append(chromium.new_context(offline=True, viewport={"width": 1280, "height": 900}, locale="en-US"))
        other = Page(contexts[-1].new_page(), file.as_uri())
        other.tab.goto(other.address)
        return other.settled()

    open_.file = opened  # type: ignore[attr-defined]
    yield open_
    for context in contexts:
        context.close()


def check_complete(page: Page) -> None:
    """Check that the page shows its view without an error, with its tabs and controls."""
    assert page.tab.locator("#view .error, #strips .error").count() == 0
    assert page.tab.locator("#view > .pane > *").count() > 0
    assert page.tab.locator("#tabs [role=tab]").count() >= 10


def test_every_layer_head_and_token_is_in_it(saved: Saved) -> None:
    one = saved(run="pair", view="heads")
    for kind in ("cross", "decoder"):
        one.tab.select_option("#kind-0", kind)
        one.tab.select_option("#layer-0", "1")
        one.settled().see("heads")
        check_complete(one)
    one.click("#tab-matrix")
    one.tab.select_option("#head-0", "1")
    for what in ("scores", "bias", "mask"):
        one.click(f"#what-0-{what}")
        check_complete(one)
    one.click("#tab-next")
    for at in (0, 2):
        one.click(f"#token-0-decoder-{at}").see("next")
        check_complete(one)
    assert one.tab.locator(".picker option:disabled, #tabs button:disabled, .chip:disabled").count() == 0
    one.click("#tab-neuron")
    one.tab.select_option("#layer-0", "1")
    one.settled().see("neuron")
    check_complete(one)
    assert one.errors == []


def test_controls_without_saved_data_are_disabled_with_a_reason(saved: Saved) -> None:
    one = saved(run="pair", view="heads")
    for selector in ("#go", "[id='switch-0-encoder.0.0']", "#layer-0-cross-1", "#seed", "#most"):
        assert one.tab.locator(selector).is_disabled(), selector
        assert REASON in str(one.tab.get_attribute(selector, "title")), selector
    for selector in ("#text", "#target"):
        assert not one.tab.locator(selector).is_editable()
        assert REASON in str(one.tab.get_attribute(selector, "title"))
    others = "[...document.querySelectorAll('#run option')].filter(e => !e.selected).every(e => e.disabled)"
    assert one.tab.evaluate(others)
    assert "saved page" in one.text("#about")
    one.click("#tab-neuron")
    off = one.tab.locator(".weights button:disabled")
    assert off.count() > 0
    assert REASON in str(off.first.get_attribute("title"))
    assert one.tab.locator(".weights button:enabled").count() == 1
    assert one.errors == []


def test_keys_and_addresses_never_lead_into_an_empty_page(saved: Saved) -> None:
    one = saved(run="lm", view="heads", layer="1")
    for key in ("x", "w", "ArrowUp", "]", "k", "ArrowLeft", *"157890"):
        one.press(key)
        check_complete(one)
    one.press("4").tab.focus("#matrix-0")
    one.press("ArrowUp", "ArrowLeft", "ArrowLeft", "Enter")  # a link that was not saved
    check_complete(one)
    one.press("5")
    check_complete(one)
    before = one.tab.url
    one.tab.evaluate("location.hash = 'run=lm&text=something+else&view=matrix'")
    one.until("document.querySelector('#said').textContent !== ''")
    check_complete(one.settled())
    assert one.tab.input_value("#text") != "something else"
    one.tab.goto(before)
    one.tab.reload()
    check_complete(one.settled())
    assert one.errors == []


def test_saved_head_switches_work(saved: Saved) -> None:
    one = saved(run="classify", view="heads", off="encoder.1.0")
    assert not one.tab.locator("#all-on-0").is_disabled()
    assert one.tab.locator("[id='switch-0-encoder.0.0']").is_disabled()
    one.tab.select_option("#layer-0", "1")
    check_complete(one.settled())
    assert one.errors == []


def test_a_notebook_has_the_same_limits(saved: Saved, tmp_path: Path) -> None:
    shown = show(made.made("tag"), made.TEXT).save(tmp_path / "shown.html")
    one = saved.file(shown)  # type: ignore[attr-defined]
    assert one.tab.locator("#go").is_disabled()
    for key in "1356":
        one.press(key)
        check_complete(one)
    assert one.errors == []

"""Accessibility: names for screen readers, keyboard, narrow windows, two subjects side by side."""

import pytest

from tests.explore.tab import Opener


def test_a_typed_text_stays_when_the_run_changes(page: Opener) -> None:
    one = page(run="pair", view="compare")
    one.tab.select_option("#run-2", "hostile")
    assert one.settled().tab.input_value("#text-2") != ""
    one.type("the lazy dog", "#text-2")
    one.tab.select_option("#run-2", "lm")
    assert one.settled().tab.input_value("#text-2") == "the lazy dog"
    assert len(one.texts("#strips .pane + .pane .chip")) == len("the lazy dog")


def test_compared_bars_are_wide_enough(page: Opener) -> None:
    one = page(run="lm", view="compare", both="next")
    widths = "[...document.querySelectorAll('.bar-track')].map(e => e.getBoundingClientRect().width)"
    assert min(one.tab.evaluate(widths)) > 100


def test_sliders_have_names_and_leave_other_keys_to_the_page(page: Opener) -> None:
    """A slider is named by its label; keys that do not move it are shortcuts of the page."""
    one = page(run="lm", view="next")
    for name in ("Temperature", "Top-k", "Top-p"):
        assert one.tab.get_by_role("slider", name=name).count() == 1
    one.tab.focus("#temperature")
    one.press("ArrowRight")
    assert float(one.tab.input_value("#temperature")) == pytest.approx(1.05)
    one.press("7").see("block")
    assert one.tab.get_by_role("group", name="Decoder").get_by_role("button", name="final norm").count() == 1
    assert page(run="classify").tab.locator("#fold-sampling").count() == 0  # it does not sample


@pytest.mark.parametrize("view", ["cache", "live"])
def test_chart_labels_are_not_cut_on_a_narrow_page(page: Opener, view: str) -> None:
    one = page(width=400, run="growing", view=view)
    over = "[...document.querySelectorAll('.chart text')].map(e => e.getBBox().x)"
    assert min(one.tab.evaluate(over)) >= 0

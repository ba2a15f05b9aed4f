"""Views about predictions in a real Chromium: their numbers are the model's, by mouse and keyboard."""

import math
import re

import pytest

from anyformer.explore.server import ExploreServer
from tests.explore.made import body
from tests.explore.tab import Opener


def percents(text: str) -> list[float]:
    return [float(found) / 100 for found in re.findall(r"([\d.]+) %", text)]


@pytest.mark.parametrize(("run", "scheme"), [("pair", "light"), ("lm", "dark"), ("classify", "dark")])
def test_the_lens_grid_lists_a_cell(page: Opener, server: ExploreServer, run: str, scheme: str) -> None:
    one = page(run=run, view="lens", text="the quick fox", scheme=scheme)
    found = server.workspace.answer("lens", body(run, text="the quick fox"))
    rows = [list(percents(text)) for text in one.texts(".cells tbody tr")]
    expected = [[p for _, p, _ in row] for row in reversed(found["rows"])]
    assert rows == [pytest.approx(row, abs=6e-4) for row in expected]
    one.click("#lens-0-1-0")
    assert one.tab.get_attribute("#lens-0-1-0", "aria-pressed") == "true"
    layer = found["layers"][-2]
    listed = server.workspace.answer("cell", body(run, text="the quick fox", layer=layer, at=0))
    assert percents(one.text(".cell-list .bars")) == pytest.approx([p for _, p in listed["top"]], abs=6e-4)
    one.tab.focus("#lens-0-1-0")
    one.tab.keyboard.press("ArrowUp")
    one.press("Enter")
    assert one.tab.get_attribute("#lens-0-0-0", "aria-pressed") == "true"
    assert one.tab.evaluate("document.activeElement.id") == "lens-0-0-0"
    other = page(run="lm")
    other.tab.goto(one.tab.url)
    assert other.settled().text("#view") == one.text("#view")


def test_the_lens_leads_to_the_next_token(page: Opener) -> None:
    one = page(run="lm", view="lens", text="the quick fox").click("#lens-0-0-4").click("#lens-next-0")
    one.see("next")
    assert one.text("#view .value").split() == ["after", "q4"]


@pytest.mark.parametrize("run", ["pair", "lm"])
def test_tokens_are_coloured_by_their_log_probability(page: Opener, server: ExploreServer, run: str) -> None:
    request = body(run, text="the quick fox", target="the dog")
    found = server.workspace.answer("surprise", request)
    one = page(run=run, view="surprise", text="the quick fox", target="the dog")
    first = found["rows"].index(next(row for row in found["rows"] if row))
    for i in (first, len(found["tokens"]) - 1):
        one.tab.focus(f"#expected-0-{i}")
        shown = re.search(r"log p (-?[\d.e-]+)", one.text("#view .value"))
        assert shown is not None
        assert float(shown[1]) == pytest.approx(found["rows"][i]["logp"], rel=1e-3)
    count, mean, perplexity = (float(text) for text in one.texts("#view .sum .term b"))
    assert (count, mean) == (found["count"], pytest.approx(found["mean"], rel=1e-3))
    assert perplexity == pytest.approx(math.exp(-found["mean"]), rel=1e-3)
    assert one.tab.locator(".surprise .none").count() == first
    one.click(f"#expected-0-{first}").see("next")


def test_views_that_a_run_lacks_are_not_listed(page: Opener) -> None:
    """A link to one opens the path; compared with another run, it shows the reason."""
    one = page(run="classify", view="surprise")
    one.see("path")
    assert one.tab.locator("#tab-surprise").count() == 0
    assert one.tab.locator("#tab-lens").count() == 1
    one.press("e").see("path")
    two = page(run="lm", view="compare", both="surprise", run2="classify", text="the quick fox")
    assert "no next token" in two.text("#view .empty")


def test_groups_fit_a_narrow_page(page: Opener) -> None:
    """The row of views scrolls inside, to the selected one."""
    one = page(width=400, run="lm", view="live")
    inside = "(t => t.getBoundingClientRect().right <= innerWidth)(document.querySelector('#tab-live'))"
    assert one.tab.evaluate(inside)
    assert one.tab.evaluate("document.querySelector('#tabs').clientHeight") < 60
    assert one.texts(".tab-caption")[1] == "Attention"

"""The page checked by axe-core: every view of every shape, light and wide in English, dark and narrow in Korean."""

from importlib import resources
from typing import Any

import pytest

from tests.explore.tab import SHAPES, Opener, Page
from tests.explore.test_browser import views_of

IMPACTS = ("serious", "critical")
WINDOWS = {
    "light": {"width": 1280, "scheme": "light", "locale": "en-US"},
    "dark": {"width": 400, "scheme": "dark", "locale": "ko-KR"},
}
FINISH = "document.getAnimations().forEach((one) => one.effect?.getComputedTiming().endTime < Infinity && one.finish())"
CHECK = "(part) => axe.run(part, { resultTypes: ['violations'], preload: false })"


@pytest.fixture(scope="module")
def axe() -> str:
    """The script of axe-core (MPL 2.0), which the package `axe-playwright-python` (MIT) carries."""
    pytest.importorskip("axe_playwright_python", reason="needs the extra `dev-all` (axe-playwright-python)")
    return (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


def faults(one: Page, part: str) -> list[str]:
    """Return a line for each violation of serious or critical impact in a part of the page, with the first elements."""
    one.tab.evaluate(FINISH)  # a colour on its way is not the one that stays
    found: dict[str, Any] = one.tab.evaluate(CHECK, part)
    return [
        f"{rule['id']}: {rule['help']}: {[node['html'][:120] for node in rule['nodes'][:3]]}"
        for rule in found["violations"]
        if rule["impact"] in IMPACTS
    ]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("run", SHAPES)
def test_axe_finds_nothing_serious(page: Opener, axe: str, run: str, window: str) -> None:
    one = page(**WINDOWS[window], run=run, text="the quick fox")
    one.tab.evaluate(axe)  # past the page's content policy
    found = {"page": faults(one, "html")}
    for view in views_of(run):
        one.click(f"#tab-{view}").see(view)
        found[view] = faults(one, "#view")
    assert {view: bad for view, bad in found.items() if bad} == {}


def test_axe_finds_what_is_wrong(page: Opener, axe: str) -> None:
    one = page(run="lm", view="block")
    one.tab.evaluate(axe)
    one.tab.evaluate("document.querySelector('#view').append(document.createElement('button'))")
    one.tab.evaluate("document.querySelector('.explained').style.color = '#ccc'")
    assert {line.split(":")[0] for line in faults(one, "#view")} == {"button-name", "color-contrast"}

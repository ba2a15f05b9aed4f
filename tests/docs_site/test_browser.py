"""The site in a Chromium: search, dark mode, narrow screens, formulae; from a server and from its files."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Opener = Callable[..., Any]
NARROW = ("index.html", "concepts/layer-norm.html", "reference/model.html", "reference/cli.html", "glossary.html",
          "lab/index.html", "benchmarks.html", "start/install.html")  # fmt: skip


@pytest.fixture
def tab(chromium: Any, address: str, site: Path) -> Iterator[Opener]:
    """Open a page as `tab("index.html", width=400)`; at the end check for errors and requests to other hosts."""
    errors, requests, contexts = list[str](), list[str](), []

    def open_(page: str, width: int = 1280, scheme: str = "light", files: bool = False) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        one = context.new_page()
        one.on("pageerror", lambda error: errors.append(str(error)))
        one.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        one.on("request", lambda request: requests.append(request.url))
        one.goto(f"{site.as_uri()}/{page}" if files else f"{address}/{page}")
        return one

    yield open_
    for context in contexts:
        context.close()
    assert errors == []
    ours = (address, site.as_uri(), "data:", "blob:", "about:")
    assert [url for url in requests if not url.startswith(ours)] == []


@pytest.mark.parametrize("files", [False, True], ids=["server", "files"])
def test_search_finds_rotary(tab: Opener, files: bool) -> None:
    one = tab("index.html", files=files)
    field = one.locator("input[placeholder='Search']")
    for _ in range(40):  # until the page's script listens
        one.keyboard.press("Control+k")
        one.wait_for_timeout(250)
        if field.count() and field.is_visible():
            break
    field.press_sequentially("rotary", delay=100)
    found = one.locator("a:has(mark)", has_text="otary").first
    found.wait_for(timeout=30_000)
    found.click()
    one.wait_for_load_state()
    assert "otary" in one.inner_text("article")


def test_dark_mode_toggles(tab: Opener) -> None:
    one = tab("concepts/layer-norm.html")
    colour = "getComputedStyle(document.body).backgroundColor"
    before = one.evaluate(colour)
    one.locator("label[title='Switch to dark mode']").click()
    assert one.get_attribute("body", "data-md-color-scheme") == "slate"
    assert one.evaluate(colour) != before
    one.reload()
    assert one.get_attribute("body", "data-md-color-scheme") == "slate", "the choice is kept"
    assert tab("index.html", scheme="dark").get_attribute("body", "data-md-color-scheme") == "slate"


@pytest.mark.parametrize("page", NARROW)
def test_narrow_screens_have_no_overflow(tab: Opener, page: str) -> None:
    one = tab(page, width=400)
    assert one.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    one.evaluate("window.scrollTo(200, 0)")
    assert one.evaluate("window.scrollX") == 0


def test_formulae_are_drawn(tab: Opener) -> None:
    one = tab("concepts/layer-norm.html")
    sizes = one.evaluate("""[...document.querySelectorAll("article math")].map(node => {
        const box = node.getBoundingClientRect()
        return [box.width, box.height]
    })""")
    assert len(sizes) > 5
    assert all(width > 3 and height > 5 for width, height in sizes)
    tall = one.evaluate("document.querySelector('article mfrac').getBoundingClientRect().height")
    assert tall > 25, "a fraction has two lines"


@pytest.mark.parametrize("width", [400, 1280, 1900])
def test_pictures_in_tables_have_their_width(tab: Opener, width: int) -> None:
    images = tab("lab/index.html", width=width).locator("td img[width]").all()
    assert images
    assert all(image.evaluate("(e) => e.clientWidth === Number(e.getAttribute('width'))") for image in images)

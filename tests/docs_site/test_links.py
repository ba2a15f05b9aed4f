"""No link of the site is dead, and nothing on it comes from another host."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src")}


class Reader(HTMLParser):
    """The ids, links and loaded addresses of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.math = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.math += tag == "math"
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            if (tag, name) == ("a", "href") and value:
                self.links.append(value)
            if (tag, name) in LOADED and value and ("rel", "canonical") not in attrs:
                self.loaded.append(value)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Reader]:
    return {path: Reader(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_links_lead_somewhere(site: Path, pages: dict[Path, Reader]) -> None:
    dead = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_relative_to(site) or not target.exists():
                dead.append(f"{path.relative_to(site)}: {link}")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                dead.append(f"{path.relative_to(site)}: {link} (no such part)")
    assert len(pages) > 100
    assert dead == []


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Reader]) -> None:
    for path, page in pages.items():
        assert [one for one in page.loaded if urlsplit(one).netloc] == [], path
        assert "@import" not in path.read_text(encoding="utf-8"), path


def test_every_formula_is_rendered(site: Path, pages: dict[Path, Reader]) -> None:
    """A formula that is left as text shows its dollar signs."""
    concepts = [path for path in pages if path.parent.name == "concepts" and path.name != "index.html"]
    assert len(concepts) > 20
    for path in concepts:
        assert pages[path].math, path
        article = re.search(r"<article.*?</article>", path.read_text(encoding="utf-8"), re.DOTALL)
        assert article
        prose = re.sub(r"<(pre|code|script)\b.*?</\1>", "", article[0], flags=re.DOTALL)
        assert not re.findall(r"\$[^$\n]{1,80}\$", prose), path

"""Markdown extension: links from a page to files of the repository outside docs/ lead to their source pages.

`python -m docs_site.source_links site` writes those pages: one for every file or folder that the site links to.
"""

import re
import sys
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FOLDER = "source"  # of the source pages, on the site
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<link rel="stylesheet" href="{up}{folder}/source.css">
<nav><a href="{up}index.html">anyformer</a> / {name}</nav>
{body}
</html>
"""
STYLE = """body { margin: 0 auto; max-width: 70rem; padding: 1rem; font-family: system-ui, sans-serif; }
pre { overflow-x: auto; font-size: 0.85rem; line-height: 1.4; }
:root { color-scheme: light dark; }
"""


def to_site(href: str, page: str) -> str:
    """Return the address on the site of a link in a page (its path below docs/); links to pages are unchanged."""
    if not href.startswith(".."):
        return href
    path, _, part = href.partition("#")
    target = (DOCS / page).parent.joinpath(unquote(path)).resolve()
    if target.is_relative_to(DOCS) or not target.is_relative_to(ROOT):
        return href
    up = "../" * page.count("/")
    return f"{up}{FOLDER}/{target.relative_to(ROOT).as_posix()}.html" + (f"#{part}" if part else "")


class _Links(Treeprocessor):
    def run(self, root: ElementTree.Element) -> None:
        from zensical.extensions.context import ContextPreprocessor

        assert self.md is not None
        context = ContextPreprocessor.from_markdown(self.md)
        assert context is not None, "zensical passes the page to its extensions"
        for link in root.iter("a"):
            link.set("href", to_site(link.get("href", ""), context.page.path))


class SourceLinks(Extension):
    """The extension, for `markdown_extensions` of mkdocs.yml."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(_Links(md), "source-links", 5)  # after links have become elements (20)


def makeExtension(**settings: Any) -> SourceLinks:
    """Return the extension; Python-Markdown calls this."""
    return SourceLinks(**settings)


def write_pages(site: Path) -> int:
    """Write a page for each file and folder that the site links to; return their number."""
    pattern = re.compile(rf'href="(?:\./)?(?:\.\./)*{FOLDER}/([^"#]+)\.html')
    linked = {unquote(name) for page in site.rglob("*.html") for name in pattern.findall(page.read_text("utf-8"))}
    css = [HtmlFormatter(style="friendly").get_style_defs(".highlight")]
    css.append("@media (prefers-color-scheme: dark) {")
    css += [HtmlFormatter(style="github-dark").get_style_defs(".highlight"), "}"]
    (site / FOLDER).mkdir(exist_ok=True)
    (site / FOLDER / "source.css").write_text(STYLE + "\n".join(css), encoding="utf-8")
    for name in sorted(linked):
        page = site / FOLDER / f"{name}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        up = "../" * (name.count("/") + 1)
        text = PAGE.format(name=escape(name), up=up, folder=FOLDER, body=_body(ROOT / name))
        page.write_text(text, encoding="utf-8")
    return len(linked)


def _body(path: Path) -> str:
    if path.is_dir():
        names = sorted(child.name + "/" * child.is_dir() for child in path.iterdir() if child.name[0] not in "._")
        return f"<pre>{escape(chr(10).join(names))}</pre>"
    text = path.read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(text, lexer, HtmlFormatter(lineanchors="L", anchorlinenos=True, linenos="inline")))


if __name__ == "__main__":
    count = write_pages(Path(sys.argv[1]))
    print(f"{count} source pages")

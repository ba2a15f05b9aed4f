"""Markdown extension: TeX between dollar signs becomes MathML, which browsers draw without a script or a request.

`$x$` within a line is inline; `$$ … $$` is a display, on one line or over several. Code is left alone.
"""

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

INLINE = r"(?<![\\$])\$(?!\s)((?:\\.|[^$\\\n]|\n(?!\n))+?)(?<![\s\\])\$(?![\d$])"
DISPLAY = r"\$\$(.+?)\$\$"


LIMITS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
ARGUMENTS = {"mi", "mn", "msub", "msup", "mfrac", "msqrt"}
BIG = {"∑", "∏", "max", "min", "lim", "argmax", "argmin"}


def to_mathml(tex: str, display: bool) -> str:
    """Return the MathML of a formula. An unknown command is an error: it would be shown as its name."""
    known = re.sub(r"\\(begin|end)\{aligned\}", r"\\\1{split}", tex.strip())
    known = re.sub(r"\\arg\s*\\(max|min)", r"\\operatorname*{arg\1}", known)
    known = re.sub(r"\\text\w*\{[^{}]*\}", lambda text: text[0].replace("<", "&lt;").replace(">", "&gt;"), known)
    text = convert(known, display="block" if display else "inline")
    root = ElementTree.fromstring(text.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', ""))
    if unknown := re.findall(r"\\\w+", "".join(root.itertext())):
        raise ValueError(f"latex2mathml does not know {', '.join(unknown)} in the formula {tex}")
    for node in root.iter():
        base = "".join(node[0].itertext()).replace("\u2009", "") if len(node) else ""
        if display and node.tag in LIMITS and base in BIG:
            node.tag = LIMITS[node.tag]  # below and above the sign, as TeX sets displays
        if node.tag == "mo" and len(node.text or "") > 1 and (node.text or "").isalpha():
            node.tag = "mi"  # a function's name: an operator would have wide spaces around it
    for node in list(root.iter()):
        for i, (one, following) in reversed([*enumerate(pairwise(node))]):
            if one.tag == "mi" and len(one.text or "") > 1 and following.tag in ARGUMENTS:
                node.insert(i + 1, ElementTree.Element("mspace", width="0.167em"))  # sin x, not sinx
    return ElementTree.tostring(root, encoding="unicode")


class _Inline(InlineProcessor):
    """Formulae within a paragraph, a table or a heading."""

    def __init__(self, pattern: str, md: Markdown, display: bool):
        super().__init__(pattern, md)
        self.display = display

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]
        assert self.md is not None
        return self.md.htmlStash.store(to_mathml(m[1], self.display)), m.start(0), m.end(0)


class _Display(BlockProcessor):
    """A block that begins and ends with two dollar signs."""

    def test(self, parent: Any, block: str) -> bool:
        return block.startswith("$$")

    def run(self, parent: Any, blocks: list[str]) -> bool | None:
        taken, text = 1, blocks[0].rstrip()
        while not (text.endswith("$$") and len(text) > 3) and taken < len(blocks):
            text += "\n\n" + blocks[taken].rstrip()
            taken += 1
        if not text.endswith("$$") or text.count("$$") != 2:
            return False
        del blocks[:taken]
        div = ElementTree.SubElement(parent, "div", {"class": "formula"})
        div.text = self.parser.md.htmlStash.store(to_mathml(text[2:-2], display=True))
        return None


class MathML(Extension):
    """The extension, for `markdown_extensions` of mkdocs.yml."""

    def extendMarkdown(self, md: Markdown) -> None:
        # After code spans (190), before backslash escapes (180).
        md.inlinePatterns.register(_Inline(DISPLAY, md, display=True), "math-display", 186)
        md.inlinePatterns.register(_Inline(INLINE, md, display=False), "math-inline", 185)
        md.parser.blockprocessors.register(_Display(md.parser), "math-block", 75)


def makeExtension(**settings: Any) -> MathML:
    """Return the extension; Python-Markdown calls this."""
    return MathML(**settings)

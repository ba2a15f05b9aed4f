"""Concept pages: each idea has its page, every page has all its sections, and every number on it is computed."""

import re
from pathlib import Path

import pytest
import torch

from anyformer.lab.experiment import find
from figures.__main__ import load
from figures.style import FOLDER
from tests.pages import ROOT, blocks, check_outputs

# One page per idea. A page that is missing here, or there, fails.
IDEAS = {
    "linear", "layer-norm", "other-norms", "dropout", "residual", "norm-placement", "feed-forward", "activations",
    "gated-feed-forward", "experts", "other-mixers", "linear-attention", "costs", "embeddings", "tying",
    "scaled-dot-product", "three-attentions", "multi-head", "grouped-query", "masks", "sparse-patterns", "graph",
    "long-sequences", "no-positions", "sinusoidal", "learned-positions", "t5-bias", "disentangled", "alibi", "rotary",
    "three-shapes", "bert-and-gpt", "shifted-targets", "cross-entropy", "warm-up", "pretraining", "lora", "tokenizers",
    "attention-gate", "value-residual", "skip-connections", "multi-token", "from-scratch",
    "muon", "width-transfer", "batches", "streams", "kv-cache", "sampling", "beam-search", "speculative", "scoring",
}  # fmt: skip
SECTIONS = ["Formula", "Worked example", "Figure", "Config", "Lab verdict", "Paper"]
KOREAN_SECTIONS = ["수식", "계산 예제", "그림", "설정", "실험 판정", "논문"]
PAGES = sorted(path for path in (ROOT / "docs" / "concepts").glob("*.md") if path.name != "README.md")
KOREAN = sorted((ROOT / "docs" / "ko" / "concepts").glob("*.md"))
MATH = re.compile(r"^\$\$\n.*?^\$\$$", re.MULTILINE | re.DOTALL)
VERDICT = re.compile(r"\]\((?:\.\./)+lab/(\w+)\.md\):([^.]+)\.", re.DOTALL)  # a claim, and the sentence after its link
WORDS = [
    ("does not hold", "does not hold"), ("undecided", "undecided"), ("hold", "holds"),
    ("성립하지 않습니다", "does not hold"), ("미결", "undecided"), ("성립합니다", "holds"),
]  # fmt: skip
FIGURES = load()
IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)\s]+)\)")


def test_every_idea_has_a_page() -> None:
    assert {page.stem for page in PAGES} == IDEAS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_has_every_section(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS
    section = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert "$" in section["Formula"]
    assert IMAGE.search(section["Figure"])
    assert any(block.language in ("bash", "toml") for block in blocks(section["Config"]))
    assert "https://" in section["Paper"]
    for image in IMAGE.finditer(text):
        path = (page.parent / image["path"]).resolve()
        assert path.relative_to(FOLDER).with_suffix("").as_posix() in FIGURES, "figures/ does not draw this image"
        assert len(image["alt"]) > 20, "the alternative text says what the figure shows"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_worked_numbers_are_computed(page: Path) -> None:
    """Blocks of Python run in order in one namespace, and each prints the text below it."""
    assert check_outputs(page.read_text(encoding="utf-8"))
    torch.set_printoptions(profile="default")


@pytest.mark.parametrize("page", KOREAN, ids=lambda page: page.stem)
def test_korean_page_shows_the_same(page: Path) -> None:
    """The same sections, code, outputs, formulae, figures and papers as on the English page, and links both ways."""
    korean, english = (path.read_text(encoding="utf-8") for path in (page, ROOT / "docs" / "concepts" / page.name))
    assert re.findall(r"^## (.*)$", korean, re.MULTILINE) == KOREAN_SECTIONS
    assert [(one.language, one.body) for one in blocks(korean)] == [(one.language, one.body) for one in blocks(english)]
    assert MATH.findall(korean) == MATH.findall(english)
    assert re.findall(r"<https://[^>]+>", korean) == re.findall(r"<https://[^>]+>", english)
    figures = [[Path(image["path"]).name for image in IMAGE.finditer(text)] for text in (korean, english)]
    assert figures[0] == figures[1]
    assert f"](../../concepts/{page.name})" in korean
    assert f"](../ko/concepts/{page.name})" in english


@pytest.mark.parametrize("page", [*PAGES, *KOREAN], ids=lambda page: f"{page.parent.parent.name}-{page.stem}")
def test_verdicts_are_those_of_the_lab(page: Path) -> None:
    """A verdict after a link to a claim is that of the results in docs/lab, at the size for a CPU."""
    for claim, after in VERDICT.findall(page.read_text(encoding="utf-8")):
        verdict = next((words[1] for words in WORDS if words[0] in after), None)
        stored = find(claim).published["cpu"].word
        assert verdict is None or stored.startswith(verdict), f"{claim}: the page says {verdict!r}, the lab {stored!r}"


def test_every_figure_is_drawn() -> None:
    drawn = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("concepts/*.png")}
    assert drawn == {name for name in FIGURES if name.startswith("concepts/")}

"""The path in a real Chromium: it comes first, plays, has a link for each step, and shows the model's numbers."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

from anyformer.explore.server import ExploreServer
from tests.explore.made import body
from tests.explore.tab import SHAPES, Opener, Page


def steps(page: Page) -> int:
    return int(page.text(".player .number").split("/")[1])


def state(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlsplit(page.link()).fragment).items()}


def shown_numbers(text: str) -> list[float]:
    return [
        float(found.replace("−", "-").replace(",", "")) for found in re.findall(r"[+−]?\d[\d,.]*(?:e[−-]\d+)?", text)
    ]


@pytest.mark.parametrize(
    ("run", "locale", "scheme", "width"),
    [
        ("pair", "en-US", "light", 1280),
        ("lm", "ko-KR", "dark", 400),
        ("classify", "en-US", "dark", 400),
    ],
)
def test_the_path_comes_first_and_leads_to_the_end(
    page: Opener, run: str, locale: str, scheme: str, width: int
) -> None:
    """Each step has a title, a sentence and numbers, and fits the page."""
    one = page(run=run, locale=locale, scheme=scheme, width=width)
    one.see("path")
    titles = []
    for number in range(1, steps(one) + 1):
        titles.append(one.text(".stage h2"))
        assert titles[-1].startswith(f"{number}. ")
        assert len(one.text(".sentence")) > 10
        assert one.tab.locator(".stage-numbers *").count() > 0
        assert one.tab.locator("#view .error").count() == 0
        assert one.tab.evaluate("document.documentElement.scrollWidth") == width, titles[-1]
        assert one.tab.locator(".rail [aria-current=step]").count() == 1
        assert one.text(".sentence") in one.tab.evaluate("document.querySelector('#announce').textContent")
        if number < steps(one):
            one.click("#next-0")
    assert one.tab.locator("#next-0").is_disabled()
    assert len(set(titles)) == len(titles)


def test_a_step_is_a_link(page: Opener) -> None:
    one = page(run="lm", text="the fox")
    one.click("[id='step-0-decoder.norm']").click("[id='step-0-decoder.softmax']")
    address = one.tab.get_attribute("[id='step-0-decoder.softmax']", "href")
    assert state(one)["stage"] == "decoder.softmax"
    two = page(run="pair")
    two.tab.goto(f"{two.address}{address}")
    assert two.settled().text("#view") == one.text("#view")
    one.tab.go_back()
    one.settled()
    assert "stage=decoder.norm" in one.tab.url
    one.press(".", ".")
    assert state(one)["stage"] == "decoder.scores"
    one.press(",")
    assert state(one)["stage"] == "decoder.qkv"


def test_play_and_pause(page: Opener) -> None:
    one = page(run="lm")
    assert one.tab.get_attribute("#play-0", "aria-pressed") == "false"
    one.click("#play-0")
    assert one.tab.get_attribute("#play-0", "aria-pressed") == "true"
    one.until("document.querySelector('.stage h2').textContent.startsWith('2.')")
    one.settled().press("p")
    assert one.tab.get_attribute("#play-0", "aria-pressed") == "false"
    assert one.text(".stage h2").startswith("2.")


@pytest.mark.parametrize("run", SHAPES)
def test_numbers_on_the_page_are_the_models(page: Opener, server: ExploreServer, run: str) -> None:
    kind = "encoder" if run == "classify" else "decoder"
    one = page(run=run, stage=f"{kind}.softmax", layer="1", head="1", text="the quick fox")
    request = body(run, text="the quick fox", stage=f"{kind}.softmax", layer=1, head=1)
    answer = server.workspace.answer("stage", request)
    assert one.text(".formula") == re.sub(r"[_{}]", "", "\n".join(answer["formula"]))
    weights = answer["weights"]
    cells = [shown_numbers(text)[0] for text in one.texts(".rows tbody tr td:nth-last-child(2)")]
    assert cells == pytest.approx(weights, abs=5e-4)
    assert sum(cells) == pytest.approx(1, abs=5e-3)
    one.click(f"[id='step-0-{kind}.values']")
    found = server.workspace.answer("stage", {**request, "stage": f"{kind}.values"})
    assert shown_numbers(one.texts(".strip-values .mono")[-1]) == pytest.approx(found["result"][:6], rel=1e-3, abs=1e-4)
    assert float(re.search(r"[\d.]+e-\d+|: 0", one.text(".check"))[0].removeprefix(": ")) < 1e-5


@pytest.mark.parametrize("run", SHAPES)
def test_a_number_is_followed_back_and_its_head_switched_off(page: Opener, server: ExploreServer, run: str) -> None:
    """By clicks: output, (position,) head, token, dimensions, switch. Every sum is shown with its difference."""
    one = page(run=run, stage="head.sample", text="the quick fox")
    one.click(".stage .link >> nth=1")
    levels = ["parts", "tokens", "dimensions"]
    if run == "classify":
        assert state(one)["stage"] == "follow.positions"
        assert float(one.text(".adding .check").split("by ")[1].rstrip(".")) < 1e-5
        one.click(".rows .link >> nth=2")
    request = {name: int(value) for name, value in state(one).items() if name in ("output", "place")}
    for level in levels:
        assert state(one)["stage"] == f"follow.{level}"
        shown = float(one.text(".adding .check").split("by ")[1].rstrip("."))
        assert shown < 1e-5
        if level == "parts":
            found = server.workspace.answer("follow", body(run, text="the quick fox", level="parts", **request))
            terms = [shown_numbers(text)[0] for text in one.texts(".adding .term:not(.whole) b")]
            assert sum(terms) == pytest.approx(found["value"], abs=5e-3)
            assert shown_numbers(one.text(".adding .whole b"))[0] == pytest.approx(found["value"], abs=1e-3)
            head = next(term for term in found["terms"] if term["heads"])["name"] + ".1"
            one.click(f"[id='part-0-{head}']")
        elif level == "tokens":
            assert state(one)["part"] == head
            one.click(".rows .link >> nth=0")
    one.click("[id='step-0-follow.check']")
    before, after, change = one.text(".rows"), one.texts(".rows tbody td"), one.texts(".stage .sum .term b")
    direct, rest, real = (shown_numbers(text)[0] for text in change)
    assert direct + rest == pytest.approx(real, abs=2e-3)
    assert shown_numbers(after[3])[0] - shown_numbers(after[0])[0] == pytest.approx(real, abs=2e-3)
    one.click("#flip-0")
    kind, layer, part, number = head.split(".")
    assert state(one)["off"] == f"{'cross' if part == 'cross' else kind}.{layer}.{number}"
    assert one.text(".rows") == before  # both are always shown
    assert one.tab.get_attribute("#flip-0", "aria-checked") == "false"


def test_only_the_numbers_of_the_step_are_sent(page: Opener) -> None:
    one = page(run="lm")
    one.requests.clear()
    one.click("#next-0")
    assert [urlsplit(url).path for url in one.requests] == ["/api/stage"]


def test_a_token_is_followed_by_a_click(page: Opener) -> None:
    one = page(run="pair", stage="encoder.embed", text="the quick fox")
    one.click("#token-0-encoder-2")
    assert "fox" in one.text(".stage-top .label")
    one.click("[id='step-0-encoder.tokens']").click("#card-0-1")
    assert "quick" in one.text(".stage-top .label")
    one.click("#tab-path")
    one.tab.goto(one.tab.url.replace("encoder.tokens", "decoder.scores"))
    one.settled().click("#token-0-decoder-1")
    assert one.text(".stage-top .label").endswith("1")


def test_the_first_step_of_an_encoder_decoder_marks_no_token_before_one_is_clicked(page: Opener) -> None:
    one = page(run="pair")
    assert "attends to most" in one.text(".sentence")
    assert one.tab.locator(".id-card[aria-pressed=true]").count() == 0
    one.click("#card-0-1")
    assert one.tab.get_attribute("#card-0-1", "aria-pressed") == "true"
    assert "blue token" in one.text(".sentence")

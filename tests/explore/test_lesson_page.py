"""Lessons in a real Chromium: a wrong and a right answer, the model's numbers, keyboard, both languages."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from anyformer.explore.lessons import shipped_lessons
from anyformer.explore.open_runs import BUNDLED, open_runs
from anyformer.explore.server import ExploreServer
from tests.explore.tab import Opener, Page, serving

FITS = "document.documentElement.scrollWidth <= innerWidth"
FOCUS = "document.activeElement.id"


@pytest.fixture(scope="module")
def server() -> Iterator[ExploreServer]:
    with serving(open_runs([BUNDLED])) as one:
        yield one


def clicks(page: Page, *selectors: str) -> None:
    """Click one after the other; the panel is drawn after the view."""
    for selector in selectors:
        page.tab.wait_for_selector(selector)
        page.click(selector)


def p_without(server: ExploreServer, *heads: str) -> float:
    """Return the probability of 0 after `1 0 2 <sep>`, as the view about ablations computes it."""
    body = {"run": "sort", "text": "1 0 2", "target": "0 1 2", "off": list(heads), "at": 3}
    rows: list[list[Any]] = server.workspace.answer("ablated", body)["rows"]
    return float(next(after for name, _, after in rows if name == "0"))


def bars(page: Page) -> dict[str, float]:
    """Return the bars of the panel: names with probabilities."""
    found = {}
    for row in page.texts("#lesson .bar-row"):
        name, number = row.rsplit("\n", 1)
        found[name.removeprefix("✓").strip()] = float(number.strip("<% ")) / 100
    return found


def test_a_wrong_and_a_right_answer(page: Opener, server: ExploreServer) -> None:
    one = page()
    clicks(one, "#lessons", "#lesson-2-heads", "#lesson-next")
    one.tab.wait_for_selector("#candidate-5")
    one.see("heads")
    assert one.tab.locator("#lesson .verdict, #lesson .bar-row").count() == 0

    clicks(one, "#candidate-5")
    one.tab.wait_for_selector(".verdict")
    said = "Not so. Without this head, 0 has a probability of 100 %; with all heads, 100 %. Try another one."
    assert one.text(".verdict") == said
    assert bars(one) == {"Layer 1 · Head 1": pytest.approx(p_without(server, "decoder.1.1"), abs=6e-4)}
    assert one.tab.get_attribute("[id='switch-0-decoder.1.1']", "aria-checked") == "false"

    clicks(one, "#candidate-0")
    one.tab.wait_for_selector(".verdict.right")
    assert one.text(".verdict").startswith("Right. Without this head, 0 has a probability of 14.3 %")
    shown = bars(one)
    every = [f"decoder.{layer}.{head}" for layer in range(2) for head in range(4)]
    assert shown.pop("Control: all heads off") == pytest.approx(p_without(server, *every), abs=6e-4)
    assert len(shown) == 8
    for name, p in shown.items():
        assert p == pytest.approx(p_without(server, ".".join(["decoder", *re.findall(r"\d", name)])), abs=6e-4)
    assert "✓ Layer 0 · Head 0" in one.text("#lesson .bars")
    question = shipped_lessons()["2-heads"].steps[1].question
    assert question
    assert one.text(".verdict-then") == question.then.en
    assert one.texts(".answer")[-1] != "0 1 2"  # the model on the page has the head off, too


def test_none_of_them_may_be_right(page: Opener) -> None:
    one = page(lesson="2-heads", lessonStep="3", text="1 0 2")
    clicks(one, "#candidate-3")
    one.tab.wait_for_selector(".verdict:not(.right)")
    clicks(one, "#candidate-8")
    one.tab.wait_for_selector(".verdict.right")
    assert one.text(".verdict").startswith("Right. No candidate alone")
    assert one.tab.locator("[role=switch][aria-checked=false]").count() == 0
    clicks(one, "#lesson-all")
    one.tab.wait_for_selector("#lesson li")
    assert one.tab.locator("#lesson li button").count() == len(shipped_lessons())


def test_a_text_without_a_token_and_a_step_of_the_training(page: Opener) -> None:
    one = page()
    clicks(one, "#lessons", "#lesson-1-input", "#lesson-next", "#candidate-2")
    one.tab.wait_for_selector(".verdict.right")
    assert one.tab.input_value("#text") == "7 3 3 8 7"
    assert one.texts(".chip.answers[aria-pressed=true] *") == ["3", "7"]  # the second token of the answer
    clicks(one, "#lesson-next")
    one.until("document.querySelector('#text').value === '7 3 5 3 8 7'")
    clicks(one, "#lesson-close", "#lessons", "#lesson-3-training", "#lesson-next", "#candidate-4")
    one.tab.wait_for_selector(".verdict.right")
    assert one.text("#film-now-0") == "step 59"
    clicks(one, "#lesson-close")
    one.until("!document.querySelector('#lesson > *')")
    assert "result" in one.text("#film-now-0")


@pytest.mark.parametrize(("width", "locale", "title"), [(400, "ko-KR", "답은 무엇에"), (1280, "en-US", "What does")])
def test_a_lesson_by_keyboard(page: Opener, width: int, locale: str, title: str) -> None:
    """The focus stays in the panel, what is new is announced, and nothing is wider than the page."""
    one = page(width=width, locale=locale)
    one.tab.focus("#lessons")
    one.press("Enter")
    one.until(f"{FOCUS} === 'lesson-title'")
    one.press("Tab", "Tab", "Enter")  # past the button that closes
    one.until(f"document.querySelector('#lesson-title').textContent.startsWith('{title}')")
    one.until(f"{FOCUS} === 'lesson-title'")
    one.tab.focus("#lesson-next")
    one.press("Enter")
    one.tab.wait_for_selector("#candidate-0")
    assert one.tab.evaluate(FOCUS) == "lesson-next"
    one.until("document.querySelector('#announce').textContent.includes(document.querySelector('.asked').textContent)")
    one.tab.focus("#candidate-0")
    one.press("ArrowRight", "ArrowRight", "Enter")
    one.tab.wait_for_selector(".verdict.right")
    assert one.tab.evaluate(FOCUS) == "candidate-2"
    one.until(
        "document.querySelector('#announce').textContent.includes(document.querySelector('.verdict').textContent)"
    )
    assert one.tab.get_attribute("#candidate-2", "aria-pressed") == "true"
    assert one.tab.evaluate(FITS)
    if locale == "ko-KR":
        assert not re.search("[a-z]{3}", one.text("#lesson"))
    one.tab.focus("#lesson-close")
    one.press("Enter")
    one.until(f"{FOCUS} === 'lessons'")


def test_a_lesson_is_a_link(page: Opener) -> None:
    one = page(lesson="3-training", lessonStep="2", text="7 3 5 3 8 7", view="next")
    one.tab.wait_for_selector("#candidate-0")
    assert one.text(".lesson-top .number") == "3 / 3"
    other = page(lesson="no-such")
    other.tab.wait_for_selector("#lesson li")
    assert other.tab.locator("#lesson li").count() == len(shipped_lessons())

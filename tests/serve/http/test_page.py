"""The page at / in a browser: each panel, streaming, token probabilities, light and dark, 400 pixels."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.http.served import Server

pytestmark = pytest.mark.system


@pytest.fixture(params=[(1100, "light"), (400, "dark")], ids=["wide", "narrow"])
def page(chromium: Any, server: Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A tab; at the end it must have no errors and no requests to other hosts."""
    width, scheme = request.param
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab = context.new_page()
    errors, hosts = [], set()
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text) if is_error(message) else None)
    tab.on("request", lambda one: hosts.add(one.url.split("/")[2]))
    tab.goto(server.address)
    tab.wait_for_selector("#tabs button")
    yield tab
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    if folder := os.environ.get("SCREENSHOTS"):
        tab.screenshot(path=f"{folder}/{request.node.name}.png")
    context.close()
    assert errors == []
    assert hosts == {server.address.removeprefix("http://")}


def is_error(message: Any) -> bool:
    return message.type == "error" and "status of 400" not in message.text  # refused input is expected


def ask(page: Any, model: str, tab: str, text: str, button: str) -> str:
    """Fill a panel, press its button and return the output."""
    page.select_option("#model", model)
    page.click(f"#tabs button:text-is('{tab}')")
    page.fill("#text", text)
    page.click(f"button.go:text-is('{button}')")
    page.wait_for_selector("#status.done")
    return page.inner_text("#out")


def test_a_completion_is_streamed(page: Any, server: Server) -> None:
    page.select_option("#model", "lm")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "12")
    page.fill("#text", "the fox")
    page.click("button.go")
    page.wait_for_selector("#status.done")
    assert page.text_content("#out") == server.run("lm").generate(["the fox"], max_new_tokens=12)[0]
    tokens = page.locator("#out .token").all_text_contents()
    assert len(tokens) > 2
    assert "".join(tokens) == page.text_content("#out")
    page.hover("#out .token >> nth=1")
    assert page.locator("#tip tr").count() == 5
    assert "%" in page.inner_text("#tip")


def test_a_conversation(page: Any) -> None:
    page.select_option("#model", "chat")
    page.click("#tabs button:text-is('Chat')")
    for text in ("hello", "and?"):
        page.fill("#max_tokens", "8")
        page.fill("#text", text)
        page.click("button.go")
        page.wait_for_selector("#status.done")
    assert page.locator(".turn").count() >= 2


def test_encoders(page: Any, server: Server) -> None:
    assert "fox" in ask(page, "tag", "Tags", "the fox", "Tag")
    assert "1.000" in ask(page, "embed", "Vectors", "the fox\nthe dog", "Compare")
    assert "%" in ask(page, "classify", "Labels", "the fox", "Classify")
    assert "%" in ask(page, "mlm", "Masks", "the <mask> fox", "Fill")
    expected = server.run("pair").hypotheses(["the fox"], beams=4, n_best=2)[0]
    found = ask(page, "pair", "Translation", "the fox", "Translate")
    assert all(hypothesis.text in found for hypothesis in expected)


def test_errors_are_shown(page: Any) -> None:
    page.select_option("#model", "lm")
    page.fill("#text", "a")
    page.fill("#max_tokens", "100000")
    page.click("button.go")
    page.wait_for_selector("#status.error")
    assert "max_new_tokens" in page.inner_text("#status")

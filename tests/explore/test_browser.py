"""The page in a real Chromium: every view by mouse and keyboard, for all three shapes, without other hosts."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer.explore.server import ExploreServer
from anyformer.explore.show import show
from anyformer.generation.logit_processors import History, build, process
from anyformer.generation.strategy import Sampling
from tests.explore import made
from tests.explore.tab import HOSTILE, SHAPES, Opener, Page

NAMES = ("path", "heads", "model", "matrix", "neuron", "next", "lens", "surprise", "salience", "patch")
NAMES += ("block", "cache", "compare", "live")
KEYS = dict(zip(NAMES, "123456gesa7890", strict=True))


def views_of(run: str) -> list[str]:
    """Return the views of a run: an encoder predicts no next token and has no cache."""
    return [view for view in NAMES if not (run == "classify" and view in ("surprise", "cache"))]


@pytest.mark.parametrize("run", SHAPES)
def test_every_view_by_clicks(page: Opener, run: str) -> None:
    one = page(run=run)
    assert one.texts("#tabs [role=tab]") == [one.text(f"#tab-{view}") for view in views_of(run)]
    for view in views_of(run):
        one.click(f"#tab-{view}").see(view)
    for what in ("scores", "bias", "mask", "weights"):
        one.click("#tab-matrix").click(f"#what-0-{what}")
        assert one.tab.locator("#view .matrix canvas, #view .empty").count() > 0
    one.click("#tab-model").click("#map-0-1-1").see("matrix")
    assert one.tab.input_value("#layer-0") == one.tab.input_value("#head-0") == "1"
    one.tab.dblclick("#matrix-0", position={"x": 150, "y": 90})
    one.settled().see("neuron")


@pytest.mark.parametrize("run", SHAPES)
def test_every_view_by_keys(page: Opener, run: str) -> None:
    one = page(run=run, layer="0")
    for view in views_of(run):
        one.press(KEYS[view]).see(view)
    one.press("2", "ArrowUp")
    assert one.tab.input_value("#layer-0") == "1"
    one.press("4", "]")
    assert one.tab.input_value("#head-0") == "1"
    one.press("[", "ArrowDown")
    assert one.tab.input_value("#head-0") == one.tab.input_value("#layer-0") == "0"
    one.tab.focus("#matrix-0")
    before = one.text(".matrix .value")
    one.press("ArrowUp", "+", "+")
    assert one.text(".matrix .value") != before
    one.press("Enter").see("neuron")
    last = one.tab.get_attribute(".chip[aria-pressed=true] >> nth=-1", "id")
    one.tab.locator("#tab-neuron").focus()
    one.press("ArrowRight").see("next")
    one.tab.evaluate("document.activeElement.blur()")
    one.press("ArrowLeft")
    assert one.tab.get_attribute(".chip[aria-pressed=true] >> nth=-1", "id") != last
    one.tab.keyboard.press("?")
    assert one.tab.locator("#keys[open] kbd").count() > 9
    one.tab.keyboard.press("Escape")
    assert one.tab.locator("#keys[open]").count() == 0
    one.press("d")
    assert one.tab.get_attribute("html", "data-theme") == "dark"
    one.press("l")
    assert one.tab.get_attribute("html", "lang") == "ko"
    one.press("/")
    assert one.tab.evaluate("document.activeElement.id") == "text"


def test_everything_is_reached_by_tab(page: Opener) -> None:
    """Each group is one tab stop, and the focused element has an outline."""
    one = page(run="pair", view="matrix")
    reached: dict[str, str] = {}
    for _ in range(60):
        one.tab.keyboard.press("Tab")
        script = "(e => [e.id, getComputedStyle(e).outlineStyle])(document.activeElement)"
        id, outline = one.tab.evaluate(script)
        reached[id] = outline
    expected = {"run", "text", "target", "go", "write-0", "tab-matrix", "copy-link", "save-html", "save-png", "kind-0"}
    expected |= {"matrix-0", "switch-0-encoder.0.0", "temperature", "topk", "topp", "seed", "language", "theme", "help"}
    assert expected <= set(reached)
    assert {id for id in expected if reached[id] == "none"} == set()


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_texts(page: Opener, text: str) -> None:
    """In tokens, answers, drawings and generated text; invisible characters are written as escapes."""
    one = page(run="hostile", text=text, write="1", most="8")
    one.tab.wait_for_selector(".written .piece")
    for view in [view for view in NAMES if view not in ("model", "block", "cache", "compare", "live")]:
        one.press(KEYS[view]).see(view)
    shown = one.tab.evaluate("document.body.innerText")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", shown)
    assert len(one.texts(".chip")) == len(text)
    assert (
        one.tab.evaluate("document.querySelectorAll('body script:not([type=module]), #strips img, #view img').length")
        == 0
    )
    if "<script>" in text:
        assert [chip.split("\n")[0] for chip in one.texts(".chip")[:8]] == list("<script>")
    directions = "[...document.querySelectorAll('.chip .token')].map(e => getComputedStyle(e).unicodeBidi)"
    assert set(one.tab.evaluate(directions)) == {"isolate"}


@pytest.mark.parametrize(
    ("run", "scheme", "locale"), [("pair", "light", "ko-KR"), ("lm", "dark", "ko-KR"), ("classify", "dark", "en-US")]
)
def test_a_narrow_page_does_not_scroll_sideways(page: Opener, run: str, scheme: str, locale: str) -> None:
    one = page(width=400, scheme=scheme, locale=locale, run=run)
    assert one.tab.get_attribute("html", "data-theme") == scheme
    assert one.tab.get_attribute("html", "lang") == locale[:2]
    for view in views_of(run):
        one.press(KEYS[view]).see(view)
        assert one.tab.evaluate("document.documentElement.scrollWidth") == 400, view


def test_both_languages_are_complete(page: Opener) -> None:
    """No text is missing in one of them, and none is replaced by its key."""
    script = str(page().tab.locator("script[type=module]").evaluate("e => e.textContent"))
    tables = {name: re.findall(rf"(?s)const \w*{name} = {{(.*?)\n}};", script) for name in ("ENGLISH", "KOREAN")}
    assert len(tables["ENGLISH"]) == len(tables["KOREAN"]) > 2
    english, korean = (set(re.findall(r'(?m)^ *("[^"]+"|\w+):\s+"', "\n".join(found))) for found in tables.values())
    used = set(re.findall(r'\bword\("([^"]+)"', script)) | set(re.findall(r'data-word="(\w+)"', script))
    assert english == korean
    assert used <= {key.strip('"') for key in english}


def test_a_link_shows_the_same(page: Opener) -> None:
    state = {"run": "lm", "text": "the lazy fox", "view": "matrix", "layer": "2", "head": "1", "what": "scores"}
    state |= {"query": "5", "key": "3", "off": "decoder.0.0", "theme": "dark", "lang": "ko"}
    one, two = page(**state), page(run="classify")
    two.tab.goto(one.tab.url)
    two.settled()
    assert two.text("#view") == one.text("#view") != ""
    assert two.tab.input_value("#text") == "the lazy fox"
    assert two.tab.get_attribute("#what-0-scores", "aria-pressed") == "true"
    assert two.tab.get_attribute("[id='switch-0-decoder.0.0']", "aria-checked") == "false"
    one.click("#tab-next").click("#tab-block").see("block")
    one.tab.go_back()
    one.settled().see("next")
    one.tab.go_back()
    one.settled().see("matrix")
    one.tab.go_forward()
    one.settled().see("next")


@pytest.mark.parametrize(("run", "view"), [("pair", "matrix"), ("lm", "next"), ("classify", "heads")])
def test_a_saved_page_needs_no_server(page: Opener, chromium: Any, tmp_path: Path, run: str, view: str) -> None:
    one = page(run=run, view=view)
    with one.tab.expect_download() as waiting:
        one.tab.click("#save-html")
    file = tmp_path / "saved.html"
    waiting.value.save_as(file)
    context = chromium.new_context(offline=True)
    other = Page(context.new_page(), file.as_uri())
    other.tab.goto(file.as_uri())
    other.settled().see(view)
    assert other.text("#view") == one.text("#view")
    assert other.text("#strips") == one.text("#strips")
    for name in views_of(run)[:-1]:
        other.press(KEYS[name]).see(name)
    other.press("2", "ArrowUp").see("heads")
    assert other.requests == [file.as_uri()]
    assert other.errors == []
    context.close()


def test_a_notebook_shows_the_same(page: Opener, chromium: Any) -> None:
    shown, one = show(made.made("pair"), made.TEXT, view="matrix"), page(run="pair", text=made.TEXT, view="matrix")
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, locale="en-US", offline=True)
    other = Page(context.new_page(), "")
    other.tab.set_content(shown._repr_html_())
    frame = other.tab.frames[1]
    frame.wait_for_selector("#view:not([aria-busy]) > *")
    assert frame.inner_text("#view") == one.text("#view")
    for view in ("path", "heads", "model", "neuron", "next", "lens", "surprise", "salience", "block", "cache"):
        frame.click(f"#tab-{view}")
        frame.wait_for_selector(f"#view:not([aria-busy]) > .view-{view}")
        assert frame.locator("#view .error").count() == 0
    assert [url for url in other.requests if url != "about:srcdoc"] == other.errors == []
    context.close()


@pytest.mark.parametrize("view", ["path", "heads", "matrix", "block"])  # HTML, canvas, drawing
def test_save_png_writes_a_picture(page: Opener, tmp_path: Path, view: str) -> None:
    one = page(run="pair", view=view)
    with one.tab.expect_download() as waiting:
        one.tab.click("#save-png")
    waiting.value.save_as(tmp_path / "view.png")
    data = (tmp_path / "view.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20]) >= 1200  # twice the pixels, for print
    assert len(data) > 10_000  # not blank


def test_a_saved_picture_shows_what_is_scrolled(page: Opener, tmp_path: Path) -> None:
    """A grid that is wider than the page is in the picture as a whole."""
    one = page(run="lm", view="lens", text=" ".join("abcd" * 20), width=800)
    whole = one.tab.evaluate("Math.max(...[...document.querySelectorAll('#view .wide')].map(e => e.scrollWidth))")
    assert whole > 1000
    with one.tab.expect_download() as waiting:
        one.tab.click("#save-png")
    waiting.value.save_as(tmp_path / "view.png")
    assert int.from_bytes((tmp_path / "view.png").read_bytes()[16:20]) >= 2 * whole


def test_wrong_texts_show_an_error(page: Opener) -> None:
    one = page(run="lm")
    one.type(" ")
    assert "blank" in one.text("#strips .error")
    one.type("the quick fox " * 10)  # of 48 positions
    assert "48" in one.text("#strips .note")
    assert len(one.texts(".chip")) <= 48
    one.type("the")
    assert len(one.texts(".chip")) == 3
    assert one.tab.locator("#strips .error, #strips .note:not(.output .note)").count() == 0
    assert [error for error in one.errors if "400" not in error] == []
    one.errors.clear()  # Chromium reports the refused request


def test_disabled_heads_change_the_prediction(page: Opener) -> None:
    one = page(run="classify")
    before = one.text(".output")
    one.click("[id='switch-0-encoder.1.0']")
    rows = one.texts(".said-row")
    assert len(rows) == 2
    assert re.findall(r"[\d.]+ %", rows[0]) == re.findall(r"[\d.]+ %", before) != re.findall(r"[\d.]+ %", rows[1])
    one.press("x", "x").click("#all-on-0")
    assert one.text(".output") == before
    two = page(run="pair", write="1", most="6", temperature="0")
    two.tab.wait_for_selector(".written .piece")
    two.click("#layer-0-decoder-0").click("#layer-0-cross-1")
    two.until("[...document.querySelectorAll('.written')].every(e => e.children.length > 0)")
    first, last = two.texts(".written")
    assert first != last


def test_sliders_change_the_distribution_as_decoding_does(page: Opener, server: ExploreServer) -> None:
    """They agree to the displayed digits."""
    one = page(run="lm", view="next", text="the quick fox")
    request = {"run": "lm", "text": "the quick fox", "at": -1, "kind": "decoder"}
    logits = torch.tensor([[logit for _, logit in server.workspace.answer("next", request)["logits"]]])
    history = History(*(torch.zeros(1, 0, dtype=kind) for kind in (torch.long, torch.bool, torch.bool)))
    for temperature, k, p in [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 7, 1.0),
        (1.5, 0, 0.6),
        (0.8, 9, 0.75),
        (3.0, 1, 1.0),
    ]:
        for name, value in (("temperature", temperature), ("topk", k), ("topp", p)):
            one.tab.fill(f"#{name}", str(value))
        one.settled()
        processors = build(Sampling(temperature=temperature, top_k=k or None, top_p=p), vocab=logits.shape[-1])
        expected = process(processors, history, logits).softmax(dim=-1)[0]
        shown = [float(text.strip("<% ")) / 100 for text in one.texts(".bar-row:not(:last-child) .number")]
        assert len(shown) > 4
        torch.testing.assert_close(torch.tensor(shown), expected[: len(shown)], atol=6e-4, rtol=0)
    one.tab.fill("#temperature", "0")
    assert one.settled().texts(".bar-row .number")[:2] == ["100 %", "0 %"]


@pytest.mark.parametrize("run", SHAPES)
def test_the_neuron_view_adds_up_to_the_score(page: Opener, run: str) -> None:
    one = page(run=run, view="neuron", head="1")
    terms = one.texts(".term b")
    numbers = [float(text.replace(",", "")) for text in terms if text != "none"]
    dot, scale, bias, score, weight = numbers
    assert dot * scale + bias == pytest.approx(score, abs=2e-3)
    assert weight == pytest.approx(float(one.texts(".weights button[aria-pressed=true] small")[0]), abs=6e-3)


def test_an_answer_that_comes_too_late_is_dropped(page: Opener) -> None:
    one = page(run="lm", text="the")
    held: list[Any] = []

    def hold(route: Any) -> None:
        if "quick" in (route.request.post_data or "") and not held:
            held.append(route)
        else:
            route.continue_()

    one.tab.route("**/api/read", hold)
    one.tab.fill("#text", "the quick")
    one.tab.press("#text", "Enter")
    one.until("document.querySelector('#view').hasAttribute('aria-busy')")
    one.type("the dog")
    assert len(one.texts(".chip")) == 7
    held[0].continue_()
    one.tab.wait_for_timeout(100)
    assert len(one.texts(".chip")) == 7


def test_two_are_compared(page: Opener) -> None:
    one = page(run="pair", view="compare")
    one.type("the lazy dog", "#text-2")
    first, second = one.texts("#strips .pane")
    assert first != second
    one.tab.select_option("#both", "next")
    assert one.settled().tab.locator("#view > .pane .bars").count() == 2
    one.tab.select_option("#run-2", "classify")
    one.settled()
    assert one.tab.locator("#strips .pane").count() == one.tab.locator("#view > .pane").count() == 2
    one.click("[id='switch-1-encoder.0.1']")
    assert [len(re.findall("off", text)) for text in one.texts("#strips .pane")] == [0, 1]


def test_the_cache_fills_while_the_run_writes(page: Opener) -> None:
    one = page(run="lm", view="cache", most="9", temperature="0")
    assert one.tab.locator(".tank-bars span").count() == 0
    one.click("#watch-0")
    one.tab.wait_for_selector(".tank-bars span >> nth=3", state="attached")
    one.until("document.querySelector('.written')?.children.length > 3")
    bars = one.tab.evaluate("[...document.querySelectorAll('.tank-bars span')].map(e => parseFloat(e.style.height))")
    assert bars == sorted(bars)
    assert bars[0] < bars[-1]


def test_a_training_is_watched(page: Opener, server: ExploreServer) -> None:
    one = page(run="growing", view="live", most="5")
    assert one.tab.locator(".chart polyline").count() == one.tab.locator("#tab-live .dot").count() == 1
    assert [text.split("\n")[0] for text in one.texts(".probe")] == ["step 5", "step 10"]
    assert one.tab.locator(".probe canvas").count() == 4  # two heads at two steps
    with (server.workspace.opened("growing").folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "loss": 2.125}\n')
    one.until("document.querySelector('.details')?.innerText.includes('2.125')")

"""The slider over training in the browser: the views at a step, the film, links, keys and the GIF."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from PIL import Image, ImageSequence

from anyformer.explore.open_runs import open_runs
from anyformer.explore.server import ExploreServer
from tests.explore.filmed import LAST, STEPS, filmed
from tests.explore.made import TEXT, written
from tests.explore.tab import Opener, Page

NAMES = [*(f"step {step}" for step in STEPS), f"step {LAST} · result"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExploreServer]:
    """In place of the server of all other tests: a run with snapshots, and one without."""
    home = tmp_path_factory.mktemp("film")
    with ExploreServer(open_runs([filmed(home), written("lm", home)])) as one:
        thread = Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def step_shown(one: Page, pane: int = 0) -> str:
    shown = one.text(f"#film-now-{pane}")
    assert one.tab.get_attribute(f"#film-step-{pane}", "aria-valuetext") == shown
    return shown


def slide(one: Page, at: int, pane: int = 0) -> Page:
    one.tab.fill(f"#film-step-{pane}", str(at))
    return one.settled()


def top_tokens(server: ExploreServer, step: int | None) -> list[float]:
    """The probabilities that the view Next token shows, from the model at a step."""
    found = server.workspace.answer("next", {"run": "film", "text": TEXT, "at": -1, "kind": "decoder", "step": step})
    logits = torch.tensor([logit for _, logit in found["logits"]])
    return [float(p) for p in logits.softmax(0)[:5]]


def numbers_shown(one: Page) -> list[float]:
    return [float(text.strip("<% ")) / 100 for text in one.texts(".bar-row:not(:last-child) .number")][:5]


def test_the_slider_selects_the_weights_of_a_step(page: Opener, server: ExploreServer) -> None:
    one = page(run="film", view="next", text=TEXT)
    assert step_shown(one) == NAMES[-1]
    for at, step in [(0, 0), (2, 9), (1, 4), (3, None)]:
        slide(one, at)
        assert step_shown(one) == NAMES[at]
        assert numbers_shown(one) == pytest.approx(top_tokens(server, step), abs=6e-4)
        assert one.text("#about").endswith(f"step {step}") == (step is not None)


def test_every_view_has_the_slider_and_changes_with_it(page: Opener) -> None:
    one = page(run="film", text=TEXT)
    for view in ("path", "heads", "model", "matrix", "neuron", "next", "block", "cache", "live"):
        one.click(f"#tab-{view}")
        one.tab.wait_for_selector("#film-step-0")
        slide(one, 0)
        assert step_shown(one) == NAMES[0], view
        assert one.tab.locator("#view .error, #strips .error").count() == 0, view
        slide(one, 3)
    assert not page(run="lm").tab.is_visible("#film")  # it has no snapshots


def test_a_link_keeps_the_step(page: Opener, server: ExploreServer) -> None:
    one = slide(page(run="film", view="next", text=TEXT), 1)
    one.until("location.hash.includes('step=4')")
    two = page(run="lm")
    two.tab.goto(one.tab.url)
    two.settled()
    assert step_shown(two) == NAMES[1]
    assert numbers_shown(two) == numbers_shown(one) == pytest.approx(top_tokens(server, 4), abs=6e-4)
    two.tab.select_option("#run", "lm")  # another run has other steps
    assert "step=" not in two.settled().tab.url


def test_the_film_plays_all_steps_and_stops(page: Opener) -> None:
    one = page(run="film", view="model", text=TEXT)
    one.tab.evaluate(
        """() => {
          window.seen = [];
          const now = document.getElementById("film-now-0");
          new MutationObserver(() => window.seen.at(-1) !== now.textContent && window.seen.push(now.textContent))
            .observe(now, { childList: true });
        }"""
    )
    one.click("#film-play-0")  # at the last step it starts from the first
    assert one.tab.get_attribute("#film-play-0", "aria-pressed") == "true"
    one.until("document.querySelector('#film-play-0').getAttribute('aria-pressed') === 'false'")
    assert one.tab.evaluate("window.seen") == NAMES


def test_the_film_goes_on_in_another_view_until_it_is_paused(page: Opener) -> None:
    one = page(run="film", view="model", text=TEXT)
    one.tab.clock.install()
    one.tab.clock.pause_at(one.tab.evaluate("Date.now()") + 1000)  # a frame lasts until the test moves the clock
    one.press("f")
    one.until(f"document.querySelector('#film-now-0').textContent === '{NAMES[0]}'")
    one.press("2").see("heads")
    next_frame(one, NAMES[1])
    assert one.tab.get_attribute("#film-play-0", "aria-pressed") == "true"
    one.press("f")
    assert one.tab.get_attribute("#film-play-0", "aria-pressed") == "false"
    one.tab.clock.run_for(5000)
    assert step_shown(one.settled()) == NAMES[1]


def next_frame(one: Page, name: str) -> None:
    """Move the clock of the page by the time of a frame, then in small steps: an answer may come after that."""
    one.tab.clock.run_for(900)
    for _ in range(800):
        if one.text("#film-now-0") == name:
            return
        one.tab.clock.run_for(1)
        one.tab.wait_for_timeout(25)
    raise AssertionError(name)


def test_keys_and_buttons_move_by_one_step(page: Opener) -> None:
    one = page(run="film", view="heads", text=TEXT)
    one.press("<", "<")
    assert step_shown(one) == NAMES[1]
    one.press(">")
    assert step_shown(one) == NAMES[2]
    one.click("#film-previous-0").click("#film-previous-0")
    assert step_shown(one) == NAMES[0]
    assert one.tab.is_disabled("#film-previous-0")
    one.tab.focus("#film-step-0")
    one.press("ArrowRight")
    assert step_shown(one) == NAMES[1]
    assert one.tab.evaluate("document.activeElement.id") == "film-step-0"
    one.press("End")
    assert step_shown(one) == NAMES[3]


def test_two_steps_are_compared(page: Opener) -> None:
    one = page(run="film", view="compare", both="next", text=TEXT)
    slide(one, 0, pane=1)
    assert (step_shown(one), step_shown(one, 1)) == (NAMES[3], NAMES[0])
    first, second = one.texts("#view > .pane")
    assert first != second
    slide(one, 0)
    first, second = one.texts("#view > .pane")
    assert first == second


def test_a_newer_snapshot_extends_the_slider(page: Opener, server: ExploreServer, tmp_path: Path) -> None:
    folder = filmed(tmp_path, ended=False)
    newer = folder / "snapshots" / f"step-{STEPS[-1]:09}"
    kept = newer.rename(tmp_path / "kept")
    server.workspace.runs["growing"] = replace(open_runs([folder]).runs["film"], name="growing")
    try:
        one = page(run="growing", view="heads", text=TEXT)
        assert step_shown(one) == "step 4"
        assert one.tab.get_attribute("#film-step-0", "max") == "1"
        one.tab.focus("#film-step-0")
        kept.rename(newer)
        one.until("document.querySelector('#film-step-0').max === '2'")
        assert step_shown(one) == "step 4"  # nothing changes until a newer one is chosen
        assert one.tab.evaluate("document.activeElement.id") == "film-step-0"
        slide(one, 2)
        assert step_shown(one) == "step 9"
        assert one.tab.locator("#view .error").count() == 0
    finally:
        del server.workspace.runs["growing"]


@pytest.mark.parametrize(("scheme", "locale"), [("light", "ko-KR"), ("dark", "en-US")])
def test_a_narrow_page_has_the_whole_bar(page: Opener, scheme: str, locale: str) -> None:
    one = page(width=400, scheme=scheme, locale=locale, run="film", view="heads", text=TEXT, step="4")
    assert one.tab.evaluate("document.documentElement.scrollWidth") == 400
    for part in ("play", "previous", "step", "next", "now", "save"):
        box = one.tab.locator(f"#film-{part}-0").bounding_box()
        assert box["width"] > 8
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 400, part
        assert box["y"] + box["height"] <= 900, part
    assert step_shown(one) == ("스텝 4" if locale == "ko-KR" else "step 4")
    assert one.tab.get_attribute("#film", "aria-label") == ("학습 영상" if locale == "ko-KR" else "Training film")


@pytest.mark.parametrize("view", ["heads", "model"])  # a drawing, canvases
def test_the_film_is_saved_as_a_gif(page: Opener, tmp_path: Path, view: str) -> None:
    one = page(run="film", view=view, text=TEXT, step="4")
    with one.tab.expect_download() as waiting:
        one.tab.click("#film-save-0")
    waiting.value.save_as(tmp_path / "film.gif")
    assert re.fullmatch(rf"anyformer-film-{view}\.gif", waiting.value.suggested_filename)
    with Image.open(tmp_path / "film.gif") as made:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(made)]
    assert len(frames) == len(NAMES)
    title = (0, 0, frames[0].width, 45)
    for one_frame, other in pairwise(frames):
        assert one_frame.crop(title).tobytes() != other.crop(title).tobytes()  # the step
        below = (0, 45, one_frame.width, one_frame.height)
        assert one_frame.crop(below).tobytes() != other.crop(below).tobytes()  # the view
    one.settled()
    assert step_shown(one) == NAMES[1]  # as before


def test_a_page_saved_at_a_step(page: Opener, chromium: Any, tmp_path: Path) -> None:
    one = page(run="film", view="heads", text=TEXT, step="4")
    with one.tab.expect_download() as waiting:
        one.tab.click("#save-html")
    file = tmp_path / "film.html"
    waiting.value.save_as(file)
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, locale="en-US", offline=True)
    other = Page(context.new_page(), "")
    other.tab.goto(file.as_uri())
    other.settled()
    assert other.text("#view") == one.text("#view")
    assert "step 4" in other.text("#about")
    assert not other.tab.is_visible("#film")
    other.press("4").see("matrix")
    assert other.tab.locator("#view .error").count() == 0
    assert other.errors == []
    context.close()

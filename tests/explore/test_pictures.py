"""Pictures and spectrograms on the page: weights over their places, by mouse and keyboard."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from anyformer.explore.open_runs import open_runs
from anyformer.explore.server import ExploreServer
from anyformer.explore.show import show
from anyformer.runs.run import load
from tests.explore import made
from tests.explore.tab import Opener, Page
from tests.explore.test_media import RUNS, TEXT, write_media

HEAT = "[...document.querySelectorAll('{}')].map(e => Number(e.style.getPropertyValue('--heat')))"


@pytest.fixture
def folder(server: ExploreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Add runs that read images and sounds to the server, in a working directory with a picture and a sound."""
    monkeypatch.chdir(tmp_path)
    write_media(tmp_path)
    for name, parts in RUNS.items():
        monkeypatch.setitem(made.RUNS, name, parts)
    names = ("label", "question", "stream")
    server.workspace.runs.update(open_runs([made.written(name, tmp_path) for name in names]).runs)
    yield tmp_path
    for name in names:
        del server.workspace.runs[name]


def weights(server: ExploreServer, run: str, kind: str, head: int, query: int) -> np.ndarray:
    where = {"run": run, "text": TEXT, "kind": kind, "layer": 0, "head": head, "query": query, "key": 0}
    return np.array(server.workspace.answer("neuron", where)["row"])


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("view", ["heads", "matrix", "neuron"])
def test_the_heat_is_that_of_the_query_and_the_head(page: Opener, server: ExploreServer, view: str) -> None:
    """For a token, and for a patch or a moment that is clicked; a picture and a sound have one scale."""
    one = page(run="label", text=TEXT, view=view, query="13", layer="0", head="1")
    for query, click in ((13, None), (3, "#place-0-encoder-3"), (16, "#place-0-encoder-16")):
        if click:
            one.click(click)
            assert one.tab.get_attribute(click, "aria-pressed") == "true"
        row = weights(server, "label", "encoder", 1, query)
        places = np.r_[row[1:13], row[15:18]]
        assert one.tab.evaluate(HEAT.format(".place")) == pytest.approx(places / places.max(), abs=2e-3)
        assert f"{100 * row[1:13].sum():.1f}" in one.text(".picture.image figcaption")
    assert one.tab.locator(".shot canvas").count() == 3  # the image also without heat


@pytest.mark.usefixtures("folder")
def test_pixels_are_drawn_as_they_are(page: Opener) -> None:
    one = page(run="label", text=TEXT, view="heads")
    script = "[...document.querySelector('.image canvas').getContext('2d').getImageData(0, 0, 16, 12).data]"
    drawn = np.array(one.tab.evaluate(script), np.uint8).reshape(12, 16, 4)
    assert (drawn[:, :, :3] == np.load("a.npz")["images"][0]).all()


@pytest.mark.usefixtures("folder")
def test_cross_attention_is_shown_first_and_a_patch_is_its_key(page: Opener, server: ExploreServer) -> None:
    one = page(run="question", text=TEXT, view="heads", query="1", layer="0")
    assert one.tab.input_value("#kind-0") == "cross"
    row = weights(server, "question", "cross", 0, 1)
    first = int(one.tab.get_attribute(".place >> nth=0", "id").rpartition("-")[2])
    heat = one.tab.evaluate(HEAT.format(".image .place"))
    assert np.argmax(heat) == np.argmax(row[first : first + 12])
    one.click(".place >> nth=5")
    assert f"key={first + 5}" in one.tab.evaluate("location.hash") or one.tab.get_attribute(
        ".place >> nth=5", "aria-pressed"
    )
    one.tab.select_option("#kind-0", "decoder")
    one.settled()
    assert "not among the keys" in one.text(".pictures .note")


@pytest.mark.usefixtures("folder")
def test_places_by_keyboard(page: Opener) -> None:
    """A picture is one tab stop; arrow keys move in two directions, Enter selects, and the matrix moves the heat."""
    one = page(run="label", text=TEXT, view="matrix", query="1")
    one.tab.focus(".image .place[tabindex='0']")
    one.tab.keyboard.press("ArrowDown")
    one.tab.keyboard.press("ArrowRight")
    one.press("Enter")
    assert one.tab.evaluate("document.activeElement.id") == "place-0-encoder-6"
    assert one.tab.get_attribute("#place-0-encoder-6", "aria-pressed") == "true"
    assert "▦ 1,1" in one.text(".picture.image figcaption")
    one.tab.focus("#matrix-0")
    one.press("ArrowDown")
    assert "▦ 1,2" in one.text(".picture.image figcaption")
    assert one.tab.locator(".place[tabindex='0']").count() == 2


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("scheme", "locale"), [("light", "en-US"), ("dark", "ko-KR")])
def test_a_narrow_page_has_room_for_pictures(page: Opener, scheme: str, locale: str) -> None:
    one = page(width=400, scheme=scheme, locale=locale, run="stream", text=TEXT)
    for view in ("heads", "matrix", "neuron"):
        one.click(f"#tab-{view}")
        assert one.tab.locator(".picture").count() == 2
        assert one.tab.evaluate("document.documentElement.scrollWidth") == 400, view
    assert ("주황색" in one.text(".pictures")) == (locale == "ko-KR")


@pytest.mark.usefixtures("folder")
def test_a_file_outside_is_refused_in_one_line(page: Opener, folder: Path) -> None:
    one = page(run="label", text=f"<image:{folder.parent}/x.png>", view="heads")
    assert "outside of" in one.text("#strips .error")
    one.errors.clear()  # the browser reports the status 400
    one.type(TEXT)
    assert one.tab.locator(".picture").count() == 2


def test_a_saved_page_shows_pictures(page: Opener, folder: Path) -> None:
    """Without a server, with the weights of all heads."""
    path = show(load(folder / "label"), TEXT).save(folder / "saved.html")
    one = page(run="label", text=TEXT, view="heads")
    alone: Page = Page(one.tab, "")
    alone.tab.goto(path.as_uri())
    alone.settled()
    alone.click("#place-0-encoder-4")
    assert max(alone.tab.evaluate(HEAT.format(".place"))) == 1
    one.requests.clear()
    one.requests.append(one.address)

"""Pointing in a text of 512 tokens and a model of 12 layers with 12 heads: what it shows, and what changes."""

import json
from collections import Counter
from collections.abc import Iterator
from threading import Thread
from typing import Any

import pytest
import torch

from anyformer.config import Attention
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.explore.server import ExploreServer
from anyformer.recipe import LanguageModel
from tests.explore import made
from tests.explore.tab import Page

LENGTH, HOVERS = 512, 10
MOST = {  # for each place that the pointer moves to; the text has more than 500 elements in each column
    "styles": 4,
    "layouts": 4,
    "elements with a new style": 200,
    "objects laid out": 200,
    "blocks of code": 600,
}
TEXT = " ".join((made.TEXT.split() * LENGTH)[:LENGTH])
LIT = "[...document.querySelectorAll('.query .lit')].map((e) => [e.id.split('-').at(-1), e.lastChild.textContent])"
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def large() -> Iterator[ExploreServer]:
    """A server with one run of 12 layers and 12 heads."""
    block = made.BLOCK.model_copy(update={"mixer": Attention(heads=12)})
    spec = LanguageModel(), made.decoder(made.stack(block, depth=12), width=24), made.WORDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(made.RUNS, "large", spec)
        run = made.made("large")
    with torch.no_grad():
        for weight in run.model.parameters():
            weight.mul_(2)  # so that most queries have strong keys
    with ExploreServer(Workspace({"large": OpenRun("large", run, run.folder)})) as one:
        thread = Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture
def tab(chromium: Any, large: ExploreServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    one = Page(context.new_page(), large.address)
    one.tab.set_default_timeout(60_000)
    yield one.open(run="large", text=TEXT, **request.param)
    context.close()
    assert one.errors == []


def cost(chromium: Any, one: Page, hovers: list[tuple[float, float]]) -> Counter[str]:
    """Return what the page does while the pointer moves to each place, in counts of work."""
    session = one.tab.context.new_cdp_session(one.tab)
    session.send("Profiler.enable")
    session.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": True})
    chromium.start_tracing(page=one.tab, categories=["devtools.timeline"])
    for x, y in hovers:
        one.tab.mouse.move(x, y)
        one.tab.evaluate(FRAMES)
    events = json.loads(chromium.stop_tracing())["traceEvents"]
    scripts = session.send("Profiler.takePreciseCoverage")["result"]
    session.detach()
    found: Counter[str] = Counter()
    for event in events:
        if event["name"] == "UpdateLayoutTree":
            found["styles"] += 1
            found["elements with a new style"] += event.get("args", {}).get("elementCount", 0)
        elif event["name"] == "Layout":
            found["layouts"] += 1
            found["objects laid out"] += event["args"].get("beginData", {}).get("dirtyObjects", 0)
    for script in scripts:
        if script["url"]:
            blocks = (block["count"] for function in script["functions"] for block in function["ranges"])
            found["blocks of code"] += sum(blocks)
    return found


HEADS = {"view": "heads", "layer": "11"}
MATRICES = {"view": "compare", "both": "matrix", "run2": "large", "text2": TEXT.replace("the", "a")}


@pytest.mark.parametrize(
    ("tab", "target", "step"),
    [
        (HEADS, ".column.query", (0, 26)),
        (HEADS, ".column.key", (0, 26)),
        (MATRICES, "#matrix-0", (7, 7)),
        ({"view": "surprise"}, ".surprise", (14, 9)),
    ],
    indirect=["tab"],
)
def test_pointing_changes_little(chromium: Any, tab: Page, target: str, step: tuple[int, int]) -> None:
    """Pointing at a thing neither changes elements that it does not show, nor computes the layout again and again."""
    tab.tab.locator(target).scroll_into_view_if_needed()
    box = tab.tab.locator(target).bounding_box()
    x, y = box["x"] + min(140, box["width"] / 2), max(0, box["y"]) + 110
    tab.tab.mouse.move(x, y)
    tab.tab.evaluate(FRAMES)
    found = cost(chromium, tab, [(x + i * step[0], y + i * step[1]) for i in range(1, HOVERS + 1)])
    assert found.keys() == MOST.keys()
    assert {name: n for name, n in found.items() if n > MOST[name] * HOVERS} == {}


@pytest.mark.parametrize("tab", [HEADS], indirect=True)
def test_pointing_at_a_key_shows_its_queries(tab: Page, large: ExploreServer) -> None:
    """All lines to the key are drawn; queries have weights once they are in sight."""
    request = {"run": "large", "text": TEXT, "target": None, "off": [], "kind": "decoder", "layer": 11}
    links = [link for head in large.workspace.answer("heads", request)["links"] for link in head]
    ((key, lines),) = Counter(key for _, key, _ in links).most_common(1)
    weights: dict[int, float] = {}
    for query, other, weight in links:
        if other == key:
            weights[query] = max(weight, weights.get(query, 0))
    assert len(weights) > 100
    tab.tab.focus(f"#key-0-{key}")
    drawn = tab.tab.evaluate("[...document.querySelectorAll('.over path')].map((e) => e.getAttribute('d')).join('')")
    assert drawn.count("M") == lines
    for query in (min(weights), max(weights)):
        tab.tab.evaluate(f"document.getElementById('query-0-{query}').scrollIntoView()")
        tab.tab.evaluate(FRAMES)
        shown = {int(text[0]): text[1] for text in tab.tab.evaluate(LIT)}
        assert shown[query] == f"{weights[query]:.2f}"
        assert all(shown[one] == f"{weights[one]:.2f}" for one in shown)
        assert len(shown) < 40
    tab.tab.evaluate("document.activeElement.blur()")
    assert tab.tab.locator(".lit").count() == tab.tab.locator(".over path").count() == 0


@pytest.mark.parametrize("tab", [MATRICES], indirect=True)
def test_a_cell_is_framed_in_the_other_matrices(tab: Page) -> None:
    """The frame lies where the pointer is in the first matrix, and is gone when that leaves it."""
    frames = tab.tab.locator(".hint:visible")
    tab.tab.locator("#matrix-0").scroll_into_view_if_needed()
    first, second = (tab.tab.locator(f"#matrix-{i}").bounding_box() for i in (0, 1))
    tab.tab.mouse.move(first["x"] + 200, first["y"] + 260)
    assert frames.count() == 2  # the second matrix, and the difference
    box = tab.tab.locator("#matrix-1 + .hint").bounding_box()
    for side, extent, margin, at in (("x", "width", 64, 200), ("y", "height", 76, 260)):  # margins hold the tokens
        place = box[side] + box[extent] / 2 - second[side] - margin
        share = (at - margin) / (first[extent] - margin)  # of the first matrix; the second is a little smaller
        assert place == pytest.approx(share * (second[extent] - margin), abs=1)
    tab.tab.mouse.move(first["x"] - 5, first["y"] - 5)
    assert frames.count() == 0

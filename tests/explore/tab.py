"""A browser tab that records errors and requests, a server in a thread, and a run that is being trained."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode, urlsplit

from anyformer.explore.open_runs import Workspace
from anyformer.explore.server import ExploreServer
from anyformer.runs.run import write_folder, write_model
from tests.explore import made

SHAPES = ("pair", "lm", "classify")  # encoder–decoder, decoder, encoder
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>",
    "שלום עולם \u202eabc\u202c مرحبا بالعالم",
    "tab\tbell\a escape\x1b zero\x00 line\nend",
    "나는 학교에 간다",
    "我去学校 &amp; {} ${x}",
)

# A selector that each view must match, for all shapes; see `Page.see`.
EXPECTED = {
    "path": ".stage .id-card, .stage .strips",
    "heads": ".links svg path",
    "model": ".maps canvas",
    "matrix": ".matrix canvas",
    "neuron": ".signs rect",
    "next": ".bar-row",
    "lens": ".cells .cell",
    "surprise": ".surprise button",
    "salience": ".salient li",
    "patch": ".cells .cell, .empty",
    "block": ".stack .part",
    "cache": ".chart rect",
    "compare": ".pane + .pane .links",
    "live": ".empty",
}


class Page:
    """A browser tab that records errors and requests."""

    def __init__(self, tab: Any, address: str):
        self.tab, self.address = tab, address
        self.errors: list[str] = []
        self.requests: list[str] = []
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", lambda line: self.errors.append(line.text) if line.type in ("error", "warning") else None)
        tab.on("request", lambda request: self.requests.append(request.url))

    def open(self, **state: str) -> "Page":
        self.tab.goto(f"{self.address}#{urlencode(state)}")
        return self.settled()

    def settled(self) -> "Page":
        done = "body:not(:has(.output[aria-busy])) #view:not([aria-busy]) > *"
        self.tab.wait_for_selector(done, state="attached", timeout=30_000)
        return self

    def until(self, script: str) -> None:
        """Poll from outside, for 30 seconds or more: the page's content policy forbids `eval`."""
        for _ in range(1200):
            if self.tab.evaluate(script):
                return
            self.tab.wait_for_timeout(25)
        raise AssertionError(script)

    def link(self) -> str:
        """The address, which follows the state after 150 ms: a longer timer of the page ends later."""
        self.tab.evaluate("new Promise((done) => setTimeout(done, 200))")
        return str(self.tab.url)

    def press(self, *keys: str) -> "Page":
        for key in keys:
            self.tab.keyboard.press(key)
            self.settled()
        return self

    def click(self, selector: str) -> "Page":
        self.tab.click(selector)
        return self.settled()

    def type(self, text: str, field: str = "#text") -> "Page":
        self.tab.fill(field, text)
        self.tab.press(field, "Enter")
        return self.settled()

    def see(self, view: str) -> None:
        assert self.tab.get_attribute(f"#tab-{view}", "aria-selected") == "true"
        assert self.tab.locator(f"#view {EXPECTED[view]}").count() > 0, view

    def text(self, selector: str) -> str:
        return str(self.tab.inner_text(selector))

    def texts(self, selector: str) -> list[str]:
        return [str(text) for text in self.tab.locator(selector).all_inner_texts()]

    def hosts(self) -> set[str]:
        return {urlsplit(url).netloc for url in self.requests if not url.startswith(("data:", "blob:"))}


Opener = Callable[..., Page]


@contextmanager
def serving(workspace: Workspace) -> Iterator[ExploreServer]:
    """Serve runs while the block runs."""
    with ExploreServer(workspace) as one:
        thread = Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def growing(home: Path) -> Path:
    """Write a run that is being trained: it has checkpoints and metrics, but no manifest."""
    run, folder = made.made("lm"), home / "growing"
    for step in (5, 10):
        weights = {name: weight * step / 10 for name, weight in run.model.state_dict().items()}
        state = folder / "state" / f"step-{step:09}"
        write_folder(state, partial(write_model, weights=weights, config=run.config, spec=run.spec, task=run.task))
    (folder / "recipe.toml").touch()
    (folder / "metrics.jsonl").write_text('{"step": 5, "loss": 3.0}\n{"step": 10, "loss": 2.5}\n')
    return folder

"""The views of a text in a notebook, or as a file: the page with all its answers in it, which asks nobody."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from anyformer.config import ConfigError
from anyformer.explore.open_runs import Explored, Opened
from anyformer.explore.page_bundle import alone, key
from anyformer.run import Run, writing

ROOM = 8 * 2**20  # characters of answers that a document holds; those of every token and map come last
WRITING = {"temperature": 1, "top_k": 0, "top_p": 1, "seed": 1, "max_new_tokens": 40}  # as the page begins with

Request = tuple[str, dict[str, Any]]


class Shown:
    """A document that stands alone: a notebook shows it in a frame, `save` writes it."""

    def __init__(self, document: str, height: int):
        self.document, self.height = document, height

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts" style="width: 100%; height: {self.height}px; border: 0" '
            f'srcdoc="{escape(self.document)}"></iframe>'
        )

    def save(self, path: str | Path) -> Path:
        """As an .html file."""
        with writing(Path(path)):
            Path(path).write_text(self.document, encoding="utf-8")
        return Path(path)


def show(
    run: Run,
    text: str,
    target: str | None = None,
    *,
    view: str = "heads",
    off: Sequence[str] = (),
    height: int = 720,
) -> Shown:
    """The views of what a run makes of a text: heads, model, matrix, neuron, next, block, cache; `view` stands first.

    `off` are heads that are switched off, such as `decoder.0.3`. What is asked for beyond the document's room, such as
    the products behind every link of a long text, needs `anyformer explore`.
    """
    opened = Opened(run.folder.resolve().name, run, run.folder)
    explored, name = Explored({opened.name: opened}), opened.name
    body = {"run": name, "text": text, "target": target, "off": sorted(off)}
    explored.answer("read", body)  # what is wrong with the text is told here
    answers = collect(explored, body)
    state = {"run": name, "text": text, "target": target or "", "off": ",".join(sorted(off)), "view": view}
    hash = "#" + urlencode({field: value for field, value in state.items() if value})
    return Shown(alone({"hash": hash, "answers": answers}), height)


def collect(explored: Explored, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of all views of a text by their requests, as many as fit into `ROOM`."""
    answers: dict[str, Any] = {key("runs", {}): explored.about()}
    room = ROOM
    for asked, request in _requests(explored, body):
        said = _answer(explored, asked, request)
        room -= len(json.dumps(said))
        if room < 0:
            break
        answers[key(asked, request)] = said
    return answers


def _answer(explored: Explored, name: str, request: dict[str, Any]) -> Any:
    try:
        if name == "write":
            return list(explored.write(request))
        found = explored.answer(name, request)
        return {**found, "checkpoints": []} if name == "live" else found  # their maps are not in the document
    except ConfigError as error:  # such as of the cache of an encoder: the view says it
        return {"error": "; ".join(str(error).splitlines())}


def _requests(explored: Explored, body: dict[str, Any]) -> Iterator[Request]:
    """What the views first ask for, then what clicks ask for."""
    about = explored.opened(body["run"]).about()
    layers = [
        (kind, layer, heads)
        for kind, found in about["kinds"].items()
        for layer, heads in zip(found["layers"], found["heads"], strict=True)
    ]
    yield from ((name, body) for name in ("read", "block", "cache"))
    if body["off"]:
        yield "read", {**body, "off": []}  # what it says with all its heads
    yield from (("heads", {**body, "kind": kind, "layer": layer}) for kind, layer, _ in layers)
    yield from (("model", {**body, "kind": kind}) for kind in about["kinds"])
    side = "encoder" if about["shape"] == "encoder" else "decoder"
    tokens = explored.answer("read", body)["tokens"][side]
    yield from (("next", {**body, "at": at, "kind": side}) for at in (-1, *range(len(tokens))))
    if about["writes"]:
        yield "write", {**body, **WRITING}
    yield "live", {"run": body["run"], "since": 0}
    for what in ("weights", "scores", "mask", "bias"):
        for kind, layer, heads in layers:
            place = {**body, "kind": kind, "layer": layer}
            yield from (("matrix", {**place, "head": head, "what": what}) for head in range(heads))
            if what == "weights":
                yield from (("neuron", pair) for pair in _pairs(explored, place))


def _pairs(explored: Explored, place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each query with the key that it looks at most."""
    for head, strongest in enumerate(explored.answer("heads", place)["strongest"]):
        yield from ({**place, "head": head, "query": query, "key": at} for query, at in enumerate(strongest))

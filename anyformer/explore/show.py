"""The page with all its answers for one text, which needs no server: for notebooks and files."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from anyformer.config import ConfigError
from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.explore.page_bundle import key, standalone
from anyformer.explore.pass_budget import allows_many_passes
from anyformer.explore.path_outline import ATTENTION, LAYER_STAGES
from anyformer.explore.requests import TextRequest
from anyformer.runs.run import Run, writing

MAX_CHARACTERS = 8 * 2**20  # of all answers in a document; those of single tokens and maps come last
WRITING = {"temperature": 1, "top_k": 0, "top_p": 1, "seed": 1, "max_new_tokens": 40}  # the page's defaults

Request = tuple[str, dict[str, Any]]


class HtmlDocument:
    """A standalone document: a notebook displays it in a frame, `save` writes it to a file."""

    def __init__(self, document: str, height: int):
        self.document, self.height = document, height

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts" style="width: 100%; height: {self.height}px; border: 0" '
            f'srcdoc="{escape(self.document)}"></iframe>'
        )

    def save(self, path: str | Path) -> Path:
        """Write the document to an .html file."""
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
) -> HtmlDocument:
    """Return the page for a run and a text, opened at a view, such as "path", "heads", "matrix", "lens" or "block".

    `off` lists disabled heads, such as `decoder.0.3`. The size of the document is limited: details of long texts, such
    as q · k of every link, need `anyformer explore`.
    """
    opened = OpenRun(run.folder.resolve().name, run, run.folder)
    workspace, name = Workspace({opened.name: opened}), opened.name
    body = {"run": name, "text": text, "target": target, "off": sorted(off)}
    workspace.answer("read", body)  # raises if the text is wrong
    answers = collect(workspace, body)
    state = {"run": name, "text": text, "target": target or "", "off": ",".join(sorted(off)), "view": view}
    hash = "#" + urlencode({field: value for field, value in state.items() if value})
    return HtmlDocument(standalone({"hash": hash, "answers": answers}), height)


def collect(workspace: Workspace, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of all views of a text by request, as many as fit into `MAX_CHARACTERS`."""
    answers: dict[str, Any] = {key("runs", {}): workspace.about()}
    left = MAX_CHARACTERS
    for view, request in _requests(workspace, body):
        answer = _answer(workspace, view, request)
        left -= len(json.dumps(answer))
        if left < 0:
            break
        answers[key(view, request)] = answer
    return answers


def _answer(workspace: Workspace, name: str, request: dict[str, Any]) -> Any:
    try:
        if name == "write":
            return list(workspace.write(request))
        answer = workspace.answer(name, request)
        return {**answer, "checkpoints": []} if name == "live" else answer  # their maps are not in the document
    except ConfigError as error:  # such as the cache of an encoder: the view shows the message
        return {"error": "; ".join(str(error).splitlines())}


def _requests(workspace: Workspace, body: dict[str, Any]) -> Iterator[Request]:
    """Yield the requests that views make when opened, then those of clicks."""
    about = workspace.opened(body["run"]).about()
    layers = [
        (kind, layer, heads)
        for kind, entry in about["kinds"].items()
        for layer, heads in zip(entry["layers"], entry["heads"], strict=True)
    ]
    yield from ((name, body) for name in ("read", "answer", "block", "cache"))
    if body["off"]:
        yield "answer", {**body, "off": []}  # the prediction with all heads
    yield from (("heads", {**body, "kind": kind, "layer": layer}) for kind, layer, _ in layers)
    yield from (("model", {**body, "kind": kind}) for kind in about["kinds"])
    outline = workspace.answer("path", body)
    yield "path", body
    yield from _stages(outline, body, 0, 0)
    yield from _levels(outline, body)
    side = "encoder" if about["shape"] == "encoder" else "decoder"
    tokens = workspace.answer("read", body)["tokens"][side]
    yield from (("next", {**body, "at": at, "kind": side}) for at in (-1, *range(len(tokens))))
    is_cheap = allows_many_passes(workspace.trace(TextRequest(**body)))
    yield from _lens(workspace, about, body, is_cheap)
    yield "scores", body
    for at in (-1, *(range(len(tokens)) if is_cheap else ())):
        yield "salience", {**body, "at": at, "output": -1, "method": "gradient"}
    if about["writes"]:
        yield "write", {**body, **WRITING}
    yield "live", {"run": body["run"], "since": 0}
    for what in ("weights", "scores", "mask", "bias"):
        for kind, layer, heads in layers:
            where = {**body, "kind": kind, "layer": layer}
            yield from (("matrix", {**where, "head": head, "what": what}) for head in range(heads))
            if what == "weights":
                yield from (("neuron", pair) for pair in _pairs(workspace, where))
    depth = max(len(side["layers"]) for side in outline["sides"])
    heads = max(max(side["heads"]) for side in outline["sides"])
    for layer, head in product(range(depth), range(max(heads, 1))):
        yield from _stages(outline, body, layer, head)
    for kind, layer, _ in layers:
        where = {**body, "kind": kind, "layer": layer}
        if workspace.answer("matrix", {**where, "head": 0, "what": "bias"})["position"].startswith("rotary"):
            yield from (("rotation", pair) for pair in _pairs(workspace, where))


def _lens(workspace: Workspace, about: dict[str, Any], body: dict[str, Any], cells: bool) -> Iterator[Request]:
    """Yield the requests of the views `surprise` and `lens`, as lens.js makes them; with `cells`, of every cell."""
    if about["tokens"] and about["shape"] != "encoder":
        yield "surprise", body
    first = {**body, "first": 0}
    if "error" in (grid := _answer(workspace, "lens", first)):
        return
    yield "lens", first
    begin = min(workspace.answer("read", body)["at"], grid["count"] - 1)
    yield "cell", {**body, "layer": grid["layers"][-1], "at": begin}
    yield from (("lens", {**body, "first": at}) for at in range(grid["page"], grid["count"], grid["page"]))
    for layer in reversed(grid["layers"] if cells else []):
        yield from (("cell", {**body, "layer": layer, "at": at}) for at in range(grid["count"]))


def _stages(outline: dict[str, Any], body: dict[str, Any], layer: int, head: int) -> Iterator[Request]:
    """Yield the requests of all stages of the path, as `stageRequest` in path.js makes them."""
    for side in outline["sides"]:
        own = side["layers"][min(layer, len(side["layers"]) - 1)]
        for stage in [*side["begin"], *own, *side["end"]]:
            kind, _, name = stage.partition(".")
            request = {**body, "stage": stage, "at": -1}
            if kind == "encoder" and outline["last"] == "decoder":
                request["key"] = -1
            if name in LAYER_STAGES:
                request["layer"] = layer
            if name in ATTENTION:
                request["head"] = head
            yield "stage", request
    yield from (("stage", {**body, "stage": stage, "at": -1}) for stage in outline["head"])


def _levels(outline: dict[str, Any], body: dict[str, Any]) -> Iterator[Request]:
    """Yield the requests that follow the most probable output back by its largest terms."""
    for stage in outline["follow"]:
        level = stage.partition(".")[2]
        request = {**body, "level": level, "at": -1, "output": -1, "place": -1}
        if level in ("tokens", "dimensions"):
            request["part"] = ""
        if level == "dimensions":
            request["key"] = -1
        if level != "check":
            yield "follow", request


def _pairs(workspace: Workspace, where: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each query with its key of highest weight."""
    for head, strongest in enumerate(workspace.answer("heads", where)["strongest"]):
        yield from ({**where, "head": head, "query": query, "key": at} for query, at in enumerate(strongest))

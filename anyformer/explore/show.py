"""The page as one document: for the server, or with all its answers for one text, for notebooks and files."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from anyformer.config import ConfigError
from anyformer.explore.open_runs import OpenRun, Workspace, views
from anyformer.explore.view import SavedText, View
from anyformer.runs.run import Run, writing

MAX_CHARACTERS = 8 * 2**20  # of all answers in a document; those of single tokens and maps come last


POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
SERVED = POLICY + "; connect-src 'self'; frame-ancestors 'self'"
STANDALONE_NONCE = "alone"  # a document without a server has no random nonce
FIRST, LAST = ("words.js", "state.js", "api.js"), "main.js"


def sources() -> dict[str, str]:
    """Return the page's files by name, scripts in the order of the document."""
    folder = resources.files("anyformer.explore") / "page"
    files = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.is_file()}
    scripts = sorted((name for name in files if name.endswith(".js")), key=_order)
    styles = sorted((name for name in files if name.endswith(".css")), reverse=True)  # style.css first
    return {name: files[name] for name in ("index.html", *styles, *scripts)}


def _order(name: str) -> tuple[int, str]:
    first = FIRST.index(name) if name in FIRST else len(FIRST)
    return first + (name == LAST), name


def page(nonce: str, policy: str = "", answers: str = "") -> str:
    """Return HTML, CSS and JavaScript as one document; the server sends its content policy in the HTTP header."""
    files = sources()
    script, style = ("\n".join(text for name, text in files.items() if name.endswith(end)) for end in (".js", ".css"))
    head = f'{policy}<style nonce="{nonce}">\n{style}</style>\n</head>'
    body = f'{answers}<script type="module" nonce="{nonce}">\n{script}</script>\n</body>'
    return files["index.html"].replace("</head>", head, 1).replace("</body>", body, 1)


def standalone(saved: dict[str, Any] | None = None) -> str:
    """Return a document that needs no server: `saved` holds the page's state, and its answers by `key`."""
    text = json.dumps(saved, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(nonce=STANDALONE_NONCE)}">\n'
    answers = f'<script type="application/json" id="saved">{text}</script>\n'
    return page(STANDALONE_NONCE, policy, answers)


def key(name: str, request: dict[str, Any]) -> str:
    """Return a request as one string, as `keyOf` in api.js does: fields sorted, without empty values."""
    fields = {name: value for name, value in sorted(request.items()) if value is not None and value != []}
    return f"{name} {json.dumps(fields, separators=(',', ':'), ensure_ascii=False)}"


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
    """Return the page of a run and a text for a notebook.

    The size of the document is limited: details of long texts, such as q · k of every link, need `anyformer explore`.

    Args:
        run: the run.
        text: the text that the model reads.
        target: the output that is read with the text; None: a model that answers a source writes it.
        view: where the page opens: "path", "heads", "matrix", "lens", "block" or another view.
        off: disabled heads, such as `decoder.0.3`.
        height: of the page in pixels.

    Returns:
        A document that a notebook displays, and that `save` writes to a file.

    Raises:
        ConfigError: the model cannot read the text, or a head does not exist.

    Example:
        >>> page = af.show(af.load("runs/sort", device="cpu"), "3 1 2", view="lens")
        >>> page.height
        720
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
    """Return the answers of all views of a text by request, as many as fit into `MAX_CHARACTERS`.

    Those that views request when they are opened come first, then those of clicks.
    """
    saved = SavedText(workspace, body)
    answers: dict[str, Any] = {key("runs", {}): workspace.about()}
    left = MAX_CHARACTERS
    for view, fields in _requests(saved):
        request = saved.request(view, fields)
        answer = _answer(workspace, view.kind, request)
        left -= len(json.dumps(answer))
        if left < 0:
            break
        answers[key(view.kind, request)] = answer
    return answers


def _requests(saved: SavedText) -> Iterator[tuple[View, dict[str, Any]]]:
    run = saved.workspace.opened(saved.body["run"]).run
    fitting = [view for view in views().values() if view.fits(run)]
    yield from ((view, fields) for view in fitting for fields in view.opened(saved))
    yield from ((view, fields) for view in fitting for fields in view.clicked(saved))


def _answer(workspace: Workspace, name: str, request: dict[str, Any]) -> Any:
    try:
        answer = workspace.answer(name, request)
    except ConfigError as error:  # such as the logits of a classifier: the view shows the message
        return {"error": "; ".join(str(error).splitlines())}
    if isinstance(answer, Iterator):
        return list(answer)
    return {**answer, "checkpoints": []} if name == "live" else answer  # their maps are not in the document

"""HTML, CSS and JavaScript of the page as one document: for the server, or standalone with all answers in it."""

import json
from importlib import resources
from typing import Any

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


def page(nonce: str) -> str:
    """Return the document that the server sends; its content policy is in the HTTP header."""
    return _document(nonce)


def standalone(saved: dict[str, Any] | None = None) -> str:
    """Return a document that needs no server: `saved` holds the page's state, and its answers by `key`."""
    text = json.dumps(saved, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(nonce=STANDALONE_NONCE)}">\n'
    answers = f'<script type="application/json" id="saved">{text}</script>\n'
    return _document(STANDALONE_NONCE, policy, answers)


def key(name: str, request: dict[str, Any]) -> str:
    """Return a request as one string, as `keyOf` in api.js does: fields sorted, without empty values."""
    fields = {name: value for name, value in sorted(request.items()) if value is not None and value != []}
    return f"{name} {json.dumps(fields, separators=(',', ':'), ensure_ascii=False)}"


def _document(nonce: str, policy: str = "", answers: str = "") -> str:
    files = sources()
    script, style = ("\n".join(text for name, text in files.items() if name.endswith(end)) for end in (".js", ".css"))
    head = f'{policy}<style nonce="{nonce}">\n{style}</style>\n</head>'
    body = f'{answers}<script type="module" nonce="{nonce}">\n{script}</script>\n</body>'
    return files["index.html"].replace("</head>", head, 1).replace("</body>", body, 1)

"""The page's files as one document: of the server, or one that stands alone with its answers in it."""

import json
from importlib import resources
from typing import Any

POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
SERVED = POLICY + "; connect-src 'self'; frame-ancestors 'self'"
ALONE = "alone"  # the nonce of a document that nobody serves
FIRST, LAST = ("words.js", "state.js", "api.js"), "main.js"


def sources() -> dict[str, str]:
    """The page's files by name, scripts in the order in which they stand."""
    folder = resources.files("anyformer.explore") / "page"
    found = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.is_file()}
    scripts = sorted((name for name in found if name.endswith(".js")), key=_place)
    return {name: found[name] for name in ("index.html", "style.css", *scripts)}


def _place(name: str) -> tuple[int, str]:
    first = FIRST.index(name) if name in FIRST else len(FIRST)
    return first + (name == LAST), name


def page(nonce: str) -> str:
    """The document that the server gives; its policy is in the header."""
    return _document(nonce)


def alone(saved: dict[str, Any] | None = None) -> str:
    """The same with all that it will ask for: `saved` is its state and the answers, by what `key` makes of requests."""
    text = json.dumps(saved, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY.format(nonce=ALONE)}">\n'
    answers = f'<script type="application/json" id="saved">{text}</script>\n'
    return _document(ALONE, policy, answers)


def key(name: str, request: dict[str, Any]) -> str:
    """A request as one text, as `keyOf` in api.js has it: keys sorted, and nothing that says nothing."""
    said = {name: value for name, value in sorted(request.items()) if value is not None and value != []}
    return f"{name} {json.dumps(said, separators=(',', ':'), ensure_ascii=False)}"


def _document(nonce: str, policy: str = "", answers: str = "") -> str:
    files = sources()
    script = "\n".join(text for name, text in files.items() if name.endswith(".js"))
    head = f'{policy}<style nonce="{nonce}">\n{files["style.css"]}</style>\n</head>'
    body = f'{answers}<script type="module" nonce="{nonce}">\n{script}</script>\n</body>'
    return files["index.html"].replace("</head>", head, 1).replace("</body>", body, 1)

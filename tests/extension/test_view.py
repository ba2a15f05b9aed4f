"""A view from outside the package has a tab and an answer like ours, and is in a saved page."""

import base64
import io
import json
import re
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anyformer.config import import_file
from anyformer.explore.open_runs import OpenRun, Workspace, views
from anyformer.explore.show import collect, sources
from tests.explore import made
from tests.explore.tab import Page, serving

FILE = Path(__file__).with_name("my_view.py")
FIELDS: dict[str, Any] = {"run": "lm", "text": "나는 학교에 간다", "target": None, "off": []}


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")
    import_file(FILE)


@pytest.fixture
def workspace() -> Workspace:
    runs = {name: made.made(name) for name in ("lm", "classify")}
    return Workspace({name: OpenRun(name, run, run.folder) for name, run in runs.items()})


def test_its_tab_answer_and_errors(workspace: Workspace) -> None:
    about = {run["name"]: run["views"] for run in workspace.about()}
    tab = {"view": "lengths", "title": "Longueurs 낱말", "group": "prediction", "key": ""}
    assert tab in about["lm"]
    assert tab not in about["classify"]  # which has no decoder
    with serving(workspace) as server:
        request = urllib.request.Request(f"{server.address}api/lengths", json.dumps({**FIELDS, "most": 2}).encode())
        with urllib.request.urlopen(request) as response:
            found = json.load(response)
    assert (found["words"][1], found["count"]) == ({"word": "학교에", "length": 3}, 3)
    picture = Image.open(io.BytesIO(base64.b64decode(found["drawing"]["png"])))
    assert (picture.size, picture.getpixel((0, 1))) == ((12, 3), 228)
    with pytest.raises(ValueError, match="most = 0"):
        workspace.answer("lengths", {**FIELDS, "most": 0})


def test_a_saved_page_has_its_answer(workspace: Workspace) -> None:
    answers = {name: collect(workspace, {**FIELDS, "run": name}) for name in ("lm", "classify")}
    own = {name: [key for key in found if key.startswith("lengths ")] for name, found in answers.items()}
    assert [len(own["lm"]), len(own["classify"])] == [1, 0]
    assert answers["lm"][own["lm"][0]]["count"] == 3
    assert [key for key, answer in answers["lm"].items() if "error" in answer] == []
    assert {key.split()[0] for key in answers["lm"]} >= {view["view"] for view in workspace.about()[0]["views"]} - {
        "patch"
    }


@pytest.mark.system
def test_the_page_shows_it(workspace: Workspace, chromium: Any) -> None:
    """Each kind of entry: a table, a number, bars and a picture."""
    with serving(workspace) as server:
        page = Page(chromium.new_page(locale="en-US"), server.address).open(run="lm", view="lengths")
        assert page.text("#tab-lengths") == "Longueurs 낱말"
        for selector in ("#view td", "#view .value", "#view .signs rect", "#view img"):
            assert page.tab.locator(selector).count() > 0, selector
        assert page.errors == []


def test_every_view_of_ours_is_drawn() -> None:
    """What has a tab has a drawing of its own and a name in both languages, and nothing else has."""
    scripts = {name: text for name, text in sources().items() if name.endswith(".js")}
    drawn = {name for text in scripts.values() for name in re.findall(r"^DRAWN\.(\w+) = ", text, re.M)}
    ours = [view for view in views().values() if type(view).__module__.startswith("anyformer.")]
    assert drawn == {view.kind for view in ours if view.group}
    named = Counter(name for text in scripts.values() for name in re.findall(r'^  "view\.(\w+)": ', text, re.M))
    assert {view for view in drawn - {"next"} if named[view] != 2} == set()  # `next` is named by what a run predicts
    keys = [view.key for view in ours if view.key]
    assert len(keys) == len(set(keys)) == len(drawn)

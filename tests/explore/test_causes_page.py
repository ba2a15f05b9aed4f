"""Views about causes in a real Chromium: salience, scores of heads, patching, differences, heads that are off."""

import math
import re
from typing import Any

import numpy as np
import pytest

from anyformer.explore.server import ExploreServer
from tests.explore.made import body
from tests.explore.tab import SHAPES, Opener
from tests.explore.test_views import numbers

TEXT, OTHER = "the quick fox", "the quick dog"


def shown(text: str) -> list[float]:
    found = re.findall(r"[+−-]?\d*\.?\d+(?:e-?\d+)?", text.replace(",", ""))
    return [float(one.replace("−", "-")) for one in found]


@pytest.mark.parametrize("run", SHAPES)
def test_salience_of_each_token(page: Opener, server: ExploreServer, run: str) -> None:
    """Another output and another method by clicks; the link carries both."""
    one = page(run=run, view="salience", text=TEXT)
    found = server.workspace.answer("salience", body(run, text=TEXT))
    expected = [value for values in found["sides"].values() for value in values]
    cells = [shown(text)[-1] for text in one.texts(".salient li small")]
    assert cells == pytest.approx(expected, rel=2e-3, abs=1e-4)
    other = found["outputs"][1]["id"]
    one.click(f"#salient-output-0-{other}").click("#method-0-integrated")
    again = server.workspace.answer("salience", body(run, text=TEXT, output=other, method="integrated"))
    expected = [value for values in again["sides"].values() for value in values]
    assert [shown(text)[-1] for text in one.texts(".salient li small")] == pytest.approx(expected, rel=2e-3, abs=1e-4)
    total, value, base, difference = (shown(text)[0] for text in one.texts("#view .sum .term b"))
    assert (total, value) == (
        pytest.approx(again["total"], rel=1e-3, abs=1e-3),
        pytest.approx(again["value"], rel=1e-3),
    )
    assert value - base == pytest.approx(difference, abs=2e-3)
    two = page(run="lm")
    two.tab.goto(one.link())
    assert two.settled().text("#view") == one.text("#view")


def test_switches_have_the_colour_of_a_score(page: Opener, server: ExploreServer) -> None:
    heads = server.workspace.answer("scores", body("pair", text=TEXT))["heads"]
    one = page(run="pair", view="heads", text=TEXT)
    plain = one.tab.get_attribute("[id='switch-0-decoder.1.0']", "style")
    one.tab.select_option("#score", "previous")
    one.tab.wait_for_selector(".strongest li")
    assert one.tab.get_attribute("[id='switch-0-decoder.1.0']", "style") != plain
    for id in ("encoder.0.0", "decoder.1.1"):
        shown_score = one.text(f"[id='switch-0-{id}']")
        assert float(f"0{shown_score}") == pytest.approx(heads[id]["previous"], abs=6e-3)
        assert f"{heads[id]['previous']:.4f}" in str(one.tab.get_attribute(f"[id='switch-0-{id}']", "title"))
    assert one.text("[id='switch-0-cross.0.0']") == ""  # two texts have no previous token
    one.tab.select_option("#score", "pattern")
    one.tab.wait_for_selector(".patterns dt")
    listed = dict(zip(one.texts(".patterns dt"), one.texts(".patterns dd"), strict=True))
    names = {heads[id]["name"] for id in heads}
    assert len(listed) == len(names)
    assert sum(len(ids.split(", ")) for ids in listed.values()) == len(heads)
    one.tab.select_option("#score", "effect")
    effects = server.workspace.answer("effects", body("pair", text=TEXT))
    one.tab.wait_for_selector(".strongest li")
    strongest = max(effects["heads"].values(), key=abs)
    assert shown(one.texts(".strongest li")[0])[-1] == pytest.approx(strongest, rel=1e-3)
    assert "score=effect" in one.link()
    one.click("[id='switch-0-decoder.1.0']")  # still a switch
    assert one.tab.get_attribute("[id='switch-0-decoder.1.0']", "aria-checked") == "false"


def patchable(server: ExploreServer, run: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a request with its answer in which two texts lead to different outputs."""
    words = {"lm": ("x", "g", "n", "z"), "pair": ("dog", "1", "2", "3"), "classify": ("dog", "1", "2", "3")}[run]
    for word in words:
        donor = TEXT[:-1] + word if run == "lm" else f"{word} quick {word}"
        answer = server.workspace.answer("patch", body(run, text=TEXT, donor=donor))
        if answer["fits"] and answer["cells"]:
            return {"run": run, "view": "patch", "text": TEXT, "text2": donor}, answer
    raise AssertionError(run)


def test_patching_by_clicks(page: Opener, server: ExploreServer) -> None:
    state, found = patchable(server, "lm")
    one = page(**state)
    effects = [[cell["effect"] for cell in row] for row in reversed(found["cells"])]
    grid = [[float(text.replace("−", "-")) for text in row.split("\t")[1:]] for row in one.texts(".cells tbody tr")]
    assert grid == [pytest.approx(row, abs=6e-3) for row in effects]
    one.click("#patch-0-0-0")
    cell = found["cells"][-1][0]
    rows = [shown(text) for text in one.texts(".patched tbody tr .number")]
    after = [value / 100 for (value,) in rows[2:4]]
    assert after == pytest.approx([cell["pa"], cell["pb"]], abs=6e-4)
    assert [value / 100 for (value,) in rows[:2]] == pytest.approx([found["a"]["pa"], found["a"]["pb"]], abs=6e-4)
    two = page(run="pair")
    two.tab.goto(one.link())
    assert two.settled().text("#view") == one.text("#view")
    assert two.tab.get_attribute("#patch-0-0-0", "aria-pressed") == "true"


def test_patching_explains_what_does_not_fit(page: Opener) -> None:
    one = page(run="lm", view="patch", text=TEXT, text2="the")
    assert "Text A has 13 tokens and text B 3" in one.text("#view .empty")
    one.tab.fill("#donor-0", TEXT[:-1] + "g")
    one.tab.press("#donor-0", "Enter")
    assert one.settled().tab.locator(".cells .cell").count() + one.tab.locator("#view .empty").count() > 0
    assert "13 tokens" not in one.text("#view")
    one.click("#tab-compare")
    assert one.tab.input_value("#text-2") == TEXT[:-1] + "g"


def test_the_difference_of_two_matrices(page: Opener, server: ExploreServer) -> None:
    one = page(run="lm", view="compare", both="matrix", text=TEXT, run2="lm", text2=OTHER, layer="1", head="1")
    place = {"kind": "decoder", "layer": 1, "head": 1}
    a, b = (numbers(server.workspace.answer("matrix", body("lm", text=text, **place))) for text in (TEXT, OTHER))
    difference = a - b
    row, column = np.unravel_index(np.abs(difference).argmax(), difference.shape)
    line = one.text("#largest-difference")
    assert shown(line.split("mean")[0])[-1] == pytest.approx(float(difference[row, column]), abs=6e-5)
    visible = np.tril(np.ones_like(difference)) == 1
    assert shown(line)[-1] == pytest.approx(float(np.abs(difference[visible]).mean()), abs=6e-5)
    one.tab.focus("#matrix-difference")
    one.press("ArrowUp", "ArrowUp", "ArrowLeft")
    values = [one.text(f"#view > .pane:nth-child({n}) .matrix .value b") for n in (2, 3, 4)]
    assert len(values) == 3
    one.tab.locator("#matrix-0").scroll_into_view_if_needed()
    box = one.tab.locator("#matrix-0").bounding_box()
    one.tab.mouse.move(box["x"] + 130, box["y"] + 200)
    first, second, both = (shown(one.text(f"#view > .pane:nth-child({n}) .matrix .value"))[-1] for n in (2, 3, 4))
    assert first - second == pytest.approx(both, abs=2e-4)
    one.type("the", "#text-2")
    assert "the same number of tokens" in one.text(".across .empty")


@pytest.mark.parametrize("run", ["lm", "classify"])
def test_heads_off_show_what_was_lost(page: Opener, server: ExploreServer, run: str) -> None:
    """Probabilities before and after for the same tokens, and one number for all of them."""
    kind = "encoder" if run == "classify" else "decoder"
    request = body(run, text=TEXT, off=[f"{kind}.0.0", f"{kind}.1.1"])
    found = server.workspace.answer("ablated", request)
    one = page(run=run, view="next", text=TEXT, off=",".join(request["off"]))  # type: ignore[arg-type]
    rows = [[value / 100 for value in shown(text)] for text in one.texts(".ablated tbody tr")]
    expected = [[before, after] for _, before, after in found["rows"]]
    assert [row[-3:-1] for row in rows] == [pytest.approx(row, abs=6e-4) for row in expected]
    assert f"{100 * found['moved']:.2f}"[:3] in one.text("#lost-0")
    assert page(run=run, view="next", text=TEXT).tab.locator(".ablated").count() == 0


def test_two_generated_texts_are_aligned(page: Opener) -> None:
    """Both begin at the same place, and the first token that differs is framed in both."""
    off = ",".join(f"decoder.{layer}.{head}" for layer in range(3) for head in range(2))
    one = page(run="lm", write="1", most="8", temperature="0", off=off, text=TEXT)
    one.until("[...document.querySelectorAll('.written')].every(e => e.children.length === 8)")
    lefts = one.tab.evaluate("[...document.querySelectorAll('.written')].map(e => e.getBoundingClientRect().left)")
    assert lefts[0] == lefts[1]
    first, second = ([text.strip() for text in one.texts(f".written >> nth={i} >> .piece")] for i in (0, 1))
    at = next((i for i in range(8) if first[i] != second[i]), None)
    marked = one.tab.locator(".piece.first-different").count()
    assert marked == (0 if at is None else 2)
    assert one.text(".first-note") == (
        "Both texts are the same so far." if at is None else f"The texts differ from token {at} on (framed)."
    )


def test_heads_says_how_many_lines_are_drawn(page: Opener, server: ExploreServer) -> None:
    """A query whose weights are all small has no line; pointing at it shows the strongest key of each head."""
    found = server.workspace.answer("heads", body("pair", kind="encoder", layer=0))
    one = page(run="pair", view="heads", kind="encoder", text=str(body("pair")["text"]))
    assert one.text("#lines-0").startswith(f"{sum(map(len, found['links']))} lines drawn.")


def test_colours_are_scaled_to_the_largest_weight(page: Opener, server: ExploreServer) -> None:
    one = page(run="lm", view="matrix", text=TEXT)
    assert one.texts(".legend span")[1] == "1"
    one.click("#fit-0")
    most = float(
        numbers(server.workspace.answer("matrix", body("lm", text=TEXT, kind="decoder", layer=0, head=0))).max()
    )
    assert float(one.texts(".legend span")[1]) == pytest.approx(most, rel=1e-3)
    assert "fit=1" in one.link()
    one.click("#tab-model")
    assert one.tab.get_attribute("#fit-0", "aria-pressed") == "true"
    assert math.isfinite(most)

"""What a newcomer meets first, on the run that comes with the package: nothing unexplained, unreadable or cut off."""

import re
from collections.abc import Iterator

import pytest

from anyformer.explore.open_runs import BUNDLED, open_runs
from anyformer.explore.server import ExploreServer
from tests.explore.tab import Opener, Page, serving

CUT = """[...document.querySelectorAll('.rows')].map((e) =>
  [e.scrollWidth - e.clientWidth, e.scrollHeight - e.clientHeight])"""


@pytest.fixture(scope="module")
def server() -> Iterator[ExploreServer]:
    with serving(open_runs([BUNDLED])) as one:
        yield one


def contrast(page: Page, selector: str) -> float:
    """Return the contrast of an element's text with its background, as WCAG defines it."""
    style = f"getComputedStyle(document.querySelector('{selector}'))"
    lights = []
    for field in ("color", "backgroundColor"):
        rgb = [int(c) / 255 for c in re.findall(r"\d+", page.tab.evaluate(f"{style}.{field}"))[:3]]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
        lights.append(0.2126 * red + 0.7152 * green + 0.0722 * blue)
    return (max(lights) + 0.05) / (min(lights) + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("button", "name"), [("#film-play-0", "Pause"), ("#play-0", "Pause")])
def test_the_button_that_pauses_can_be_read(page: Opener, scheme: str, button: str, name: str) -> None:
    one = page(scheme=scheme)
    one.tab.click(button)
    one.until(f"document.querySelector('{button}').textContent.includes('{name}')")
    assert contrast(one, button) > 4.5


@pytest.mark.parametrize("stage", ["decoder.scores", "decoder.softmax", "follow.tokens"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_terms_of_a_sum_are_all_there(page: Opener, stage: str, width: int) -> None:
    """A table whose total stands below it shows all its rows, with their bars."""
    assert page(width=width, stage=stage).tab.evaluate(CUT) == [[0, 0]]


def test_a_token_and_its_position_are_two_numbers(page: Opener) -> None:
    one = page()
    token, place = one.texts(".chip[aria-pressed=true] *")
    assert one.text(".stage-top .label") == f"Input · token {token} · position {place}"


def test_the_first_output_differs_from_the_token_before_it(page: Opener) -> None:
    one = page()
    chips = one.texts(".chip .token")
    at = int(one.texts(".chip[aria-pressed=true] small")[0])
    assert chips[at] != chips[at + 1]


@pytest.mark.parametrize(("locale", "name"), [("en-US", "dashed: answer"), ("ko-KR", "점선: 답")])
def test_dashed_tokens_are_explained(page: Opener, locale: str, name: str) -> None:
    one = page(locale=locale)
    assert one.text(".strip .label small") == name
    assert "".join(one.texts(".chip.answers .token")) == one.text(".answer").replace(" ", "")


@pytest.mark.parametrize("view", ["lens", "patch"])
def test_no_cell_is_seen_beside_the_names_of_a_grid(page: Opener, view: str) -> None:
    """Left of the sticky column there is only background, also when the grid is scrolled."""
    one = page(width=400, view=view)
    one.tab.evaluate("document.querySelector('.cells-box').scrollLeft = 101")
    found = one.tab.evaluate("""[...document.querySelectorAll('.cells tr')].map((row) => {
      const box = row.closest('.cells-box').getBoundingClientRect(), at = row.getBoundingClientRect();
      row.scrollIntoView({ block: "center" });
      const y = row.getBoundingClientRect().top + at.height / 2;
      return document.elementFromPoint(box.left + 8, y) === row.firstElementChild;
    })""")
    assert found
    assert all(found)

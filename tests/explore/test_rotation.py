"""Effect of rotary positions: q and k before and after, the score by distance, and the drawing of both on the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from anyformer.config import Attention, ConfigError, Latent, LinearScaling, NoPosition, Position, Rotary, YarnScaling
from anyformer.explore.open_runs import OpenRun, Workspace, open_runs
from anyformer.explore.server import ExploreServer
from anyformer.nn.inspection.score_terms import position_curves
from anyformer.nn.model import Transformer
from anyformer.recipe import LanguageModel
from anyformer.runs.run import Run
from tests.explore import made
from tests.explore.made import TEXT, body
from tests.explore.tab import Opener

LATENT = made.BLOCK.model_copy(
    update={"mixer": Attention(heads=2, key_width=12, value_width=8, compress=Latent(rank=8, rotary_width=4))}
)
YARN = YarnScaling(factor=4, original_length=32)
SCHEMES: dict[str, tuple[Position, object]] = {
    "plain": (Rotary(), made.BLOCK),
    "half": (Rotary(fraction=0.5, scaling=LinearScaling(factor=2)), made.BLOCK),
    "yarn": (Rotary(scaling=YARN), made.BLOCK),
    "latent": (Rotary(), LATENT),
}


def opened(name: str, position: Position, block: object) -> Workspace:
    """Open a run with a position scheme; the weights are the same with every scheme without weights."""
    with pytest.MonkeyPatch.context() as patch:
        config = made.decoder(made.stack(block, position))  # type: ignore[arg-type]
        patch.setitem(made.RUNS, name, (LanguageModel(), config, made.LETTERS))
        run = made.made(name)
    return Workspace({name: OpenRun(name, run, run.folder)})


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("query", "key"), [(9, 9), (20, 3), (4, 11)])
def test_pairs_are_rotated_and_scores_follow_the_distance(name: str, query: int, key: int) -> None:
    """Before the rotation q and k are those of the model without positions; at its own distance a score is its own."""
    position, block = SCHEMES[name]
    request = body(name, kind="decoder", layer=0, head=1, query=query, key=key)
    found = opened(name, position, block).answer("rotation", request)
    after = opened(name, position, block).answer("neuron", request)
    before = opened(name, NoPosition(), block).answer("neuron", request)
    assert found["distance"] == query - key
    assert (found["dot"], found["before"]) == pytest.approx((after["dot"], before["dot"]), rel=1e-5)
    for pair in found["shown"]:
        i, j = pair["dims"]
        for side in ("q", "k"):
            assert pair[side] == pytest.approx([before[side][i], before[side][j]], rel=1e-4, abs=1e-6)
            assert pair[f"{side}_turned"] == pytest.approx([after[side][i], after[side][j]], rel=1e-4, abs=1e-6)
    score = dict(zip(found["distances"], found["scores"], strict=True))
    unmasked = after["dot"] * after["scale"]
    assert score[query - key] == pytest.approx(unmasked, rel=1e-4)
    if name != "yarn":  # which changes their length as well
        assert score[0] == pytest.approx(before["dot"] * before["scale"], rel=1e-4)
    shift = {**request, "query": query + 2, "key": key + 2}
    assert opened(name, position, block).answer("rotation", shift)["distance"] == query - key


def test_the_envelope_is_that_of_position_curves() -> None:
    workspace = opened("plain", Rotary(), made.BLOCK)
    found = workspace.answer("rotation", body("plain", kind="decoder", layer=1, head=0, query=5, key=2))
    model: Transformer = workspace.runs["plain"].run.model
    curve = position_curves(model, reach=max(found["distances"]))["decoder.1.mixer"]
    assert found["envelope"] == pytest.approx(curve.values[0][found["distances"]].tolist(), abs=1e-5)


def test_other_positions_have_no_rotation() -> None:
    run: Run = made.made("lm")
    workspace = Workspace({"lm": OpenRun("lm", run, run.folder)})
    with pytest.raises(ConfigError, match="no rotary positions"):
        workspace.answer("rotation", body("lm", kind="decoder", layer=0, head=0, query=1, key=0))


# -- on the page ------------------------------------------------------------------------------------------------------


@pytest.fixture
def window(server: ExploreServer, tmp_path: Path) -> Iterator[str]:
    """Add a run with rotary positions to the server."""
    server.workspace.runs.update(open_runs([made.written("window", tmp_path)]).runs)
    yield "window"
    del server.workspace.runs["window"]


@pytest.mark.parametrize(("locale", "scheme", "width"), [("en-US", "light", 1280), ("ko-KR", "dark", 400)])
def test_rotation_is_drawn_in_neurons_and_in_place_of_a_bias(
    page: Opener, server: ExploreServer, window: str, locale: str, scheme: str, width: int
) -> None:
    state = {"run": window, "text": TEXT, "layer": "1", "head": "2", "query": "9", "key": "7"}
    one = page(view="neuron", locale=locale, scheme=scheme, width=width, **state)
    found = server.workspace.answer("rotation", body(window, kind="decoder", layer=1, head=2, query=9, key=7))
    assert one.tab.locator(".dial").count() == len(found["shown"])
    assert one.tab.locator(".turning .curve").count() == 2
    assert one.tab.locator(".turning .mark").count() == 2  # the distance of this pair
    assert one.tab.evaluate("document.documentElement.scrollWidth") == width
    label = str(one.tab.get_attribute(".dial svg >> nth=0", "aria-label"))
    assert f"{found['shown'][0]['turn'] * 180 / 3.14159265:.1f}°" in label
    two = page(view="matrix", what="bias", locale=locale, scheme=scheme, width=width, **state)
    assert two.tab.locator(".dial").count() == len(found["shown"])
    assert page(run="lm", view="neuron").tab.locator(".turning").count() == 0

"""Explanations in the views: positions, the strongest key, comparison of two texts, and drawings without overlap."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from anyformer.explore.open_runs import OpenRun, Workspace, open_runs
from anyformer.explore.server import Server
from anyformer.recipe import LanguageModel
from tests.explore import made
from tests.explore.made import body
from tests.explore.tab import Opener
from tests.explore.test_views import numbers


@pytest.mark.parametrize(
    ("name", "kind", "position"),
    [
        ("pair", "encoder", "t5"),
        ("pair", "decoder", "alibi"),
        ("pair", "cross", "cross"),
        ("lm", "decoder", "learned"),
        ("window", "decoder", "rotary"),
        ("classify", "encoder", "sinusoidal"),
    ],
)
def test_a_matrix_names_its_positions(name: str, kind: str, position: str) -> None:
    run = made.made(name)
    result = Workspace({name: OpenRun(name, run, run.folder)}).answer(
        "matrix", body(name, kind=kind, layer=0, head=0, what="bias")
    )
    assert result["position"] == position
    assert (result["values"] is None) == (position not in ("t5", "alibi"))


def test_the_strongest_key_is_known_without_a_link() -> None:
    """With many keys of similar weight none reaches the minimum of a link, but one is still the highest."""
    run = made.made("latent")
    with torch.no_grad():
        for name, weight in run.model.named_parameters():
            if "mixer" in name:
                weight.mul_(0.1)
    workspace = Workspace({"latent": OpenRun("latent", run, run.folder)})
    where = body("latent", text="the quick brown fox jumps over the lazy dog " * 6, kind="decoder", layer=0)
    result = workspace.answer("heads", where)
    last = len(result["rows"]) - 1
    for head, keys in enumerate(result["strongest"]):
        weights = numbers(workspace.answer("matrix", {**where, "head": head}))
        assert keys == np.argmax(weights, axis=1).tolist()
        assert last not in [query for query, _, _ in result["links"][head]]


@pytest.fixture
def post(server: Server, tmp_path: Path) -> Iterator[str]:
    """Add a run with post-norm blocks to the server."""
    block = made.BLOCK.model_copy(update={"placement": "post"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(made.RUNS, "post", (LanguageModel(), made.decoder(made.stack(block, depth=6)), made.LETTERS))
        server.workspace.runs.update(open_runs([made.written("post", tmp_path)]).runs)
    yield "post"
    del server.workspace.runs["post"]


def test_names_in_the_block_do_not_overlap(page: Opener, post: str) -> None:
    one = page(run=post, view="block")
    overlaps = """(() => {
      const box = (e) => e.getBoundingClientRect();
      const names = [...document.querySelectorAll('.stack svg > text')].map(box);
      const parts = [...document.querySelectorAll('.stack .part rect')].map(box);
      return names.filter((a) => parts.some((b) =>
        a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length;
    })()"""
    assert one.tab.locator(".stack text.times").count() == 1
    assert one.tab.evaluate(overlaps) == 0


def test_rotary_positions_are_explained(page: Opener, post: str) -> None:
    one = page(run=post, view="matrix", what="bias")
    assert "rotate q and k" in one.text("#view .empty")
    assert "add nothing" not in one.text("#view .empty")


def test_a_link_to_a_second_run_without_a_text_reads_the_first_text(page: Opener) -> None:
    one = page(run="lm", view="compare", text="the quick fox", run2="lm")
    assert one.tab.input_value("#text-2") == "the quick fox"
    assert one.tab.locator("#strips .error").count() == 0


def test_a_head_that_is_off_has_no_lines(page: Opener) -> None:
    one = page(run="lm", view="heads", off="decoder.0.0")
    before = page(run="lm", view="heads").tab.locator(".links .lines path").count()
    assert one.tab.get_attribute("#chip-0-0", "aria-pressed") == "false"
    assert one.text("#chip-0-0").split() == ["0", "off"]
    assert 0 < one.tab.locator(".links .lines path").count() < before

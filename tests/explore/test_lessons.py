"""Explanations in the views: positions, the strongest key, comparison of two texts, and drawings without overlap."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from anyformer.config import Attention, LayerNorm, Learned, MaskedLM, ModelConfig, Parallel, Rotary, Tokens, Window
from anyformer.data.tokenizer import TextTokenizer
from anyformer.explore.open_runs import OpenRun, Workspace, open_runs
from anyformer.explore.server import ExploreServer
from anyformer.recipe import AnyTask, LanguageModel, MaskedLanguageModel
from tests.explore import made
from tests.explore.made import body
from tests.explore.tab import Opener, Page
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


@pytest.fixture(scope="module")
def drawn(server: ExploreServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Add runs to the server whose blocks differ: post-norm, parallel, windows, norm and types of the embeddings."""
    post = made.BLOCK.model_copy(update={"placement": "post"})
    both = made.BLOCK.model_copy(update={"order": Parallel()})
    window = made.BLOCK.model_copy(update={"mixer": Attention(heads=2, pattern=Window(before=7, after=0))})
    typed = made.encoder(made.stack(post, Learned(length=48), depth=6), MaskedLM())
    typed = typed.model_copy(update={"source": Tokens(vocab=1, types=2, norm=LayerNorm())})
    runs: dict[str, tuple[AnyTask, ModelConfig, TextTokenizer]] = {
        "post": (LanguageModel(), made.decoder(made.stack(post, depth=6)), made.LETTERS),
        "both": (LanguageModel(), made.decoder(made.stack(both)), made.LETTERS),
        "near": (LanguageModel(), made.decoder(made.stack(window, Rotary(theta=5000.0))), made.LETTERS),
        "typed": (MaskedLanguageModel(), typed, made.WORDS),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, parts in runs.items():
            patch.setitem(made.RUNS, name, parts)
        home = tmp_path_factory.mktemp("drawn")
        server.workspace.runs.update(open_runs([made.written(name, home) for name in runs]).runs)
    yield
    for name in runs:
        del server.workspace.runs[name]


def drawn_texts(page: Page, selector: str) -> list[str]:
    """Return the texts of elements of a drawing, which have no inner text."""
    return [str(text) for text in page.tab.locator(selector).all_text_contents()]


OVERLAPS = """(() => {
  const box = (e) => e.getBoundingClientRect();
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  const names = [...document.querySelectorAll('.stack svg > text')].map(box);
  const parts = [...document.querySelectorAll('.stack .part rect')].map(box);
  const near = (a, b) => meet({left: a.left, right: a.right, top: a.top - 2, bottom: a.bottom + 2}, b);
  return [names.filter((a) => parts.some((b) => meet(a, b))).length,
          parts.filter((a, i) => parts.some((b, j) => i < j && near(a, b))).length];
})()"""


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("run", ["post", "both", "near", "typed", "pair"])
@pytest.mark.parametrize("locale", ["en-US", "ko-KR"])
def test_names_and_boxes_of_the_block_do_not_overlap(page: Opener, run: str, locale: str) -> None:
    one = page(run=run, view="block", locale=locale)
    assert one.tab.locator(".stack text.times").count() == (2 if run == "pair" else 1)
    assert one.tab.evaluate(OVERLAPS) == [0, 0]
    if locale == "ko-KR":
        assert not re.search("[a-z]{5,}", " ".join(drawn_texts(one, ".stack svg text")))


@pytest.mark.usefixtures("drawn")
def test_the_block_shows_norm_and_types_of_embeddings_windows_and_the_base_of_rotations(page: Opener) -> None:
    labels = drawn_texts(page(run="typed", view="block"), ".stack .part")
    order = [next(i for i, text in enumerate(labels) if name in text) for name in ("learned", "token types: 2")]
    assert order == sorted(order)
    assert labels[order[1] + 1].startswith("layer norm")
    one = page(run="near", view="block")
    assert "window (before 7, after 0) · rotary" in drawn_texts(one, ".stack .part.mixer")[0]
    one.click(".stack .part.mixer")
    assert "pattern.before7" in one.text("#details-0")
    assert "position.theta5000" in one.text("#details-0")


def test_the_output_of_the_encoder_reaches_each_cross_attention(page: Opener) -> None:
    """One line leads from a box with the name that ends the encoder's drawing to every cross-attention."""
    one = page(run="pair", view="block")
    assert drawn_texts(one, ".stack .encoded + text") == ["encoder output", "encoder output"]
    line = str(one.tab.get_attribute(".stack .memory", "d"))
    assert line.count("M") == 1 + one.tab.locator(".part.cross").count()


@pytest.mark.usefixtures("drawn")
def test_rotary_positions_are_explained(page: Opener) -> None:
    one = page(run="post", view="matrix", what="bias")
    assert "rotate q and k" in one.text("#view .empty")
    assert "add nothing" not in one.text("#view .empty")


def test_a_link_to_a_second_run_without_a_text_reads_the_first_text(page: Opener) -> None:
    one = page(run="lm", view="compare", text="the quick fox", run2="lm")
    assert one.tab.input_value("#text-2") == "the quick fox"
    assert one.tab.locator("#strips .error").count() == 0


@pytest.mark.parametrize(
    ("run", "kind", "layer"), [("pair", "cross", "1"), ("lm", "decoder", "2"), ("classify", "encoder", "1")]
)
def test_the_first_attention_is_that_of_inspect(page: Opener, run: str, kind: str, layer: str) -> None:
    """Cross-attention if there is any, and the last layer; the path begins in the first layer."""
    one = page(run=run, view="heads")
    assert (one.tab.input_value("#kind-0"), one.tab.input_value("#layer-0")) == (kind, layer)
    one.press("ArrowDown")
    assert one.tab.input_value("#layer-0") == str(int(layer) - 1)
    two = page(run=run, stage=f"{'encoder' if run == 'classify' else 'decoder'}.softmax")
    assert two.tab.input_value("#path-layer-0") == "0"


def test_a_head_that_is_off_has_no_lines(page: Opener) -> None:
    one = page(run="lm", view="heads", layer="0", off="decoder.0.0")
    before = page(run="lm", view="heads", layer="0").tab.locator(".links .lines path").count()
    assert one.tab.get_attribute("#chip-0-0", "aria-pressed") == "false"
    assert one.text("#chip-0-0").split() == ["0", "off"]
    assert 0 < one.tab.locator(".links .lines path").count() < before

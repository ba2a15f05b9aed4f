"""Figures accept the results of the inspection functions, and labels do not overlap."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from anyformer import presets
from anyformer.nn.inspection import plot
from anyformer.nn.inspection.ablation import logit
from anyformer.nn.inspection.attribution import Attribution, attribute
from anyformer.nn.inspection.cache_growth import cache_growth
from anyformer.nn.inspection.logit_terms import logit_lens
from anyformer.nn.model import Transformer

pytest.importorskip("matplotlib")
IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
NAMES = [f"token {i}" for i in range(10)]


def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(presets.gpt2(depth=2, width=16, heads=2, vocab=11, length=16)).eval()


def test_logit_lens_of_several_texts(tmp_path: Path):
    lens, labels = logit_lens(model(), IDS), NAMES[:4]
    rows = [plot.plot_lens(lens, labels, NAMES, tmp_path / f"{row}.svg", row).read_text() for row in range(2)]
    whole = plot.plot_lens(lens, labels, NAMES, tmp_path / "first.svg").read_text()
    alone = plot.plot_lens(lens[:, 0], labels, NAMES, tmp_path / "alone.svg").read_text()
    assert labels_in(rows[0]) == labels_in(whole) == labels_in(alone) != labels_in(rows[1])


def labels_in(svg: str) -> list[str]:
    return [line.split(">")[1].split("<")[0] for line in svg.splitlines() if line.lstrip().startswith("<text")]


def test_growth_of_one_cache(tmp_path: Path):
    grown = cache_growth(model(), 4)
    plot.plot_growth(grown, tmp_path / "one.svg")
    named = plot.plot_growth({"auto": grown}, tmp_path / "named.svg").read_text()
    assert labels_in(named) == [*labels_in((tmp_path / "one.svg").read_text()), "auto"]


LONG_LABELS = [
    ["the", "quick", "brown", "foxes", "jumped", "over", "congratulations", "internationalization"],
    ["我去学校"] * 12,
]


@pytest.mark.parametrize("labels", [*LONG_LABELS, ["a", "b"], ["t"] * 200], ids=["long", "wide", "short", "many"])
def test_labels_of_an_attribution_do_not_overlap(labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    boxes: list[Any] = []

    def measure(figure: Any, path: Path, **options: Any) -> None:
        figure.canvas.draw()
        shown = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
        boxes.extend(label.get_window_extent() for label in shown)

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", measure)
    result = Attribution(torch.tensor(0.0), {"decoder": torch.linspace(-1, 1, len(labels))[None]})
    plot.plot_attribution(result, {"decoder": labels}, tmp_path / "a.png")
    assert len(boxes) > 1
    assert all(a.x1 <= b.x0 + 1 for a, b in itertools.pairwise(boxes))


def attribution(tokens: dict[str, list[str]], row: int = 0) -> None:
    plot.plot_attribution(attribute(model(), logit(3), IDS), tokens, "a.svg", row)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.plot_lens(torch.zeros(3, 11), NAMES[:4], NAMES, "a.svg"), "logits have shape .*logit_lens"),
        (
            lambda: plot.plot_lens(logit_lens(model(), IDS), NAMES[:3], NAMES, "a.svg"),
            "tokens has 3 labels, expected 4",
        ),
        (
            lambda: plot.plot_lens(logit_lens(model(), IDS), NAMES[:4], NAMES, "a.svg", 2),
            "row = 2: must be from 0 to 1",
        ),
        (lambda: attribution({}), "tokens has no 'decoder'"),
        (lambda: attribution({"decoder": NAMES[:3]}), "tokens.'decoder'. has 3 labels, expected 4"),
        (lambda: attribution({"decoder": NAMES[:4]}, row=2), "row = 2: must be from 0 to 1"),
    ],
)
def test_arguments_of_the_wrong_size_are_refused(
    call: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        call()
    assert not list(tmp_path.iterdir())

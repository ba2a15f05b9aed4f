"""The run that `anyformer explore` opens without an argument: small, complete, and right about examples of the docs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import anyformer as af
from anyformer.explore.make_bundled import CHANGES, make_bundled
from anyformer.explore.open_runs import BUNDLED, open_runs
from anyformer.recipe.ready import read_recipe
from anyformer.runs.run import load, snapshots
from tests.test_cli import run as command

DOCS = Path(__file__).parents[2] / "docs"
MAX_BYTES = 10**6


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in BUNDLED.rglob("*") if path.is_file()) < MAX_BYTES
    assert {path.suffix for path in BUNDLED.rglob("*") if path.is_file()} == {
        ".json",
        ".jsonl",
        ".safetensors",
        ".toml",
    }


def test_it_is_trained_by_the_recipe_sort() -> None:
    """A changed recipe needs `make bundled-model`."""
    recipe = read_recipe("sort", list(CHANGES))
    assert af.load(BUNDLED).config.width == recipe.model.width == 32
    assert read_recipe(str(BUNDLED / "recipe.toml")) == recipe


@pytest.mark.parametrize("page", ["explore.md", "inspection.md", "decoding.md"])
def test_it_sorts_the_examples_of_the_docs(page: str) -> None:
    texts = sorted(set(re.findall(r'"(\d(?: \d)+)"', (DOCS / page).read_text(encoding="utf-8"))))
    assert "3 1 2" in texts
    assert af.load(BUNDLED).predict(texts) == [" ".join(sorted(text.split())) for text in texts]


def test_it_sorts_other_digits() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(10, (1 + n % 11,), generator=generator).tolist() for n in range(110)]
    right = [" ".join(map(str, sorted(row))) for row in rows]
    answers = af.load(BUNDLED).predict([" ".join(map(str, row)) for row in rows])
    assert sum(a == b for a, b in zip(answers, right, strict=True)) >= 108


def test_its_steps_lead_from_nonsense_to_the_result() -> None:
    (about,) = open_runs([BUNDLED]).about()
    assert about["steps"][0] == 0
    assert len(about["steps"]) >= 12
    assert about["result"] == about["steps"][-1] == read_recipe("sort").train.steps
    first, *_, last = (load(path).predict(["3 1 2"])[0] for path in snapshots(BUNDLED))
    assert first != last == "1 2 3"


def test_the_command_opens_it_if_no_run_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def end(server: Any) -> None:
        opened.extend(server.workspace.about())
        raise KeyboardInterrupt

    monkeypatch.setattr("anyformer.explore.server.ExploreServer.serve_forever", end)
    result = command("explore", "--port", "0", "--no-browser")
    assert result.exit_code == 0
    assert "sorts digits" in result.output
    assert [about["name"] for about in opened] == ["sort"]
    assert re.fullmatch(r"\d( \d)+", opened[0]["example"])  # of its own data, which is generated


def test_it_can_be_made_again(tmp_path: Path) -> None:
    """In place of an old one, with weights in fp16."""
    small = [*CHANGES, "train.steps=2", "data.train.count=64", "data.valid.count=4", "train.schedule.warmup=1"]
    for _ in range(2):
        make_bundled(tmp_path / "sort", small)
    made = load(tmp_path / "sort", "cpu")
    assert {weight.dtype for weight in made.model.parameters()} == {torch.float16}
    assert [int(path.name.removeprefix("step-")) for path in snapshots(tmp_path / "sort")] == [0, 1, 2]

"""Images and captions in one space: with an image tower (CLIP), and in one encoder that reads both."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import anyformer as af
from anyformer.config.parse import to_data
from anyformer.recipe import Recipe
from anyformer.training.train import evaluate
from examples.clip import CAPTIONS, RECIPE, write_data

CHANCE = 1 / len(CAPTIONS)
# one encoder: an image is its patches, among the tokens
SINGLE: dict[str, Any] = {
    "width": 48,
    "head": {"kind": "embedder", "pool": "mean", "normalize": True, "learned_scale": True},
    "source": {"media": {"image": {"image_height": 16, "patch": 4, "position": "learned"}}},
    "encoder": {
        "depth": 2,
        "position": {"kind": "learned", "length": 24},
        "final_norm": "layer",
        "blocks": [{"mixer": {"kind": "attention", "heads": 2}}],
    },
}


@pytest.mark.parametrize("towers", [2, 1])
def test_new_pictures_find_their_captions(towers: int, tmp_path: Path) -> None:
    """After a short training, most pictures that were not in it are nearest to their captions."""
    write_data(tmp_path, copies=20)
    recipe = tomllib.loads(RECIPE)
    recipe["data"]["root"] = str(tmp_path)
    recipe["train"] |= {"steps": 120, "evaluate_every": 120}
    recipe["train"]["schedule"]["warmup"] = 10
    if towers == 1:
        recipe["model"] = SINGLE
        recipe["batches"]["tokens"] = 1280
    run = af.train(Recipe.model_validate(recipe), tmp_path / "run")
    found = evaluate(tmp_path / "run")
    assert found.values["accuracy"] > 10 * CHANCE
    again = af.load(run.folder)
    names = [f"<image:{tmp_path / 'test.npz'}#images/{i}>" for i in range(len(CAPTIONS))]
    said = again.predict(names, labels=CAPTIONS)
    assert sum(a == b for a, b in zip(said, CAPTIONS, strict=True)) / len(CAPTIONS) > 10 * CHANCE
    assert to_data(again.config) == to_data(run.config)


def test_a_learned_temperature_needs_a_learned_scale() -> None:
    recipe = tomllib.loads(RECIPE)
    recipe["task"]["temperature"] = 0.05
    with pytest.raises(ValueError, match=r"model\.head\.learned_scale = true: task\.temperature = 0\.05"):
        Recipe.model_validate(recipe)

"""Errors of a recipe that is refused."""

from pathlib import Path

import pytest

from anyformer.config import ConfigError
from anyformer.recipe import Recipe
from tests.training.small import make


def told(recipe: Recipe, folder: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make(recipe, folder / "never")
    assert not (folder / "never").exists()
    return str(caught.value).splitlines()

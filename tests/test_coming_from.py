"""Every setting that is named for people from other tools is one of ours."""

import re

import pytest

from anyformer.config import io
from anyformer.recipe.ready import read_recipe
from tests.pages import ROOT

BASES = ("multi30k-en-de", "shakespeare", "sst2")


def settings() -> list[str]:
    """Whatever the page for people from other tools sets or names, outside of the other tools' own columns."""
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    cells = [line.split(" | ")[-1] for line in text.splitlines() if line.startswith("| `")]
    found = [word for cell in cells for code in re.findall(r"`([^`]*)`", cell) for word in code.split()]
    return list(dict.fromkeys(word for word in found if re.match(r"(model|train|batches|task|parallel|data)\.", word)))


@pytest.mark.parametrize("setting", settings())
def test_settings_for_newcomers_exist(setting: str) -> None:
    path, _, value = setting.partition("=")
    if value:
        assert any(taken(base, setting) for base in BASES)
    else:  # named only
        assert any(there(base, path.split(".")) for base in BASES)


def taken(base: str, setting: str) -> bool:
    try:
        io.override(read_recipe(base), [setting])
    except io.ConfigError:
        return False
    return True


def there(base: str, steps: list[str]) -> bool:
    found: object = read_recipe(base)
    for step in steps:
        found = found[0] if isinstance(found, tuple) and step == "*" else getattr(found, step, ...)
    return found is not ...

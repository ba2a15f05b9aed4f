"""Imports of earlier guides still work, and say where the module is now."""

import subprocess
import sys
from importlib import import_module

import pytest

from anyformer.moved import MODULES, NAMES


@pytest.mark.parametrize(("old", "new"), MODULES.items())
def test_an_old_module_is_the_new_one(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"anyformer.{old}", raising=False)
    with pytest.warns(FutureWarning, match=f"anyformer.{old} is now anyformer.{new}$"):
        module = import_module(f"anyformer.{old}")
    current = import_module(f"anyformer.{new}")
    assert all(getattr(module, name) is value for name, value in vars(current).items() if not name.startswith("__"))
    assert all(getattr(module, name) is getattr(current, now) for name, now in NAMES.get(old, {}).items())


def test_the_warning_reaches_a_user() -> None:
    code = "from anyformer.inspection.lens import logit_lens; print(logit_lens.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "anyformer.inspection.logit_lens"
    assert "anyformer.inspection.lens is now anyformer.inspection.logit_lens" in done.stderr


def test_other_names_are_still_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'anyformer\.inspection\.nothing'"):
        import_module("anyformer.inspection.nothing")

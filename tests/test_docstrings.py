"""Docstrings of stable names: every argument, the result, and an example that runs."""

import doctest
import inspect
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import anyformer as af

SORT = Path(af.__file__).parent / "explore" / "bundled_runs" / "sort"
NEED_FILES = ("Run.chat", "Run.part", "from_hf", "to_hf", "register")  # of large runs; a part would stay known
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Example):$", re.MULTILINE)


def stable() -> Iterator[tuple[str, Any]]:
    """Yield the functions and classes of `af`, and the methods of a run and of an engine."""
    for name in af.__all__:
        value = getattr(af, name)
        if callable(value) and name != "ModelConfig":  # its fields are described one by one
            yield name, value
    for cls in (af.Run, af.Engine):
        for name, member in vars(cls).items():
            value = getattr(member, "func", member)  # of a cached property
            if callable(value) and not name.startswith("_"):
                yield f"{cls.__name__}.{name}", value


NAMES = dict(stable())


def sections(value: Any) -> dict[str, str]:
    """Return the sections of a docstring by their titles."""
    parts = SECTION.split(inspect.getdoc(value) or "")
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def arguments(value: Callable[..., Any]) -> set[str]:
    return {name for name, one in inspect.signature(value).parameters.items() if name != "self"}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_results_are_described(name: str) -> None:
    value = NAMES[name]
    found = sections(value)
    described = {
        argument
        for title in ("Args", "Attributes" if name == "Run" else "Args")
        for names in re.findall(r"^    (\w[\w, ]*):", found.get(title, ""), re.MULTILINE)
        for argument in names.split(", ")
    }
    assert arguments(value) == described
    returns = inspect.signature(value).return_annotation
    if not inspect.isclass(value) and returns not in (None, "None"):
        assert {"Returns", "Yields"} & found.keys() or not arguments(value)
    assert "Example" in found


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(SORT, tmp_path / "runs" / "sort")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("runs")
def test_the_example_gives_what_it_shows(name: str) -> None:
    text = inspect.getdoc(NAMES[name]) or ""
    test = doctest.DocTestParser().get_doctest(text, {"af": af, "torch": torch}, name, None, None)
    out = list[str]()
    with ThreadPoolExecutor(1) as pool:  # the browser of other tests has an event loop in the main thread
        result = pool.submit(doctest.DocTestRunner().run, test, out=out.append).result()
    assert result.failed == 0, "".join(out)
    assert result.attempted == len(test.examples) or name in NEED_FILES

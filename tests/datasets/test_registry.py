"""The registry agrees with the recipes, the bundled files and the page docs/data.md."""

import lzma
import re
from hashlib import sha256
from importlib import resources
from pathlib import Path, PurePosixPath

import pytest
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config.spec import ConfigError
from anyformer.data.datasets.registry import HOST, DataSet, lookup, registry
from anyformer.recipe import ready as recipes
from anyformer.recipe.data import named_files

ROOT = Path(__file__).parents[2]
BUNDLED = resources.files("anyformer.data.datasets") / "bundled"
MAX_BUNDLED = 4_000_000  # bytes inside the package


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_names_its_data_sets(name: str) -> None:
    """Files are registered, or made by commands of a page: thousands of pictures are not fetched one by one."""
    data = recipes.read_recipe(name).data
    paths = [path for _, path in named_files(data)]
    pages = "".join(
        (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("your-data", "environments")
    )
    assert {path.partition("/")[0] for path in paths if lookup(path)} == set(data.sets)
    assert not [path for path in paths if lookup(path) is None and path.partition("/")[0] not in pages]


def test_every_data_set_is_used() -> None:
    assert {one for name in recipes.names() for one in recipes.read_recipe(name).data.sets} == set(registry())


@pytest.mark.parametrize("one", registry().values(), ids=lambda one: one.name)
def test_addresses_are_pinned_and_paths_stay_in_their_folder(one: DataSet) -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", one.commit)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", one.repository)
    assert len({file.path for file in one.files}) == len({file.sha256 for file in one.files}) == len(one.files)
    for file in one.files:
        assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
        for path in (PurePosixPath(one.name), PurePosixPath(file.path), PurePosixPath(file.at)):
            assert not path.is_absolute()
            assert not {"..", "."} & set(path.parts)
            assert not path.name.startswith(".")


def test_bundled_files_are_the_upstream_bytes_beside_their_licence() -> None:
    sets = [one for one in registry().values() if one.bundled]
    found = {f"{folder.name}/{file.name}" for folder in BUNDLED.iterdir() for file in folder.iterdir()}
    listed = {f"{one.name}/{file.path}.xz" for one in sets for file in one.files}
    assert found == listed | {f"{one.name}/LICENSE" for one in sets}
    for one in sets:
        assert not [file for file in one.files if file.packed]
        for file in one.files:
            content = lzma.decompress((BUNDLED / one.name / f"{file.path}.xz").read_bytes())
            assert (len(content), sha256(content).hexdigest()) == (file.bytes, file.sha256)
    assert sum(len((BUNDLED / path).read_bytes()) for path in found) <= MAX_BUNDLED


def test_an_unknown_data_set_is_a_fault() -> None:
    with pytest.raises(ConfigError, match=r"^data\.sets\.0 = 'scna': no such data set; did you mean 'scan'\?$"):
        recipes.read_recipe("scan", ['data.sets=["scna"]'])


def row(one: DataSet) -> str:
    used = [f"`{name}`" for name in recipes.names() if one.name in recipes.read_recipe(name).data.sets]
    source = f"[{one.repository}](https://github.com/{one.repository}/tree/{one.commit})"
    here = "in the package" if one.bundled else "fetched" if one.verified else "fetched, unverified"
    cells = f"`{one.name}`", one.about, f"{one.bytes / 1e6:.1f} MB, {here}", one.licence, source, ", ".join(used)
    return f"| {' | '.join(cells)} |"


def test_the_page_lists_the_registry() -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [row(one) for one in registry().values()]
    for one in registry().values():
        assert one.note in text
    assert HOST in text


def test_the_list_names_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ANYFORMER_DATA", raising=False)
    shown = CliRunner().invoke(app, ["data", "list"]).stdout
    for one in registry().values():
        here = "bundled" if one.bundled else "not present" if one.verified else "not present, unverified"
        line = rf"^{one.name} +{one.bytes / 1e6:.1f} MB +{here} +{re.escape(one.licence)}$"
        assert re.search(line, shown, re.MULTILINE)
    assert "recipes: mlm-english, shakespeare, shakespeare-gpu, shakespeare-small, t5-denoise" in shown
    (tmp_path / "anyformer" / "data" / "trec").mkdir(parents=True)
    (tmp_path / "anyformer" / "data" / "trec" / "TREC.train").touch()
    assert re.search(r"^trec +0\.3 MB +present ", CliRunner().invoke(app, ["data", "list"]).stdout, re.MULTILINE)
    assert "data: trec (present)" in CliRunner().invoke(app, ["recipes"]).stdout

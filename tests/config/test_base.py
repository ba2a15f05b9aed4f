"""`base = "..."` in a recipe file: the base with the values of the file, or an error that names the file."""

import json
from pathlib import Path

import pytest

from anyformer.config import io
from anyformer.recipe import Classify, Recipe, ready as recipes
from tests.config.test_schema import fits
from tests.test_cli import done, refused
from tests.training.small import labelled, parities, run

# Lines of TOML that are overrides, too.
CHANGES = {
    "sort": ["train.steps = 7", "model.width = 32", 'data.valid = "none"', "seed = 5"],
    "multi30k-en-de": [
        'data.train = {kind="table", path="새.tsv", source="a", target="b"}',
        'data.test = "none"',
        "tokenizer.size = 300",
        'model.encoder.position = {kind = "rotary", theta = 5e5}',
        'model.encoder.final_norm = "rms"',
        'batches = {kind="packed", tokens=64, length=32}',
    ],
    "sst2": ['model.head.labels = "auto"', "data.train.stop = 0.5", 'train.optimizer = {kind="adam", lr=0.1}'],
    "shakespeare": ['tokenizer = "bytes"', 'data.train.path = "책.txt"', "train.schedule.warmup = 3"],
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("count", [0, 1, None])
def test_a_base_is_changed_as_by_overrides(name: str, count: int | None, tmp_path: Path) -> None:
    lines = CHANGES[name][:count]
    (tmp_path / "own.toml").write_text("\n".join([f'base = "{name}"', *lines]), encoding="utf-8")
    expected = recipes.read_recipe(name, [line.replace('"none"', "none") for line in lines])
    assert recipes.read_recipe(str(tmp_path / "own.toml")) == expected
    assert done("config", "show", tmp_path / "own.toml") == io.dumps(expected)


@pytest.mark.parametrize("name", recipes.names())
def test_merging_what_is_there_changes_nothing(name: str) -> None:
    recipe = recipes.read_recipe(name)
    data = io.to_data(recipe)
    assert io.merge(Recipe, data, {}) == io.merge(Recipe, data, data) == data


def test_a_table_changes_each_table_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('base = "sort"\n[model.decoder.blocks.mixer]\nheads = 2\n', encoding="utf-8")
    expected = recipes.read_recipe("sort", ["model.decoder.blocks.*.mixer.heads=2"])
    assert recipes.read_recipe(str(tmp_path / "own.toml")) == expected


def test_a_base_may_have_a_base(tmp_path: Path) -> None:
    """Paths begin at the folder of each file, and the nearest file decides."""
    (tmp_path / "in").mkdir()
    (tmp_path / "first.toml").write_text('base = "sort"\ntrain.steps = 1\nseed = 1\n', encoding="utf-8")
    (tmp_path / "in" / "둘.json").write_text(json.dumps({"base": "../first.toml", "seed": 2}), encoding="utf-8")
    (tmp_path / "last.toml").write_text('base = "in/둘.json"\nmodel.width = 32\n', encoding="utf-8")
    expected = recipes.read_recipe("sort", ["train.steps=1", "seed=2", "model.width=32"])
    assert recipes.read_recipe(str(tmp_path / "last.toml")) == expected


def test_a_run_stores_the_merged_recipe(tmp_path: Path) -> None:
    base = labelled(tmp_path, Classify(), parities(), steps=2)
    io.save(base, tmp_path / "base.toml")
    (tmp_path / "own.toml").write_text('base = "base.toml"\nseed = 4\n', encoding="utf-8")
    recipe = recipes.read_recipe(str(tmp_path / "own.toml"))
    run(recipe, tmp_path / "run")
    assert io.load(Recipe, tmp_path / "run" / "recipe.toml") == io.override(base, ["seed=4"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('base = "srot"', "own.toml: base = 'srot': is neither a recipe nor a file; did you mean 'sort'?"),
        ("base = 3", "own.toml: base = 3: must be the name of a recipe, or a file"),
        (
            'base = "other.toml"',
            "own.toml: base = 'other.toml': no file {folder}/other.toml; paths begin",
        ),
        (
            'base = "own.toml"',
            "own.toml: base = 'own.toml': leads back to itself: {folder}/own.toml -> {folder}",
        ),
        (
            'base = "loop.toml"',
            "loop.toml: base = './own.toml': leads back to itself: {folder}/own.toml -> ",
        ),
        ('base = "bad.toml"', "bad.toml: train.stepz: unknown key; did you mean 'steps'?"),
        ('base = "sort"\ntrain.stepz = 3', "own.toml: train.stepz: unknown key; did you mean 'steps'?"),
        ('base = "sort"\ntask.kind = "lmm"', "own.toml: task.kind = 'lmm': unknown kind; did you mean 'lm'?"),
        ('base = "sort"\nmodel = 3', "own.toml: model = 3: must be a table"),
        ('base = "\\u0000.toml"', "own.toml: base = '\\x00.toml': no file"),
    ],
)
def test_a_wrong_base_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    (tmp_path / "loop.toml").write_text('base = "./own.toml"', encoding="utf-8")
    (tmp_path / "bad.toml").write_text('base = "sort"\ntrain.stepz = 3', encoding="utf-8")
    for command in (["config", "show"], ["config", "check"], ["train"]):
        line, *_ = refused(*command, tmp_path / "own.toml")
        assert line.startswith(f"{tmp_path}/{why.format(folder=tmp_path)}")


def test_the_model_of_a_run_replaces_that_of_the_base(tmp_path: Path) -> None:
    """Also its tokenizer: both belong to the weights."""
    recipe = labelled(tmp_path, Classify(), parities(), steps=2)
    run(recipe, tmp_path / "first")
    (tmp_path / "own.toml").write_text(f'base = "sst2"\nmodel.from = "{tmp_path}/first"\n', encoding="utf-8")
    found = recipes.read_recipe(str(tmp_path / "own.toml"))
    assert (found.model.width, found.tokenizer.kind, found.train.init_from) == (8, "run", f"{tmp_path}/first")
    assert found.train.steps == recipes.read_recipe("sst2").train.steps
    (tmp_path / "next.toml").write_text('base = "own.toml"\nseed = 3\n', encoding="utf-8")
    assert recipes.read_recipe(str(tmp_path / "next.toml")) == io.override(found, ["seed=3"])


@pytest.mark.parametrize(
    ("tables", "right"),
    [
        ({"base": "sort"}, True),
        ({"base": "sort", "train": {"steps": 3}, "data": {"train": {"stop": 0.9}}}, True),
        ({"base": "sort", "trian": {"steps": 3}}, False),
        ({"base": 3}, False),
        ({"train": {"steps": 3}}, False),
    ],
)
def test_editors_know_bases(tables: dict[str, object], right: bool) -> None:
    schema = recipes.schema()
    assert fits(tables, schema, schema) == right


@pytest.mark.parametrize("name", recipes.names())
def test_editors_know_recipes(name: str) -> None:
    schema = recipes.schema()
    assert fits(io.to_data(recipes.read_recipe(name)), schema, schema)

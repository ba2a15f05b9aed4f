"""Laws of all data sources."""

import re
from importlib import import_module
from typing import Any, get_args

import pytest

from anyformer.config import io
from anyformer.config.part import kind_of
from anyformer.recipe import JoinedSources, SingleSource, Source
from anyformer.recipe.data import Data, MixedSources, splits
from anyformer.recipe.source import NEEDS, PAIR, source_faults
from anyformer.recipe.table import FORMATS, TableFile, format_of

GIVEN: dict[str, Any] = {"path": "a.csv", "source": "a", "target": "b", "count": 3, "pattern": "(?P<label>a)"}
OUTER = (JoinedSources, MixedSources)
SINGLE = [part for part in Source.choices() if part not in OUTER]


def least(part: Any, **more: Any) -> Any:
    """A source with the fields that it must have."""
    required = {name: GIVEN[name] for name, field in part.model_fields.items() if field.is_required()}
    return part(**required, **more)


@pytest.mark.parametrize("part", SINGLE, ids=kind_of)
def test_a_source_names_its_files_and_returns_from_a_recipe(part: Any) -> None:
    source = least(part)
    data = Data(train=source)
    assert all(isinstance(getattr(source, name), str) for name in source.files)
    assert bool(source.files) == ("path" in part.model_fields or kind_of(part) == "parallel")
    assert io.loads(Data, io.dumps(data, "toml"), "toml") == data
    assert [one.source for one in splits(data)] == [source]


@pytest.mark.parametrize(
    "part", [part for part in SINGLE if {"start", "stop"} <= part.model_fields.keys()], ids=kind_of
)
def test_a_part_begins_before_its_end(part: Any) -> None:
    source = least(part, start=0.5, stop=0.5)
    assert any(fault.path == "start" for fault in source.faults("seq2seq", PAIR))


def test_every_format_of_a_table_is_a_row() -> None:
    (words, _) = get_args(TableFile.model_fields["format"].annotation)
    assert get_args(words) == tuple(FORMATS)
    for name, form in FORMATS.items():
        assert format_of(f"a.{name}") == format_of(f"A.{name}.gz".upper()) == name
        if form.reader:
            assert hasattr(import_module(f"anyformer.data.{form.reader}"), "Reader")


@pytest.mark.parametrize("columns", NEEDS, ids="-".join)
def test_what_is_advised_can_be_read(columns: tuple[str, ...]) -> None:
    """The sources that a message names for a task do fit it."""
    named = [part for part in SINGLE if re.search(rf"\b{kind_of(part)}\b", NEEDS[columns].partition(":")[2])]
    assert named
    for part in named:
        labelled = kind_of(part) == "text" and "label" in columns
        assert least(part, **({"label": "a"} if labelled else {})).fits(columns)


@pytest.mark.parametrize("part", SINGLE, ids=kind_of)
def test_a_source_that_does_not_fit_is_refused_by_its_kind(part: Any) -> None:
    source = least(part)
    for columns in NEEDS:
        refused = any(fault.path == "kind" for fault in source_faults(source, "a task", columns))
        assert refused != source.fits(columns)
    assert [fault.path for fault in source_faults(source, "mixture", PAIR)] == ["kind"]


def test_parts_of_joined_sources_are_single() -> None:
    assert {*SINGLE} - {*SingleSource.choices()} == {part for part in SINGLE if part.is_tokenised}

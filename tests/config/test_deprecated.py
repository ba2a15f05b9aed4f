"""Stable names that end: they keep working, with a warning that says what to use and until when."""

import types
import warnings

import pytest

from anyformer import recipe
from anyformer.config.deprecated import renamed, warn_deprecated


def new_name() -> int:
    return 3


def old_function() -> int:
    warn_deprecated("old_function", "new_name", ends="9.0")
    return new_name()


def test_a_function_that_ends_still_works_and_names_its_successor() -> None:
    with pytest.warns(DeprecationWarning, match=r"^old_function ends in anyformer 9\.0: use new_name$") as caught:
        assert old_function() == new_name()
    assert caught[0].filename == __file__  # the line of the caller, and not of the helper


def test_an_old_name_of_a_module_is_the_new_one() -> None:
    module = types.ModuleType("some_module")
    vars(module)["__getattr__"] = renamed("some_module", {"old": new_name}, ends="9.0")
    with pytest.warns(
        DeprecationWarning, match=r"some_module\.old ends in anyformer 9\.0: use some_module\.new_name"
    ) as it:
        assert module.old is new_name
    assert it[0].filename == __file__
    with pytest.raises(AttributeError, match="module 'some_module' has no attribute 'other'"):
        module.other  # noqa: B018


def test_the_schedule_of_an_older_name_loads() -> None:
    with pytest.warns(DeprecationWarning, match="use anyformer.recipe.LinearDecay"):
        schedule = vars(recipe)["__getattr__"]("Linear")
    assert schedule is recipe.LinearDecay
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert schedule(warmup=2).kind == "linear"  # as files say it, in every version

"""Parts from outside are known to the tests of this folder alone."""

import sys
from collections.abc import Iterator

import pytest

from anyformer.config import outside, part


@pytest.fixture(scope="module", autouse=True)
def known() -> Iterator[None]:
    """Forget all parts, and their modules, that the tests of a file register."""
    before, modules = list(part._PARTS), set(outside._SOURCES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANYFORMER_IMPORT", "")  # commands add the files that they import, for their processes
        yield
    families = {family for one in part._PARTS if one not in before for family in part.families(one)}
    part._PARTS[:] = before
    for spec in part._containing(families):
        spec.model_rebuild(force=True)
    for name in outside._SOURCES.keys() - modules:
        del outside._SOURCES[name], sys.modules[name]

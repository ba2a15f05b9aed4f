"""One server for all tests that change none of its limits."""

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the tests of the server need the extra serve")

from tests.serve.http.served import Server, serving


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with serving() as one:
        yield one

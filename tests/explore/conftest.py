"""A server with runs of all shapes and a Chromium, shared by all tests; the fixture `page` opens a tab."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from anyformer.data.tokenizer import train_tokenizer
from anyformer.explore.open_runs import open_runs
from anyformer.explore.server import ExploreServer
from anyformer.recipe import Characters, LanguageModel
from tests.explore import made
from tests.explore.tab import HOSTILE, SHAPES, Opener, Page, growing, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExploreServer]:
    home = tmp_path_factory.mktemp("browser")
    hostile = LanguageModel(), made.decoder(made.stack()), train_tokenizer(Characters(), list(HOSTILE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(made.RUNS, "hostile", hostile)
        folders = [made.written(name, home) for name in (*SHAPES, "hostile")]
    with serving(open_runs([*folders, growing(home)])) as one:
        yield one


@pytest.fixture
def page(chromium: Any, server: ExploreServer) -> Iterator[Opener]:
    """Open the page as `page(width=400, run="lm", ...)`; at the end check for errors and requests to other hosts."""
    opened = []

    def open_(width: int = 1280, scheme: str = "light", locale: str = "en-US", **state: str) -> Page:
        options = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme, "locale": locale}
        context = chromium.new_context(**options, accept_downloads=True)
        one = Page(context.new_page(), server.address)
        opened.append((context, one))
        return one.open(**state)

    yield open_
    for context, one in opened:
        context.close()
        assert one.errors == []
        assert one.hosts() == {urlsplit(server.address).netloc}

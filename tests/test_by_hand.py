"""The sums on the page docs/by-hand.md: each block prints what stands under it."""

import contextlib
import io
import re
from itertools import pairwise

from tests.test_pages import ROOT, blocks

PAGE = (ROOT / "docs" / "by-hand.md").read_text(encoding="utf-8")


def test_every_block_prints_what_stands_under_it() -> None:
    names: dict[str, object] = {}
    checked = 0
    for block, under in pairwise(blocks(PAGE)):
        if block.language == "python":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(block.body, names)
            assert under.language == "text"
            assert said.getvalue() == under.body
            assert "False" not in under.body
            checked += 1
    assert checked == len(re.findall("^## ", PAGE, re.MULTILINE)) == 5

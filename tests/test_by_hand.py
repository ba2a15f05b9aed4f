"""The sums on the page docs/by-hand.md: each block prints what stands under it."""

import re

from tests.pages import ROOT, blocks, check_outputs

PAGE = (ROOT / "docs" / "by-hand.md").read_text(encoding="utf-8")


def test_every_block_prints_what_stands_under_it() -> None:
    assert check_outputs(PAGE) == len(re.findall("^## ", PAGE, re.MULTILINE)) == 5
    assert not [block for block in blocks(PAGE) if block.language == "text" and "False" in block.body]

"""The scripts of the page, which share one scope."""

import re
from collections import Counter

from anyformer.explore.show import sources

NAME = re.compile(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", re.MULTILINE)


def test_no_name_is_defined_twice() -> None:
    """A browser refuses the whole of a script whose name is taken, and the page stays empty."""
    scripts = [text for file, text in sources().items() if file.endswith(".js")]
    names = Counter(name for text in scripts for name in NAME.findall(text))
    assert len(names) > 100
    assert [name for name, number in names.items() if number > 1] == []

"""Commands on the pages name targets, files and extras that exist; links lead somewhere; images have words.

`make docs-test` runs what the pages show: `tests/docs_site/test_pages_run.py`.
"""

import re
from pathlib import Path

import pytest

from anyformer.config import Rotary
from anyformer.recipe import AdamW, TableFile
from docs_site.excerpts import with_excerpts
from tests.pages import FENCE, PAGES, ROOT, blocks, commands, faults, words

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_name_what_exists(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language in ("bash", "sh", "shell", "console"):
            wrong = [f"{line}: {fault}" for line in commands(block.body) for fault in faults(line)]
            assert not wrong, f"{page.relative_to(ROOT)}:{block.line}: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_has_no_wide_punctuation_between_letters(page: Path) -> None:
    """`hf：owner` fails when it is copied; Chinese input methods write such a colon."""
    for block in blocks(page.read_text(encoding="utf-8")):
        assert not re.findall(r"[\w.-]+[：，；（）]\w+", block.body, re.ASCII), f"{page.relative_to(ROOT)}:{block.line}"


def test_the_readme_names_the_file_of_a_part() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for what, part in (("an optimiser", AdamW), ("a data format", TableFile), ("a position scheme", Rotary)):
        (row,) = re.findall(rf"^\| add {what}.*", text, re.MULTILINE)
        assert part.__module__.replace(".", "/") in row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    found = [next(filter(None, groups)) for groups in LINK.findall(text)]
    local = [link.split("#")[0] for link in found if not re.match(r"[a-z][a-z+.-]*:", link) and link[0] != "#"]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to files that are not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_images_have_alternative_text(page: Path) -> None:
    """Says what the picture shows, for those who do not see it: a few words, or as many Chinese ones."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    short = [alt for alt in re.findall(r"!\[([^\]]*)\]\(", text) if len(alt.split()) < 4 and len(alt) < 20]
    assert not short


def test_excerpts_are_the_source() -> None:
    texts = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
    assert sum('```py title="' in text for text in texts.values()) >= 2
    assert [page for page, text in texts.items() if with_excerpts(text) != text] == [], "run `make reference`"


@pytest.mark.parametrize("page", ["docs/ko/README.md", "docs/zh/README.md"])
def test_translated_readme_shows_the_same(page: str) -> None:
    """The commands, code and outputs of README.md, in their order, and links to the same pages; it may have more."""
    translated = iter(shown(ROOT / page))
    for block in shown(ROOT / "README.md"):
        assert block in translated, f"{page} lacks this block of README.md: {block}"
    assert pages_linked(ROOT / "README.md") <= pages_linked(ROOT / page)


def shown(page: Path) -> list[list[str]]:
    """Return the lines of each block of a language, without comments."""
    found = (block for block in blocks(page.read_text(encoding="utf-8")) if block.language)
    return [[re.sub(r"\s+#.*", "", line) for line in block.body.splitlines()] for block in found]


def pages_linked(page: Path) -> set[Path]:
    """Return the pages of docs/ that a page links to, besides itself and the translations."""
    links = re.findall(r"\]\(([^):\s#]+\.md)", page.read_text(encoding="utf-8"))
    targets = {(page.parent / link).resolve().relative_to(ROOT) for link in links}
    return {target for target in targets if target.parts[0] == "docs" and target.parts[1] not in ("ko", "zh")}


# -- the reader itself ----------------------------------------------------------------------------------------------

PAGE = """
A [link](docs/page.md#part), an ![image](figure.png).

```bash
$ make demo JOBS=1   # minutes
echo "3 1 2" | anyformer predict runs/sort \\
    --out sorted.txt && make nonsense
```

<!-- not run: it serves until stopped -->
```bash
anyformer explore runs/sort
```

1. then
   ```python
   import anyformer
   ```
"""


def test_the_reader_finds_blocks() -> None:
    found = list(blocks(PAGE))
    assert [(block.language, block.run) for block in found] == [("bash", True), ("bash", False), ("python", True)]
    assert found[2].body == "import anyformer\n"
    assert [PAGE.splitlines()[block.line - 1].strip() for block in found] == ["```bash", "```bash", "```python"]


def test_the_reader_finds_commands() -> None:
    first, second = commands(next(blocks(PAGE)).body)
    assert words(first) == [["make", "demo", "JOBS=1"]]
    assert [part[0] for part in words(second)] == ["echo", "anyformer", "make"]
    assert list(faults(second)) == ["no target nonsense"]
    assert list(faults("pip install -e '.[plot,nonsense]'")) == ["no extra nonsense"]
    assert list(faults("python examples/nonsense.py --out x")) == ["no file examples/nonsense.py"]


def test_rows_that_pages_sort_are_as_long_as_those_of_training() -> None:
    """Every row of digits in the pages has a length that the recipe `sort` trains on."""
    from anyformer.recipe import SortDigits
    from anyformer.recipe.ready import read_recipe

    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, ROOT / "examples" / "sort.py")]
    rows = {row for text in texts if "sort" in text for row in re.findall(r'"(\d(?: \d)*)"', text)}
    data = read_recipe("sort").data
    assert "3 1 2" in rows
    for source in (data.train, data.valid, data.test):
        assert isinstance(source, SortDigits)
        assert [row for row in rows if not source.shortest <= len(row.split()) <= source.longest] == []

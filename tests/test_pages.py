"""What the pages show works: their Python runs, their commands run or exist, and their links lead somewhere.

A block that must not run (a server, an hour of training) has an HTML comment before it: <!-- not run: reason -->
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forking import forking, reopen

ROOT = Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]

FENCE = re.compile(
    r"(?P<skip><!--\s*not run:[^>]*-->\s*\n)?"
    r"^(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^[ ]*```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)|(?:src|href)=\"([^\"]+)\"|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)

SECONDS = 600  # for one command or block


class Block(NamedTuple):
    """A fenced block, the line it starts on, and whether it may run."""

    line: int
    language: str
    body: str
    run: bool


def blocks(text: str) -> Iterator[Block]:
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(line, found["language"], textwrap.dedent(found["body"]), run=not found["skip"])


def check_outputs(text: str) -> int:
    """Run the Python of a page in one namespace; each block prints the text below it. Return the number of blocks."""
    names: dict[str, object] = {"__name__": "__main__"}
    checked = 0
    for block, below in pairwise([*blocks(text), None]):
        if block is not None and block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(block.body, names)
            assert below is not None
            assert below.language == "text", "the output stands below the code"
            assert printed.getvalue() == below.body
            checked += 1
    return checked


def commands(body: str) -> list[str]:
    """The lines of a shell block, continued lines joined, without prompts and comments."""
    lines = (line.strip().removeprefix("$ ") for line in body.replace("\\\n", " ").splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def words(command: str) -> list[list[str]]:
    """The simple commands of a line, each as its words, without leading assignments."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    simple: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|;&"):
            simple.append([])
        elif simple[-1] or not re.match(r"\w+=", word):
            simple[-1].append(word)
    return [part for part in simple if part]


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def faults(command: str) -> Iterator[str]:
    """What is wrong with a line that is not run: a target, file or extra that is not there."""
    for program, *rest in words(command):
        if program == "make":
            yield from (f"no target {word}" for word in rest if re.fullmatch(r"[\w-]+", word) and word not in targets())
        elif re.fullmatch(r"(.*/)?python[\d.]*", program) and rest and rest[0].endswith(".py"):
            if not (ROOT / rest[0]).exists():
                yield f"no file {rest[0]}"
        elif program == "pip":
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            for extras in re.findall(r"(?:\.|anyformer)\[([^\]]*)\]", command):
                yield from (f"no extra {extra}" for extra in extras.split(",") if extra.strip() not in known)


class Step(NamedTuple):
    """Python code, or the words of an `anyformer` command, with what is piped to it and the file for what it says."""

    run: str | list[str]
    piped: str = ""
    file: str | None = None


def simple(line: str) -> Step | None:
    """`anyformer ...`, maybe behind `echo ... |` and before `> FILE`; None of anything else."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    found, piped, file = list(lexer), "", None
    if found[0] == "echo" and found.count("|") == 1:
        at = found.index("|")
        piped, found = " ".join(found[1:at]) + "\n", found[at + 1 :]
    if ">" in found[-2:-1]:
        found, file = found[:-2], found[-1]
    plain = found[0] == "anyformer" and not any(set(word) <= set("|;&<>") for word in found if word) and "$" not in line
    return Step(found, piped, file) if plain else None


def forked(step: Step, cwd: Path, said: Path) -> subprocess.CompletedProcess[str]:
    """Takes a step in a process of its own that has torch already: importing it takes longer than most steps."""
    process = forking().Process(target=child, args=(step, cwd, said))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return subprocess.CompletedProcess(
        [], process.exitcode or 0, said.read_text(encoding="utf-8", errors="replace"), ""
    )


def child(step: Step, cwd: Path, said: Path) -> None:
    os.chdir(cwd)
    os.environ["MPLBACKEND"] = "Agg"
    before = cwd / ".piped"
    before.write_text(step.piped, encoding="utf-8")
    reopen(before, step.file or said, said)
    if isinstance(step.run, str):
        exec(step.run, {"__name__": "__main__"})
    else:
        from anyformer.cli import main

        sys.argv = step.run
        main()


def run(step: list[str], bin: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Any other command, where `anyformer` and `python` are this checkout and this interpreter."""
    bin.mkdir(exist_ok=True)
    start = "import sys; sys.argv[0] = 'anyformer'; from anyformer.cli import main; sys.exit(main())"
    for name, script in {"anyformer": f'{sys.executable} -c "{start}"', "python": sys.executable}.items():
        (bin / name).write_text(f'#!/bin/sh\nexec {script} "$@"\n')
        (bin / name).chmod(0o755)
    path = os.pathsep.join([str(bin), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    return subprocess.run(
        step, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
    )


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.is_relative_to(ROOT / "docs" / "ko" / "concepts")],  # equal to English ones
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_what_a_page_shows_runs(page: Path, tmp_path: Path) -> None:
    """In the order of the page and in one folder: a later block may use what an earlier one made."""
    name = page.relative_to(ROOT).as_posix()
    work = tmp_path / "work"
    work.mkdir()
    for block in blocks(page.read_text(encoding="utf-8")):
        steps = list[Step | str]()
        if block.language in ("python", "py"):
            steps = [] if page.parent.name == "concepts" else [Step(block.body)]  # test_concepts.py runs those
        elif block.language in ("bash", "sh", "shell", "console"):
            lines = commands(block.body)
            wrong = [f"{line}: {fault}" for line in lines for fault in faults(line)]
            assert not wrong, f"{name}:{block.line}: {wrong}"
            ours = [line for line in lines if any(part[0] == "anyformer" for part in words(line))]
            steps = [simple(line) or line for line in ours]
        for step in steps if block.run else []:
            if isinstance(step, Step):
                done = forked(step, work, tmp_path / "said.txt")
            else:
                done = run(["bash", "-euo", "pipefail", "-c", step], tmp_path / "bin", work)
            assert done.returncode == 0, f"{name}:{block.line}: {step}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    found = [next(filter(None, groups)) for groups in LINK.findall(text)]
    local = [link.split("#")[0] for link in found if not re.match(r"[a-z][a-z+.-]*:", link) and link[0] != "#"]
    missing = [link for link in local if not (page.parent / link).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to files that are not there: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_images_have_alternative_text(page: Path) -> None:
    """Says what the picture shows, for those who do not see it: at least a few words."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    short = [alt for alt in re.findall(r"!\[([^\]]*)\]\(", text) if len(alt.split()) < 4]
    assert not short


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


def test_the_reader_tells_simple_lines() -> None:
    assert simple('echo "3 1" | anyformer predict runs/a > out.txt') == Step(
        ["anyformer", "predict", "runs/a"], "3 1\n", "out.txt"
    )
    assert simple("anyformer presets") == Step(["anyformer", "presets"])
    for other in ("anyformer presets && make demo", "cat x | anyformer predict runs/a", "make demo", "anyformer a $B"):
        assert simple(other) is None


@pytest.mark.parametrize(("code", "expected"), [("print(1)", 0), ("raise ValueError('no')", 1)])
def test_a_step_fails_if_it_fails(tmp_path: Path, code: str, expected: int) -> None:
    done = forked(Step(code), tmp_path, tmp_path / "said.txt")
    assert done.returncode == expected
    assert ("no" if expected else "1") in done.stdout
    assert forked(Step(["anyformer", "count", "nonsense"]), tmp_path, tmp_path / "said.txt").returncode == 2


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
    from anyformer.recipes import read_recipe

    texts = [path.read_text(encoding="utf-8") for path in (*PAGES, ROOT / "examples" / "sort.py")]
    rows = {row for text in texts if "sort" in text for row in re.findall(r'"(\d(?: \d)*)"', text)}
    data = read_recipe("sort").data
    assert "3 1 2" in rows
    for source in (data.train, data.valid, data.test):
        assert isinstance(source, SortDigits)
        assert [row for row in rows if not source.shortest <= len(row.split()) <= source.longest] == []

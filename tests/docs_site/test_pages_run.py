"""What the pages show works: their Python and their commands run."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.forking import forking, reopen
from tests.pages import PAGES, ROOT, blocks, commands, words

SECONDS = 600  # for one command or block


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
            ours = [line for line in lines if any(part[0] == "anyformer" for part in words(line))]
            steps = [simple(line) or line for line in ours]
        for step in steps if block.run else []:
            if isinstance(step, Step):
                done = forked(step, work, tmp_path / "said.txt")
            else:
                done = run(["bash", "-euo", "pipefail", "-c", step], tmp_path / "bin", work)
            assert done.returncode == 0, f"{name}:{block.line}: {step}\n{done.stdout}\n{done.stderr}"


# -- the runner itself ---------------------------------------------------------------------------------------------


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

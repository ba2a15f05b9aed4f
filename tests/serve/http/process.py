"""Start `anyformer serve` as a separate process."""

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.explore import made
from tests.serve.http import served

ROOT = Path(__file__).parents[3]


def written(folder: Path, names: Sequence[str]) -> list[str]:
    """Write runs and return their folders."""
    assert served.NAMES  # its runs are among those of `made`
    return [str(made.written(name, folder)) for name in names]


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server on a free port; yield the process and its address, and kill it at the end."""
    command = [sys.executable, "-m", "anyformer", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"(http://\S+)/  ", line)
            assert found, line + process.stdout.read()
            yield process, found[1]
        finally:
            process.kill()

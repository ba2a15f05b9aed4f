"""Fuzz a server with requests from its /openapi.json: `python -m tests.serve.http.fuzz --requests 20000`.

No response may be 5xx, have an undeclared status or type, or a body that its schema does not describe.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

from tests.serve.http.process import started, written
from tests.serve.http.served import NAMES

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
COVERAGE = 1200  # requests that schemathesis sends beside the random ones, about


def fuzz(requests: int, seed: int, workers: int = 2) -> int:
    """Send at least `requests` requests in rounds and return their number. Raise if a check fails."""
    sent = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        started(*written(Path(folder), NAMES), "--max-new-tokens", "64") as (process, address),
    ):
        operations = sum(map(len, httpx.get(f"{address}/openapi.json").json()["paths"].values()))
        while sent < requests:
            examples = max(1, min(50, (requests - sent) // operations + 1))
            phases = "fuzzing" if sent or requests < COVERAGE else "coverage,fuzzing"
            options = [
                "--max-examples",
                examples,
                "--seed",
                seed,
                "--workers",
                workers,
                "--phases",
                phases,
                "--request-timeout",
                120,
            ]
            command = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json", *map(str, options)]
            command += ["--checks", CHECKS, "--no-color", "--warnings", "off", "--continue-on-failure"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
            if done.returncode or not found:
                raise AssertionError(done.stdout[-8000:] + done.stderr[-2000:])
            sent += int(found[1])
            seed += 1
            print(f"{sent:,} requests, all as declared", flush=True)
            assert process.poll() is None, "the server has ended"
        text = httpx.get(f"{address}/metrics").text
        assert not re.search(r'status="5\d\d"', text), text
        assert all(line.endswith(" 0") for line in text.splitlines() if "num_requests_running{" in line), text
    return sent


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    fuzz(given.requests, given.seed)

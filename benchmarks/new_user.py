"""What a new user gets: `new`, `train` and `evaluate` on six sets, `--minutes` each, by the commands of a user.

    python -m benchmarks.new_user DATA [TASK ...] [--minutes 3]

DATA is the folder of the unpacked sets. The results are the seconds of the training, tokens/s, and the metrics of the
test rows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.sheet import RESULTS

PATH = RESULTS / "new_user.json"
TASKS = {  # the arguments of `new`, with files below DATA
    "documentation": "translate --data pydocs/en-es/train.tsv --source 1 --target 2",
    "captions": "translate --data multi30k/tok/train.lc.norm.tok.en multi30k/tok/train.lc.norm.tok.de",
    "opinions": "classify --data sst2/stsa.binary.train",
    "parts of speech": "tag --data ud_english_ewt/en_ewt-ud-train.conllu",
    "Shakespeare": "lm --data tinyshakespeare/input.txt",
    "prose": "lm --data mdn_prose/train.txt",
}


def measure(name: str, data: Path, minutes: float, folder: Path) -> dict[str, Any]:
    """Return the results of one task."""
    words = [str(data / word) if (data / word).is_file() else word for word in TASKS[name].split()]
    recipe, out = folder / "recipe.toml", folder / "run"
    _anyformer("new", *words, "--minutes", f"{minutes:g}", "--out", str(recipe))
    began = time.perf_counter()
    _anyformer("train", str(recipe), "--out", str(out))
    used = round(time.perf_counter() - began)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    metrics = json.loads(_anyformer("evaluate", str(out), "--json").splitlines()[-1])["metrics"]
    return {
        "seconds": used,
        "steps": rows[-1]["step"],
        "tokens_per_second": speeds[len(speeds) // 2],
        "metrics": metrics,
    }


def _anyformer(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "anyformer", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("tasks", nargs="*", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--minutes", type=float, default=3.0)
    given = parser.parse_args()
    found: dict[str, Any] = {"minutes": given.minutes, "beside": 1, "rows": {}}
    for name in given.tasks:
        with tempfile.TemporaryDirectory() as folder:
            found["rows"][name] = measure(name, given.data.resolve(), given.minutes, Path(folder))
        print(name, json.dumps(found["rows"][name]), flush=True)
        PATH.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""`anyformer plan`: its table, its JSON, its figure and its errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from anyformer.cli import app

SMALL = ["plan", "llama", "depth=2", "width=256", "heads=4", "vocab=1000", "--length", "512"]


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_row_for_each_number_of_gpus() -> None:
    text = run(*SMALL, "--gpus", "1-64", "--tokens", "2B", "--rate", "3")
    rows = [line.split()[0] for line in text.splitlines() if line[:6].strip().isdigit()]
    assert rows == ["1", "2", "4", "8", "16", "32", "64"]
    assert "2.0 G tokens" in text
    assert "price" in text
    assert "settings for 64 GPUs: batches.rows=" in text


def test_json_has_what_the_table_has() -> None:
    found = json.loads(run(*SMALL, "--gpus", "3,8", "--rate", "3", "--batch", "48", "--json"))
    three, eight = found["rows"]
    assert (three["gpus"], eight["gpus"]) == (3, 8)
    assert three["seconds"] == three["compute"] + three["communication"]
    assert eight["price"] == pytest.approx(24 * eight["days"] * 8 * 3)
    assert {"memory", "tokens_per_second", "mfu", "settings"} <= eight.keys()


def test_a_slower_network_takes_longer() -> None:
    times = []
    for speed in ("400", "10"):
        (row,) = json.loads(run(*SMALL, "--gpus", "64", "--network", speed, "--json"))["rows"]
        times.append(row["seconds"])
    assert times[0] < times[1]


def test_a_recipe_and_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "new" / "plan.svg"
    text = run("plan", "multi30k-en-de", "--gpus", "1-4", "--gpu", "A100-80GB", "--out", str(out))
    assert "encoder-decoder" in text
    assert "batches.tokens=" in text
    assert "</svg>" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--gpu", "h1000"], "--gpu = 'h1000': no such GPU in the table; did you mean 'h100'"),
        (["--gpus", "0"], "--gpus = '0': must be a number"),
        (["--gpus", "8-4"], "--gpus = '8-4'"),
        (["--gpus", "many"], "--gpus = 'many'"),
        (["--tokens", "lots"], "--tokens = 'lots': must be a number such as 300e9"),
        (["--tokens", "infB"], "--tokens = 'infB'"),
        (["--out", "plan.txt"], "--out = plan.txt: must end in .png"),
        (["--length", "0"], "--length"),
    ],
)
def test_wrong_options(arguments: list[str], part: str) -> None:
    done = CliRunner().invoke(app, [*SMALL, "--gpus", "1", *arguments])
    assert done.exit_code == 2
    assert part in done.output


def test_nothing_fits() -> None:
    text = run("plan", "llama", "--gpus", "1", "--gpu", "t4")
    assert "at least" in text
    assert "settings" not in text

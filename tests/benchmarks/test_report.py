"""The page of benchmarks is made of the stored numbers alone."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import gpu, report

CURVES = {"train_gpt2_fp8": {"ours": [3.0, 2.5], "ours in bf16": [3.0, 2.52]}}


def test_all_rows_have_their_words() -> None:
    assert gpu.ROWS.keys() <= report.WORK.keys()


def test_the_page_is_that_of_the_results() -> None:
    assert (report.DOCS / "benchmarks.md").read_text(encoding="utf-8") == report.page()


def test_curves_are_drawn_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "DOCS", tmp_path)
    assert report.draw_fp8("h200", CURVES).stat().st_size > 10_000
    rows = json.loads((report.RESULTS / "h200.json").read_text(encoding="utf-8"))
    known = {**rows["train_gpt2"], "curves": CURVES["train_gpt2_fp8"], "share": {"ours": 0.4}}
    told = report._section("h200", "One", {"machine": rows["machine"], "train_gpt2_fp8": known, "decode_1b_b1": known})
    assert "0.02 apart in `train_gpt2_fp8`" in told
    assert "40% MFU" in told
    assert "40% of bandwidth" in told

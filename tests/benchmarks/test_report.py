"""The page of benchmarks is made of the stored numbers alone."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import gpu, report, rows

ROW = {"unit": "tokens/s", "peer_name": "transformers"}
CURVES = {"train_gpt2_fp8": {"ours": [3.0, 2.5], "ours in bf16": [3.0, 2.52]}}


def test_all_rows_have_their_words() -> None:
    assert gpu.ROWS.keys() <= rows.ROWS["h200"].keys()
    for name, known in rows.ROWS.items():
        stored = json.loads((report.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        assert stored.keys() - {"machine", "growth"} == known.keys()
        assert all(row.ours and row.peer and row.conditions for row in known.values() if row.kind != "alone")
        assert {key for key, row in known.items() if row.kind == "peer"} <= report.LABELS.keys()


def test_a_faster_peer_is_in_bold() -> None:
    told = "\n".join(map(str, rows.peers({"decode_gpt2": ROW | {"ours": 1.0, "peer": 2.0}}, rows.ROWS["cpu"])))
    assert "**0.50: the peer is faster**" in told
    assert "**" not in str(rows.peers({"decode_gpt2": ROW | {"ours": 2.0, "peer": 1.0}}, rows.ROWS["cpu"]))


def test_the_page_is_that_of_the_results() -> None:
    assert (report.DOCS / "benchmarks.md").read_text(encoding="utf-8") == report.page()


def test_curves_are_drawn_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "DOCS", tmp_path)
    assert report.draw_fp8("h200", CURVES).stat().st_size > 10_000
    stored = json.loads((report.RESULTS / "h200.json").read_text(encoding="utf-8"))
    known = {**stored["train_gpt2"], "curves": CURVES["train_gpt2_fp8"], "share": {"ours": 0.4}}
    told = report._section(
        "h200", "One", {"machine": stored["machine"], "train_gpt2_fp8": known, "decode_1b_b1": known}
    )
    assert "0.02 apart in `train_gpt2_fp8`" in told
    assert "40% MFU" in told
    assert "40% of bandwidth" in told


def test_the_times_by_context_length_are_those_stored() -> None:
    stored = json.loads((report.RESULTS / "prefix.json").read_text(encoding="utf-8"))
    page = (report.DOCS / "results.md").read_text(encoding="utf-8")
    ends = [some[n] for some in stored.values() for n in ("32", "2048")]
    assert "{:.1f} ms after 32 tokens and {:.1f} ms after 2,048".format(*ends) in page
    assert "{:.1f} and\n{:,.1f} ms".format(*ends[2:]) in page

"""The benchmark of serving runs at small sizes."""

from benchmarks.serving import main


def test_all_rows() -> None:
    found = main(["--tiny"])
    assert all(value > 0 for value in found.values())
    assert {"llama_tokens_per_s", "base_sentences_per_s", "minilm_texts_per_s", "cpu_ratio"} <= set(found)

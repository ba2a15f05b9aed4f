"""The benchmark of serving runs at small sizes."""

from concurrent.futures import ThreadPoolExecutor

from benchmarks import serving_host
from benchmarks.serving import main


def test_all_rows() -> None:
    with ThreadPoolExecutor(1) as pool:  # the browser of other tests has an event loop in the main thread
        found = pool.submit(main, ["--tiny"]).result()
    assert all(value > 0 for value in found.values())
    assert {"llama_tokens_per_s", "base_sentences_per_s", "minilm_texts_per_s", "cpu_ratio"} <= set(found)


def test_host_time() -> None:
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(serving_host.main, ["--rows", "8", "--new", "4", "--rounds", "1"]).result()
    assert set(found) == {
        f"{kind}_us_per_{what}" for kind in ("complete", "stream") for what in ("request", "row_and_step")
    }

"""The benchmark of serving runs at small sizes."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from anyformer import presets
from anyformer.interop.families import FAMILIES
from benchmarks import serving_host, serving_peer
from benchmarks.serving import draw, main


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


@pytest.mark.system
def test_continuous_batching_of_transformers() -> None:
    config = presets.llama(depth=1, width=16, heads=2, kv_heads=1, ff=16, vocab=64).model_copy(update={"tie": "output"})
    fields, requests = FAMILIES["llama"].fields(config), draw(4, 3, 9, 64)
    found = serving_peer.measure(fields, requests, "cpu")
    assert found["transformers_share_of_tokens"] == 1
    assert found["transformers_tokens_per_s"] > 0
    assert serving_peer.measure(fields, requests, "cpu", limit=0.1) == {}, "killed before its first token"

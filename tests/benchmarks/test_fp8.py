"""Training in fp8 is held against bf16 on the same batches."""

import pytest
import torch

from anyformer import presets
from anyformer.nn.transforms.fp8 import Float8Matmul
from benchmarks import fp8

CONFIG = presets.gpt2(depth=2, width=64, heads=2, vocab=64, length=32, dropout=0.0)


def test_both_learn_the_same_from_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "RATE", 3e-3)
    data, products = fp8.batches(16, 64, 8, 32), []
    plain = Float8Matmul.apply
    monkeypatch.setattr(Float8Matmul, "apply", lambda *x: products.append(1) or plain(*x))
    found, uses = {}, {}
    for name, eight in fp8.WAYS.items():
        products.clear()
        found[name], uses[name] = list(fp8.learn(CONFIG, eight, data)), len(products)
    assert uses == {"ours": 16 * 2 * 4, fp8.PEER: 0}
    row = fp8.row(found, 256, 1e6, 1e9)
    ours, theirs = (torch.tensor(row["curves"][name]) for name in fp8.WAYS)
    assert (ours - theirs).abs().max() < 0.02 * theirs[0]
    assert theirs[-1] < 0.95 * theirs[0]
    assert row["share"]["ours"] == pytest.approx(row["ours"] / 256 * 1e6 / 1e9)


def test_words_follow_their_table() -> None:
    words = fp8.batches(2, 64, 8, 500).flatten(0, 1)
    assert torch.equal(words, fp8.batches(2, 64, 8, 500).flatten(0, 1))
    pairs = torch.zeros(64, 64).index_put_((words[:, :-1].flatten(), words[:, 1:].flatten()), torch.ones(()), True)
    often = pairs.sum(1) > 50
    assert (pairs[often].max(1).values / pairs[often].sum(1)).min() > 0.35

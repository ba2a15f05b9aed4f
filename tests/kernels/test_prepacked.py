"""Products with weights that were laid out beforehand are products, and only of weights that are there to stay."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer import presets
from anyformer.generation.beam_search import beam_search
from anyformer.generation.generate import generate
from anyformer.kernels import prepacked as packs_file
from anyformer.kernels.matmul import linear
from anyformer.kernels.prepacked import PrepackedWeights, can_use_prepacked, prepacking_pays, use_prepacked
from anyformer.kernels.private import has_mkl_linear, has_reordered_linear
from anyformer.nn.model import Transformer

ROWS, STEPS = 4, 100  # enough for any library
gains = pytest.mark.skipif(not prepacking_pays(ROWS, STEPS), reason="needs a CPU that gains by it")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs_file, "MIN_WEIGHTS", 1)


@gains
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(2,), (9,), (3, 5), (64, 1)])
@pytest.mark.parametrize(("n", "k"), [(200, 96), (7, 13)])
def test_as_linear(rows: tuple[int, ...], n: int, k: int, biased: bool):
    x, weight, bias, packed = (
        random(*rows, k),
        nn.Parameter(random(n, k)),
        random(n) if biased else None,
        PrepackedWeights(),
    )
    with torch.no_grad(), use_prepacked(packed, ROWS, STEPS):
        assert can_use_prepacked(x, weight)
        for other in (x, -x, x.transpose(0, -2), random(k, *rows).movedim(0, -1)):  # also not contiguous
            exact = F.linear(other, weight, bias)
            torch.testing.assert_close(linear(other, weight, bias), exact, atol=1e-4, rtol=1e-4)
    assert len(packed._copies) == 1


@gains
def test_who_it_is_for():
    x, weight = random(4, 32), nn.Parameter(random(16, 32))
    with torch.no_grad():
        assert not can_use_prepacked(x, weight)  # no one said so
        with use_prepacked(PrepackedWeights(), 1, STEPS):
            assert not can_use_prepacked(x, weight)  # one row reads weights as they are
        with use_prepacked(PrepackedWeights(), ROWS, STEPS):
            assert can_use_prepacked(x, weight)
            assert not can_use_prepacked(x, weight.data)  # may be gone tomorrow, and another at its address
            assert not can_use_prepacked(x.double(), weight)
            assert not can_use_prepacked(x, nn.Parameter(random(32, 16).T))
            with torch.autocast("cpu", torch.bfloat16):
                assert not can_use_prepacked(x, weight)
        assert not can_use_prepacked(x, weight)
    with use_prepacked(PrepackedWeights(), ROWS, STEPS):
        assert not can_use_prepacked(x, weight)  # it has no backward pass


@gains
def test_no_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packs_file, "MAX_COPY_BYTES", 5000)
    x, packed, weights = random(4, 32), PrepackedWeights(), [nn.Parameter(random(n, 32)) for n in (16, 17, 18)]
    with torch.no_grad(), use_prepacked(packed, ROWS, STEPS):
        for weight in [*weights, *weights]:
            torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert len(packed._copies) == 2  # of 2048 and of 2176 bytes


@gains
def test_compiled():
    """As what stays in the graph; run elsewhere, such a graph does without copies."""
    weight, packed = nn.Parameter(random(64, 32)), PrepackedWeights()
    run = torch.compile(lambda x: linear(x.relu(), weight).relu(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for seed in range(2):
            x = random(4 + seed, 32)[:4]
            exact = F.linear(x.relu(), weight).relu()
            with (
                use_prepacked(packed, ROWS, STEPS),
                torch.compiler.set_stance("fail_on_recompile" if seed else "default"),
            ):
                torch.testing.assert_close(run(x), exact, atol=1e-4, rtol=1e-4)
        assert len(packed._copies) == 1
        torch.testing.assert_close(run(x), exact, atol=1e-4, rtol=1e-4)


@gains
def test_decoding_as_without(monkeypatch: pytest.MonkeyPatch):
    """The same answers, also after weights have changed in place."""
    torch.manual_seed(0)
    model = Transformer(presets.vaswani(depth=1, width=32, heads=2, ff=64, vocab=50, dropout=0.0)).eval()
    ids = torch.randint(5, 50, (3, 6))
    found: list[int] = []
    monkeypatch.setattr(
        PrepackedWeights,
        "find",
        lambda self, weight, rows, find=PrepackedWeights.find: (found.append(rows), find(self, weight, rows))[1],
    )
    for _ in range(2):
        ours = beam_search(model, ids, beams=2, max_new_tokens=17)
        greedy = generate(model, ids, max_new_tokens=17)
        assert found
        with monkeypatch.context() as patch:
            patch.setattr(packs_file, "prepacking_pays", lambda rows, steps: False)
            found.clear()
            plain = beam_search(model, ids, beams=2, max_new_tokens=17)
            assert torch.equal(greedy, generate(model, ids, max_new_tokens=17))
            assert not found
        assert torch.equal(ours.ids, plain.ids)
        torch.testing.assert_close(ours.scores, plain.scores, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-1.5)


@gains
def test_changed_weights_are_laid_out_again():
    """A stream lets its caller train between two tokens."""
    x, weight, packed = random(ROWS, 32), nn.Parameter(random(16, 32)), PrepackedWeights()
    first = packed.find(weight, ROWS)
    assert packed.find(weight, ROWS) is first
    with torch.no_grad():
        weight.add_(1)
        assert packed.find(weight, ROWS) is not first
        with use_prepacked(packed, ROWS, STEPS):
            torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert len(packed._copies) == 1


@pytest.mark.skipif(not has_mkl_linear() or has_reordered_linear(), reason="needs MKL")
def test_mkl_copies_weights_for_enough_rows_and_steps():
    """A copy serves one number of rows, and takes the time of several steps."""
    assert not prepacking_pays(3, STEPS)
    assert not prepacking_pays(ROWS, 15)
    weight, packed = nn.Parameter(random(64, 32)), PrepackedWeights()
    with torch.no_grad(), use_prepacked(packed, ROWS, STEPS):
        for rows in (4, 9, 4, 64):
            x = random(rows, 32)
            torch.testing.assert_close(linear(x, weight), F.linear(x, weight), atol=1e-4, rtol=1e-4)
    assert [rows for _, rows in packed._copies] == [4, 9, 64]

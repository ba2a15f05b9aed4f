"""What batches say of themselves is true of the batches that a loader reads."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from anyformer.data.batch import Example
from anyformer.data.loader import Cursor, ExampleLoader, Loader
from anyformer.data.shards import InMemory
from anyformer.recipe import Batches, Crops, Ordered, Packed, Padded
from anyformer.recipe.batches import TextBatches

sizes = st.integers(1, 6)
KINDS = {
    "padded": st.builds(Padded, tokens=st.integers(12, 40), few_shapes=st.booleans()),
    "packed": st.builds(lambda rows, length: Packed(tokens=rows * length, length=length), sizes, st.integers(12, 20)),
    "crops": st.builds(Crops, rows=sizes, length=st.integers(1, 20)),
    "ordered": st.builds(Ordered, rows=sizes, length=st.integers(1, 20)),
}


def loader_of(batches: Batches, seed: int) -> Loader:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(4, 90, n).tolist() for n in rng.integers(1, 13, 60)]
    if isinstance(batches, TextBatches):
        return batches.loader(InMemory.of(texts), seed)
    return ExampleLoader([Example(ids, ids) for ids in texts], batches, seed, pad=0, source_pad=0)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), seed=st.integers(0, 99))
def test_rows_are_as_long_as_they_say(kind: str, data: st.DataObject, seed: int) -> None:
    batches: Batches = data.draw(KINDS[kind])
    loader, cursor, widths = loader_of(batches, seed), Cursor(), set[int]()
    for _ in range(4):
        batch, cursor = loader.read(cursor)
        rows, width = batch.ids.shape
        widths.add(width)
        assert width <= batches.row_limit
        assert rows <= batches.row_count(width)
        assert (rows if batches.batched_by == "rows" else rows * width) <= batches.size
    assert batches.row_length is None or widths == {batches.row_length}
    assert batches.packs == (kind == "packed")


@given(batches=KINDS["crops"] | KINDS["ordered"], tokens=st.integers(1, 200))
def test_a_text_is_too_short_exactly_where_its_loader_has_no_batch(batches: TextBatches, tokens: int) -> None:
    if batches.text_fault(tokens) is None:
        batch, _ = batches.loader(InMemory.of([list(range(tokens))]), 0).read(Cursor())
        assert batch.ids.shape == (batches.rows, batches.length)
    else:
        least = next(n for n in range(tokens, 10_000) if batches.text_fault(n) is None)
        assert batches.text_fault(least - 1) is not None

"""Rows of decode steps as arrays hold what the rows say, however they came together."""

import numpy as np
from hypothesis import given, strategies as st

from anyformer.generation.engine.rows import Row, StepRows, fill

PAGE = 4


@st.composite
def rows(draw: st.DrawFn) -> Row:
    read = draw(st.integers(0, 40))
    pages = st.integers(1, 99)
    table = draw(st.lists(pages, min_size=read // PAGE + 1, max_size=read // PAGE + 3))
    return Row(table, read, [draw(st.integers(-5, 99))], draw(st.lists(pages, min_size=1, max_size=3)), (7,) * 5)


@given(st.lists(rows(), min_size=1, max_size=6), st.data())
def test_steps_after_rows_join_and_leave(given: list[Row], data: st.DataObject):
    cut = data.draw(st.integers(0, len(given)))
    found = StepRows(given[:cut])
    found.join(StepRows(given[cut:]))
    keep = np.array(data.draw(st.lists(st.booleans(), min_size=len(given), max_size=len(given))))
    keep[data.draw(st.integers(0, len(given) - 1))] = True
    found.keep(keep)
    left = [row for row, kept in zip(given, keep, strict=True) if kept]
    at, page = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 99))
    found.set_page(0, at, page)
    table = left[0].table + [0] * (at + 1 - len(left[0].table))
    left[0] = left[0]._replace(table=[*table[:at], page, *table[at + 1 :]])

    shape = found.shape(PAGE)
    assert shape.pages * PAGE > max(row.read for row in left) + 1
    wide = shape.rounded((64, 2))
    assert all(a >= b for a, b in zip(wide._replace(source_pages=9), shape, strict=True))
    for one in (shape, wide._replace(source_pages=shape.source_pages)):
        assert (found.columns(one) == fill(left, one)).all()

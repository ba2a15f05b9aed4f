"""A classifier reads the beginning of a row that is longer than `task.max_length`, alike in training and prediction."""

from pathlib import Path

from hypothesis import given, strategies as st

from anyformer.data.readers import Rows
from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import Bytes, Classify
from anyformer.runs.run import load
from anyformer.tasks.classify import Classifying
from anyformer.training.train import evaluate
from tests.training.small import labelled, make, parities, quiet, run, said

BYTES = train_tokenizer(Bytes(), [])


@given(st.integers(6, 12), st.text("ab", min_size=1, max_size=20), st.none() | st.text("cd", min_size=1, max_size=20))
def test_a_row_is_cut_to_its_limit_and_no_further(limit: int, text: str, pair: str | None) -> None:
    columns = {"text": [text], "label": ["x"], **({} if pair is None else {"pair": [pair]})}
    rows = Rows(columns, "f", [1])
    whole, task = (
        Classifying(Classify(labels=("x", "y"), pairs=pair is not None, max_length=n), BYTES) for n in (None, limit)
    )
    ((all_text, all_pair),), ((cut_text, cut_pair),) = whole._ids(rows), task._ids(rows)
    length, full = len(task.frame.row(cut_text, cut_pair)), len(task.frame.row(all_text, all_pair))
    assert length == min(limit, full)
    assert cut_text == all_text[: len(cut_text)] != []
    if all_pair is not None:
        assert cut_pair is not None
        assert cut_pair == all_pair[: len(cut_pair)] != []
        lost = len(all_text) - len(cut_text), len(all_pair) - len(cut_pair)
        for loss, own, other in zip(lost, (cut_text, cut_pair), (cut_pair, cut_text), strict=True):
            assert not loss or len(own) >= len(other) - 1  # the shorter text of a pair is not cut first


def test_long_rows_are_cut_with_a_note(tmp_path: Path) -> None:
    """Not refused, and their predictions are those of their beginnings."""
    long = "1 " * 50
    recipe = labelled(tmp_path, Classify(max_length=20), [*parities(), (long, "odd")], steps=2)
    console = quiet()
    make(recipe, tmp_path / "other", console=console)
    assert "train: the beginnings alone of 1 of 41 rows are read, which exceed task.max_length" in said(console)
    made = run(recipe, tmp_path / "run")
    assert made.predict([long, "1 " * 30], scores=True) == made.predict(["1 " * 18] * 2, scores=True)
    assert evaluate(tmp_path / "run", split="valid").notes["cut"] == 1
    assert load(tmp_path / "run").spec == made.spec

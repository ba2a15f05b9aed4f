"""Language modelling: every token but the first is asked once, and bits are counted per byte."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from anyformer.config import ConfigError
from anyformer.data.loader import Cursor
from anyformer.data.readers import Rows
from anyformer.data.tokenizer import train_tokenizer
from anyformer.recipe import Bytes, Crops, LanguageModel, Packed, Padded
from anyformer.runs.run import Run
from anyformer.tasks.lm import LanguageModelling
from tests.training.small import TEXT, run, text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("lm")
    return run(text(folder, steps=10), folder / "run")


def rows_of(*texts: str) -> Rows:
    return Rows({"text": list(texts)}, "text.txt", range(1, len(texts) + 1))


@given(st.lists(st.text("the quick brown", min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 20))
@settings(max_examples=10)
def test_evaluation_is_a_plain_loop_over_all_but_the_first_token(trained: Run, texts: list[str], length: int) -> None:
    rows, task = rows_of(*texts), trained.task
    assert isinstance(task, LanguageModelling)
    stream = [i for ids in task.encode(rows) for i in ids]
    if len(stream) < 2:
        return
    total = 0.0
    with torch.no_grad():
        for at in range(1, len(stream)):
            begin = (at - 1) // length * length  # of the window that asks for it
            logits = trained.model(torch.tensor([stream[begin:at]]))[0, -1]
            total -= float(logits.log_softmax(-1)[stream[at]])
    size = len("".join(texts).encode("utf-8"))
    for batches in (Crops(rows=2, length=length), Packed(tokens=length, length=length)):
        found = task.evaluate(trained.model, rows, batches)
        assert found.count == len(stream) - 1
        assert found.values["loss"] == pytest.approx(total / found.count, rel=1e-4)
        assert found.values["perplexity"] == pytest.approx(math.exp(total / found.count), rel=1e-3)
        assert found.values["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-4)


def test_bits_per_byte_of_a_model_that_knows_nothing(trained: Run, tmp_path: Path) -> None:
    """A uniform guess among v ids costs log2(v) bits a token."""
    model = trained.model
    kept = {name: x.clone() for name, x in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    sentence = "the lazy dog"
    found = trained.task.evaluate(model, rows_of(sentence), Crops(rows=1, length=4))
    model.load_state_dict(kept)
    bits = math.log2(trained.tokenizer.size) * (len(sentence) - 1)
    assert found.values["bits_per_byte"] == pytest.approx(bits / len(sentence), rel=1e-5)


def test_documents_are_ended_and_a_single_text_is_not() -> None:
    task = LanguageModelling(LanguageModel(), train_tokenizer(Bytes(), [TEXT]))
    eos = task.tokenizer.eos
    assert task.encode(rows_of("ab")) == [task.tokenizer.encode("ab")]
    assert task.encode(rows_of("ab", "c")) == [[*task.tokenizer.encode("ab"), eos], [*task.tokenizer.encode("c"), eos]]


@given(st.lists(st.text("abc", min_size=1, max_size=40), min_size=1, max_size=5), st.integers(2, 30), st.booleans())
def test_every_token_but_a_documents_first_is_asked_once(
    trained: Run, texts: list[str], length: int, packed: bool
) -> None:
    """A document longer than a row goes on in another."""
    task = LanguageModelling(LanguageModel(), train_tokenizer(Bytes(), [TEXT]))
    documents = task.encode(rows_of(*texts))
    if all(len(ids) < 2 for ids in documents):
        return
    spec = Packed(tokens=2 * length, length=length) if packed else Padded(tokens=length)
    made, place, asked = task.loader(rows_of(*texts), spec, 0, trained.model), Cursor(), []
    while place.epoch == 0:
        batch, place = made.read(place)
        assert batch.ids.shape[1] <= length
        asked += batch.labels[batch.labels >= 0].tolist()
    assert sorted(asked) == sorted(i for ids in documents for i in ids[1:])


def test_a_text_shorter_than_a_crop_is_refused(trained: Run) -> None:
    with pytest.raises(ConfigError, match=r"batches\.length = 50: the text has 3 tokens"):
        trained.task.loader(rows_of("the"), Crops(rows=1, length=50), 0, trained.model)


def test_predictions_go_on(trained: Run) -> None:
    said = trained.predict(["the qui", "dog"])
    assert [text.startswith(start) for text, start in zip(said, ["the qui", "dog"], strict=True)] == [True, True]
    assert trained.predict(["the qui"])[0] == said[0]
    assert len(said[0]) > 7

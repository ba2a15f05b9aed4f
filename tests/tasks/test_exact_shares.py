"""A share of rows is the quotient of two counts in float64, as `--json` prints it: 0.53 and not 0.5299999713897705."""

import pytest
import torch

from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.recipe import Classify, Embed, Words
from anyformer.tasks.classify import Classifying
from anyformer.tasks.embed import EmbedTask

COUNTS = [(53, 100), (1, 3), (2, 3), (7, 11), (999, 1000)]


@pytest.fixture(scope="module")
def words() -> TextTokenizer:
    return train_tokenizer(Words(), ["a b"])


@pytest.mark.parametrize(("right", "count"), COUNTS)
@pytest.mark.parametrize("separator", [None, ","])
def test_the_accuracy_of_labels(words: TextTokenizer, separator: str | None, right: int, count: int) -> None:
    task = Classifying(Classify(labels=("no", "yes"), separator=separator), words)
    said = torch.arange(count) < right  # rows whose prediction is the second label, the true one of all rows
    logits = torch.stack((~said, said), dim=1).float() * 2 - 1
    asked = torch.ones(count, 1, dtype=torch.long) if separator is None else torch.tensor([[0, 1]] * count)
    values, _ = task.measure(logits, asked)
    assert values["accuracy"] == right / count


@pytest.mark.parametrize(("right", "count"), [(2, 3), (7, 11)])
def test_the_accuracy_of_pairs(words: TextTokenizer, right: int, count: int) -> None:
    """Each text has its own direction, and so does its pair; those of the last few texts are opposite."""
    own = torch.eye(count)
    pair = torch.where(torch.arange(count)[:, None] < right, own, -own)
    labels = torch.arange(2 * count).view(count, 2)
    values, _ = EmbedTask(Embed(), words).measure(torch.stack((own, pair), dim=1).flatten(0, 1), labels)
    assert values["accuracy"] == right / count

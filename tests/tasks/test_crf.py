"""Conditional random fields against all rows of labels there are."""

from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.config import (
    Attention,
    Block,
    ByteSpelling,
    ConfigError,
    FactorisedTable,
    ModelConfig,
    Stack,
    TokenLabels,
    Tokens,
)
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.tasks import crf
from tests.strategies import build, close, seeds, tokens

LABELS, IGNORE = 3, -100


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Potentials, and labels with gaps within words and rows of several lengths, or of no words at all."""
    rows, length, seed = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(seeds)
    generator = torch.Generator().manual_seed(seed)
    potentials = 2 * torch.randn(rows, length, LABELS + 1, LABELS, generator=generator, dtype=torch.float64)
    cells = st.sampled_from([IGNORE, *range(LABELS)])
    labels = draw(st.lists(st.lists(cells, min_size=length, max_size=length), min_size=rows, max_size=rows))
    return potentials, torch.tensor(labels)


def scores(potentials: Tensor, labels: Tensor) -> dict[tuple[int, ...], Tensor]:
    """Of every row of labels of the words of one row of tokens."""
    at = (labels != IGNORE).nonzero()[:, 0].tolist()
    found = {}
    for path in product(range(LABELS), repeat=len(at)):
        before = (LABELS, *path[:-1])
        steps = zip(at, before, path, strict=True) if path else ()
        found[path] = sum((potentials[place, a, b] for place, a, b in steps), torch.zeros(()).double())
    return found


@given(batches())
def test_the_loss_is_over_all_rows_of_labels(drawn: tuple[Tensor, Tensor]) -> None:
    potentials, labels = drawn
    potentials.requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for row, asked in zip(potentials, labels, strict=True):
        every = scores(row, asked)
        right = every[tuple(asked[asked != IGNORE].tolist())]
        expected = expected + torch.stack(list(every.values())).logsumexp(0) - right
    loss = crf.loss(potentials, labels, labels != IGNORE)
    close(loss, expected)
    (found,) = torch.autograd.grad(loss, potentials)
    (wanted,) = torch.autograd.grad(expected + 0 * potentials.sum(), potentials)
    close(found, wanted)


@given(batches())
def test_the_best_row_is_the_best_of_all(drawn: tuple[Tensor, Tensor]) -> None:
    potentials, labels = drawn
    found = crf.best(potentials, labels != IGNORE)
    for row, asked, path in zip(potentials, labels, found, strict=True):
        every = scores(row, asked)
        assert tuple(path) == max(every, key=lambda path: float(every[path]))


def test_nothing_is_lost_where_nothing_is_asked() -> None:
    potentials = torch.full((2, 4, LABELS + 1, LABELS), 1e4, dtype=torch.bfloat16, requires_grad=True)
    loss = crf.loss(potentials, torch.full((2, 4), IGNORE), torch.zeros(2, 4, dtype=torch.bool))
    assert loss == 0
    assert loss.dtype == torch.float32
    loss.backward()
    assert potentials.grad is not None
    assert not potentials.grad.any()


def tagger(**fields: object) -> ModelConfig:
    stack = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2)),))
    head = TokenLabels(labels=LABELS, crf=bool(fields.pop("crf", False)))
    return ModelConfig(width=8, source=Tokens(vocab=11, **fields), encoder=stack, head=head)


def test_potentials_are_logits_and_transitions() -> None:
    model, ids = build(tagger(crf=True)), tokens(0, 2, 4)
    head, hidden = model.head, model.encode(ids)
    logits = hidden @ head.linear.weight.T + head.linear.bias
    out = model(ids)
    assert out.shape == (2, 4, LABELS + 1, LABELS)
    close(out, torch.stack([logits + head.transitions[i] for i in range(LABELS + 1)], dim=2))
    assert not Transformer(tagger(crf=True)).head.transitions.any()  # a new one knows of no order
    assert count(model.config, 4).parameters == model.num_parameters()
    plain = count(tagger(), 4)
    assert count(model.config, 4).parameters == plain.parameters + LABELS * (LABELS + 1)
    assert count(model.config, 4).flops == plain.flops


# -- spelled words ----------------------------------------------------------------------------------------------------

SPELLING = ByteSpelling(width=4, channels=6, kernel=3, longest=5)


def words(seed: int, rows: int = 2, length: int = 4) -> Tensor:
    """Bytes of words of 0 to 5 letters."""
    generator = torch.Generator().manual_seed(seed)
    letters = torch.randint(1, 257, (rows, length, 5), generator=generator)
    return letters * (torch.arange(5) < torch.randint(0, 6, (rows, length, 1), generator=generator))


@pytest.mark.parametrize(
    "table", ["full", FactorisedTable(width=3), FactorisedTable(width=3, project="before_position")]
)
@pytest.mark.parametrize("kernel", [1, 2, 3, 6])
def test_a_word_is_the_largest_of_its_windows(table: object, kernel: int) -> None:
    """By hand, byte by byte; what stands beyond a word is row 0 of the table."""
    config = tagger(spelling=SPELLING.model_copy(update={"kernel": kernel}), table=table)
    model, ids, spelled = build(config), tokens(0, 2, 4), words(1)
    part = model.source.spelling
    found, before = part(spelled), (kernel - 1) // 2
    for row, wanted in zip(spelled.flatten(0, 1).tolist(), found.flatten(0, 1), strict=True):
        letters = [letter for letter in row if letter]
        if not letters:
            assert not wanted.any()
            continue
        around = [0] * before + letters + [0] * kernel
        windows = [part.table.weight[around[i : i + kernel]] for i in range(len(letters))]
        said = torch.stack([torch.einsum("kw,cwk->c", window, part.conv.weight) + part.conv.bias for window in windows])
        close(wanted, said.max(dim=0).values @ part.linear.weight.T)
    assert not torch.equal(model(ids, spelled=spelled), model(ids, spelled=words(2)))
    assert count(config, 4).parameters == model.num_parameters()


@given(seeds, st.integers(0, 3))
def test_padding_and_packing_change_no_spelling(seed: int, pads: int) -> None:
    model, ids, spelled = build(tagger(spelling=SPELLING)), tokens(seed, 1, 7), words(seed, 1, 7)
    segments = torch.tensor([[0] * 3 + [1] * 4 + [-1] * pads])
    wide = torch.cat((ids, tokens(seed, 1, pads)), dim=1), torch.cat((spelled, words(seed, 1, pads)), dim=1)
    out = model(wide[0], spelled=wide[1], segments=segments)
    close(out[:, :3], model(ids[:, :3], spelled=spelled[:, :3]))
    close(out[:, 3:7], model(ids[:, 3:], spelled=spelled[:, 3:]))


def test_spelled_words_are_given_where_they_are_read_and_only_there() -> None:
    model, ids = build(tagger(spelling=SPELLING)), tokens(0, 2, 4)
    with pytest.raises(ConfigError, match=r"spelled: is required: .* \[2, 4, 5\]"):
        model(ids)
    with pytest.raises(ValueError, match=r"spelled must be integers \[2, 4, 5\], got torch.int64 \[2, 3, 5\]"):
        model(ids, spelled=words(0, 2, 3))
    with pytest.raises(ValueError, match="spelled 257 is outside"):
        model(ids, spelled=torch.full((2, 4, 5), 257))
    with pytest.raises(ValueError, match="leave `spelled` out"):
        build(tagger())(ids, spelled=words(0))
    decoder = build(
        ModelConfig(width=8, target=Tokens(vocab=11, spelling=SPELLING), decoder=tagger().encoder, head=tagger().head)
    )
    changed = words(1)
    changed[:, :2] = words(0)[:, :2]
    close(decoder(ids, spelled=words(0))[:, :2], decoder(ids, spelled=changed)[:, :2])  # it sees no later word
    both = {"source": Tokens(vocab=11, spelling=SPELLING), "target": Tokens(vocab=11)}
    cross = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2), cross=Attention(heads=2)),))
    with pytest.raises(ConfigError, match=r"source\.spelling = 'bytes': is for models of one stack"):
        ModelConfig(width=8, **both, encoder=tagger().encoder, decoder=cross)


def test_flops_of_spelling() -> None:
    found = count(tagger(spelling=SPELLING), 7, batch=2).flops - count(tagger(), 7, batch=2).flops
    assert found == 2 * 2 * 7 * (5 * 3 * 4 * 6 + 6 * 8)

"""Heads: what comes out, in which shape, by explicit formula."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from anyformer import presets
from anyformer.attention.layout import Layout, make_layout
from anyformer.config import (
    LM,
    Attention,
    Block,
    Classifier,
    DenseLayer,
    Embedder,
    FactorisedTable,
    FullTable,
    Gelu,
    Head,
    InvSqrtWidth,
    LayerNorm,
    MaskedLM,
    ModelConfig,
    NoHead,
    NoTransform,
    SpanBounds,
    Stack,
    Times,
    TokenLabels,
    Tokens,
    Transform,
    Unscaled,
)
from anyformer.nn import heads
from anyformer.nn.heads import pool
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from tests.strategies import build, close, seeds, tokens

CPU = torch.device("cpu")
WIDTH, VOCAB, LABELS = 8, 11, 5


def encoder(head: Head, tie: str = "none", **fields) -> ModelConfig:
    stack = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2)),))
    return ModelConfig(width=WIDTH, source=Tokens(vocab=VOCAB, **fields), encoder=stack, head=head, tie=tie)


def outputs(config: ModelConfig) -> tuple[Transformer, Tensor, Tensor]:
    """The model, its hidden states, and what its head makes of them."""
    model, ids = build(config), tokens(0, 2, 4)
    return model, model.encode(ids), model(ids)


@pytest.mark.parametrize(
    ("head", "shape"),
    [
        (NoHead(), (2, 4, WIDTH)),
        (LM(), (2, 4, VOCAB)),
        (LM(bias=True), (2, 4, VOCAB)),
        (MaskedLM(), (2, 4, VOCAB)),
        (MaskedLM(transform=NoTransform()), (2, 4, VOCAB)),
        (TokenLabels(labels=LABELS), (2, 4, LABELS)),
        (SpanBounds(), (2, 4, 2)),
        (Classifier(labels=LABELS), (2, LABELS)),
        (Classifier(labels=LABELS, bias=False), (2, LABELS)),
        (Classifier(labels=LABELS, transform=Transform()), (2, LABELS)),
        (Embedder(), (2, WIDTH)),
        (Embedder(pool="first", transform=Transform()), (2, WIDTH)),
        (Embedder(layers=(DenseLayer(width=7),)), (2, 7)),
        (Embedder(layers=(DenseLayer(width=7),), projection=9), (2, 9)),
    ],
)
@pytest.mark.parametrize("table", [FullTable(), FactorisedTable(width=3)], ids=lambda table: table.kind)
def test_shapes(head: Head, shape: tuple[int, ...], table):
    assert outputs(encoder(head, table=table))[2].shape == shape


def test_no_head_gives_the_hidden_states():
    _, hidden, out = outputs(encoder(NoHead()))
    assert torch.equal(out, hidden)


@pytest.mark.parametrize("scale", [Unscaled(), InvSqrtWidth(), Times(value=3.0)], ids=lambda scale: scale.kind)
@pytest.mark.parametrize("tie", ["none", "output"])
@pytest.mark.parametrize("bias", [False, True])
def test_lm(scale, tie: str, bias: bool):
    """scale · h Wᵀ + b, with a table of its own or the input's."""
    model, hidden, out = outputs(encoder(LM(bias=bias, scale=scale), tie))
    table = model.source.table.weight if tie == "output" else model.head.table
    factor = {"none": 1.0, "inv_sqrt_width": WIDTH**-0.5, "value": 3.0}[scale.kind]
    close(out, factor * hidden @ table.T + (model.head.bias if bias else 0.0))


@pytest.mark.parametrize("tie", ["none", "output"])
def test_masked_lm(tie: str):
    """N(gelu(h W + b)) Tᵀ + c: BERT's transform before the table."""
    model, hidden, out = outputs(encoder(MaskedLM(), tie))
    dense, norm = model.head.transform.linear, model.head.transform.norm
    h = F.layer_norm(F.gelu(hidden @ dense.weight.T + dense.bias), (WIDTH,), norm.weight, norm.bias, 1e-12)
    close(out, h @ (model.source.table.weight if tie == "output" else model.head.table).T + model.head.bias)


@pytest.mark.parametrize("tie", ["none", "output"])
@pytest.mark.parametrize("head", [LM(), MaskedLM(), MaskedLM(transform=NoTransform())], ids=lambda head: head.kind)
def test_a_factorised_table_is_read_through_a_map_to_its_width(head: Head, tie: str):
    model, hidden, out = outputs(encoder(head, tie, table=FactorisedTable(width=3)))
    table = model.source.table.weight if tie == "output" else model.head.table
    assert table.shape == (VOCAB, 3)
    close(out, model.head.transform(hidden) @ table.T + (0.0 if model.head.bias is None else model.head.bias))


def test_token_labels():
    model, hidden, out = outputs(encoder(TokenLabels(labels=LABELS)))
    close(out, hidden @ model.head.linear.weight.T + model.head.linear.bias)


@pytest.mark.parametrize("how", ["first", "mean", "max", "last"])
def test_classifier(how: str):
    """A linear layer on one vector per row, behind tanh(h W + b) where there is a transform."""
    model, hidden, out = outputs(encoder(Classifier(labels=LABELS, pool=how, transform=Transform())))
    pooled = {"first": hidden[:, 0], "mean": hidden.mean(dim=1), "max": hidden.amax(dim=1), "last": hidden[:, -1]}[how]
    dense, last = model.head.transform.linear, model.head.last[-1]
    close(out, torch.tanh(pooled @ dense.weight.T + dense.bias) @ last.weight.T + last.bias)


def test_layers_of_an_embedder():
    """tanh(h W + b), gelu(h W), and a projection."""
    layers = (DenseLayer(width=7), DenseLayer(width=5, activation=Gelu(), bias=False))
    model, hidden, out = outputs(encoder(Embedder(pool="last", layers=layers, projection=9)))
    (first, second), last = (layer.linear for layer in model.head.layers), model.head.project
    h = torch.tanh(hidden[:, -1] @ first.weight.T + first.bias)
    close(out, F.gelu(h @ second.weight.T) @ last.weight.T)
    assert second.bias is None
    assert count(model.config).parameters == model.num_parameters()


def test_transform_norm_and_activation():
    spec = Transform(activation=Gelu(), norm=LayerNorm(), bias=False)
    model, hidden, out = outputs(encoder(Embedder(pool="last", transform=spec)))
    norm = model.head.transform.norm
    h = F.gelu(hidden[:, -1] @ model.head.transform.linear.weight.T)
    close(out, F.layer_norm(h, (WIDTH,), norm.weight, norm.bias, 1e-5))
    assert model.head.transform.linear.bias is None


def test_embedder_normalize():
    """Length 1, in the same direction."""
    _, hidden, out = outputs(encoder(Embedder(normalize=True)))
    close(out.norm(dim=-1), torch.ones(2, dtype=torch.float64))
    close(out, F.normalize(hidden.mean(dim=1), dim=-1))


# -- pooling --------------------------------------------------------------------------------------------------------


@st.composite
def padded(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Vectors and their segments, with padding anywhere but at least one real token in a row."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    rows = st.lists(st.sampled_from([-1, 0, 1]), min_size=length, max_size=length).filter(lambda row: max(row) >= 0)
    segments = torch.tensor(draw(st.lists(rows, min_size=batch, max_size=batch)))
    x = torch.randn(batch, length, 4, generator=torch.Generator().manual_seed(draw(seeds)), dtype=torch.float64)
    return x, segments


@given(padded())
def test_pooling_reads_real_tokens_only(problem: tuple[Tensor, Tensor]):
    x, segments = problem
    layout = make_layout(*segments.shape, CPU, segments=segments)
    pooled = {how: pool(x, layout, how) for how in ("first", "mean", "max", "last")}
    for b, row in enumerate(segments.tolist()):
        real = [x[b, i] for i, segment in enumerate(row) if segment >= 0]
        assert torch.equal(pooled["first"][b], real[0])
        assert torch.equal(pooled["last"][b], real[-1])
        close(pooled["mean"][b], sum(real) / len(real))
        assert torch.equal(pooled["max"][b], torch.stack(real).amax(dim=0))


@pytest.mark.parametrize("how", ["first", "mean", "max", "last"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_padding_pools_to_zeros(how: str, dtype: torch.dtype):
    """Whatever its pads hold, and without a gradient."""
    x = torch.randn(2, 3, 4, dtype=dtype)
    x[1, 1] = torch.nan
    x.requires_grad_()
    segments = torch.tensor([[0, 0, 0], [-1, -1, -1]])
    out = pool(x, Layout(torch.arange(3)[None], segments), how)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    assert gradient[0].any()


@pytest.mark.parametrize("how", ["first", "mean", "max", "last"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_a_pooled_output(how: str, side: str):
    model, ids = build(encoder(Classifier(labels=LABELS, pool=how))), tokens(0, 2, 4)
    pads, real, fill = tokens(1, 2, 3), torch.zeros(2, 4, dtype=torch.long), torch.full((2, 3), -1)
    parts = ((pads, ids), (fill, real)) if side == "left" else ((ids, pads), (real, fill))
    long, segments = (torch.cat(part, dim=1) for part in parts)
    close(model(long, segments=segments), model(ids))


@pytest.mark.parametrize("how", ["first", "mean", "max", "last"])
def test_a_decoder_may_have_a_pooled_head(how: str):
    """GPT-1's way to classify: the head reads whatever stack is last."""
    stack = Stack(depth=1, blocks=(Block(mixer=Attention(heads=2)),))
    config = ModelConfig(
        width=WIDTH, target=Tokens(vocab=VOCAB), decoder=stack, head=Classifier(labels=LABELS, pool=how)
    )
    model, ids = build(config), tokens(0, 2, 4)
    hidden = model.decode(ids)
    pooled = {"first": hidden[:, 0], "mean": hidden.mean(dim=1), "max": hidden.amax(dim=1), "last": hidden[:, -1]}[how]
    close(model(ids), model.head.last(pooled))


@pytest.mark.parametrize("most", [1, 7, 64, 10_000])
@torch.no_grad()
def test_a_loss_without_gradients_is_computed_in_chunks(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MAX_LOGITS", most)
    torch.manual_seed(0)
    model = build(presets.gpt2(depth=1, width=8, heads=1, vocab=11)).eval()
    ids, labels = torch.randint(11, (3, 5)), torch.randint(11, (3, 5))
    labels[0, 2:] = -100
    whole = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)
    found = model(ids, loss_target=heads.LossTarget(labels, 0.1))
    torch.testing.assert_close(found.double(), whole, rtol=1e-6, atol=0.0)

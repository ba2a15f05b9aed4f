"""Inputs: from ids to vectors, and whose table it is."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.layout import make_layout
from anyformer.config import (
    LM,
    Attention,
    Block,
    FactorisedTable,
    Head,
    LayerNorm,
    Learned,
    MaskedLM,
    ModelConfig,
    NoPosition,
    Position,
    SqrtWidth,
    Stack,
    Times,
    Tokens,
    Unscaled,
)
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.strategies import build, close, seeds, tokens

WIDTH, VOCAB = 8, 11
NOWHERE, NEXT = NoPosition(), LM()
BLOCK = Block(mixer=Attention(heads=2))
TIES = ["none", "output", "inputs", "all"]


def encoder(position: Position = NOWHERE, head: Head = NEXT, tie: str = "none", **fields) -> ModelConfig:
    stack = Stack(depth=1, blocks=(BLOCK,), position=position)
    return ModelConfig(width=WIDTH, source=Tokens(vocab=VOCAB, **fields), encoder=stack, head=head, tie=tie)


def pair(tie: str, **fields) -> ModelConfig:
    crossing = BLOCK.model_copy(update={"cross": Attention(heads=2)})
    return ModelConfig(
        width=WIDTH,
        source=Tokens(vocab=VOCAB, **fields),
        target=Tokens(vocab=VOCAB, **fields),
        encoder=Stack(depth=1, blocks=(BLOCK,)),
        decoder=Stack(depth=1, blocks=(crossing,)),
        head=LM(),
        tie=tie,
    )


def embedded(model: Transformer, ids: Tensor, **options) -> Tensor:
    return run_with_taps(model, ["encoder.embed"], ids, **options)[1]["encoder.embed"]


@given(seeds, st.integers(1, 5))
def test_lookup_equals_one_hot_times_the_table(seed: int, length: int):
    """In value and in gradient."""
    model, ids = build(encoder(), seed), tokens(seed, 2, length)
    table = model.source.table.weight
    product = F.one_hot(ids, VOCAB).double() @ table
    close(embedded(model, ids), product)
    weight = torch.randn_like(product)
    (ours,) = torch.autograd.grad((embedded(model, ids) * weight).sum(), table)
    (theirs,) = torch.autograd.grad((product * weight).sum(), table)
    close(ours, theirs)


@pytest.mark.parametrize("scale", [Unscaled(), SqrtWidth(), Times(value=0.3)], ids=lambda scale: scale.kind)
def test_the_order_of_the_parts(scale):
    """N(s · E[id] + P[position] + T[type]): only the lookup is scaled."""
    config = encoder(Learned(length=9), types=3, scale=scale, norm=LayerNorm())
    model, ids, types = build(config), tokens(0, 2, 4), torch.tensor([[0, 0, 1, 2], [2, 1, 1, 0]])
    source = model.source
    factor = {"none": 1.0, "sqrt_width": WIDTH**0.5, "value": 0.3}[scale.kind]
    x = factor * source.table.weight[ids] + model.encoder.embedder.tables.positions[:4] + source.types.weight[types]
    close(embedded(model, ids, types=types), F.layer_norm(x, (WIDTH,), source.norm.weight, source.norm.bias))


def test_types_not_given_are_the_first():
    model, ids = build(encoder(types=2)), tokens(0, 2, 4)
    assert torch.equal(model(ids), model(ids, types=torch.zeros_like(ids)))
    assert not torch.allclose(model(ids), model(ids, types=torch.ones_like(ids)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("project", ["after_norm", "before_position"])
def test_a_factorised_table(project: str, bias: bool):
    """A linear layer from the table's width to d: after the norm, so that positions, types and norm are narrow too
    (ALBERT, ELECTRA), or before anything is added, so that they are wide (OPT)."""
    late = project == "after_norm"
    table = FactorisedTable(width=3, project=project, bias=bias)
    config = encoder(Learned(length=9), table=table, types=2, norm=LayerNorm(), scale=Times(value=2.0))
    model, ids = build(config), tokens(0, 2, 4)
    source, inner = model.source, 3 if late else WIDTH
    assert source.table.weight.shape == (VOCAB, 3)
    assert model.encoder.embedder.tables.positions.shape == (9, inner)
    assert source.types.weight.shape == (2, inner)

    def project_up(x: Tensor) -> Tensor:
        return x @ source.project.weight.T + (source.project.bias if bias else 0.0)

    x = 2 * source.table.weight[ids]
    x = (x if late else project_up(x)) + model.encoder.embedder.tables.positions[:4] + source.types.weight[0]
    x = F.layer_norm(x, (inner,), source.norm.weight, source.norm.bias)
    close(embedded(model, ids), project_up(x) if late else x)


# -- the pad row ----------------------------------------------------------------------------------------------------


def loss(model: Transformer, *args: Tensor) -> Tensor:
    """Reads every output, so that every row of an output table has a gradient."""
    return model(*args).logsumexp(dim=-1).sum()


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.AdamW])
def test_the_pad_row_is_zero_and_stays_zero(tie: str, optimiser):
    """However the table is tied, and even where the model reads pads."""
    model = Transformer(pair(tie, pad=3))
    source, target = tokens(0, 2, 6), tokens(1, 2, 5)
    source[:, 2] = target[:, 1] = 3
    tables = [x.table.weight for x in (model.source, model.target) if x.table is not None]
    assert len(tables) == (1 if tie in ("inputs", "all") else 2)
    before = [table.detach().clone() for table in tables]
    assert all(not table[3].any() for table in tables)
    steps = optimiser(model.parameters(), lr=0.1)
    for _ in range(2):
        steps.zero_grad()
        loss(model, source, target).backward()
        steps.step()
    for table, old in zip(tables, before, strict=True):
        assert not table[3].any()
        others = [i for i in range(VOCAB) if i != 3]
        assert (table[others] != old[others]).any()


@pytest.mark.parametrize("head", [LM(), MaskedLM()], ids=lambda head: head.kind)
def test_a_frozen_pad_row_changes_no_other_gradient(head: Head):
    """The model with a pad row computes and learns what one without does, but for that row."""
    with_pad, without = (build(encoder(head=head, tie="output", pad=pad)) for pad in (3, None))
    for model in (with_pad, without):
        with torch.no_grad():
            model.source.table.weight[3] = 0.0
        loss(model, tokens(0, 2, 6)).backward()
    close(with_pad(tokens(0, 2, 6)), without(tokens(0, 2, 6)))
    mine, other = with_pad.source.table.weight.grad.clone(), without.source.table.weight.grad.clone()
    assert other[3].any()
    assert not mine[3].any()
    other[3] = 0.0
    close(mine, other)
    for (name, a), (_, b) in zip(with_pad.named_parameters(), without.named_parameters(), strict=True):
        if name != "source.table.weight":
            close(a.grad, b.grad)


# -- tying ----------------------------------------------------------------------------------------------------------

OWN = {
    "none": {"source.table.weight", "target.table.weight", "head.table"},
    "output": {"source.table.weight", "target.table.weight"},
    "inputs": {"source.table.weight", "head.table"},
    "all": {"source.table.weight"},
}


@pytest.mark.parametrize("tie", TIES)
def test_which_tables_exist(tie: str):
    """A tied table is one parameter, under one name, counted once; nothing refers to it a second time."""
    model, untied = Transformer(pair(tie)), Transformer(pair("none"))
    assert {name for name, _ in model.named_parameters() if name.endswith(("table", "table.weight"))} == OWN[tie]
    assert model.num_parameters() == untied.num_parameters() - (3 - len(OWN[tie])) * VOCAB * WIDTH
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("pad", [None, 3])
def test_tied_gradients_add_up(tie: str, pad: int | None):
    """A tied model computes what an untied one with equal tables does; its gradient is the sum of theirs."""
    tied, untied = build(pair(tie, pad=pad)), build(pair("none", pad=pad))
    shared = {
        "none": {},
        "output": {"head.table": "target.table.weight"},
        "inputs": {"target.table.weight": "source.table.weight"},
        "all": {"target.table.weight": "source.table.weight", "head.table": "source.table.weight"},
    }[tie]
    state = tied.state_dict()
    untied.load_state_dict({name: state[shared.get(name, name)] for name in untied.state_dict()})
    args = tokens(0, 2, 5), tokens(1, 2, 4)
    close(tied(*args), untied(*args))
    loss(tied, *args).backward()
    loss(untied, *args).backward()
    apart = {name: parameter.grad.clone() for name, parameter in untied.named_parameters()}
    for name, parameter in tied.named_parameters():
        total = apart[name] + sum(apart[other] for other, home in shared.items() if home == name)
        rows = [i for i in range(VOCAB) if i != pad] if "table" in name else slice(None)
        close(parameter.grad[rows], total[rows])


@pytest.mark.parametrize("tie", ["output", "all"])
def test_moving_a_tied_table_moves_the_output(tie: str):
    model, args = build(pair(tie)), (tokens(0, 2, 5), tokens(1, 2, 4))
    hidden = model.decode(args[1], model.encode(args[0]))
    layout = make_layout(2, 4, hidden.device)
    with torch.no_grad():
        before = model.apply_head(hidden, layout)
        (model.target.table or model.source.table).weight.mul_(2)
        close(model.apply_head(hidden, layout), 2 * before)

"""ExpertMixture of experts: equal to a loop over tokens, and paid for by the chosen alone."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from anyformer.config import (
    BatchNorm,
    ConfigError,
    Experts,
    Gated,
    ModelConfig,
    NoFeedForward,
    Plain,
    Relu,
    SigmoidTopK,
    Silu,
    SoftmaxTopK,
    io,
)
from anyformer.kernels.expert_matmul import ExpertRows, expert_matmul
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.context import Tap
from anyformer.nn.experts import ExpertMixture
from anyformer.nn.init import initialise
from anyformer.nn.inspection.count import count
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.nn.model import Transformer
from tests.nn.small_experts import NOWHERE, ROUTERS, WIDTH, made, model_of, networks, random
from tests.strategies import build, close, seeds, tokens


def one_expert(mixture: ExpertMixture, spec: Experts, i: int, x: Tensor) -> Tensor:
    bias = [layer.bias[i] if layer.bias is not None else None for layer in (mixture.up, mixture.down)]
    h = F.linear(x, mixture.up.weight[i], bias[0])
    act = spec.expert.activation.function()
    if isinstance(spec.expert, Gated):
        gate, up = h.chunk(2)
        if (limit := spec.expert.limit) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        h = act(gate) * (up + spec.expert.offset)
    else:
        h = act(h)
    return F.linear(h, mixture.down.weight[i], bias[1])


def chosen(mixture: ExpertMixture, spec: Experts, x: Tensor) -> dict[int, Tensor]:
    """The experts of one token and their weights, by the definitions."""
    router, k = spec.router, spec.top_k
    logits = mixture.router.linear(x)
    soft = isinstance(router, SoftmaxTopK)
    scores = logits.softmax(0) if soft else logits.sigmoid()
    ranks = (scores if soft else scores + mixture.router.bias).tolist()
    size = spec.count // router.groups
    groups = [range(g * size, (g + 1) * size) for g in range(router.groups)]
    groups.sort(key=lambda group: -sum(sorted(ranks[i] for i in group)[-1 if soft else -2 :]))
    best = sorted((i for group in groups[: router.top_groups] for i in group), key=lambda i: -ranks[i])[:k]
    weights = scores[best] / scores[best].sum() if router.normalize else scores[best]
    return dict(zip(best, router.scale * weights, strict=True))


def naive(mixture: ExpertMixture, spec: Experts, x: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for row in x.flatten(0, 1):
        picked = chosen(mixture, spec, row)
        rows.append(sum(weight * one_expert(mixture, spec, i, row) for i, weight in picked.items()))
    out = torch.stack(rows).view(x.shape)
    if mixture.shared is None:
        return out
    weight = torch.sigmoid(mixture.shared_gate(x)) if spec.shared_gate else 1
    return out + weight * mixture.shared(x, NOWHERE)


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
@given(seed=seeds, expert=networks, top_k=st.integers(1, 4), shared=st.integers(0, 2), gate=st.booleans())
def test_equal_to_a_loop_over_tokens(router, seed: int, expert, top_k: int, shared: int, gate: bool):
    """Outputs and all gradients, also where an expert reads nothing."""
    gate = gate and shared > 0
    spec = Experts(count=6, top_k=top_k, router=router, expert=expert, shared=shared, shared_gate=gate)
    mixture, x = made(spec, seed), random(seed, 2, 3, WIDTH).requires_grad_()
    results = []
    for out in (mixture(x, NOWHERE), naive(mixture, spec, x)):
        grads = torch.autograd.grad(out.square().sum(), [x, *mixture.parameters()])
        results.append((out, *grads))
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


@given(seeds, networks, st.integers(1, 5))
def test_all_experts_alike_are_their_average(seed: int, expert, n: int):
    spec = Experts(count=n, top_k=n, expert=expert)
    mixture, x = made(spec, seed), random(seed, 2, 3, WIDTH)
    mixture.router.linear.weight.data.zero_()
    each = [one_expert(mixture, spec, i, row) for row in x.flatten(0, 1) for i in range(n)]
    close(mixture(x, NOWHERE), torch.stack(each).view(2, 3, n, WIDTH).mean(2))


def test_normalised_probabilities_are_a_softmax_over_the_chosen():
    mixture, x = made(Experts(count=6, top_k=3)), random(0, 2, 4, WIDTH)
    logits = mixture.router.linear(x.flatten(0, 1))
    choice = mixture.router(x.flatten(0, 1))
    close(choice.weights, logits.topk(3).values.softmax(-1))


def test_the_bias_chooses_and_does_not_weigh():
    """An expert with a large bias reads every token, with the weight of its own score; no gradient reaches the bias."""
    spec = Experts(count=6, top_k=2, router=SigmoidTopK(normalize=False))
    mixture, x = made(spec), random(0, 1, 7, WIDTH)
    mixture.router.bias.zero_()[4] = 100.0
    choice = mixture.router(x[0])
    assert (choice.experts[:, 0] == 4).all()
    close(choice.weights[:, 0], mixture.router.linear(x[0])[:, 4].sigmoid())
    assert "router.bias" not in dict(mixture.named_parameters())
    assert "router.bias" in mixture.state_dict()


@pytest.mark.parametrize("kind", [Plain, Gated])
def test_one_expert_is_a_feedforward(kind):
    """A softmax over one expert is 1; and shared experts are one network of their width together."""
    torch.manual_seed(0)
    single, x = made(Experts(count=1, top_k=1, expert=kind(width=5))), random(0, 2, 3, WIDTH)
    plain = kind(width=5).build(WIDTH).double()
    inner = plain.up if kind is Plain else plain.gate_up
    for ours, theirs in ((single.up, inner), (single.down, plain.down)):
        theirs.weight.data = ours.weight[0].detach()
        if theirs.bias is not None:
            theirs.bias.data = ours.bias[0].detach()
    close(single(x, NOWHERE), plain(x, NOWHERE))
    both = made(Experts(count=2, top_k=1, expert=kind(width=5), shared=3))
    assert both.shared.down.in_features == 15


@pytest.mark.parametrize("kernel", ["opaque_loop", "grouped_mm", "gather"])
@given(seed=seeds, rows=st.integers(0, 9))
def test_all_kernels_equal_the_loop(kernel: str, seed: int, rows: int):
    """Outputs and gradients. grouped_mm in fp32, which it supports on a CPU, and at sizes that it supports."""
    torch.manual_seed(seed)
    dtype, (d, f) = (torch.float32, (8, 12)) if kernel == "grouped_mm" else (torch.float64, (3, 5))
    x, weight = torch.randn(rows, d, dtype=dtype), torch.randn(4, f, d, dtype=dtype)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    experts = torch.randint(0, 4, (rows,)).sort().values
    of_experts, results = ExpertRows(experts, experts.bincount(minlength=4)), []
    for how in ("loop", kernel):
        y = expert_matmul(x, weight, of_experts, how)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, weight))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


# -- a model of experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("router", [SoftmaxTopK(bias=True), SigmoidTopK()], ids=lambda r: r.kind)
@pytest.mark.parametrize("expert", [Gated(width=5), Plain(width=5)], ids=lambda e: e.kind)
def test_only_the_chosen_are_paid_for(shared: int, router, expert):
    """FLOPs by torch's counter; parameters of all."""
    parts = {"top_k": 2, "router": router, "expert": expert, "shared": shared, "shared_gate": shared > 0}
    config = model_of(Experts(count=8, **parts))
    model = Transformer(config)
    model.backend = "eager"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(0, 3, 7))
    table = count(config, 7, batch=3)
    assert table.flops == counter.get_total_flops()
    assert table.parameters == model.num_parameters()
    bare = count(model_of(NoFeedForward()), 7, batch=3)
    more = count(model_of(Experts(count=80, **parts)), 7, batch=3)
    assert more.parameters > 5 * table.parameters
    assert more.flops - table.flops == 2 * 2 * 21 * WIDTH * 72  # the router alone grows
    assert table.flops > bare.flops


def test_the_router_can_be_seen_and_changed():
    """Weights of all experts, zero where not chosen; one that is set to zero is as if it said nothing."""
    model, ids = build(model_of(Experts(count=5, top_k=2, expert=Gated(width=4)))), tokens(0, 2, 7)
    plain, seen = run_with_taps(model, ["decoder.*.feedforward.router"], ids)
    weights = seen["decoder.0.feedforward.router"]
    assert weights.shape == (2, 7, 5)
    assert ((weights > 0).sum(-1) == 2).all()
    close(weights.sum(-1), torch.ones(2, 7, dtype=torch.float64))
    dumb = Tap(lambda name, x: x * 0 if name.endswith("router") else x)
    silent = build(model_of(Experts(count=5, top_k=2, expert=Gated(width=4))))
    for block in silent.decoder.blocks:
        block["feedforward"].inner.down.weight.data.zero_()
    close(model(ids, taps=dumb), silent(ids))
    assert not torch.equal(plain, silent(ids))


def test_initialised_expert_by_expert():
    """Each matrix as that of a layer of its own: Xavier's bound is of its parts, not of the stack."""
    config = model_of(Experts(count=3, top_k=1, expert=Gated(width=40), router=SigmoidTopK()))
    mixture = Transformer(config.model_copy(update={"init": "xavier"})).decoder.blocks[0]["feedforward"].inner
    bound = (6 / (WIDTH + 40)) ** 0.5
    for matrix in (*mixture.up.weight.split(40, dim=1), mixture.down.weight):
        for expert in matrix:
            assert 0.9 * bound < float(expert.detach().abs().max()) <= bound
    assert not mixture.router.bias.any()
    scaled = config.model_copy(update={"init": {"kind": "normal", "residual": True}})
    deep = Transformer(scaled).decoder.blocks[0]["feedforward"].inner
    torch.testing.assert_close(float(deep.down.weight.detach().std()), 0.02 / 2, rtol=0.2, atol=0)
    torch.testing.assert_close(float(deep.up.weight.detach().std()), 0.02, rtol=0.2, atol=0)


def test_dropout_falls_on_the_hidden_units():
    """In training only; without it, training computes what eval does."""
    for p in (0.0, 0.5):
        mixture, x = made(Experts(count=3, top_k=2, expert=Gated(width=5, dropout=p))), random(0, 2, 5, WIDTH)
        same = torch.equal(mixture.train()(x, NOWHERE), mixture.eval()(x, NOWHERE))
        assert same == (p == 0)


# -- balance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({"top_k": 9}, ["top_k = 9: must be at most count = 8"]),
        ({"router": {"kind": "sigmoid", "groups": 3}}, ["router.groups = 3: must divide count = 8"]),
        ({"router": {"kind": "softmax", "groups": 3}}, ["router.groups = 3: must divide count = 8"]),
        (
            {"shared_gate": True},
            ["shared_gate = True: there are no shared experts; set shared, or leave this out"],
        ),
        (
            {"router": {"kind": "sigmoid", "groups": 2, "top_groups": 4}},
            ["router.top_groups = 4: must be at most groups = 2"],
        ),
        (
            {"router": {"kind": "sigmoid", "groups": 8}},
            ["router.top_groups = 1: 1 of 8 groups hold 1 experts, fewer than top_k = 2"],
        ),
    ],
)
def test_what_does_not_fit(fields: dict, faults: list[str]):
    with pytest.raises(ConfigError) as error:
        model_of(Experts(**{"count": 8, "top_k": 2, **fields}))
    assert [str(fault) for fault in error.value.faults] == [f"decoder.blocks.0.feedforward.{fault}" for fault in faults]


def test_autocast_multiplies_in_its_precision():
    mixture, x = made(Experts(count=3, top_k=2, expert=Plain(width=8, activation=Relu()))).float(), random(0, 2, 3, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = mixture(x.float(), NOWHERE)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), mixture(x.float(), NOWHERE), rtol=0.1, atol=0.3)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_in_one_graph(recompute: bool):
    """With batch norms, balance and a bias: outputs, losses, gradients, and all that a step moves."""
    feedforward = Experts(count=4, top_k=2, router=SigmoidTopK(), expert=Gated(width=3, bias=True), balance=0.1)
    config = io.override(model_of(feedforward, final_norm=BatchNorm()), ["decoder.depth=1"])
    models = [build(config).train() for _ in range(2)]
    torch._dynamo.reset()
    calls = models[0], torch.compile(models[1], backend="aot_eager", fullgraph=True)
    for step in range(3):
        results = []
        for model, call in zip(models, calls, strict=True):
            model.zero_grad()
            aux = AuxOutputs()
            with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
                segments = torch.tensor([[0] * 7, [0] * 4 + [-1] * 3])
                out = call(tokens(step, 2, 7), segments=segments, aux=aux, recompute=recompute)
            (out.logsumexp(-1).sum() + sum(aux.losses)).backward()
            model.commit()
            grads = [p.grad for p in model.parameters()]
            results.append([out, *aux.losses, *grads, *map(torch.clone, model.buffers())])
        for ours, theirs in zip(*results, strict=True):
            close(ours, theirs)
    torch._dynamo.reset()


def test_initialising_gives_every_number_a_value():
    mixture = Experts(count=3, top_k=2, router=SigmoidTopK(), expert=Gated(activation=Silu())).build(WIDTH)
    for tensor in (*mixture.parameters(), *mixture.buffers()):
        tensor.data.fill_(torch.nan)
    initialise(mixture, ModelConfig.model_fields["init"].default, WIDTH)
    assert all(tensor.isfinite().all() for tensor in (*mixture.parameters(), *mixture.buffers()))

"""Load balance of experts: the loss by its formula, and the bias that moves the load."""

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from anyformer.attention.layout import Layout
from anyformer.config import Experts, Gated, SigmoidTopK
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.context import Context
from anyformer.nn.experts import ExpertMixture, SigmoidRouter
from tests.nn.small_experts import ROUTERS, WIDTH, made, model_of, random
from tests.strategies import build, close, seeds, tokens


def noted(mixture: ExpertMixture, x: Tensor, segments: Tensor | None = None) -> AuxOutputs:
    aux, layout = AuxOutputs(), Layout(torch.zeros(1, x.shape[1], dtype=torch.long), segments)
    mixture.train()(x, Context(layout, layout, aux=aux))
    return aux


def test_balance_is_its_weight_where_all_experts_get_alike():
    """And count times that where one gets all; between, as the formula says."""
    spec = Experts(count=4, top_k=1, expert=Gated(width=3), balance=0.3)
    mixture = made(spec)
    x = torch.eye(WIDTH, dtype=torch.float64)[:4].view(1, 4, WIDTH)  # token i asks for expert i
    for sharpness in (1.0, 30.0):
        mixture.router.linear.weight.data = torch.eye(WIDTH, dtype=torch.float64)[:4] * sharpness
        close(noted(mixture, x).losses[0], torch.tensor(0.3, dtype=torch.float64))
        same = x[:, :1].expand(1, 4, WIDTH)
        p = torch.tensor([sharpness, 0, 0, 0], dtype=torch.float64).softmax(0)
        close(noted(mixture, same).losses[0], 0.3 * 4 * p[0])


@given(seeds, st.sampled_from(ROUTERS))
def test_balance_by_its_formula_over_real_tokens(seed: int, router):
    spec = Experts(count=6, top_k=2, router=router, expert=Gated(width=3), balance=0.7)
    mixture, x = made(spec, seed), random(seed, 2, 5, WIDTH)
    segments = torch.tensor([[0, 0, 1, -1, -1], [-1, 0, 0, 0, 0]])
    rows = x[segments >= 0]
    choice = mixture.router(rows)
    share = torch.stack([(choice.experts == i).double().mean() for i in range(6)])
    expected = 0.7 * 6 * (share * choice.probabilities.mean(0)).sum()
    aux = noted(mixture, x, segments)
    close(aux.losses[0], expected)
    assert aux.losses[0].requires_grad
    if isinstance(router, SigmoidTopK):
        close(aux.statistics[mixture.router], share * 2 * len(rows))
    empty = noted(mixture, x, torch.full_like(segments, -1))
    assert empty.losses[0].detach() == 0


def test_losses_are_given_to_who_asks_in_training():
    model = build(model_of(Experts(count=4, top_k=2, expert=Gated(width=3), balance=0.1)))
    results, given_in_eval = [], AuxOutputs()
    model(tokens(0, 2, 5), aux=given_in_eval)
    assert not given_in_eval.losses
    for recompute in (False, True):  # a block that runs twice counts once
        model.train()
        aux = AuxOutputs()
        model.zero_grad()
        out = model(tokens(0, 2, 5), aux=aux, recompute=recompute)
        (out.sum() + sum(aux.losses)).backward()
        assert len(aux.losses) == 2
        results.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        close(a, b)


def test_the_bias_moves_the_load_towards_balance():
    """Tokens that all prefer the same experts: after some steps every expert reads its share, or nearly so."""
    spec = Experts(count=8, top_k=2, router=SigmoidTopK(rate=0.005), expert=Gated(width=2))
    mixture, x = made(spec, 1), random(0, 4, 64, WIDTH) * 0.3 + 0.2
    router = mixture.router
    router.bias.zero_()

    def spread() -> float:
        load = noted(mixture, x).statistics[router]
        return float(load.std() / load.mean())

    first = spread()
    for _ in range(200):
        router.statistics = noted(mixture, x).statistics[router]
        with torch.no_grad():
            router.commit()
    assert router.statistics is None
    assert spread() < 0.1 < 0.5 < first


def test_a_model_commits_once():
    model = build(model_of(Experts(count=4, top_k=1, router=SigmoidTopK(rate=0.5), expert=Gated(width=2)))).train()
    routers = [module for module in model.modules() if isinstance(module, SigmoidRouter)]
    before = [router.bias.clone() for router in routers]
    model(tokens(0, 2, 9))
    assert all(torch.equal(router.bias, old) for router, old in zip(routers, before, strict=True))
    model.commit()
    moved = [router.bias.clone() for router in routers]
    for new, old in zip(moved, before, strict=True):
        assert set((new - old).abs().round(decimals=9).tolist()) <= {0.0, 0.5}
        assert not torch.equal(new, old)
    model.commit()  # nothing new was seen
    assert all(torch.equal(router.bias, now) for router, now in zip(routers, moved, strict=True))
    model.eval()(tokens(1, 2, 9))
    model.commit()
    assert all(torch.equal(router.bias, now) for router, now in zip(routers, moved, strict=True))


def test_a_shared_layer_sees_the_tokens_of_all_its_places():
    config = model_of(Experts(count=4, top_k=1, router=SigmoidTopK(), expert=Gated(width=2)), share=True)
    for recompute in (False, True):
        model = build(config).train()
        model(tokens(0, 2, 9), recompute=recompute).sum().backward()
        (router,) = (module for module in model.modules() if isinstance(module, SigmoidRouter))
        assert float(router.statistics.sum()) == 2 * 18

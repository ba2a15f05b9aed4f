"""The examples of parts: each obeys the laws of any part, and computes its formula."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer.attention.attend import choose
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import make_layout
from anyformer.attention.lowered import Dense, Relation
from anyformer.config import Causal, NoPosition, import_file
from anyformer.config.outside import outside_parts
from anyformer.kernels.runtime import Runtime
from anyformer.nn.context import Context
from anyformer.nn.inspection.taps import run_with_taps
from anyformer.testing import check_part
from anyformer.testing.check import SPLIT
from anyformer.testing.subject import VOCAB, built, model_with

EXAMPLES = Path(__file__).parents[2] / "examples" / "parts"
PARTS = {
    "kerple": {"position": "kerple"},
    "cope": {"position": {"kind": "cope", "positions": 3}},
    "forgetting": {"mixer": {"kind": "forgetting", "heads": 2}},
    "differential": {"mixer": {"kind": "differential", "heads": 2, "start": 0.6}, "position": "rotary"},
    "canon": {"mixer": {"kind": "canon", "width": 3, "bias": True}},
    "kimi_delta": {"mixer": {"kind": "kimi_delta", "heads": 2, "rank": 3, "convolution": 2}},
    "entmax_attention": {"mixer": {"kind": "entmax", "heads": 2, "kv_heads": 1}, "position": "alibi"},
    "ngpt": {
        "mixer": {"kind": "sphere_attention", "heads": 2, "qk_norm": "unit"},
        "feedforward": {"kind": "sphere_feedforward", "inner": {"kind": "plain", "width": 6}},
        "norm": "unit",
        "placement": "post",
        "position": "rotary",
    },
}
IDS = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFORMER_IMPORT", "")
    for file in EXAMPLES.glob("*.py"):
        import_file(file)


def mixer(name: str) -> nn.Module:
    """The mixer of a model with an example, with random weights."""
    return built(model_with(**PARTS[name])).decoder.blocks[0]["mixer"].inner


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_all_examples_are_tried() -> None:
    assert PARTS.keys() == {file.stem for file in EXAMPLES.glob("*.py")}


@pytest.mark.parametrize("name", PARTS)
def test_an_example_obeys_the_laws(name: str) -> None:
    config = model_with(**PARTS[name])
    for part in dict.fromkeys(outside_parts(config)):
        check_part(part, around=PARTS[name], skip=(SPLIT,))


def test_kerple_is_a_logarithm_of_the_distance() -> None:
    at, logs = torch.arange(5)[None], random(2, 2)
    scheme = model_with(**PARTS["kerple"]).decoder.position
    bias = scheme.bias(at, at, 2, True, {"logs": logs})
    for h, q, k in torch.cartesian_prod(torch.arange(2), at[0], at[0]).tolist():
        r1, r2 = logs[:, h].exp().tolist()
        assert math.isclose(bias[0, h, q, k], -r1 * math.log(1 + r2 * abs(q - k)))


def test_cope_sums_gates_to_a_position() -> None:
    module, scheme = mixer("cope"), model_with(**PARTS["cope"]).decoder.position
    q, k, at = random(1, 2, 5, 4), random(1, 2, 5, 4).flip(2), torch.arange(5)[None]
    relation = Relation(Dense(causal=True), relative=scheme.relative(at, at, {}))
    bias, scores = module.mask(relation, q, k).bias, q @ k.mT / 2
    for h, i in torch.cartesian_prod(torch.arange(2), torch.arange(5)).tolist():
        for j in range(i + 1):
            p = min(scores[0, h, i, j : i + 1].sigmoid().sum().item(), 3)
            low, high = module.vectors[math.floor(p)], module.vectors[math.ceil(p)]
            vector = low + (p - math.floor(p)) * (high - low)
            assert torch.isclose(bias[0, h, i, j], q[0, h, i] @ vector / 2)
    assert (bias.triu(1)[bias.triu(1) != 0] == -math.inf).all()


def test_forgetting_at_a_constant_rate_is_alibi() -> None:
    forgets, alibi = built(model_with(**PARTS["forgetting"])), built(model_with(position="alibi"))
    alibi.load_state_dict({name: x for name, x in forgets.state_dict().items() if ".forget." not in name})
    keep = -torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)  # log f: the slopes of two heads
    with torch.no_grad():
        for name, parameter in forgets.named_parameters():
            if ".forget." in name:
                parameter.copy_(torch.logit(keep.exp()) if name.endswith("bias") else torch.zeros_like(parameter))
    assert torch.allclose(forgets(IDS), alibi(IDS))


def test_differential_attention_subtracts_a_softmax() -> None:
    module = mixer("differential")
    q, k, v = random(3, 1, 2, 5, 4).unbind()
    out = module.attend(q, k, v, Dense(causal=True), module.scoring)
    (a1, a2), (b1, b2) = module.vectors
    weight = (a1 @ b1).exp() - (a2 @ b2).exp() + 0.6
    hidden = torch.ones(5, 5).triu(1).bool()
    first, second = (
        (q[..., i::2] @ k[..., i::2].mT / math.sqrt(2)).masked_fill(hidden, -math.inf).softmax(-1) for i in (0, 1)
    )
    assert torch.allclose(out, (first - weight * second) @ v)


def test_canon_is_a_convolution_with_diagonal_matrices() -> None:
    canon = built(model_with(**PARTS["canon"]))
    dense = built(model_with(mixer={"kind": "convolution", "width": 3}))
    weights = canon.state_dict()
    for name, x in weights.items():
        if name.endswith("conv.weight"):
            weights[name] = torch.diag_embed(x[:, 0].T).permute(1, 2, 0)
    dense.load_state_dict(weights)
    assert torch.allclose(canon(IDS), dense(IDS))


def test_kimi_delta_attention_replaces_what_a_key_stores() -> None:
    module, x = mixer("kimi_delta"), random(1, 6, 8)
    layout = make_layout(1, 6, x.device)
    found = module(x, Context(layout, layout))[0]
    mixed = module.conv(F.pad(module.qkv(x), (0, 0, 1, 0)), None)[0].unflatten(-1, (3, 2, 4))  # q, k and v of two heads
    decay, gate, rate = module.down.split(x[0])
    steps = F.softplus(module.decay(decay).unflatten(-1, (2, 4)) + module.dt_bias)
    state = torch.zeros(2, 4, 4, dtype=x.dtype)
    for t, (q, k, v) in enumerate(mixed):
        q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
        state = (-module.log_a.exp() * steps[t]).clamp(min=-5).exp()[..., None] * state
        old = (k[:, None] @ state)[:, 0]
        state = state + k[..., None] * (rate[t].sigmoid()[:, None] * (v - old))[:, None]
        heads = module.norm((q[:, None] @ state)[:, 0] / 2).flatten()
        assert torch.allclose(found[t], module.out(heads * module.gate(gate[t]).sigmoid()))


def test_entmax_attention_is_a_thresholded_square() -> None:
    module, (q, k) = mixer("entmax_attention"), random(2, 1, 2, 6, 4)
    weights, scores = module.weigh(q, k[:, :1], Dense(causal=True), module.scoring), q @ k[:, :1].mT / 4
    for i in range(6):
        row, z = weights[0, 0, i, : i + 1], scores[0, 0, i, : i + 1]
        assert torch.isclose(row.sum(), row.new_ones(()))
        inside = row > 0
        thresholds = (z - row.sqrt())[inside]
        assert torch.allclose(thresholds, thresholds[:1])  # τ, the same for all
        assert (z[~inside] <= thresholds[0]).all()
    assert (weights.triu(1) == 0).all()
    assert (weights.tril() == 0).sum() > 30  # besides those hidden


def test_no_kernel_is_chosen_for_weights_of_ones_own() -> None:
    spec, gpu = model_with(**PARTS["entmax_attention"]).decoder.blocks[0].mixer, Runtime("cuda", torch.bfloat16, False)
    for backend in ("auto", "sdpa", "short", "flex", "varlen", "decode"):
        layout = make_layout(1, 2048, torch.device("cpu"))
        needs = Requirements.of(spec, 8)
        assert choose(backend, Causal(), layout, layout, "self", NoPosition(), needs, gpu).kernel == "eager"


def test_ngpt_moves_vectors_on_a_sphere() -> None:
    model = built(model_with(**PARTS["ngpt"]))
    names = ["decoder.0.mixer.in", "decoder.0.*.out", "decoder.0.mixer.heads", "decoder.1.mixer.in"]
    _, seen = run_with_taps(model, names, IDS)
    step = model.decoder.blocks[0]["mixer"].inner.step
    x, heads = seen["decoder.0.mixer.in"], seen["decoder.0.mixer.heads"].transpose(1, 2).flatten(2)
    y = F.normalize(model.decoder.blocks[0]["mixer"].inner.out(heads), dim=-1)
    assert torch.allclose(seen["decoder.0.mixer.out"], step.rate * (y - x))
    moved = seen["decoder.1.mixer.in"]
    assert torch.allclose(moved.norm(dim=-1), moved.new_ones(()))
    middle = F.normalize(x + seen["decoder.0.mixer.out"], dim=-1)
    assert torch.allclose(moved, F.normalize(middle + seen["decoder.0.feedforward.out"], dim=-1))

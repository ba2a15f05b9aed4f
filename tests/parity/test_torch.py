"""Equal to torch's own modules where they overlap: outputs, gradients of inputs and of weights, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anyformer.attention.attend import lower_dense
from anyformer.attention.layout import Layout, Role, make_layout
from anyformer.attention.lowered import Relation
from anyformer.config import (
    Attention,
    Block,
    Causal,
    Full,
    Gelu,
    LayerNorm,
    Pattern,
    Plain,
    Projected,
    Relu,
    Side,
    Stack,
)
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.block import build_block
from anyformer.nn.context import Context, Crossing
from anyformer.nn.stack import BlockStack, Encoded

WIDTH, HEADS, FF, DEPTH = 24, 4, 40, 2
TARGET, SOURCE = (11, 8, 3), (13, 5, 9)  # lengths of the rows
Weights = dict[str, Tensor]

# -- the same weights under our names -------------------------------------------------------------------------------


def attention_names(weights: Weights, theirs: str, ours: str, *, cross: bool = False) -> Weights:
    """One matrix for q, k and v; across, our queries stand apart."""
    found = {}
    for kind in ("weight", "bias"):
        if f"{theirs}in_proj_{kind}" not in weights:
            continue
        rows = weights[f"{theirs}in_proj_{kind}"]
        if cross:
            found[f"{ours}q.{kind}"], found[f"{ours}kv.{kind}"] = rows.split((WIDTH, 2 * WIDTH))
        else:
            found[f"{ours}qkv.{kind}"] = rows
        found[f"{ours}out.{kind}"] = weights[f"{theirs}out_proj.{kind}"]
    return found


def layer_names(weights: Weights, theirs: str, ours: str, norm: str, *, cross: bool) -> Weights:
    """An encoder's or a decoder's layer; `norm` is where ours stands."""
    found = attention_names(weights, f"{theirs}self_attn.", f"{ours}mixer.inner.")
    if cross:
        found |= attention_names(weights, f"{theirs}multihead_attn.", f"{ours}cross.inner.", cross=True)
    pairs = {"linear1": "feedforward.inner.up", "linear2": "feedforward.inner.down"}
    sublayers = ("mixer", "cross", "feedforward") if cross else ("mixer", "feedforward")
    pairs |= {f"norm{i + 1}": f"{sublayer}.{norm}" for i, sublayer in enumerate(sublayers)}
    return found | module_names(weights, {theirs + a: ours + b for a, b in pairs.items()})


def module_names(weights: Weights, pairs: dict[str, str]) -> Weights:
    return {
        f"{ours}.{kind}": weights[f"{theirs}.{kind}"]
        for theirs, ours in pairs.items()
        for kind in ("weight", "bias")
        if f"{theirs}.{kind}" in weights
    }


# -- batches --------------------------------------------------------------------------------------------------------


def rows(lengths: tuple[int, ...], pattern: Pattern) -> tuple[Tensor, Tensor, Layout]:
    """Random vectors for ragged rows, what is padding, and our layout."""
    longest = max(lengths)
    padding = torch.arange(longest) >= torch.tensor(lengths)[:, None]
    if pattern != Causal():  # a pad on the left sees nothing, which in torch's modules is NaN
        padding[-1] = padding[-1].flip(0)
    x = torch.randn(len(lengths), longest, WIDTH, dtype=torch.float64, requires_grad=True)
    return x, padding, make_layout(len(lengths), longest, x.device, segments=-padding.long())


def ahead(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def loud(module: nn.Module) -> nn.Module:
    """Weights that matter, biases and norms too."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module.double()


def assert_same(
    ours: nn.Module,
    theirs: nn.Module,
    run_ours: Callable[..., Tensor],
    run_theirs: Callable[..., Tensor],
    names: Callable[[Weights], Weights],
    inputs: tuple[Tensor, ...],
    padding: Tensor,
) -> None:
    """The same values at real tokens, and the same gradients of all inputs and weights from those."""
    ours.double().load_state_dict(names(dict(theirs.named_parameters())))
    expected, found = run_theirs(*inputs), run_ours(*inputs)
    close(found[~padding], expected[~padding])
    weigh = torch.randn_like(expected).masked_fill(padding[..., None], 0)
    (theirs_by_input, theirs_by_weight), (ours_by_input, ours_by_weight) = (
        gradients(module, (out * weigh).sum(), inputs) for module, out in ((theirs, expected), (ours, found))
    )
    close(ours_by_input, theirs_by_input)
    close(ours_by_weight, names(theirs_by_weight))


def gradients(module: nn.Module, loss: Tensor, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Weights]:
    weights = dict(module.named_parameters())
    found = torch.autograd.grad(loss, (*inputs, *weights.values()))
    return found[: len(inputs)], dict(zip(weights, found[len(inputs) :], strict=True))


def close(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


# -- attention ------------------------------------------------------------------------------------------------------


def relate(pattern: Pattern, q: Layout, k: Layout, role: Role, kernel: str = "sdpa") -> Relation:
    return Relation(lower_dense(pattern, q, k, role)._replace(kernel=kernel))


PATTERNS = pytest.mark.parametrize("pattern", [Full(), Causal()], ids=["full", "causal"])


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("bias", [True, False])
@PATTERNS
def test_self_attention(pattern: Pattern, bias: bool, backend: str) -> None:
    theirs = loud(nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True))
    ours = MultiHeadAttention(Attention(heads=HEADS, bias=bias, output=Projected(bias=bias)), WIDTH)
    x, padding, layout = rows(TARGET, pattern)
    ctx = Context(layout, layout, relate(pattern, layout, layout, "self", backend))
    mask = ahead(x.shape[1]) if pattern == Causal() else None
    assert_same(
        ours,
        theirs,
        lambda x: ours(x, ctx),
        lambda x: theirs(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=False)[0],
        lambda weights: attention_names(weights, "", ""),
        (x,),
        padding,
    )


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention(bias: bool, backend: str) -> None:
    theirs = loud(nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True))
    ours = CrossAttention(Attention(heads=HEADS, bias=bias, output=Projected(bias=bias)), WIDTH)
    (x, padding, layout), (memory, hidden, source) = rows(TARGET, Full()), rows(SOURCE, Full())
    ctx = Context(
        layout,
        layout,
        relate(Full(), layout, layout, "self"),
        Crossing(relate(Full(), layout, source, "cross", backend)),
    )
    assert_same(
        ours,
        theirs,
        lambda x, memory: ours(x, ctx._replace(cross=ctx.cross._replace(encoder_out=memory))),
        lambda x, memory: theirs(x, memory, memory, key_padding_mask=hidden, need_weights=False)[0],
        lambda weights: attention_names(weights, "", "", cross=True),
        (x, memory),
        padding,
    )


# -- layers ---------------------------------------------------------------------------------------------------------

LAYERS = pytest.mark.parametrize(
    ("placement", "activation", "bias", "eps"),
    [
        ("post", "relu", True, 1e-5),
        ("post", "gelu", True, 1e-3),
        ("pre", "relu", True, 1e-3),
        ("pre", "gelu", True, 1e-5),
        ("pre", "relu", False, 1e-5),
    ],
)


def their_layer(cls: type[nn.Module], placement: str, activation: str, bias: bool, eps: float) -> nn.Module:
    pre = placement == "pre"
    return cls(WIDTH, HEADS, FF, 0.0, activation, layer_norm_eps=eps, batch_first=True, norm_first=pre, bias=bias)


def our_layer(placement: str, activation: str, bias: bool, eps: float, *, cross: bool) -> Block:
    attention = Attention(heads=HEADS, bias=bias, output=Projected(bias=bias))
    return Block(
        mixer=attention,
        cross=attention if cross else None,
        feedforward=Plain(width=FF, activation=Gelu() if activation == "gelu" else Relu(), bias=bias),
        norm=LayerNorm(eps=eps, bias=bias),
        placement=placement,
    )


def norm_at(placement: str) -> str:
    return "norm_in" if placement == "pre" else "norm_sum"


@PATTERNS
@LAYERS
def test_encoder_layer(placement: str, activation: str, bias: bool, eps: float, pattern: Pattern) -> None:
    theirs = loud(their_layer(nn.TransformerEncoderLayer, placement, activation, bias, eps))
    ours = build_block(our_layer(placement, activation, bias, eps, cross=False), WIDTH)
    x, padding, layout = rows(TARGET, pattern)
    ctx = Context(layout, layout, relate(pattern, layout, layout, "self"))
    mask = ahead(x.shape[1]) if pattern == Causal() else None
    assert_same(
        ours,
        theirs,
        lambda x: ours(x, ctx),
        lambda x: theirs(x, src_mask=mask, src_key_padding_mask=padding),
        lambda weights: layer_names(weights, "", "", norm_at(placement), cross=False),
        (x,),
        padding,
    )


@LAYERS
def test_decoder_layer(placement: str, activation: str, bias: bool, eps: float) -> None:
    theirs = loud(their_layer(nn.TransformerDecoderLayer, placement, activation, bias, eps))
    ours = build_block(our_layer(placement, activation, bias, eps, cross=True), WIDTH)
    (x, padding, layout), (memory, hidden, source) = rows(TARGET, Causal()), rows(SOURCE, Full())
    ctx = Context(
        layout, layout, relate(Causal(), layout, layout, "self"), Crossing(relate(Full(), layout, source, "cross"))
    )
    masks = {"tgt_mask": ahead(x.shape[1]), "tgt_key_padding_mask": padding, "memory_key_padding_mask": hidden}
    assert_same(
        ours,
        theirs,
        lambda x, memory: ours(x, ctx._replace(cross=ctx.cross._replace(encoder_out=memory))),
        lambda x, memory: theirs(x, memory, **masks),
        lambda weights: layer_names(weights, "", "", norm_at(placement), cross=True),
        (x, memory),
        padding,
    )


# -- the whole of it ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # torch says that it will not use them
@LAYERS
def test_encoder_decoder(placement: str, activation: str, bias: bool, eps: float) -> None:
    settings = {"layer_norm_eps": eps, "batch_first": True, "norm_first": placement == "pre", "bias": bias}
    theirs = loud(nn.Transformer(WIDTH, HEADS, DEPTH, DEPTH, FF, 0.0, activation, **settings))

    def stack(side: Side) -> BlockStack:
        block = our_layer(placement, activation, bias, eps, cross=side == "decoder")
        spec = Stack(depth=DEPTH, blocks=(block,), final_norm=LayerNorm(eps=eps, bias=bias))
        return BlockStack(spec, WIDTH, side, WIDTH)

    ours = nn.ModuleDict({"encoder": stack("encoder"), "decoder": stack("decoder")})
    (x, padding, layout), (y, hidden, source) = rows(TARGET, Causal()), rows(SOURCE, Full())

    def run_ours(y: Tensor, x: Tensor) -> Tensor:
        return ours["decoder"](x, layout, encoded=Encoded(ours["encoder"](y, source), source, {}))

    masks = {
        "tgt_mask": ahead(x.shape[1]),
        "src_key_padding_mask": hidden,
        "tgt_key_padding_mask": padding,
        "memory_key_padding_mask": hidden,
    }

    def names(weights: Weights) -> Weights:
        found = module_names(weights, {f"{side}.norm": f"{side}.final_norm" for side in ours})
        for side in ours:
            for i in range(DEPTH):
                places = f"{side}.layers.{i}.", f"{side}.blocks.{i}."
                found |= layer_names(weights, *places, norm_at(placement), cross=side == "decoder")
        assert len(found) == len(weights) + DEPTH * (1 + bias)  # across, q stands apart from k and v
        return found

    assert_same(ours, theirs, run_ours, lambda y, x: theirs(y, x, **masks), names, (y, x), padding)

"""Formulas of the stages of the path, written from the modules and settings of a part.

Vectors are rows, as in x W. Neighbours are multiplied; ⊙ multiplies elements, · is a dot product or a factor, [a; b]
joins vectors, and Σ_s is a sum over the index s. R_t rotates to the position t, σ is the sigmoid.
"""

from typing import assert_never

from torch import Tensor, nn

from anyformer.config import (
    Activation,
    Embedder,
    Experts,
    FeedForward,
    Gated,
    Gelu,
    Head,
    Identity,
    LeakyRelu,
    Mixer,
    Network,
    Plain,
    Side,
    SquaredRelu,
)
from anyformer.nn.attention import MultiHeadAttention
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.attention_variants.global_tokens import GlobalTokenAttention
from anyformer.nn.attention_variants.latent import LatentAttention, LatentProjection
from anyformer.nn.block import ParallelBlock, SequentialBlock, Sublayer
from anyformer.nn.feature_inputs import PatchInput
from anyformer.nn.heads import (
    DenseTransform,
    EmbeddingHead,
    LearnedLength,
    PooledHead,
    SpanHead,
    TokenHead,
    UnitLength,
    VocabularyHead,
)
from anyformer.nn.inputs import InputModule, TokenInput
from anyformer.nn.linear import Linear
from anyformer.nn.norm import OverBatch, RootMeanSquare, ScaledTanh
from anyformer.nn.stack import BlockStack


def number(x: float) -> str:
    """Return a setting to four digits."""
    return f"{x:.4g}".replace("-", "−")


def is_norm(norm: nn.Module) -> bool:
    return not isinstance(norm, nn.Identity)


def plus(bias: Tensor | None, name: str) -> str:
    """Return the sum with a bias, if there is one."""
    return "" if bias is None else f" + {name}"


def norm_formula(norm: nn.Module) -> list[str]:
    """Return the formula of a norm; none for no norm."""
    match norm:
        case nn.LayerNorm():
            return [f"N(x) = (x − mean(x)) / √(var(x) + {number(norm.eps)}) ⊙ γ{plus(norm.bias, 'β')}"]
        case RootMeanSquare():
            gain = f"({number(norm.offset)} + γ)" if norm.offset else "γ"
            return [f"N(x) = x / √(mean(x²) + {number(norm.eps)}) ⊙ {gain}"]
        case OverBatch():
            return [f"N(x) = (x − μ) / √(σ² + {number(norm.eps)}) ⊙ γ + β"]
        case ScaledTanh():
            return ["N(x) = tanh(α x) ⊙ γ + β"]
        case _:
            return []


# -- input ------------------------------------------------------------------------------------------------------------


def embed_formula(module: InputModule, id: int | None, patch: bool) -> list[str]:
    """Return the formula of a vector before its position: of a token, of a patch of pixels p, or none of others."""
    if id is None:
        return [f"e = p W{plus(module.project.bias, 'b')}"] if patch and isinstance(module, PatchInput) else []
    if not isinstance(module, TokenInput):
        return []
    row = f"E[{id}]" if module.scale == 1 else f"E[{id}] · {number(module.scale)}"
    if module.project is not None and module.early:
        row = f"({row}) W" if module.scale != 1 else f"{row} W"
        row += plus(module.project.bias, "b")
    spelled, typed = module.spelling is not None, module.media is not None and module.media.types is not None
    return [f"e = {row}{' + s' * spelled}{' + m' * typed}"]


def position_formula(module: InputModule, added: bool, types: bool) -> list[str]:
    """Return the formula of what the first layer reads, from the vector e, its position p and its type t."""
    x = f"e{' + p' * added}{' + t' * types}"
    normed = is_norm(getattr(module, "norm", nn.Identity()))
    x = f"N({x})" if normed else x
    if (last := module.last_linear()) is not None:
        x = f"({x}) W" if " + " in x and not normed else f"{x} W"
        x += plus(last.bias, "b")
    return [f"x = {x}"]


# -- attention --------------------------------------------------------------------------------------------------------


def linear(x: str, weight: str, bias: str) -> str:
    return f"{x} {weight} + {bias}" if bias else f"{x} {weight}"


def qkv_formula(attention: MultiHeadAttention, rotates: bool, is_global: bool | None) -> list[str]:
    """Return how a head's query, key and value are made; `is_global`: of separate projections, None without such."""
    if isinstance(attention, LatentAttention):
        return _latent(attention.latent, rotates)
    source = "m" if isinstance(attention, CrossAttention) else "x"
    if isinstance(attention, CrossAttention):
        names, biased = ["q", "k", "v"], attention.kv.bias is not None
    else:
        parts = {(0, 1, 2): "q k v", (0, 0, 1): "qk qk v", (0, 0, 0): "qkv qkv qkv"}[attention.serves]
        names, biased = parts.split(), attention.qkv.bias is not None

    def one(part: str, name: str, x: str, mark: str = "") -> str:
        y = linear(x, f"W{mark}_{{{name}}}", f"b{mark}_{{{name}}}" if biased else "")
        if part != "v" and attention.norms:
            y = f"N_{part}({y})_h" if attention.whole_norms else f"N_{part}({y})"
        return f"R_t({y})" if part != "v" and rotates else y

    q, k, v = (one(part, name, x) for part, name, x in zip("qkv", names, ("x", source, source), strict=True))
    if is_global is not None:
        assert isinstance(attention, GlobalTokenAttention)
        other = [one(part, part, "x", "′") for part in "qkv"]
        q, k = f"[0; {other[0]}]" if is_global else f"[{q}; 0]", f"[{k}; {other[1]}]"
        v = other[2] if is_global else v
    if attention.value_mix is not None:
        own, first = attention.value_mix.tolist()
        v = f"{number(own)} · ({v}) + {number(first)} · v_0"
    return [f"q = {q}", f"k = {k}", f"v = {v}"]


def _latent(latent: LatentProjection, rotates: bool) -> list[str]:
    bias = "b" if latent.down.bias is not None else ""
    found, rotated = [], "R_t({})" if rotates else "{}"
    if isinstance(latent.query_up, Linear):
        down = linear("x", "W_a", bias and "b_a")
        found.append(f"a = {f'N_a({down})' if is_norm(latent.query_norm) else down}")
        content, turned = "a W_q", "a W_{qr}"
    else:
        content, turned = linear("x", "W_q", bias and "b_q"), linear("x", "W_{qr}", bias and "b_{qr}")
    compressed = linear("x", "W_c", bias and "b_c")
    found.append(f"c = {f'N({compressed})' if is_norm(latent.norm) else compressed}")
    shared = rotated.format(linear("x", "W_r", bias and "b_r"))
    return [*found, f"q = [{content}; {rotated.format(turned)}]", f"k = [c W_k; {shared}]", "v = c W_v"]


def is_inverse_root(scale: float, width: int) -> bool:
    """Test whether the factor of scores is one over the root of the width of a key."""
    return abs(scale * width**0.5 - 1) < 1e-6


def scores_formula(attention: MultiHeadAttention, biased: bool, width: int) -> list[str]:
    """Return the formula of a score before the mask; `width` is that of a key."""
    factor = f" / √{width}" if is_inverse_root(attention.scale, width) else f" · {number(attention.scale)}"
    score = f"q · k_s{factor if attention.scale != 1 else ''}"
    if attention.cap is not None:
        cap = number(attention.cap)
        score = f"{cap} · tanh({score} / {cap})"
    return [f"score_s = {score}{' + bias_s' * biased}"]


def softmax_formula(attention: MultiHeadAttention, head: int) -> list[str]:
    match attention.normalizer:
        case "relu":
            return ["w_s = max(score_s, 0) / n"]
        case "softmax" if attention.sinks is None:
            return ["w_s = exp(score_s) / Σ_s exp(score_s)"]
        case "softmax":
            return [f"w_s = exp(score_s) / (Σ_s exp(score_s) + exp({number(float(attention.sinks[head]))}))"]
        case _:
            assert_never(attention.normalizer)


def mix_formula(spec: Mixer, side: Side) -> list[str]:
    """Return which tokens a mixer other than attention reads: those up to its own, or all n."""
    return [f"y_t = mix(x_1, …, x_{'t' if spec.reads_back(side) else 'n'})"]


def out_formula(attention: MultiHeadAttention, norm: nn.Module) -> list[str]:
    """Return what attention adds to the stream, from the heads' outputs o."""
    gated = "(g_h ⊙ o_h)" if attention.gate is not None else "o_h"
    y = f"Σ_h {gated} W_{{o,h}}"
    if isinstance(attention.out, Linear):
        y += plus(attention.out.bias, "b")
    return [f"y = {f'N({y})' if is_norm(norm) else y}"]


# -- blocks -----------------------------------------------------------------------------------------------------------


def add_formula(block: SequentialBlock | ParallelBlock, part: str) -> list[str]:
    """Return how what a sublayer adds changes the stream; of parallel sublayers all at once."""
    parts = {name: one for name, one in block.named_children() if isinstance(one, Sublayer)}
    if isinstance(block, ParallelBlock):
        residual, norm, count = block.residual, block.norm_sum, len(parts)
    else:
        residual, norm, count = parts[part].residual, parts[part].norm_sum, 1
    terms = ["x"] * residual + (["y"] if count == 1 else [f"y_{i}" for i in range(1, count + 1)])
    total = " + ".join(terms)
    return [f"x ← {f'N({total})' if is_norm(norm) else total}"]


def layers_formula(stack: BlockStack) -> list[str]:
    """Return the rules by which a layer changes the stream, each once."""
    rules = list[str]()
    if stack.skips is not None:
        rules += ["x ← x + c x_{j}"] * (stack.skips.unet is not None)
        rules += ["x ← a x + b x_0"] * (stack.skips.own is not None)
    for block in stack.blocks:
        assert isinstance(block, SequentialBlock | ParallelBlock)
        for name, part in block.named_children():
            if isinstance(part, Sublayer):
                rules += add_formula(block, name)
    return list(dict.fromkeys(rules))


def activated(spec: Activation, x: str) -> str:
    """Return an activation of x."""
    match spec:
        case Identity():
            return x if " " not in x else f"({x})"
        case SquaredRelu():
            return f"relu({x})²"
        case LeakyRelu(slope=slope):
            return f"leaky_relu({x}, {number(slope)})"
        case Gelu(approximate="tanh"):
            return f"gelu_tanh({x})"
        case _:
            return f"{'σ' if spec.kind == 'sigmoid' else spec.kind}({x})"


def _network(spec: Network, index: str = "", h: str | None = None) -> tuple[str, str]:
    """Return the hidden values of a network as a formula, and its output from their name `h`, or from that formula.

    `index` is that of an expert.
    """

    def of(name: str, x: str) -> str:
        return linear(x, f"W_{{{name}{index}}}", f"b_{{{name}{index}}}" if spec.bias else "")

    if not isinstance(spec, Gated):
        hidden = activated(spec.activation, of("up", "x"))
        return hidden, of("down", h or hidden)
    gate, up = of("gate", "x"), of("up", "x")
    if spec.limit is not None:
        limit = number(spec.limit)
        gate, up = f"min({gate}, {limit})", f"clip({up}, {limit})"
    if spec.offset:
        up = f"{up} + {number(spec.offset)}"
    hidden = f"{activated(spec.activation, gate)} ⊙ {f'({up})' if ' + ' in up else up}"
    return hidden, of("down", h or f"({hidden})")


def feedforward_formula(spec: FeedForward, norm: nn.Module) -> list[str]:
    """Return the formulas of a feed-forward: hidden values h and output y, or those of each expert."""
    if not isinstance(spec, Plain | Gated | Experts):
        return [f"y = {f'N({spec.kind}(x))' if is_norm(norm) else f'{spec.kind}(x)'}"]
    if not isinstance(spec, Experts):
        hidden, y = _network(spec, "", "h")
        return [f"h = {hidden}", f"y = {f'N({y})' if is_norm(norm) else y}"]
    y, formulas = "Σ_e r_e f_e(x)", [f"f_e(x) = {_network(spec.expert, ',e')[1]}"]
    if spec.shared:
        formulas.append(f"f(x) = {_network(spec.expert)[1]}")
        y = f"{y} + {'σ(x · w) · ' * spec.shared_gate}f(x)"
    return [f"y = {f'N({y})' if is_norm(norm) else y}", *formulas]


# -- head -------------------------------------------------------------------------------------------------------------


def head_formula(head: nn.Module, spec: Head) -> list[str]:
    """Return the formulas of an output, from the hidden state h by way of a transform z of it, if there is one."""
    if not isinstance(head, VocabularyHead | TokenHead | SpanHead | PooledHead):
        return ["y = h" if spec.kind == "none" else f"y = {spec.kind}(h)"]
    z = _transformed(head.transform, spec)
    match head:
        case VocabularyHead():
            z += f" · {number(head.scale)}" * (head.scale != 1)
            output = f"logit_i = z · W_i{plus(head.bias, 'b_i')}"
            if head.cap is not None:
                cap = number(head.cap)
                output = f"logit_i = {cap} · tanh(({output.removeprefix('logit_i = ')}) / {cap})"
        case EmbeddingHead():
            assert isinstance(spec, Embedder)
            for i, layer in enumerate(spec.layers, 1):
                z = activated(layer.activation, linear(z, f"W_{i}", f"b_{i}" * layer.bias))
            z, output = linear(z, "W_p", "") if is_norm(head.project) else z, f"y = {_length(head.last)}"
        case TokenHead() | SpanHead():
            output = "logit_i = z · W_i + b_i"
        case PooledHead():
            (last,) = (part for part in head.last.children() if isinstance(part, nn.Linear))
            output = f"logit_i = z · W_i{plus(last.bias, 'b_i')}"
    return [output.replace("z", "h")] if z == "h" else [f"z = {z}", output]


def _transformed(transform: nn.Module, spec: Head) -> str:
    if isinstance(transform, nn.Identity):
        return "h"
    if not isinstance(transform, DenseTransform):
        return "h W_t"
    dense = spec.transform  # type: ignore[attr-defined]  # of a head with a dense layer
    y = activated(dense.activation, linear("h", "W_t", "b_t" * dense.bias))
    return f"N({y})" if is_norm(transform.norm) else y


def _length(last: nn.Module) -> str:
    match last:
        case UnitLength():
            return "z / |z|"
        case LearnedLength():
            return f"{number(float((last.log_scale / 2).exp()))} · z / |z|"
        case _:
            return "z"


POOLED = {"mean": "h = Σ_t x_t / n", "max": "h = max_t(x_t)", "first": "h = x_1", "last": "h = x_n"}

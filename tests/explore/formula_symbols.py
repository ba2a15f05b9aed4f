"""Compare what a formula of the path gives with the numbers of its step; its symbols are those of the model."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anyformer.attention.layout import make_layout
from anyformer.explore.outputs import values_at
from anyformer.explore.path_place import PathPlace, attention_row
from anyformer.explore.trace import last_side
from anyformer.nn.attention_variants.cross import CrossAttention
from anyformer.nn.attention_variants.latent import LatentAttention
from anyformer.nn.block import ParallelBlock, Sublayer
from anyformer.nn.experts import ExpertMixture
from anyformer.nn.feature_inputs import PatchInput
from anyformer.nn.heads import EmbeddingHead, PooledHead
from anyformer.nn.inputs import TokenInput
from anyformer.nn.inspection.sublayers import stacks_of
from anyformer.nn.norm import HeadNorm, normed
from tests.explore import formula

CLOSE = {"rtol": 2e-3, "atol": 2e-3}  # settings in a formula have four digits
WITHOUT = {"tokens", "mask", "mix"}  # nothing to compute, or no numbers inside


def recompute(place: PathPlace, stage: str, found: dict[str, Any]) -> None:
    """Compare what the formula of a stage gives with the numbers of its answer."""
    name = stage.partition(".")[2]
    if name in WITHOUT or not found["formula"]:
        assert name in WITHOUT or name in ("sample", "norm", "final", "embed")
        return
    if name == "layers":
        follow_layers(place, found["formula"], found["rows"][-1]["length"])
        return
    values, functions, sizes = SYMBOLS[name](place, found)
    symbols, shown = formula.Symbols(values, {"join": join, **functions}, sizes), SHOWN[name](place, found)
    if found["formula"][0].startswith("N(x) ="):
        np.testing.assert_allclose(formula.norm(found["formula"], symbols), shown["N"], err_msg=stage, **CLOSE)
        return
    result = formula.solve(found["formula"], symbols)
    if name == "ff" and found["hidden"]:
        for i, value in found["hidden"]["top"]:
            np.testing.assert_allclose(result["h"][i], value, err_msg=f"{stage}: {found['formula']}", **CLOSE)
    if name == "sample":
        p = [[result["p_i"][index], p] for index, _, _, p in found["outputs"]]
        np.testing.assert_allclose(*np.transpose(p), **CLOSE)
    for symbol, value in shown.items():
        if symbol == "z" and symbol not in result:
            np.testing.assert_array_equal(value, found["hidden"])
            continue
        np.testing.assert_allclose(result[symbol], value, err_msg=f"{stage}: {found['formula']}", **CLOSE)


def follow_layers(place: PathPlace, rules: list[str], length: float) -> None:
    """Apply the rule of the stream to what all sublayers added, from the embedding on."""
    stack, seen = stacks_of(place.trace.run.model)[place.side], place.trace.activations
    (rule,) = rules
    if stack.pooling is not None:
        return
    x = array(seen[f"{place.side}.embed"][0, place.at])
    for i, run in enumerate(stack.runs):
        block, added = stack.blocks[run], dict[str, Any]()
        parts = [(name, part) for name, part in block.named_children() if isinstance(part, Sublayer)]
        for count, (name, part) in enumerate(parts, 1):
            y = array(seen[f"{place.side}.{i}.{name}.out"][0, place.at])
            added |= {"y": y, f"y_{count}": y}
            if count == len(parts) or not isinstance(block, ParallelBlock):
                norm = block.norm_sum if isinstance(block, ParallelBlock) else part.norm_sum
                x = formula.solve([rule], formula.Symbols(added | {"x": x}, {"N": of_module(norm)}, {}))["x"]
    assert np.linalg.norm(x) == pytest.approx(length, rel=2e-3)


def join(*parts: Any) -> Any:
    """Join vectors; 0 is as long as the other part."""
    size = max(np.size(part) for part in parts)
    return np.concatenate([np.zeros(size) if np.ndim(part) == 0 else part for part in parts])


def array(x: Tensor) -> Any:
    return x.detach().double().cpu().numpy()


def matrix(layer: Callable[[Tensor], Tensor], width: int) -> tuple[Any, Any]:
    """Return the weight [in, out] and the bias of a linear map, by its outputs."""
    with torch.no_grad():
        bias = layer(torch.zeros(width))
        return array(layer(torch.eye(width)) - bias), array(bias)


def of_module(norm: nn.Module) -> Callable[[Any], Any]:
    layout = make_layout(1, 1, torch.device("cpu"))

    def apply(x: Any) -> Any:
        with torch.no_grad():
            return array(normed(norm, torch.tensor(x).float()[None, None], layout)[0, 0])

    return apply


def norm_symbols(norm: nn.Module, x: Any) -> dict[str, Any]:
    names = {"weight": "γ", "bias": "β", "alpha": "α", "mean": "μ"}
    known = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
    found = {names[name]: array(value) for name, value in known.items() if name in names}
    if "variance" in known:
        found["σ"] = np.sqrt(array(known["variance"]))
    return {**found, "x": x} | ({"α": found["α"][0]} if "α" in found else {})


Symbols = tuple[dict[str, Any], dict[str, Any], dict[str, int]]


def _norm(place: PathPlace, found: dict[str, Any]) -> Symbols:
    own = place.block
    norm = own.norm_in if isinstance(own, ParallelBlock) else nn.Identity()
    norm = place.mixer.sublayer.norm_in if isinstance(norm, nn.Identity) else norm
    return norm_symbols(norm, found["before"]), {}, {}


def _final(place: PathPlace, found: dict[str, Any]) -> Symbols:
    return norm_symbols(stacks_of(place.trace.run.model)[place.side].final_norm, found["before"]), {}, {}


def _embed(place: PathPlace, found: dict[str, Any]) -> Symbols:
    model, values = place.trace.run.model, dict[str, Any]()
    module = model.source if place.side == "encoder" else model.target
    if isinstance(module, TokenInput):
        table = model.table(module)
        assert table is not None
        values[f"E[{found['id']}]"] = array(table[found["id"]])
        if module.project is not None:
            values["W"], values["b"] = matrix(module.project, table.shape[1])
        if module.media is not None and module.media.types is not None:
            values["m"] = array(module.media.types.weight[0])
    elif isinstance(module, PatchInput):
        values["W"], values["b"] = matrix(module.project, module.size)
        values["p"] = found["patch"]
    return values, {}, {}


def _position(place: PathPlace, found: dict[str, Any]) -> Symbols:
    model = place.trace.run.model
    module = model.source if place.side == "encoder" else model.target
    assert module is not None
    values = {"e": found["before"]} | {k: v for k, v in (("p", found["added"]), ("t", found["types"])) if v}
    if isinstance(module, TokenInput) and module.project is not None:
        values["W"], values["b"] = matrix(module.project, module.project.in_features)
    return values, {"N": of_module(module.norm)}, {}


def _qkv(place: PathPlace, found: dict[str, Any]) -> Symbols:
    trace, name = place.trace, place.mixer.name
    layer, width, head = trace.attention(name), len(found["read"]), place.head
    values, functions = {"x": found["read"]}, dict[str, Any](R_t=rotation(place))
    sizes = {"q": (head, layer.heads), "k": (head * layer.groups // layer.heads, layer.groups)}
    sizes["v"] = sizes["k"]

    def of_head(x: Any, role: str) -> Any:
        index, count = sizes[role]
        return x.reshape(*x.shape[:-1], count, -1)[..., index, :]

    for role, norm in (("q", layer.q_norm), ("k", layer.k_norm)):
        functions[f"N_{role}"] = head_norm(norm, *sizes[role])
    if isinstance(layer, LatentAttention):
        return _latent(place, found)
    if isinstance(layer, CrossAttention):
        memory = trace.activations["encoder.final"][0, found["key"][0]]
        values["m"] = array(memory)
        parts = {
            "q": matrix(layer.q, width),
            "k": matrix(lambda x: layer.kv.split(x)[0], len(memory)),
            "v": matrix(lambda x: layer.kv.split(x)[1], len(memory)),
        }
    else:
        names = ["".join(role for role, i in zip("qkv", layer.serves, strict=True) if i == part) for part in range(3)]
        parts = {names[i]: matrix(lambda x, i=i: layer.qkv.split(x)[i], width) for i in sorted(set(layer.serves))}
        if hasattr(layer, "global_qkv"):
            for i, role in enumerate("qkv"):
                weight, bias = matrix(lambda x, i=i: layer.global_qkv.split(x)[i], width)
                values[f"W′_{role}"], values[f"b′_{role}"] = of_head(weight, role), of_head(bias, role)
    for roles, (weight, bias) in parts.items():
        whole = layer.whole_norms and roles != "v"
        role = roles[-1]
        values[f"W_{roles}"] = weight if whole else of_head(weight, role)
        values[f"b_{roles}"] = bias if whole else of_head(bias, role)
    functions["_h"] = lambda x: x.reshape(layer.heads, -1)[head]
    if layer.value_mix is not None:
        first = trace.activations[f"{place.side}.embed"]
        block = stacks_of(trace.run.model)[place.side].blocks[0].mixer
        read = block.norm_in(first)[0, place.row]
        values["v_0"] = of_head(array(block.inner.qkv.split(read)[-1]), "v")
    return values, functions, {}


def rotation(place: PathPlace) -> Callable[[Any], Any]:
    """Return the rotation to the position of a place."""
    trace, name, at = place.trace, place.mixer.name, place.row
    relation = trace.relation(name)

    def rotate(x: Any) -> Any:
        padded = torch.zeros(1, 1, trace.activations[f"{name}.q"].shape[2], len(x))
        padded[0, 0, at] = torch.tensor(x).float()
        return array(relation.scheme.rotate(padded, relation.rotation)[0, 0, at])

    return rotate


def head_norm(norm: nn.Module, index: int, count: int) -> Callable[[Any], Any]:
    def apply(x: Any) -> Any:
        if not isinstance(norm, HeadNorm):
            return array(norm(torch.tensor(x).float()))
        every = torch.zeros(1, count, 1, len(x))
        every[0, index, 0] = torch.tensor(x).float()
        return array(norm(every)[0, index, 0])

    return apply


def _latent(place: PathPlace, found: dict[str, Any]) -> Symbols:
    trace, name, head = place.trace, place.mixer.name, place.head
    attention, width = trace.attention(name), len(found["read"])
    assert isinstance(attention, LatentAttention)
    latent = attention.latent
    content = latent.parts[0]

    def cut(x: Any) -> Any:
        return x.reshape(*x.shape[:-1], latent.heads, -1)[..., head, :]

    down = [matrix(lambda x, i=i: latent.down.split(x)[i], width) for i in range(3)]
    values: dict[str, Any] = {"x": found["read"]}
    for symbol, (weight, bias) in zip(("a", "c", "r"), down, strict=True):
        values[f"W_{symbol}"], values[f"b_{symbol}"] = weight, bias
    functions: dict[str, Any] = {"R_t": rotation(place), "N": of_module(latent.norm)}
    weight, bias = down[0]
    if not isinstance(latent.query_up, nn.Identity):
        functions["N_a"] = of_module(latent.query_norm)
        weight, bias = matrix(latent.query_up, weight.shape[1])
    values |= {"W_q": cut(weight)[..., :content], "W_qr": cut(weight)[..., content:]}
    values |= {"b_q": cut(bias)[..., :content], "b_qr": cut(bias)[..., content:]}
    rank = down[1][0].shape[1]
    for i, symbol in enumerate("kv"):
        values[f"W_{symbol}"] = cut(matrix(lambda x, i=i: latent.up.split(x)[i], rank)[0])
    return values, functions, {}


def _scores(place: PathPlace, found: dict[str, Any]) -> Symbols:
    row = attention_row(place.trace, place.mixer.name, place.head, place.row)
    values = {"q": array(row.q), "k_s": array(row.keys)} | ({"bias_s": found["bias"]} if found["bias"] else {})
    return values, {}, {"s": len(row.keys)}


def _softmax(place: PathPlace, found: dict[str, Any]) -> Symbols:
    scores = [score for score in found["scores"] if score is not None]
    return {"score_s": scores, "n": len(scores)}, {}, {"s": len(scores)}


def _values(place: PathPlace, found: dict[str, Any]) -> Symbols:
    row = attention_row(place.trace, place.mixer.name, place.head, place.row)
    return {"w_s": array(row.weights), "v_s": array(row.values)}, {}, {"s": len(row.values)}


def _out(place: PathPlace, found: dict[str, Any]) -> Symbols:
    trace, name = place.trace, place.mixer.name
    layer = trace.attention(name)
    heads = trace.activations[f"{name}.heads"][0, :, place.row]
    weight, bias = matrix(layer.out, heads.numel())
    values = {"o_h": array(heads), "W_o_h": weight.reshape(layer.heads, -1, weight.shape[1]), "b": bias}
    values["W_o,h"] = values.pop("W_o_h")
    if layer.gate is not None:
        values["g_h"] = array(trace.activations[f"{name}.gate"][0, :, place.row])
    return values, {"N": of_module(place.mixer.sublayer.norm_branch)}, {"h": layer.heads}


def _add(place: PathPlace, found: dict[str, Any], part: str = "mixer") -> Symbols:
    values = {"x": found["before"] or 0} | {f"y_{i}": y for i, (_, y) in enumerate(found["added"], 1)}
    norm = place.block.norm_sum if isinstance(place.block, ParallelBlock) else _sublayer(place, part).norm_sum
    return values | {"y": found["added"][0][1]}, {"N": of_module(norm)}, {}


def _sublayer(place: PathPlace, part: str) -> Any:
    return place.mixer.sublayer if part == "mixer" else place.step(".feedforward").sublayer


def _feedforward(place: PathPlace, found: dict[str, Any]) -> Symbols:
    sublayer = _sublayer(place, "feedforward")
    inner, width, values = sublayer.inner, len(found["read"]), {"x": found["read"]}
    functions, sizes = {"N": of_module(sublayer.norm_branch)}, dict[str, int]()
    if isinstance(inner, ExpertMixture):
        weights = dict(found["router"])
        sizes["e"] = inner.up.count
        values["r_e"] = [weights.get(i, 0.0) for i in range(sizes["e"])]
        for layer, names in ((inner.up, ["gate", "up"][-len(inner.up.parts) :]), (inner.down, ["down"])):
            for symbol, weight in zip(names, layer.rows().split(layer.parts, dim=1), strict=True):
                values[f"W_{symbol},e"] = array(weight.mT)
            biases = [] if layer.bias is None else layer.bias.split(layer.parts, dim=1)
            values |= {f"b_{symbol},e": array(bias) for symbol, bias in zip(names, biases, strict=False)}
        if inner.shared_gate is not None:
            values["w"] = array(inner.shared_gate.weight[0])
        inner = inner.shared
    if inner is not None:
        layers = {"up": lambda x: inner.up(x)} if hasattr(inner, "up") else {}
        if not layers:
            layers = {"gate": lambda x: inner.gate_up.split(x)[0], "up": lambda x: inner.gate_up.split(x)[1]}
        for symbol, layer in layers.items():
            values[f"W_{symbol}"], values[f"b_{symbol}"] = matrix(layer, width)
        values["W_down"], values["b_down"] = matrix(inner.down, inner.down.in_features)
    return values, functions, sizes


def _pool(place: PathPlace, found: dict[str, Any]) -> Symbols:
    states = array(place.trace.activations[f"{last_side(place.trace.run)}.final"][0])
    return {"x_t": states, "x_1": states[0], "x_n": states[-1], "n": len(states)}, {}, {"t": len(states)}


def _logits(place: PathPlace, found: dict[str, Any]) -> Symbols:
    head, model = place.trace.run.model.head, place.trace.run.model
    values: dict[str, Any] = {"h": found["hidden"]}
    functions: dict[str, Any] = {}
    transform = getattr(head, "transform", nn.Identity())
    if not isinstance(transform, nn.Identity):
        inner = getattr(transform, "linear", transform)
        values["W_t"], values["b_t"] = matrix(inner, inner.in_features)
        functions["N"] = of_module(getattr(transform, "norm", nn.Identity()))
    if isinstance(head, EmbeddingHead):
        for i, layer in enumerate(head.layers, 1):
            values[f"W_{i}"], values[f"b_{i}"] = matrix(layer.linear, layer.linear.in_features)
        if not isinstance(head.project, nn.Identity):
            values["W_p"], _ = matrix(head.project, head.project.in_features)
        return values, functions, {}
    if isinstance(head, PooledHead):
        last = next(part for part in head.last.children() if isinstance(part, nn.Linear))
        table, bias = last.weight, last.bias
    elif hasattr(head, "linear"):
        table, bias = head.linear.weight, head.linear.bias
    else:
        table, bias = head.table, head.bias
        table = model.table(model.target or model.source) if table is None else table
    values["W_i"] = array(table)
    if bias is not None:
        values["b_i"] = array(bias)
    return values, functions, {"i": len(table)}


def _sample(place: PathPlace, found: dict[str, Any]) -> Symbols:
    values = array(values_at(place.trace, found["position"]))
    return {"logit_i": values, "T": 1.0}, {}, {"i": len(values)}


SYMBOLS: dict[str, Callable[[PathPlace, dict[str, Any]], Symbols]] = {
    "embed": _embed,
    "position": _position,
    "norm": _norm,
    "qkv": _qkv,
    "scores": _scores,
    "softmax": _softmax,
    "values": _values,
    "out": _out,
    "add": _add,
    "ff": _feedforward,
    "ffadd": lambda place, found: _add(place, found, "feedforward"),
    "final": _final,
    "pool": _pool,
    "logits": _logits,
    "sample": _sample,
}


def _shown_logits(place: PathPlace, found: dict[str, Any]) -> dict[str, Any]:
    if "result" in found:
        return {"z": found["read"], "y": found["result"]}
    values = array(values_at(place.trace, found["position"]))
    return {"z": found["read"], "logit_i": values} if found["row"] else {"y": found["read"]}


SHOWN: dict[str, Callable[[PathPlace, dict[str, Any]], dict[str, Any]]] = {
    "embed": lambda place, found: {"e": found["vector"]},
    "position": lambda place, found: {"x": found["result"]},
    "norm": lambda place, found: {"N": found["result"]},
    "qkv": lambda place, found: {role: found[role] for role in "qkv"},
    "scores": lambda place, found: {"score_s": found["scores"]},
    "softmax": lambda place, found: {
        "w_s": [w for w, score in zip(found["weights"], found["scores"], strict=True) if score is not None]
    },
    "values": lambda place, found: {"o": found["result"]},
    "out": lambda place, found: {"y": found["result"]},
    "add": lambda place, found: {"x": found["result"]},
    "ff": lambda place, found: {"y": found["result"]},
    "ffadd": lambda place, found: {"x": found["result"]},
    "final": lambda place, found: {"N": found["result"]},
    "pool": lambda place, found: {"h": found["result"]},
    "logits": _shown_logits,
    "sample": lambda place, found: {},
}

"""The answers of the views, as JSON: pure functions of a text that was read (`seen.py`) and of what is asked about it.

Requests are in `asked.py`; about a text each has run, text, target, off and step. What is answered:

    runs     [{name, folder, shape, task, parameters, vocab, limit, writes, tokens, says, pair, example,
             example_target, kinds: {kind: {layers, heads}}, live, step}]                            (`opened.py`)
    read     tokens by stack, notes, begins (how many stand before the answer), at (the token that is looked at
             first), answer, probabilities; of a tagger tags, of an embedder vector                   (`answer.py`)
    write    NDJSON, a line for each token: text, token, p, top, cache; the last: done, text        (`writing.py`)
    heads    of one layer: rows, columns, heads; of each head its links [query, key, weight], the strongest key of each
             query, name, entropy, distance
    model    of all layers of a kind: layers, sizes, maps {layer.head: base64 of bytes, 48 × 48 at most}, names
    matrix   of one head: rows, columns, shape, what, normalizer, position (its kind), values (base64 of float32)
    neuron   of a query and a key: q, k, product, dot, scale, cap, bias, sink, score, weight, visible, normalizer, row
    next     at one place: at, token, actual, logits [[token, logit]], rest {count, temperatures, lse} of all other
             tokens, lens [{layer, top, entropy}]; layer -1 is the embeddings
    block    width, stacks, input, head, length, source_length, total: parts with parameters, flops (`diagram.py`)
    cache    steps, kinds {self, cross: bytes}, now, limit, capacity, layers                        (`diagram.py`)
    live     rows, count, checkpoints, live                                                         (`live.py`)
    everything  the answers of all views of a text, by request, for a page that is saved              (`show.py`)

Numbers that have no meaning are null. Tokens are as `tokenizer.token` shows them: plain text, nothing without a shape.
Rows of maps are queries; in "bias" and "scores" a hidden cell is -1e30. What is wrong is {error: one line}.
"""

import math
from base64 import b64encode
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.layout import make_layout
from anyformer.config import ConfigError, Fault
from anyformer.explore.requests import AboutKind, AboutLayer, AboutMatrix, AboutNext, AboutPair
from anyformer.explore.trace import Trace, last_side, place, says_tokens
from anyformer.inspection.head_patterns import HeadStatistics, head_statistics
from anyformer.inspection.sublayers import stacks_of
from anyformer.nn.norm import normed

LINKS, LEAST = 6, 0.01  # of a query at most so many links, of at least this weight
SMALL = 48  # queries and keys of a small map
LIKELIEST, LENS = 200, 5  # tokens that are named
TEMPERATURES = tuple(round(0.05 * n, 2) for n in range(1, 61))
HIDDEN = -1e30


def heads(seen: Trace, asked: AboutLayer) -> dict[str, Any]:
    name = seen.name(asked.kind, asked.layer)
    weights, (rows, columns) = seen.weights(name), seen.labels(name)
    found = _statistics(seen, name, weights)
    (called,) = found.names()
    return {
        "rows": rows,
        "columns": columns,
        "heads": list(range(len(weights))),
        "links": [_links(one) for one in weights],
        "strongest": weights.argmax(dim=-1).tolist(),
        "names": called,
        "entropy": [_number(x) for x in found.entropy[0]],
        "distance": [_number(x) for x in found.distance[0]],
    }


def model(seen: Trace, asked: AboutKind) -> dict[str, Any]:
    layers = seen.attentions.get(asked.kind) or {0: seen.name(asked.kind, 0)}  # which says what is wrong
    sizes, maps, names = {}, {}, {}
    for layer, name in layers.items():
        weights = seen.weights(name)
        size = min(weights.shape[1], SMALL), min(weights.shape[2], SMALL)
        small = F.adaptive_max_pool2d(weights[None], size)[0]  # the greatest: a thin diagonal stays to be seen
        (called,) = _statistics(seen, name, weights).names()
        sizes[str(layer)] = list(size)
        for head, one in enumerate((small.clamp(0, 1) * 255).round().to(torch.uint8)):
            maps[f"{layer}.{head}"] = _base64(one)
            names[f"{layer}.{head}"] = called[head]
    return {"layers": list(layers), "sizes": sizes, "maps": maps, "names": names}


def matrix(seen: Trace, asked: AboutMatrix) -> dict[str, Any]:
    name = seen.name(asked.kind, asked.layer, asked.head)
    rows, columns = seen.labels(name)
    values: Tensor | None
    match asked.what:
        case "weights":
            values = seen.weights(name)[asked.head]
        case "mask":
            values = seen.visible(name).float()
        case "bias":
            bias = seen.bias(name)
            values = None if bias is None else bias[asked.head].clamp(min=HIDDEN)
        case "scores":
            values = seen.scores(name)[asked.head].clamp(min=HIDDEN)
    return {
        "rows": rows,
        "columns": columns,
        "shape": [len(rows), len(columns)],
        "what": asked.what,
        "normalizer": seen.attention(name).normalizer,
        "position": seen.position(name),
        "values": None if values is None else _base64(values.float()),
    }


def neuron(seen: Trace, asked: AboutPair) -> dict[str, Any]:
    name = seen.name(asked.kind, asked.layer, asked.head)
    attention, (rows, columns) = seen.attention(name), seen.labels(name)
    for end, labels in (("query", rows), ("key", columns)):
        if (at := getattr(asked, end)) >= len(labels):
            raise ConfigError([Fault(end, f"= {at}: there are {len(labels)} of them, from 0")])
    q = seen.activations[f"{name}.q"][0, asked.head, asked.query].float().cpu()
    k = seen.keys(name)[asked.head, asked.key].float().cpu()
    bias, at = seen.bias(name), (asked.head, asked.query, asked.key)
    product = q * k
    row = seen.weights(name)[asked.head, asked.query]
    return {
        "q": q.tolist(),
        "k": k.tolist(),
        "product": product.tolist(),
        "dot": float(product.sum()),
        "scale": attention.scale,
        "cap": attention.cap,
        "bias": None if bias is None else _number(bias[at]),
        "sink": None if attention.sinks is None else float(attention.sinks[asked.head].detach()),
        "score": _number(seen.scores(name)[at]),
        "weight": float(row[asked.key]),
        "visible": bool(seen.visible(name)[asked.query, asked.key]),
        "normalizer": attention.normalizer,
        "row": row.tolist(),
    }


@torch.no_grad()
def next_(seen: Trace, asked: AboutNext) -> dict[str, Any]:
    run, side = seen.run, last_side(seen.run)
    if not says_tokens(run):
        raise ConfigError([Fault("run", f"its model says {run.config.head.kind}, not how likely tokens are")])
    if asked.kind not in (None, side):
        raise ConfigError([Fault("kind", f"= '{asked.kind}': tokens are said by the {side}")])
    tokens = seen.reading.tokens[side]
    if not -len(tokens) <= asked.at < len(tokens):
        raise ConfigError([Fault("at", f"= {asked.at}: there are {len(tokens)} tokens, from 0")])
    at = place(seen) if asked.at == -1 else asked.at % len(tokens)
    layers, depth = logits_by_layer(seen, at), run.config.stacks[side].depth
    best = layers[-1].topk(min(LIKELIEST, layers.shape[-1]))
    others = layers[-1].scatter(0, best.indices, -torch.inf)
    others = others[others > -torch.inf]
    rest = {
        "count": len(others),
        "temperatures": TEMPERATURES,
        "lse": [float((others.double() / t).logsumexp(0)) for t in TEMPERATURES],
    }
    follows = tokens[at + 1] if at + 1 < len(tokens) and side == "decoder" else None
    return {
        "at": at,
        "token": tokens[at],
        "actual": follows,
        "logits": _named(seen, best.indices, best.values),
        "rest": rest if len(others) else None,
        "lens": [_lens(seen, layer, logits) for layer, logits in enumerate(layers, depth - len(layers))],
    }


def logits_by_layer(seen: Trace, at: int) -> Tensor:
    """What the final norm and the head make of the embeddings and of the stream after each layer, at one place.

    [1 + layers, v]: those of `logit_lens`, of which a long text has too many to make at once; [1, v] of an encoder that
    pools its tokens.
    """
    model, side = seen.run.model, last_side(seen.run)
    stack = stacks_of(model)[side]
    names = [f"{side}.embed", *(f"{side}.{i}.out" for i in range(len(stack.runs) - 1))]
    if stack.pooling is not None:
        names = []  # there is no stream of tokens to look through
    streams = [seen.activations[name][:, at : at + 1] for name in names]
    layout = make_layout(1, 1, seen.activations[f"{side}.final"].device)
    read = [*(normed(stack.final_norm, x, layout) for x in streams), seen.activations[f"{side}.final"][:, at : at + 1]]
    return torch.cat([model.apply_head(x, layout)[:, 0] for x in read]).float().cpu()


# -- small steps ------------------------------------------------------------------------------------------------------


def _statistics(seen: Trace, name: str, weights: Tensor) -> HeadStatistics:
    cross, ids = name.endswith("cross"), seen.reading.inputs[0 if name.startswith("encoder") else -1].cpu()
    same = None if cross or weights.shape[-1] != ids.shape[1] else ids
    return head_statistics(weights[None, None], same, cross=cross)


def _links(weights: Tensor) -> list[list[float]]:
    """[query, key, weight] of a map [t, s], the strongest first."""
    best = weights.topk(min(LINKS, weights.shape[1]))
    queries = torch.arange(len(weights))[:, None].expand_as(best.indices)
    strong = best.values >= LEAST
    order = best.values[strong].argsort(descending=True, stable=True)
    columns = queries[strong][order], best.indices[strong][order], best.values[strong][order]
    queries_, keys, values = (column.tolist() for column in columns)
    return [[query, key, round(value, 4)] for query, key, value in zip(queries_, keys, values, strict=True)]


def _lens(seen: Trace, layer: int, logits: Tensor) -> dict[str, Any]:
    p = logits.softmax(dim=-1)
    best = p.topk(min(LENS, len(p)))
    return {
        "layer": layer,
        "top": _named(seen, best.indices, best.values),
        "entropy": float(torch.special.entr(p).sum()),
    }


def _named(seen: Trace, ids: Tensor, values: Tensor) -> list[list[Any]]:
    token = seen.run.tokenizer.token
    return [[token(id), _number(value)] for id, value in zip(ids.tolist(), values, strict=True)]


def _number(x: Tensor) -> float | None:
    return float(x) if math.isfinite(float(x)) else None


def _base64(x: Tensor) -> str:
    return b64encode(x.contiguous().numpy().astype("<f4" if x.is_floating_point() else "u1").tobytes()).decode()

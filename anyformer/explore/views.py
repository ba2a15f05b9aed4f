"""Views of attention and logits as JSON: pure functions of a trace (`trace.py`) and a request (`requests.py`).

Every request about a text has run, text, target, off and step. The answers of all views:

    runs     [{name, folder, shape, task, parameters, vocab, limit, writes, tokens, says, probabilities, pair, media,
             example, example_target, kinds: {kind: {layers, heads}}, live, step, steps, result}]     (`open_runs.py`)
    read     tokens by stack, notes, begins (number of tokens before the answer), at (initial position)
                                                                                                    (`prediction.py`);
             pictures by stack: [{kind, start, grid, size, channels, pixels}]                          (`pictures.py`)
    answer   answer, probabilities; for a tagger tags, for an embedder vector                        (`prediction.py`)
    write    NDJSON, a line for each token: text, token, p, top, cache; the last: done, text  (`generation_stream.py`)
    heads    of one layer: rows, columns, heads; for each head links [query, key, weight], the strongest key of each
             query and its weight (`highest`), name, entropy, distance
    model    of all layers of a kind: layers, sizes, maps {layer.head: base64 of bytes, 48 × 48 at most}, peaks (the
             largest weight of each map, 255 in its bytes), names
    matrix   of one head: rows, columns, shape, what, normalizer, position (its kind), values (base64 of float32)
    neuron   of a query and a key: q, k, product, dot, scale, root (the width k, where scale is 1/√k), cap, bias,
             sink, score, weight, visible, normalizer, row, position (its kind)
    rotation of a query and a key with rotary positions: pairs of q and k before and after, scores by distance
             (`rotation.py`)
    next     at one position: at, token, actual, logits [[token, logit]], ids, rest {count, temperatures, lse} of all
             other tokens, lens [{layer, top, entropy}]; layer -1 is the embeddings
    block    width, stacks, input, head, length, source_length, total: parts with parameters, flops (`diagram.py`)
    cache    steps, kinds {self, cross: bytes}, now, limit, capacity, layers                        (`diagram.py`)
    path     sides [{side, begin, layers, end, heads}], head, follow, last, says: stages by name  (`path_outline.py`)
    stage    the numbers of one stage, with token, position and check                            (`path_stages.py`)
    follow   the terms of one number: value, terms, total, ...                                        (`follow.py`)
    lens     layers, first, count, columns, rows: for each layer [token, probability, id] of each position   (`lens.py`)
    cell     of one layer and position: token, top [[token, probability]], entropy                           (`lens.py`)
    surprise tokens, rows {logp, rank, best, best_p}, count, mean, perplexity                            (`surprise.py`)
    salience at, output, outputs, value, baseline, total, sides {stack: number of each token}            (`salience.py`)
    scores   heads {decoder.0.3: {name, previous, entropy, ...}}                                      (`head_values.py`)
    effects  heads {decoder.0.3: change}, at, output, of (logp, value)                                (`head_values.py`)
    patch    fits, a, b, at, side, positions, layers, cells [effect, p of a, p of b, top]                   (`patch.py`)
    ablated  at, rows [[name, before, after]], top, moved, logp: with heads off, beside all heads on      (`ablated.py`)
    live     rows, count, checkpoints, live                                                         (`live_run.py`)
    lessons  [{name, title, text, answer, steps, places, why}]: `why` a run does not fit                 (`lessons.py`)
    lesson   of one question: output, before, candidates [{name, p, change}], right [index]              (`lessons.py`)
    gif      a GIF of pictures that the page has drawn                                                  (`film.py`)
    everything  the answers of all views of a text, by request, for a saved page                      (`show.py`)

Undefined numbers are null. Tokens are plain text, as `tokenizer.token` returns them, without invisible characters.
Rows of maps are queries; in "bias" and "scores" a masked cell is -1e30. Errors are {error: one line}.
"""

import math
from base64 import b64encode
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from anyformer.attention.layout import make_layout
from anyformer.config import ConfigError, Fault, Side
from anyformer.explore.formulas import is_inverse_root
from anyformer.explore.requests import KindRequest, LayerRequest, MatrixRequest, NeuronRequest, NextRequest
from anyformer.explore.trace import Trace, initial_position, last_side, predicts_tokens
from anyformer.nn.inspection.head_patterns import HeadStatistics, head_statistics
from anyformer.nn.inspection.sublayers import stacks_of
from anyformer.nn.norm import normed

MAX_LINKS, MIN_WEIGHT = 6, 0.01  # of a query
MAX_MAP_SIDE = 48  # queries and keys of a small map
TOP_LOGITS, TOP_LENS = 200, 5  # most probable tokens of the output, and of each layer
TEMPERATURES = tuple(round(0.05 * n, 2) for n in range(1, 61))
HIDDEN = -1e30


def heads(trace: Trace, request: LayerRequest) -> dict[str, Any]:
    name = trace.name(request.kind, request.layer)
    weights, (rows, columns) = trace.weights(name), trace.labels(name)
    statistics = statistics_of(trace, name, weights)
    (names,) = statistics.names()
    return {
        "rows": rows,
        "columns": columns,
        "heads": list(range(len(weights))),
        "links": [_links(head) for head in weights],
        "strongest": weights.argmax(dim=-1).tolist(),
        "highest": [[round(x, 6) for x in head] for head in weights.amax(dim=-1).tolist()],
        "names": names,
        "entropy": [finite(x) for x in statistics.entropy[0]],
        "distance": [finite(x) for x in statistics.distance[0]],
    }


def model(trace: Trace, request: KindRequest) -> dict[str, Any]:
    layers = trace.attentions.get(request.kind) or {0: trace.name(request.kind, 0)}  # which raises
    sizes, maps, peaks, names = {}, {}, {}, {}
    for layer, name in layers.items():
        weights = trace.weights(name)
        size = min(weights.shape[1], MAX_MAP_SIDE), min(weights.shape[2], MAX_MAP_SIDE)
        small = F.adaptive_max_pool2d(weights[None], size)[0]  # the maximum keeps thin diagonals visible
        (patterns,) = statistics_of(trace, name, weights).names()
        sizes[str(layer)] = list(size)
        for head, small_map in enumerate(small):
            peak = float(small_map.max())
            scaled = small_map / peak if peak > 0 else small_map
            maps[f"{layer}.{head}"] = _base64((scaled.clamp(0, 1) * 255).round().to(torch.uint8))
            peaks[f"{layer}.{head}"] = peak
            names[f"{layer}.{head}"] = patterns[head]
    return {"layers": list(layers), "sizes": sizes, "maps": maps, "peaks": peaks, "names": names}


def matrix(trace: Trace, request: MatrixRequest) -> dict[str, Any]:
    name = trace.name(request.kind, request.layer, request.head)
    rows, columns = trace.labels(name)
    values: Tensor | None
    match request.what:
        case "weights":
            values = trace.weights(name)[request.head]
        case "mask":
            values = trace.visible(name).float()
        case "bias":
            bias = trace.bias(name)
            values = None if bias is None else bias[request.head].clamp(min=HIDDEN)
        case "scores":
            values = trace.scores(name)[request.head].clamp(min=HIDDEN)
    return {
        "rows": rows,
        "columns": columns,
        "shape": [len(rows), len(columns)],
        "what": request.what,
        "normalizer": trace.attention(name).normalizer,
        "position": trace.position(name),
        "values": None if values is None else _base64(values.float()),
    }


def neuron(trace: Trace, request: NeuronRequest) -> dict[str, Any]:
    name = trace.name(request.kind, request.layer, request.head)
    check_pair(trace, name, request)
    attention = trace.attention(name)
    q = trace.activations[f"{name}.q"][0, request.head, request.query].float().cpu()
    k = trace.keys(name)[request.head, request.key].float().cpu()
    bias, at = trace.bias(name), (request.head, request.query, request.key)
    product = q * k
    row = trace.weights(name)[request.head, request.query]
    return {
        "q": q.tolist(),
        "k": k.tolist(),
        "product": product.tolist(),
        "dot": float(product.sum()),
        "scale": attention.scale,
        "root": len(q) if is_inverse_root(attention.scale, len(q)) else None,
        "cap": attention.cap,
        "bias": None if bias is None else finite(bias[at]),
        "sink": None if attention.sinks is None else float(attention.sinks[request.head].detach()),
        "score": finite(trace.scores(name)[at]),
        "weight": float(row[request.key]),
        "visible": bool(trace.visible(name)[request.query, request.key]),
        "normalizer": attention.normalizer,
        "position": trace.position(name),
        "row": row.tolist(),
    }


def check_pair(trace: Trace, name: str, request: NeuronRequest) -> None:
    """Raise if an attention layer has no such query or key."""
    for end, labels in zip(("query", "key"), trace.labels(name), strict=True):
        if (at := getattr(request, end)) >= len(labels):
            raise ConfigError([Fault(end, f"= {at}: there are {len(labels)} of them, from 0")])


@torch.no_grad()
def next_(trace: Trace, request: NextRequest) -> dict[str, Any]:
    run, side = trace.run, last_side(trace.run)
    if not predicts_tokens(run):
        raise ConfigError([Fault("run", f"its head {run.config.head.kind} does not predict tokens")])
    if request.kind not in (None, side):
        raise ConfigError([Fault("kind", f"= '{request.kind}': the {side} predicts tokens")])
    tokens = trace.reading.tokens[side]
    if not -len(tokens) <= request.at < len(tokens):
        raise ConfigError([Fault("at", f"= {request.at}: there are {len(tokens)} tokens, from 0")])
    at = initial_position(trace) if request.at == -1 else request.at % len(tokens)
    layers, depth = logits_by_layer(trace, at), run.config.stacks[side].depth
    best = layers[-1].topk(min(TOP_LOGITS, layers.shape[-1]))
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
        "logits": _token_values(trace, best.indices, best.values),
        "ids": best.indices.tolist(),
        "rest": rest if len(others) else None,
        "lens": [_lens(trace, layer, logits) for layer, logits in enumerate(layers, depth - len(layers))],
    }


def logits_by_layer(trace: Trace, at: int) -> Tensor:
    """Return the logit lens at one position, [1 + layers, v]; for an encoder that pools tokens only the last, [1, v].

    Equals `logit_lens`, whose result for all positions of a long text would be too large.
    """
    model, side = trace.run.model, last_side(trace.run)
    stack = stacks_of(model)[side]
    names = [f"{side}.embed", *(f"{side}.{i}.out" for i in range(len(stack.runs) - 1))]
    if stack.pooling is not None:
        names = []  # layers have different numbers of tokens
    streams = [trace.activations[name][:, at : at + 1] for name in names]
    layout = make_layout(1, 1, trace.activations[f"{side}.final"].device)
    read = [*(normed(stack.final_norm, x, layout) for x in streams), trace.activations[f"{side}.final"][:, at : at + 1]]
    return torch.cat([model.apply_head(x, layout)[:, 0] for x in read]).float().cpu()


# -- helpers ----------------------------------------------------------------------------------------------------------


def statistics_of(trace: Trace, name: str, weights: Tensor) -> HeadStatistics:
    """Return the statistics of the heads of one attention layer."""
    cross, side = name.endswith("cross"), cast(Side, name.split(".")[0])
    ids = trace.reading.distinct_ids(side)
    same = None if cross or weights.shape[-1] != ids.shape[1] else ids
    return head_statistics(weights[None, None], same, cross=cross)


def _links(weights: Tensor) -> list[list[float]]:
    """Return [query, key, weight] of a map [t, s], in descending order of weight."""
    best = weights.topk(min(MAX_LINKS, weights.shape[1]))
    queries = torch.arange(len(weights))[:, None].expand_as(best.indices)
    strong = best.values >= MIN_WEIGHT
    order = best.values[strong].argsort(descending=True, stable=True)
    columns = queries[strong][order], best.indices[strong][order], best.values[strong][order]
    queries_, keys, values = (column.tolist() for column in columns)
    return [[query, key, round(value, 4)] for query, key, value in zip(queries_, keys, values, strict=True)]


def _lens(trace: Trace, layer: int, logits: Tensor) -> dict[str, Any]:
    p = logits.softmax(dim=-1)
    best = p.topk(min(TOP_LENS, len(p)))
    return {
        "layer": layer,
        "top": _token_values(trace, best.indices, best.values),
        "entropy": float(torch.special.entr(p).sum()),
    }


def _token_values(trace: Trace, ids: Tensor, values: Tensor) -> list[list[Any]]:
    token = trace.run.tokenizer.token
    return [[token(id), finite(value)] for id, value in zip(ids.tolist(), values, strict=True)]


def finite(x: Tensor) -> float | None:
    """Return a number, or None for NaN and infinity, which JSON does not have."""
    return float(x) if math.isfinite(float(x)) else None


def _base64(x: Tensor) -> str:
    return b64encode(x.contiguous().numpy().astype("<f4" if x.is_floating_point() else "u1").tobytes()).decode()

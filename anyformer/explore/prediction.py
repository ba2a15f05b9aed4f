"""The tokens of a text, and the run's prediction for it: a label, a number, tags, a vector or a text."""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch

from anyformer.config import ConfigError
from anyformer.data.media import Segment
from anyformer.explore.outputs import probabilities_of, values_at
from anyformer.explore.requests import TextRequest
from anyformer.explore.trace import Trace, initial_position, last_side, parse_heads
from anyformer.explore.view import SavedText, TextView
from anyformer.nn.inspection.ablation import disable_heads

TOP_LABELS = 5  # of a word


class ReadView(TextView):
    """Tokens of a text, which need no forward pass; a model that generates a text has done so before."""

    kind: Literal["read"] = "read"

    def answer(self, trace: Trace, request: TextRequest) -> dict[str, Any]:
        reading = trace.reading
        return {
            "tokens": reading.tokens,
            "pictures": {side: list(pictures(found)) for side, found in reading.segments.items()},
            "notes": list(reading.notes),
            "begins": reading.begins,
            "at": initial_position(trace),
        }


class AnswerView(TextView):
    """The prediction for a text."""

    kind: Literal["answer"] = "answer"

    def answer(self, trace: Trace, request: TextRequest) -> dict[str, Any]:
        return {
            "answer": answer_text(trace, request),
            "probabilities": probabilities(trace),
            "tags": tags(trace),
            "vector": vector(trace),
        }

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield {}
        if saved.body["off"]:
            yield {"off": []}  # the prediction with all heads


def answer_text(trace: Trace, request: TextRequest) -> str:
    """Return the prediction as text; for a model that generates, the generated tokens.

    It is `run.predict`'s, from the trace where one forward pass has all of it. A vector is described by its size. A
    text without a mask has no prediction.
    """
    run, reading = trace.run, trace.reading
    if reading.begins is not None:
        return run.tokenizer.decode(reading.inputs[-1][0, reading.begins :].tolist())
    task: Any = run.task
    match run.spec.serves(run.config.head):
        case "classify" | "number" if not getattr(run.spec, "apart", False):
            return str(task.format_prediction(trace.output[0].float().cpu()))
        case "tag":
            tabs = run.spec.reads_words and "\t" in reading.text
            return ("\t" if tabs else " ").join(one["label"] for one in tags(trace) or [])
        case "fill_mask":
            return _filled(trace)
        case "embed":
            return f"{len(vector(trace) or [])} numbers"
        case _:  # such as two texts, each with another pass
            return _predicted(trace, request)


def _filled(trace: Trace) -> str:
    """Return the text with the most probable token in place of each mask."""
    task: Any = trace.run.task
    row, mask = task.masked(trace.reading.text), trace.run.tokenizer.mask
    if mask not in row:
        return ""
    ids = [int(values_at(trace, at).argmax()) if id == mask else id for at, id in enumerate(row)]
    return trace.run.tokenizer.decode(ids[len(task.frame.before) : len(ids) - len(task.frame.after)])


def _predicted(trace: Trace, request: TextRequest) -> str:
    """Return the prediction of further passes, or "" if the text has none."""
    run = trace.run
    try:
        with disable_heads(run.model, parse_heads(run.model, request.off)):
            (found,) = run.predict([trace.reading.text])
    except ConfigError:
        return ""
    return found


def tags(trace: Trace) -> list[dict[str, Any]] | None:
    """Return each word with the token at which it begins, its label, and its most probable labels.

    A CRF chooses the labels of a sentence together: there the probabilities are None. None for other heads.
    """
    run, names = trace.run, trace.reading.tokens[last_side(trace.run)]
    if run.spec.serves(run.config.head) != "tag":
        return None
    task: Any = run.task
    labels, piece = run.spec.label_names or (), task.read(trace.reading.text, run.config)
    places, words = task.words(trace.reading.text, piece)
    if not run.spec.reads_words:
        words = [names[at] for at in places]
    if trace.output.dim() == 4:
        (best,) = task.best(trace.output.float().cpu(), torch.tensor([piece.labels]))
        shares: list[Any] = [None] * len(places)
    else:
        logits = trace.output[0, places].float().cpu()
        best = [labels[i] for i in logits.argmax(dim=-1).tolist()]
        p = logits.softmax(dim=-1)
        top = p.topk(min(TOP_LABELS, len(labels)))
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        shares = [[(labels[i], x) for i, x in zip(*row, strict=True)] for row in rows]
    columns = zip(places, words, best, shares, strict=True)
    return [{"at": at, "word": word, "label": label, "probabilities": share} for at, word, label, share in columns]


def vector(trace: Trace) -> list[float] | None:
    """Return the vector of a text, to six digits; None for other heads."""
    match trace.run.config.head.output:
        case "embedder":
            values = trace.output[0]
        case "none":
            values = trace.output[0].mean(dim=0)
        case _:
            return None
    return [float(f"{x:.6g}") for x in values.float().cpu().tolist()]


def probabilities(trace: Trace) -> list[tuple[str, float]] | None:
    """Return the probability of each label in descending order; None for other heads."""
    run = trace.run
    if run.spec.serves(run.config.head) != "classify":
        return None
    p = probabilities_of(trace, trace.output[0].float().cpu())
    return sorted(zip(run.spec.label_names or (), p.tolist(), strict=True), key=lambda pair: -pair[1])


def pictures(segments: Sequence[Segment]) -> Iterator[dict[str, Any]]:
    """Yield each image and sound: kind, start, grid (rows and columns of places), size (height and width), channels,
    and pixels, base64 of bytes row by row. A sound has one row of places; its low bands are at the bottom."""
    for one in segments:
        match one.kind:
            case "image":
                pixels = one.value.transpose(1, 2, 0)
            case "audio":
                pixels = _grey(one.value.T[::-1])[:, :, None]
            case "features":
                continue
        height, width, channels = pixels.shape
        yield {
            "kind": one.kind,
            "start": one.start,
            "grid": list(one.grid),
            "size": [height, width],
            "channels": channels,
            "pixels": b64encode(np.ascontiguousarray(pixels).tobytes()).decode(),
        }


def _grey(values: np.ndarray) -> np.ndarray:
    """Return values as bytes, from the lowest to the highest."""
    low, high = float(values.min()), float(values.max())
    scaled: np.ndarray = ((values - low) / (high - low or 1.0) * 255).round().astype(np.uint8)
    return scaled

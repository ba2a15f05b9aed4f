"""What a run says of a text: a label, a number, tags, a text."""

import json
from typing import Any

import torch

from anyformer.config import Classifier, ConfigError, Embedder, NoHead, TokenLabels
from anyformer.explore.head_switches import named, switched_off
from anyformer.explore.requests import AboutText
from anyformer.explore.trace import Trace, last_side, place
from anyformer.run import Run
from anyformer.tasks.classify import Classifying
from anyformer.tasks.imported_encoder import Encoding
from anyformer.tasks.regress import Regressing
from anyformer.tasks.tag import Tagging, split

LABELS = 5  # of a word that are named


def read(seen: Trace, asked: AboutText) -> dict[str, Any]:
    """The view `read`."""
    found, begins = seen.reading, seen.reading.begins
    return {
        "tokens": found.tokens,
        "notes": list(found.notes),
        "begins": begins,
        "at": place(seen),
        "answer": said(seen, asked),
        "probabilities": probabilities(seen),
        "tags": tags(seen),
        "vector": vector(seen),
    }


def said(seen: Trace, asked: AboutText) -> str:
    """The answer as text; of a model that writes, the part of the tokens that is its answer."""
    run, reading = seen.run, seen.reading
    if reading.begins is not None:
        return run.tokenizer.decode(reading.inputs[-1][0, reading.begins :].tolist())
    match run.task:
        case Classifying() | Regressing() if not run.task.apart:
            return run.task.said(seen.output[0].float().cpu())
        case _:
            return _predicted(run, reading.text, asked)


def _predicted(run: Run, text: str, asked: AboutText) -> str:
    """Nothing where there is nothing to say, as of a text without a mask."""
    try:
        with switched_off(run.model, named(run.model, asked.off)):
            (answer,) = run.predict([text])
    except ConfigError:
        return ""
    try:
        numbers = json.loads(answer)
    except ValueError:
        return answer
    return f"{len(numbers)} numbers" if isinstance(numbers, list) else answer


def tags(seen: Trace) -> list[dict[str, Any]] | None:
    """Return each word with the token at which it begins, its label, and its most probable labels.

    A CRF chooses the labels of a sentence together: there the probabilities are None. None for other heads.
    """
    run, names = seen.run, seen.reading.tokens[last_side(seen.run)]
    match run.task:
        case Tagging():
            piece = run.task.read(seen.reading.text, run.config)
            places, words, labels = run.task.first_tokens(piece), split(seen.reading.text), run.task.spec.labels
            (best,) = run.task.best(seen.output.float().cpu(), torch.tensor([piece.labels]))
        case Encoding() if isinstance(run.config.head, TokenLabels) and not run.config.head.crf:
            places = list(range(len(run.task.before), len(names) - len(run.task.after)))
            words, labels = [names[at] for at in places], run.task.spec.labels
            best = [labels[i] for i in seen.output[0, places].argmax(-1).tolist()]
        case _:
            return None
    if seen.output.dim() == 4:
        shares: list[Any] = [None] * len(places)
    else:
        p = seen.output[0, places].float().cpu().softmax(dim=-1)
        top = p.topk(min(LABELS, len(labels)))
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        shares = [[(labels[i], x) for i, x in zip(*row, strict=True)] for row in rows]
    found = zip(places, words, best, shares, strict=True)
    return [{"at": at, "word": word, "label": label, "probabilities": share} for at, word, label, share in found]


def vector(seen: Trace) -> list[float] | None:
    """Return the vector of a text, to six digits; None where the run answers in another form."""
    match seen.run.config.head:
        case Embedder():
            found = seen.output[0]
        case NoHead():
            found = seen.output[0].mean(dim=0)
        case _:
            return None
    return [float(f"{x:.6g}") for x in found.float().cpu().tolist()]


def probabilities(seen: Trace) -> list[tuple[str, float]] | None:
    """Of each label, the likeliest first; None where labels are not what is said."""
    run = seen.run
    match run.task:
        case Classifying():
            labels, several = run.task.spec.labels, run.task.spec.separator is not None
        case Encoding() if isinstance(run.config.head, Classifier):
            labels, several = run.task.spec.labels, False
        case _:
            return None
    logits = seen.output[0].float().cpu()
    p = torch.sigmoid(logits) if several else logits.softmax(dim=-1)
    return sorted(zip(labels, p.tolist(), strict=True), key=lambda pair: -pair[1])

"""What a run says of a text: a label, a number, tags, a text."""

import json
from typing import Any

import torch

from anyformer.config import Classifier, ConfigError
from anyformer.explore.asked import AboutText
from anyformer.explore.seen import Seen, place
from anyformer.explore.switches import named, switched_off
from anyformer.run import Run
from anyformer.tasks.classify import Classifying
from anyformer.tasks.encoder import Encoding
from anyformer.tasks.regress import Regressing


def read(seen: Seen, asked: AboutText) -> dict[str, Any]:
    """The view `read`."""
    found, begins = seen.reading, seen.reading.begins
    return {
        "tokens": found.tokens,
        "notes": list(found.notes),
        "begins": begins,
        "at": place(seen),
        "answer": said(seen, asked),
        "probabilities": probabilities(seen),
    }


def said(seen: Seen, asked: AboutText) -> str:
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


def probabilities(seen: Seen) -> list[tuple[str, float]] | None:
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

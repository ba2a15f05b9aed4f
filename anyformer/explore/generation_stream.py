"""An answer that appears token by token, with what else could have been said and the cache as it fills."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from anyformer.config import ConfigError, Fault
from anyformer.conventions import SEEN
from anyformer.decoding.generate import seeds_of
from anyformer.decoding.logit_processors import Sampling, build, process
from anyformer.decoding.sampling import greedy, sample
from anyformer.decoding.session import Session, evaluating
from anyformer.explore.head_switches import named, switched_off
from anyformer.explore.requests import ToWrite
from anyformer.inspection.cache_growth import used_bytes
from anyformer.run import Run
from anyformer.tasks.generation import GenerationRequest, Writer
from anyformer.tasks.lm import LanguageModelling
from anyformer.tasks.seq2seq import SequenceToSequence
from anyformer.tasks.span_corruption import SpanCorrupting

TOP = 10
AT_MOST = 200  # tokens, where nobody says how many


def writer_of(run: Run) -> Writer | None:
    """The task, where its model writes."""
    return run.task if isinstance(run.task, LanguageModelling | SequenceToSequence | SpanCorrupting) else None


def write(run: Run, asked: ToWrite, text: str | None = None) -> Iterator[dict[str, Any]]:
    """What `run.generate` says to a text, or to as much of it as is read, a line for each token.

    Between two lines the model is as it was, with all its heads on.
    """
    task, model = writer_of(run), run.model
    if task is None:
        raise ConfigError([Fault("run", f"its task is {run.spec.kind}: its model does not write")])
    off = named(model, asked.off)
    options = {"temperature": asked.temperature, "max_new_tokens": asked.max_new_tokens}
    options |= {"top_k": asked.top_k or None, "top_p": None if asked.top_p == 1 else asked.top_p}
    options["seed"] = asked.seed if asked.temperature else None
    given = {name: value for name, value in options.items() if value is not None}
    if not asked.text.strip() and not isinstance(task, LanguageModelling):
        raise ConfigError([Fault("text", "is blank: it is answered by nothing")])
    whole = GenerationRequest.of(task, model, [asked.text if text is None else text], given)
    return _lines(run, whole, off) if whole.prompts[0] else iter([{"done": True, "text": ""}])


def _lines(run: Run, asked: GenerationRequest, off: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    model, token = run.model, run.tokenizer.token
    device, writing, way = next(model.parameters()).device, asked.writing(0), asked.way
    assert isinstance(way, Sampling)
    room = asked.rooms[0] if asked.rooms[0] <= AT_MOST else AT_MOST
    with _quiet(run, off):
        ids = torch.tensor(asked.prompts, device=device)
        marks = torch.full_like(ids, SEEN) if asked.task.marked else None
        session = Session(model, ids, room, marks=marks)
    vocab = session.logits.shape[-1]
    processors = build(way, vocab=vocab, stop=asked.stop_ids, device=device)
    seeds = None if way.temperature == 0 else asked.seeds
    if seeds is None and way.temperature:
        seeds = seeds_of(None, 1, device)
    for step in range(room):
        with _quiet(run, off):
            logits = process(processors, session.history, session.logits)
            choice = greedy(logits) if seeds is None else sample(logits, seeds.to(device), torch.full_like(seeds, step))
            if not bool(choice.ok):
                raise FloatingPointError("the model's logits are not finite")
            p = logits[0].softmax(dim=-1)
            best, id = p.topk(min(TOP, vocab)), int(choice.ids)
            used = used_bytes(session.cache)
            piece = writing.push([id])
            if not writing.ended and step + 1 < room:
                session.read(choice.ids[:, None])
        top = [[token(i), value] for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        yield {"text": piece, "token": token(id), "p": float(p[id]), "top": top, "cache": used}
        if writing.ended:
            break
    yield {"done": True, "text": writing.whole()}


def _quiet(run: Run, off: dict[str, list[int]]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(evaluating(run.model))
    stack.enter_context(switched_off(run.model, off))
    return stack

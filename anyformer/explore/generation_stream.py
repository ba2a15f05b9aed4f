"""View `write`: generation token by token, with the most probable alternatives and the size of the KV cache."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any, Literal

import torch

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import Number
from anyformer.explore.requests import StrictInt, TextRequest
from anyformer.explore.trace import parse_heads
from anyformer.explore.view import SavedText, View
from anyformer.generation.generate import seeds_of
from anyformer.generation.logit_processors import process
from anyformer.generation.sampling import choose
from anyformer.generation.session import Session
from anyformer.generation.strategy import Sampling
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.inspection.ablation import disable_heads
from anyformer.nn.inspection.cache_growth import used_bytes
from anyformer.runs.run import Run
from anyformer.tasks.base import Writer
from anyformer.tasks.generation import GenerationRequest

TOP_TOKENS = 10
MAX_NEW_TOKENS = 200
DEFAULTS = {"temperature": 1, "top_k": 0, "top_p": 1, "seed": 1, "max_new_tokens": 40}  # of the page


class WriteRequest(TextRequest):
    """A request for generation, with the options of `generation/logit_processors.py`."""

    temperature: Number = 0.0
    top_k: StrictInt | None = None
    top_p: Number | None = None
    seed: StrictInt | None = None
    max_new_tokens: StrictInt | None = None


class WriteView(View):
    """The text that a model writes, as a stream: a line for each token."""

    kind: Literal["write"] = "write"
    request = WriteRequest

    def respond(self, workspace: Any, request: WriteRequest) -> Iterator[dict[str, Any]]:
        with workspace.lock:
            run = workspace.run_of(request)
            text = workspace.trace(request).reading.text if request.text.strip() else None
            lines = write(run, request, text)

        def locked() -> Iterator[dict[str, Any]]:
            while True:
                with workspace.lock:  # other requests may run between two tokens
                    line = next(lines, None)
                if line is None:
                    return
                yield line

        return locked()

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        if saved.about["writes"]:
            yield DEFAULTS


def writer_of(run: Run) -> Writer | None:
    """Return the task if it generates text, else None."""
    return run.task if isinstance(run.task, Writer) else None


def write(run: Run, request: WriteRequest, text: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield the output of `run.generate` for a text, a line for each token; `text` replaces a text that was cut.

    Between two lines the model is unchanged, with all heads enabled.
    """
    task, model = writer_of(run), run.model
    if task is None:
        raise ConfigError([Fault("run", f"its task {run.spec.kind} does not generate text")])
    off = parse_heads(model, request.off)
    options = {"temperature": request.temperature, "max_new_tokens": request.max_new_tokens}
    options |= {"top_k": request.top_k or None, "top_p": None if request.top_p == 1 else request.top_p}
    options["seed"] = request.seed if request.temperature else None
    options = {name: value for name, value in options.items() if value is not None}
    if not request.text.strip() and not task.continues:
        raise ConfigError([Fault("text", "is blank: type a text")])
    generation = GenerationRequest.of(task, model, [request.text if text is None else text], options)
    return _lines(run, generation, off) if generation.prompts[0] else iter([{"done": True, "text": ""}])


def _lines(run: Run, request: GenerationRequest, off: dict[str, list[int]]) -> Iterator[dict[str, Any]]:
    model, token = run.model, run.tokenizer.token
    device, writing, sampling = next(model.parameters()).device, request.answer_text(0), request.strategy
    assert isinstance(sampling, Sampling)
    budget = min(request.budgets[0], MAX_NEW_TOKENS)
    with _evaluation_mode(run, off):
        asked = replace(request.request([0]), max_new_tokens=budget)
        session = Session(model, asked)
        processors = session.processors(asked)
    seeds = seeds_of(asked.seed, 1, device) if sampling.temperature else None
    for step in range(budget):
        with _evaluation_mode(run, off):
            logits = process(processors, session.history, session.logits)
            choice = choose(logits, seeds, torch.tensor([step], device=device))
            if not bool(choice.ok):
                raise FloatingPointError("the model's logits are not finite")
            p = logits[0].softmax(dim=-1)
            best, id = p.topk(min(TOP_TOKENS, len(p))), int(choice.ids)
            used = used_bytes(session.cache)
            piece = writing.push([id])
            if not writing.ended and step + 1 < budget:
                session.read(choice.ids[:, None])
        top = [[token(i), value] for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
        yield {"text": piece, "token": token(id), "p": float(p[id]), "top": top, "cache": used}
        if writing.ended:
            break
    yield {"done": True, "text": writing.whole()}


def _evaluation_mode(run: Run, off: dict[str, list[int]]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(evaluating(run.model))
    stack.enter_context(disable_heads(run.model, off))
    return stack

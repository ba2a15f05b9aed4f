"""Cost of the first view: tokens and the stages of the path need no forward pass, and no pass computes all logits."""

import pytest
import torch

from anyformer.explore.open_runs import OpenRun, Workspace
from anyformer.nn.inspection.taps import hidden_with_taps, run_with_taps
from anyformer.nn.model import Transformer
from anyformer.nn.stack import BlockStack
from tests.explore import made
from tests.explore.made import body


def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count calls of the stacks, and the positions that the head reads."""
    seen = {"stack": 0, "logits": 0}
    stack, head = BlockStack.forward, Transformer.apply_head

    def run(self: BlockStack, *rest: object, **more: object) -> object:
        seen["stack"] += 1
        return stack(self, *rest, **more)  # type: ignore[arg-type]

    def apply(self: Transformer, hidden: torch.Tensor, *rest: object) -> torch.Tensor:
        seen["logits"] += hidden.shape[1]
        return head(self, hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockStack, "forward", run)
    monkeypatch.setattr(Transformer, "apply_head", apply)
    return seen


def test_the_first_view_of_a_language_model_needs_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.made("lm")
    workspace, seen = Workspace({"lm": OpenRun("lm", run, run.folder)}), passes(monkeypatch)
    workspace.answer("read", body("lm"))
    workspace.answer("path", body("lm"))
    workspace.answer("stage", body("lm", stage="decoder.tokens", at=-1))
    assert seen == {"stack": 0, "logits": 0}
    workspace.answer("stage", body("lm", stage="decoder.softmax", at=-1))
    workspace.answer("heads", body("lm", kind="decoder", layer=0))
    assert seen == {"stack": 1, "logits": 0}
    workspace.answer("next", body("lm"))
    assert seen == {"stack": 1, "logits": 1 + run.config.stacks["decoder"].depth}


@pytest.mark.parametrize("name", ["classify", "regress", "tag", "embed", "mlm", "pair"])
def test_the_first_view_comes_before_the_pass_and_the_answer_is_that_of_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder runs once for its answer and all activations; what an encoder-decoder generates is its answer."""
    run = made.made(name)
    workspace, seen = Workspace({name: OpenRun(name, run, run.folder)}), passes(monkeypatch)
    request = body(name, **({"target": "the dog"} if name == "pair" else {}))
    workspace.answer("read", request)
    outline = workspace.answer("path", request)
    first = outline["sides"][0]["begin"][0]
    stage = workspace.answer("stage", {**request, "stage": first, "at": -1, "key": -1})
    assert len(stage["tokens"]) == len(stage["ids"]) > 1
    assert seen["stack"] == 0
    workspace.answer("answer", request)
    kind = outline["last"]
    workspace.answer("heads", {**request, "kind": kind, "layer": 0})
    assert seen["stack"] == len(run.config.stacks)


@pytest.mark.parametrize("name", ["lm", "prefix", "mlm", "pair", "window"])
def test_activations_without_the_head_are_those_with_it(name: str) -> None:
    run = made.made(name)
    reading = Workspace({name: OpenRun(name, run, run.folder)})
    trace = reading.answer("read", body(name)) and next(iter(reading.traces.values()))
    names = ["*.out", "*.q", "*.final"]
    with torch.no_grad():
        _, whole = run_with_taps(run.model, names, *trace.reading.inputs, **trace.reading.options)
        part = hidden_with_taps(run.model, names, *trace.reading.inputs, **trace.reading.options)
    assert whole.keys() == part.keys()
    assert all(torch.equal(whole[key], part[key]) for key in whole)

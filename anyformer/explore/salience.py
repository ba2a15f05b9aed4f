"""View `salience`: the contribution of each input token to one output, by gradients."""

from collections.abc import Iterator
from typing import Any, Literal, assert_never

from anyformer.config import ConfigError, Fault, Side
from anyformer.explore.outputs import chosen, has_probabilities, outputs, position
from anyformer.explore.requests import StrictInt, TextRequest
from anyformer.explore.trace import Trace, output_kind
from anyformer.explore.view import SavedText, TextView
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.inspection.ablation import disable_heads, logit
from anyformer.nn.inspection.attribution import attribute, integrated_gradients
from anyformer.runs.run import Run

STEPS = 32  # of integrated gradients


class SalienceRequest(TextRequest):
    """The contribution of each token to an output; `at` is as in the view `next`, `output` as in `FollowRequest`."""

    at: StrictInt = -1
    output: StrictInt = -1
    method: Literal["gradient", "integrated"] = "gradient"


class SalienceView(TextView):
    """The contribution of each token of both stacks to an output, before softmax or sigmoid."""

    kind: Literal["salience"] = "salience"
    request = SalienceRequest
    group, place, key = "prediction", 4, "s"

    def answer(self, trace: Trace, request: SalienceRequest) -> dict[str, Any]:
        run, reading = trace.run, trace.reading
        if run.config.head.joint:
            raise ConfigError([Fault("run", "a CRF scores all tags of a sentence jointly: no single output")])
        at = position(trace, request.at)
        output = chosen(trace, at, request.output)
        measure = logit(output.id, at)
        with evaluating(run.model), disable_heads(run.model, trace.off):
            if request.method == "gradient":
                found = attribute(run.model, measure, *reading.inputs, **reading.options)
            elif request.method == "integrated":
                found = integrated_gradients(run.model, measure, *reading.inputs, steps=STEPS, **reading.options)
            else:
                assert_never(request.method)
        sides: dict[Side, list[float]] = {side: found.tokens[side][0].float().tolist() for side in reading.tokens}
        for side, names in reading.tokens.items():
            if len(names) != len(sides[side]):
                raise ConfigError(
                    [Fault("run", f"its {side} embeds {len(sides[side])} places for {len(names)} tokens")]
                )
        return {
            "at": at,
            "output": output._asdict(),
            "outputs": [one._asdict() for one in outputs(trace, at)],
            "method": request.method,
            "steps": STEPS,
            "value": float(found.value),
            "baseline": None if found.baseline is None else float(found.baseline),
            "total": float(found.total),
            "sides": sides,
        }

    def fits(self, run: Run) -> bool:
        return has_probabilities(run) or output_kind(run) != "tags"  # not for tags that are chosen together

    def opened(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        yield {"at": -1, "output": -1, "method": "gradient"}

    def clicked(self, saved: SavedText) -> Iterator[dict[str, Any]]:
        for at in range(len(saved.tokens) if saved.is_cheap else 0):
            yield {"at": at, "output": -1, "method": "gradient"}

"""View `salience`: the contribution of each input token to one output, by gradients."""

from typing import Any

from anyformer.config import ConfigError, Fault, Side
from anyformer.explore.head_switches import disable_heads
from anyformer.explore.outputs import chosen, outputs, position
from anyformer.explore.requests import SalienceRequest
from anyformer.explore.trace import Trace
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.inspection.attribution import attribute, integrated_gradients
from anyformer.nn.inspection.scalar_outputs import logit

STEPS = 32  # of integrated gradients


def salience(trace: Trace, request: SalienceRequest) -> dict[str, Any]:
    """Return the contribution of each token of both stacks to an output, before softmax or sigmoid."""
    run, reading = trace.run, trace.reading
    if run.config.head.joint:
        raise ConfigError([Fault("run", "a CRF scores all tags of a sentence jointly: no single output")])
    at = position(trace, request.at)
    output = chosen(trace, at, request.output)
    measure = logit(output.id, at)
    with evaluating(run.model), disable_heads(run.model, trace.off):
        if request.method == "gradient":
            found = attribute(run.model, measure, *reading.inputs, **reading.options)
        else:
            found = integrated_gradients(run.model, measure, *reading.inputs, steps=STEPS, **reading.options)
    sides: dict[Side, list[float]] = {side: found.tokens[side][0].float().tolist() for side in reading.tokens}
    for side, names in reading.tokens.items():
        if len(names) != len(sides[side]):
            raise ConfigError([Fault("run", f"its {side} embeds {len(sides[side])} places for {len(names)} tokens")])
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

"""Views `scores`, `effects` and `ablated`: numbers of every head, and probabilities with some heads off."""

from typing import Any, Literal

from torch import Tensor

from anyformer.config import ConfigError, Fault
from anyformer.explore.outputs import (
    chosen,
    has_probabilities,
    output_names,
    position,
    probabilities_of,
    separate_labels,
    values_at,
)
from anyformer.explore.requests import NextRequest, StrictInt, TextRequest
from anyformer.explore.trace import Trace, passes_allowed, trace_reading
from anyformer.explore.vectors import finite
from anyformer.explore.view import Detail, TextView
from anyformer.explore.views import statistics_of
from anyformer.nn.eval_mode import evaluating
from anyformer.nn.inspection.ablation import disable_heads, head_scores, logit

SCORES = ("previous", "next", "itself", "first", "induction", "vertical", "spread", "entropy", "distance")


class ScoresView(TextView):
    """The pattern and the statistics of every head: {"decoder.0.3": {name, previous, ...}}."""

    kind: Literal["scores"] = "scores"

    def answer(self, trace: Trace, request: TextRequest) -> dict[str, Any]:
        heads: dict[str, dict[str, Any]] = {}
        for kind, layers in trace.attentions.items():
            for layer, name in layers.items():
                found = statistics_of(trace, name, trace.weights(name))
                (names,) = found.names()
                for head, pattern in enumerate(names):
                    values = {score: finite(getattr(found, score)[0, head]) for score in SCORES}
                    heads[f"{kind}.{layer}.{head}"] = {"name": pattern, **values}
        return {"heads": heads}


class EffectRequest(TextRequest):
    """The change of an output when each head is switched off."""

    at: StrictInt = -1
    output: StrictInt = -1


class EffectsView(Detail):
    """The change of one output when each head is switched off, one forward pass per head.

    The change of its log-probability; of outputs without one, of the output itself.
    """

    kind: Literal["effects"] = "effects"
    request = EffectRequest

    def answer(self, trace: Trace, request: EffectRequest) -> dict[str, Any]:
        run, reading = trace.run, trace.reading
        if run.config.head.joint:
            raise ConfigError([Fault("run", "a CRF scores all tags of a sentence jointly: no single output")])
        at = position(trace, request.at)
        output = chosen(trace, at, request.output)
        count = len(trace.heads)
        if count > (most := passes_allowed(trace)):
            why = f"{count} heads take {count} forward passes, and {most} of this text are allowed: shorten the text"
            raise ConfigError([Fault("text", why)])
        of_value, value = separate_labels(trace) or output.p is None, logit(output.id, at)

        def measure(output: Tensor) -> Tensor:
            return value(output.float() if of_value else output.float().log_softmax(dim=-1))

        with evaluating(run.model), disable_heads(run.model, trace.off):
            tables = head_scores(run.model, measure, *reading.inputs, **reading.options)
        heads = {
            name: finite(tables["decoder.cross" if kind == "cross" else f"{kind}.mixer"][layer, head])
            for name, (kind, layer, head) in trace.heads.items()
        }
        return {"heads": heads, "at": at, "output": output._asdict(), "of": "value" if of_value else "logp"}


TOP_OUTPUTS = 8


class AblatedView(Detail):
    """Probabilities before and after for the same tokens, those that changed most first, and the total moved.

    The total is the sum of all increases, which equals that of all decreases (the total variation distance); of labels
    that are decided separately, the largest change.
    """

    kind: Literal["ablated"] = "ablated"
    request = NextRequest

    def answer(self, trace: Trace, request: NextRequest) -> dict[str, Any]:
        if not has_probabilities(trace.run):
            raise ConfigError([Fault("run", f"its head {trace.run.config.head.kind} has no probabilities to compare")])
        at, names = position(trace, request.at), output_names(trace)
        before = probabilities_of(trace, values_at(trace_reading(trace.run, trace.reading, ()), at).double())
        after = probabilities_of(trace, values_at(trace, at).double())
        change = (after - before).abs()
        moved = change.max() if separate_labels(trace) else change.sum() / 2
        best = int(before.argmax())
        order = [best, *(i for i in change.argsort(descending=True)[:TOP_OUTPUTS].tolist() if i != best)]
        return {
            "at": at,
            "rows": [[names(i), float(before[i]), float(after[i])] for i in order],
            "top": names(int(after.argmax())),
            "moved": float(moved),
            "logp": float(after[best].log() - before[best].log()) if float(after[best]) > 0 else None,
        }

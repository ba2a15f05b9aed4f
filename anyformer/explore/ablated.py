"""View `ablated`: the probabilities at one position with some heads off, beside those with all heads on."""

from typing import Any, Literal

from torch import Tensor

from anyformer.config import ConfigError, Fault
from anyformer.explore.outputs import has_probabilities, output_names, position, separate_labels, values_at
from anyformer.explore.requests import NextRequest
from anyformer.explore.trace import Trace, trace_reading
from anyformer.explore.view import Detail

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
        before = _probabilities(trace, values_at(trace_reading(trace.run, trace.reading, ()), at))
        after = _probabilities(trace, values_at(trace, at))
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


def _probabilities(trace: Trace, values: Tensor) -> Tensor:
    return values.double().sigmoid() if separate_labels(trace) else values.double().softmax(dim=-1)

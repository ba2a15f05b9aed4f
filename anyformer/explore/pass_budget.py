"""Number of forward passes that one request may take."""

from anyformer.explore.trace import Trace, last_side
from anyformer.nn.inspection.count import count

MAX_FLOPS = 4e12  # of one request: below a minute on a CPU
MAX_PASSES = 4096


def passes_allowed(trace: Trace) -> int:
    """Return how many forward passes over a text stay within `MAX_FLOPS`, at least one."""
    tokens, config = trace.reading.tokens, trace.run.config
    source = len(tokens["encoder"]) if config.shape == "encoder-decoder" else None
    flops = count(config, len(tokens[last_side(trace.run)]), source_length=source).flops
    return max(1, min(MAX_PASSES, int(MAX_FLOPS / max(flops, 1))))


def allows_many_passes(trace: Trace) -> bool:
    """Return whether a pass is so cheap that a document may hold one for every token."""
    return passes_allowed(trace) == MAX_PASSES

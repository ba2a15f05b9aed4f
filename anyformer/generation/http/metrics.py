"""Metrics in the text format of Prometheus. The names are those of vLLM, with the prefix `anyformer:`."""

from collections.abc import Callable, Iterator

from anyformer.generation.engine.stats import Histogram, Stats
from anyformer.generation.http.service import Service

Value = Callable[[Stats], float | dict[str, int] | Histogram]

PREFIX = "anyformer:"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(service: Service) -> str:
    """Return all metrics."""
    stats = service.engine.stats()
    lines: list[str] = []
    for name, kind, about, values in _metrics():
        lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} {kind}"]
        for model, one in stats.items():
            label = f'model_name="{_escaped(model)}"'
            value = values(one)
            lines += _histogram(name, label, value) if isinstance(value, Histogram) else _samples(name, label, value)
    gauges = {
        "http_requests_running": ("HTTP requests that are being answered.", service.active),
        "http_streams_running": ("Answers that are being streamed.", service.streams),
    }
    for name, (about, number) in gauges.items():
        lines += [f"# HELP {PREFIX}{name} {about}", f"# TYPE {PREFIX}{name} gauge", f"{PREFIX}{name} {number}"]
    lines += [f"# HELP {PREFIX}http_responses_total Responses by path and status."]
    lines += [f"# TYPE {PREFIX}http_responses_total counter"]
    for (path, status), number in sorted(service.responses.items()):
        lines.append(f'{PREFIX}http_responses_total{{path="{_escaped(path)}",status="{status}"}} {number}')
    return "\n".join(lines) + "\n"


def _metrics() -> Iterator[tuple[str, str, str, Value]]:
    """Yield name, kind and meaning of the metrics of a model, and their value as a function of its state."""
    yield "num_requests_running", "gauge", "Requests that are being answered.", lambda s: s.running
    yield "num_requests_waiting", "gauge", "Requests in the queue.", lambda s: s.waiting
    yield "kv_cache_usage_perc", "gauge", "Share of the KV cache in use, 0 to 1.", _usage
    yield "num_preemptions_total", "counter", "Requests that were set back for lack of pages.", lambda s: s.preemptions
    yield "prompt_tokens_total", "counter", "Tokens of prompts.", lambda s: s.prompt_tokens
    yield "prefix_cache_hits_total", "counter", "Tokens of prompts read earlier.", lambda s: s.cached_tokens
    yield "generation_tokens_total", "counter", "Tokens of answers.", lambda s: s.generated_tokens
    yield "encoded_texts_total", "counter", "Texts of encoders.", lambda s: s.encoded_texts
    yield "request_success_total", "counter", "Finished requests by reason.", lambda s: dict(s.finished)
    yield "time_to_first_token_seconds", "histogram", "Arrival to first token.", lambda s: s.first_token_time
    yield "inter_token_latency_seconds", "histogram", "Between two tokens.", lambda s: s.token_time
    yield "e2e_request_latency_seconds", "histogram", "Arrival to end.", lambda s: s.request_time
    yield "request_queue_time_seconds", "histogram", "Arrival to start.", lambda s: s.queue_time


def _usage(stats: Stats) -> float:
    return stats.pages_used / stats.pages if stats.pages else 0.0


def _samples(name: str, label: str, value: float | dict[str, int]) -> list[str]:
    if not isinstance(value, dict):
        return [f"{PREFIX}{name}{{{label}}} {value}"]
    return [f'{PREFIX}{name}{{{label},finished_reason="{reason}"}} {count}' for reason, count in sorted(value.items())]


def _histogram(name: str, label: str, value: Histogram) -> list[str]:
    lines, total = [], 0
    for bound, count in zip((*map(str, value.bounds), "+Inf"), value.counts, strict=True):
        total += count
        lines.append(f'{PREFIX}{name}_bucket{{{label},le="{bound}"}} {total}')
    return [*lines, f"{PREFIX}{name}_sum{{{label}}} {value.total:g}", f"{PREFIX}{name}_count{{{label}}} {total}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

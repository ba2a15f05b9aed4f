"""A run as a model of lm-evaluation-harness (package lm-eval): log-likelihoods, perplexity and generation.

Its option to apply chat templates is not supported: it passes conversations as text, where special tokens are plain
text.

`evaluate_tasks(run, ["words.yaml"])` and `anyformer evaluate runs/mine --tasks words.yaml` return metrics. With all
options of the harness: `lm_eval.simple_evaluate(model=HarnessModel("runs/mine"), tasks=["arc_easy"])`, or
`python -m anyformer.lab.evaluation.harness run --model anyformer --model_args run=runs/mine --tasks arc_easy`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anyformer.config import ConfigError, Fault
from anyformer.config.spec import visible
from anyformer.generation.strategy import Sampling, options as all_options, owner_of
from anyformer.lab.evaluation.likelihood import continuations, language_model, max_length, texts
from anyformer.runs.run import Run, load
from anyformer.tasks.base import Metrics

try:
    from lm_eval import evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.defaults import DEFAULT_OTHER_SEED
    from lm_eval.tasks import TaskManager
    from tqdm import tqdm
except ImportError as error:
    raise ImportError("tasks need the package lm-eval: pip install 'anyformer[harness]'") from error

MAX_NEW_TOKENS = 256  # of a request that names no number
os.environ.setdefault("DISABLE_MULTIPROC", "1")  # of the harness's bootstrap, which would fork this process
# Names of options of a request that differ from ours.
NAMES = {"max_gen_toks": "max_new_tokens", "max_tokens": "max_new_tokens", "num_beams": "beams"}


@register_model("anyformer")
class HarnessModel(LM):  # type: ignore[misc]
    """A language model for lm-evaluation-harness: a run, or the folder of one."""

    def __init__(
        self,
        run: Run | str | Path,
        *,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """Load the run. Batches are sized by memory: the harness's `batch_size` may only be 1 or "auto"."""
        super().__init__()
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            raise ConfigError([Fault("batch_size", f"= {batch_size}: is not set here: batches are sized by memory")])
        self.run = run if isinstance(run, Run) else load(run, device=device)
        language_model(self.run)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding gives it."""
        with tqdm(total=len(requests), disable=disable_tqdm, desc="log-likelihoods") as bar:
            found = continuations(self.run, [request.args for request in requests], bar.update)
        return [(each.total, each.greedy) for each in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text."""
        with tqdm(disable=disable_tqdm, desc="windows of texts") as bar:
            return [each.total for each in texts(self.run, [request.args[0] for request in requests], bar.update)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context, up to a stop string; requests with equal options are one batch."""
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(i)
        found: dict[int, str] = {}
        for members in groups.values():
            options = _options(requests[members[0]].args[1])
            contexts = [self._shortened(requests[i].args[0], options["max_new_tokens"]) for i in members]
            found |= zip(members, self.run.generate(contexts, **options), strict=True)
        return [found[i] for i in range(len(requests))]

    def _shortened(self, context: str, new: int) -> str:
        """Return a context that leaves `new` tokens; one that is too long loses its first tokens."""
        task, room = language_model(self.run), max_length(self.run) - new
        if room < 1:
            what = f"= {new}: must be less than {max_length(self.run)}, the tokens that the model reads at once"
            raise ConfigError([Fault("max_gen_toks", what)])
        ids = task.tokenizer.encode(context)
        kept = room - len(task.begin)
        return context if len(ids) <= kept else task.tokenizer.decode(ids[-kept:])


def evaluate_tasks(run: Run, tasks: Sequence[str | Path], limit: int | None = None) -> list[Metrics]:
    """Return the metrics of a language model on tasks of the harness, or on the first `limit` rows of each.

    A task is a file of YAML, or the name of one that comes with the harness, which may download its data. Raise
    `ConfigError` where a task cannot be read. Files and data may run code of their own: use those that you trust.
    """
    model, names = HarnessModel(run), list(map(str, tasks))
    manager = TaskManager(include_defaults=any(Path(name).suffix not in (".yaml", ".yml") for name in names))
    try:
        loaded = manager.load(names)
    except Exception as error:  # of any kind: the harness and the packages that read its data have no common one
        raise ConfigError([Fault("--tasks", f"= {visible(', '.join(names))}: is not read: {error}")]) from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    found = evaluate(model, loaded, limit=limit, log_samples=False, bootstrap_iters=100)
    return [_metrics(name, found) for name in found["results"]]


def _metrics(name: str, found: Mapping[str, Any]) -> Metrics:
    """Return the metrics of one task; names like "acc,none" lose a filter that is none, and values that are none go."""
    values = {key.removesuffix(",none"): value for key, value in found["results"][name].items() if "," in key}
    config = found["configs"].get(name, {})
    metadata = {key: value for key, value in (config.get("metadata") or {}).items() if key != "config_source"}
    notes = {"output_type": config["output_type"]} if "output_type" in config else {}
    numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
    count = found["n-samples"].get(name, {}).get("effective", 0)
    return Metrics(name, count, numbers, notes | ({"metadata": metadata} if metadata else {}))


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `run.generate` for those of a request."""
    left = dict(given)
    until, sample = left.pop("until", None) or [], left.pop("do_sample", False)
    options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS}
    ours = {NAMES.get(name, name): value for name, value in left.items() if value is not None}
    if unknown := ours.keys() - options.keys() - all_options().keys():
        raise ConfigError([Fault(name, "is not an option of generate_until here") for name in sorted(unknown)])
    options |= ours
    if not sample:  # tasks name a temperature of 0 and the like even so
        options = {name: value for name, value in options.items() if owner_of(name) is not Sampling}
    stop = [until] if isinstance(until, str) else list(until)
    return options | ({"stop": stop} if stop else {})


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()

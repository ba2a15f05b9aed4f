"""Faults planted one at a time in a copy of the package, to measure which of them the tests notice.

    python -m tests.planted_faults [NAME ...] [--thorough] [--jobs N]

Each fault changes one place of one file. The tests named beside it run on the copy until the first failure, with the
rotation and the number of examples of `make test`, or with those of `make thorough`. `tests/test_planted_faults.py`
keeps the table true: each place must occur exactly once in its file.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 900  # for the tests of one fault


class Fault(NamedTuple):
    name: str
    file: str  # in anyformer/
    right: str
    wrong: str
    tests: str  # files and folders in tests/ that should notice


FAULTS = [
    # attention, positions, norms, blocks
    Fault(
        "masked rows are not zeroed",
        "attention/attend.py",
        "if dense.has_key is None else weights * dense.has_key).to(q.dtype)",
        "if dense.has_key is None else weights).to(q.dtype)",
        "attention laws/test_tokens.py",
    ),
    Fault(
        "a window one too wide",
        "config/pattern.py",
        "seen = (q - k <= self.before) &",
        "seen = (q - k <= self.before + 1) &",
        "attention laws nn/test_attention.py",
    ),
    Fault(
        "a token sees the next one",
        "config/pattern.py",
        "return k <= q\n",
        "return k <= q + 1\n",
        "attention laws nn/test_attention.py",
    ),
    Fault(
        "the future is masked from oneself on",
        "attention/lowered.py",
        "device=scores.device).triu(1)",
        "device=scores.device).triu(0)",
        "attention laws",
    ),
    Fault(
        "eps outside of the root",
        "nn/norm.py",
        "y = y * torch.rsqrt(mean + self.eps)\n",
        "y = y * (torch.rsqrt(mean) + self.eps)\n",
        "nn/test_norm.py",
    ),
    Fault(
        "a ring one slot short",
        "attention/cache/ring.py",
        "self.size = reach + self.free\n",
        "self.size = reach + self.free - 1\n",
        "cache laws/test_cache.py",
    ),
    Fault(
        "a sandwich without its second norm",
        "nn/block.py",
        'norm_branch=norm("branch", "sandwich"),',
        'norm_branch=norm("branch"),',
        "nn/test_block.py nn/test_norm.py interop/test_decoders.py",
    ),
    Fault(
        "value residuals swapped",
        "nn/attention.py",
        "v = own * v + first *",
        "v = first * v + own *",
        "nn/test_skips.py",
    ),
    Fault(
        "the ramp of YaRN rounded the other way",
        "config/position.py",
        "low, high = math.floor(low), math.ceil(high)",
        "low, high = math.ceil(low), math.floor(high)",
        "interop/test_published.py interop/test_long_rope.py parity/test_positions.py",
    ),
    Fault(
        "slopes of ALiBi one too flat",
        "config/position.py",
        "2.0 ** (-8 * (i + 1) / power)",
        "2.0 ** (-8 * (i + 2) / power)",
        "nn/test_position.py nn/test_position_bias.py",
    ),
    Fault(
        "the bias of a router follows the load",
        "nn/experts.py",
        "(statistics.mean() - statistics).sign()",
        "(statistics - statistics.mean()).sign()",
        "nn/test_expert_balance.py nn/test_experts.py",
    ),
    Fault(
        "an adapter merged without its scale",
        "nn/lora.py",
        "return self.scale * (self.b",
        "return (self.b",
        "nn/test_lora.py",
    ),
    Fault(
        "integers rounded down",
        "nn/transforms/rounding.py",
        ".float()[..., None]).round().clamp(",
        ".float()[..., None]).floor().clamp(",
        "transforms",
    ),
    Fault(
        "a matmul counted once",
        "config/cost.py",
        "2 * rows * inputs * outputs",
        "rows * inputs * outputs",
        "inspection/test_count.py inspection/test_laws.py",
    ),
    # training
    Fault(
        "a cosine falls to 0, not to its floor",
        "recipe/schedule.py",
        "return self.floor + (1 - self.floor) * 0.5 *",
        "return 0.5 *",
        "training/test_schedule.py",
    ),
    Fault(
        "a linear schedule one step early",
        "recipe/schedule.py",
        "((step - self.warmup) / max(1, steps - self.warmup))",
        "((step + 1 - self.warmup) / max(1, steps - self.warmup))",
        "training/test_schedule.py",
    ),
    Fault(
        "a loss over the labels of the first batch",
        "training/step.py",
        "job.ranks.shares.size / counts[0]).backward()",
        "job.ranks.shares.size / counts[1]).backward()",
        "training/test_accumulate.py training/test_aux_outputs.py",
    ),
    Fault(
        "auxiliary losses not weighted by labels",
        "training/step.py",
        "auxiliary * counts[number]",
        "auxiliary",
        "training/test_aux_outputs.py training/test_accumulate.py",
    ),
    Fault(
        "an average of weights turned round",
        "training/step.py",
        "average.lerp_(weight, share)",
        "average.lerp_(weight, 1 - share)",
        "training/test_saving.py training/test_snapshots.py",
    ),
    Fault(
        "Muon without its look-ahead",
        "training/muon.py",
        "ahead = weight.grad.lerp(average, beta)",
        "ahead = average.clone()",
        "training/test_optimisers.py",
    ),
    Fault(
        "Muon without decay",
        "training/muon.py",
        'values * (1 - lr * group["weight_decay"]) -',
        "values -",
        "training/test_optimisers.py",
    ),
    Fault(
        "vectors decay, too",
        "training/optimizers.py",
        "decay / width if p.dim() >= 2 else 0.0,",
        "decay / width,",
        "training/test_optimisers.py training/test_width_transfer.py",
    ),
    Fault(
        "no label smoothing",
        "kernels/cross_entropy.py",
        'reduction="sum", label_smoothing=smoothing',
        'reduction="sum", label_smoothing=0 * smoothing',
        "nn/test_heads.py training/test_objective.py training/test_distillation.py",
    ),
    Fault(
        "distillation without T²",
        "training/distillation.py",
        "return temperature**2 * torch",
        "return torch",
        "training/test_distillation.py",
    ),
    Fault(
        "a teacher's divergence turned round",
        "training/distillation.py",
        "(target.exp() * (target - student))",
        "(student.exp() * (student - target))",
        "training/test_distillation.py",
    ),
    Fault(
        "batches in the same order in every epoch",
        "data/batch_plan.py",
        "order, rows = _shuffled(len(sizes), seed, epoch), list[Row]()",
        "order, rows = _shuffled(len(sizes), seed, 0), list[Row]()",
        "data/test_batch.py",
    ),
    # decoding and serving
    Fault(
        "of equal logits the last",
        "generation/top_k.py",
        "& (index < index[:, None])",
        "& (index > index[:, None])",
        "decoding/test_top_k.py decoding/test_beam_search.py",
    ),
    Fault(
        "frequencies of the prompt, too",
        "generation/filters.py",
        "counted = ids.where(history.present & history.new &",
        "counted = ids.where(history.present &",
        "decoding/test_logit_processors.py decoding/test_process_laws.py",
    ),
    Fault(
        "a rejected draft drawn from p",
        "generation/verifier.py",
        "rest = (p - q).clamp(min=0)",
        "rest = p",
        "decoding/test_speculative.py decoding/test_speculative_draws.py decoding/test_short_draft.py",
    ),
    Fault(
        "beams divided by the longest length",
        "generation/beam_search.py",
        "last, divisor = self.budgets == new, self.divisors[new]",
        "last, divisor = self.budgets == new, self.divisors[-1]",
        "decoding/test_beam_search.py",
    ),
    Fault(
        "texts of other weights reused",
        "generation/prefix_cache.py",
        "if (now := fingerprint(model)) != self.model:",
        "if (now := fingerprint(model)) is None:",
        "decoding/test_prefix_cache.py decoding/test_prefix_cache_stale.py",
    ),
    Fault(
        "pages released while others read them",
        "generation/engine/pages.py",
        "            if self._counts[page]:\n                continue\n",
        "",
        "serve/test_paged.py serve/test_exactness.py",
    ),
    Fault(
        "adapters share pages",
        "generation/engine/pages.py",
        "key = salt.encode()",
        'key = b""',
        "serve/test_adapters.py",
    ),
    Fault(
        "seeds of the first rows for a group of others",
        "generation/engine/sampler.py",
        "_choose(options, [sequences[i] for i in rows]",
        "_choose(options, sequences[: len(rows)]",
        "serve/test_exactness.py serve/test_engine.py serve/test_late.py",
    ),
    Fault(
        "equal seeds for all choices",
        "generation/http/completions.py",
        "(body.seed + i) % 2**63",
        "body.seed % 2**63",
        "serve/http/test_completions.py serve/http/test_defaults.py",
    ),
    Fault(
        "HTTP ignores top_p",
        "generation/http/completions.py",
        "if field in asked}",
        'if field in asked and field != "top_p"}',
        "serve/http/test_defaults.py",
    ),
    Fault(
        "a stop string in two pieces is missed",
        "tasks/text_stream.py",
        "text = self._held + piece",
        "text = piece",
        "decoding/test_stream.py serve/http/test_completions.py tasks",
    ),
    # tasks and statistics
    Fault(
        "Viterbi follows the next word's pointer",
        "tasks/crf.py",
        "for at in reversed(steps[: max(0, length - 1)]):",
        "for at in reversed(steps[1:length]):",
        "tasks/test_crf.py",
    ),
    Fault(
        "ties with the lowest rank",
        "tasks/metrics.py",
        "(counts.cumsum(0) - (counts + 1) / 2)[which]",
        "(counts.cumsum(0) - counts)[which]",
        "tasks/test_embed.py tasks/test_classify.py tasks",
    ),
    Fault(
        "degrees of freedom of equal variances",
        "lab/stats.py",
        "(u + v) ** 2 / (u**2 / (x.count - 1) + v**2 / (y.count - 1))",
        "float(x.count + y.count - 2)",
        "lab/test_stats.py",
    ),
    Fault(
        "an effect not corrected for few values",
        "lab/stats.py",
        "return (1 - 3 / (4 * freedom - 1)) * (x.mean",
        "return (x.mean",
        "lab/test_stats.py lab/test_decision.py",
    ),
    Fault(
        "p values adjusted by one test less",
        "lab/stats.py",
        "(len(order) - rank) * ps[i]",
        "(len(order) - rank - 1) * ps[i]",
        "lab/test_decision.py",
    ),
    Fault("a mean of the wrong deviation", "lab/stats.py", "x.std(ddof=1)", "x.std(ddof=0)", "lab/test_stats.py"),
]


def copy_to(folder: Path) -> None:
    """Copy the tracked files."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def first_failure(folder: Path, fault: Fault, thorough: bool) -> str | None:
    """Return the first test that fails with a fault, "out of time", or None."""
    path = folder / "anyformer" / fault.file
    right = path.read_text(encoding="utf-8")
    path.write_text(right.replace(fault.right, fault.wrong), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not system"]
    command += [f"tests/{name}" for name in fault.tests.split()]
    command += [] if thorough else ["--rotate"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"HYPOTHESIS_PROFILE": "thorough"} if thorough else {}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        path.write_text(right, encoding="utf-8")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"{fault.name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed[0].split(" - ")[0] if failed else None


def result(fault: Fault, thorough: bool) -> tuple[str | None, float]:
    """Return the first test that fails with a fault, and the seconds."""
    with tempfile.TemporaryDirectory() as name:
        copy_to(Path(name))
        begin = time.perf_counter()
        return first_failure(Path(name), fault, thorough), time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults and print which tests notice.")
    parser.add_argument("names", nargs="*", help="parts of names; all by default")
    parser.add_argument("--thorough", action="store_true", help="all cases and more examples")
    parser.add_argument("--jobs", type=int, default=1, help="faults side by side")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if not given.names or any(name in fault.name for name in given.names)]
    caught = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for fault, (failed, seconds) in zip(
            faults, pool.map(partial(result, thorough=given.thorough), faults), strict=True
        ):
            caught += failed is not None
            shown = "caught" if failed else "MISSED"
            print(f"{shown:7} {fault.name} ({seconds:.0f} s): {failed or fault.tests}", flush=True)
    print(f"{caught} of {len(faults)} caught")
    raise SystemExit(caught < len(faults))


if __name__ == "__main__":
    main()

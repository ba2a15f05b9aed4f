"""Forecasts beside published training runs of other engines: `python -m benchmarks.published`.

Runs with FSDP and tensor parallelism only are forecast with their own split. Runs with pipeline parallelism, which
anyformer does not have, are forecast with the best split of the same GPUs.
"""

from typing import Any, NamedTuple

from anyformer import presets
from anyformer.config import ModelConfig
from anyformer.kernels.gpu_table import GPUS
from anyformer.training.forecast.estimate import Forecast, NoSplit, TrainingEngine, best_split, forecast
from anyformer.training.forecast.split import Split
from anyformer.training.forecast.workload import Workload

OTHER = TrainingEngine(gather_bytes=2, builds_whole=False)  # weights are gathered in bf16
MPT = "https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking"
TITAN_A100 = "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
TITAN_H100 = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
LLAMA_3 = "https://arxiv.org/abs/2407.21783"  # table 4: 430 and 400 TFLOP/s, at 6 FLOPs for each weight and token
MEGATRON = "https://arxiv.org/abs/2104.04473"  # section 5.1: 300 B tokens in 34 days


class Run(NamedTuple):
    """A published run; `rows` of a step over all GPUs."""

    name: str
    config: ModelConfig
    gpu: str
    gpus: int
    length: int
    rows: int
    split: Split | None  # None: one that we do not have
    tokens_per_second: float  # of each GPU
    source: str

    def forecast(self) -> Forecast | NoSplit:
        work = Workload(self.config, self.rows, self.length)
        if self.split is None:
            return best_split(work, GPUS[self.gpu], self.gpus, OTHER)
        return forecast(work, GPUS[self.gpu], self.split, OTHER)


def mpt(depth: int, width: int, heads: int, length: int) -> ModelConfig:
    return presets.gpt2(depth=depth, width=width, heads=heads, length=length, vocab=50_368, dropout=0.0)


def llama3(depth: int, width: int, heads: int, ff: int) -> ModelConfig:
    return presets.llama(depth=depth, width=width, heads=heads, kv_heads=8, ff=ff, vocab=128_256)


def fsdp(gpus: int, rows: int, accumulate: int = 1, recompute: bool = False, tensor: int = 1) -> dict[str, Any]:
    """Return the fields of a run that FSDP splits."""
    data = gpus // tensor
    split = Split(data, 1, tensor, True, rows, accumulate, recompute)
    return {"gpus": gpus, "rows": data * rows * accumulate, "split": split}


L8, L70, L405 = llama3(32, 4096, 32, 14336), llama3(80, 8192, 64, 28672), llama3(126, 16384, 128, 53248)
M1, M7 = mpt(24, 2048, 16, 2048), mpt(32, 4096, 32, 2048)
M13, M30, M70 = mpt(40, 5120, 40, 2048), mpt(48, 7168, 56, 2048), mpt(80, 8192, 64, 2048)


def runs() -> list[Run]:
    def run(name: str, config: ModelConfig, gpu: str, length: int, speed: float, source: str, **fields: Any) -> Run:
        return Run(name, config, gpu, length=length, tokens_per_second=speed, source=source, **fields)

    return [
        run("MPT 1B", M1, "h100", 2048, 44_402, MPT, **fsdp(64, 20)),
        run("MPT 7B", M7, "h100", 2048, 10_643, MPT, **fsdp(8, 6)),
        run("MPT 13B", M13, "h100", 2048, 4_800, MPT, **fsdp(64, 2)),
        run("MPT 30B", M30, "h100", 2048, 2_308, MPT, **fsdp(32, 14, 3, True)),
        run("MPT 70B", M70, "h100", 2048, 1_039, MPT, **fsdp(64, 8, 4, True)),
        run("MPT 1B", M1, "a100-80gb", 2048, 20_513, MPT, **fsdp(8, 14, 4)),
        run("MPT 7B", M7, "a100-80gb", 2048, 4_641, MPT, **fsdp(8, 6, 2)),
        run("MPT 13B", M13, "a100-40gb", 2048, 1_972, MPT, **fsdp(128, 16, 1, True)),
        run("MPT 30B", M30, "a100-40gb", 2048, 865, MPT, **fsdp(128, 6, 1, True)),
        run("MPT 70B", M70, "a100-80gb", 2048, 410, MPT, **fsdp(64, 8, 4, True)),
        run("Llama 3 8B", L8, "a100-80gb", 8192, 2_904, TITAN_A100, **fsdp(64, 1)),
        run("Llama 3 70B", L70, "a100-80gb", 8192, 331, TITAN_A100, **fsdp(64, 1, 1, True)),
        run("Llama 3 8B", L8, "h100", 8192, 6_514, TITAN_H100, **fsdp(128, 2)),
        run("GPT-3 175B", mpt(96, 12288, 96, 2048), "a100-80gb", 2048, 100, MEGATRON, gpus=1024, rows=1536, split=None),
        run("Llama 3 405B", L405, "h100", 8192, 177, LLAMA_3, gpus=8192, rows=2048, split=None),
        run("Llama 3 405B", L405, "h100", 8192, 165, LLAMA_3, gpus=16384, rows=2048, split=None),
    ]


def line(run: Run) -> str:
    """Return the forecast beside the published speed."""
    found = run.forecast()
    text = f"{run.name:<15} {run.gpu:<10} {run.gpus:>6,} GPUs"
    if isinstance(found, NoSplit):
        return f"{text}  {found.reason}"
    speed = found.tokens_per_second / run.gpus
    note = str(found.split) if run.split else f"{found.split}, published with a pipeline"
    return f"{text}  {speed:8,.0f} {run.tokens_per_second:8,.0f}  {speed / run.tokens_per_second:5.2f}  {note}"


def main() -> None:
    print(f"{'':<38}  forecast published ratio of tokens/s for each GPU")
    for run in runs():
        print(line(run))


if __name__ == "__main__":
    main()

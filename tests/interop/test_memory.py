"""Importing a sharded checkpoint takes little more memory than its weights; `benchmarks/import_memory.py` does 7B."""

import importlib.util
from pathlib import Path

import pytest
import torch

from anyformer import presets

ROOT = Path(__file__).parents[2]
BOUND = 1.1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
def test_peak(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("import_memory", ROOT / "benchmarks" / "import_memory.py")
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    source = tmp_path / "public"
    source.mkdir()
    config = presets.llama(depth=20, width=1024, heads=8, ff=2048, vocab=2000)
    weights = script.write_checkpoint(source, config, torch.float16, 20_000_000)  # one or two are mapped at a time
    assert weights > 400_000_000
    assert len(list(source.glob("*.safetensors"))) > 10
    taken = script.measure(source, tmp_path / "run", weights)
    assert 0.9 < taken.share <= BOUND, taken  # less would mean that nothing was read

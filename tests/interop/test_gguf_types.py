"""Quantised weights: what llama.cpp computes from random blocks of each type, we compute from the fp32 values."""

from pathlib import Path

import numpy as np
import pytest
import torch

from anyformer.interop import import_model
from anyformer.interop.gguf_file import FLOATS, QUANTISED

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("xllamacpp", reason="needs the extra `dev-all` (llama.cpp)")
from tests.interop.gguf_files import F32, TOKENIZER, TOKENS, write  # noqa: E402
from tests.interop.llama_cpp import LlamaCpp  # noqa: E402

WIDTH, HEADS, LENGTH = 256, 4, 64
NAMES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # bytes of half precision
SIZES = {"Q2_K": 4e-3, "Q3_K": 1e-3, "Q4_K": 2e-4, "Q5_K": 1e-4, "Q6_K": 3e-5}


def blocks(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Return random values in a type: rounded by the package, or random bytes with a small scale where it cannot."""
    number = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        values = rng.normal(scale=0.1, size=shape).astype(np.float32)
        return gguf.quants.quantize(values, number).view(np.uint8).reshape(shape[0], -1)
    block, size = gguf.GGML_QUANT_SIZES[number]
    data = rng.integers(0, 256, (shape[0] * shape[1] // block, size), np.uint8)
    for at in SCALES[kind]:
        data[:, at : at + 2] = np.frombuffer(np.float16(SIZES[kind]).tobytes(), np.uint8)
    return data.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTISED])
def test_log_probabilities_are_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    rng, number = np.random.default_rng(0), gguf.GGMLQuantizationType[kind]
    tensors = {f"blk.0.{name}.weight": (blocks(kind, (WIDTH, WIDTH), rng), number) for name in NAMES}
    tensors["token_embd.weight"] = (rng.normal(scale=0.2, size=(len(TOKENS), WIDTH)).astype(np.float32), F32)
    ones = np.ones(WIDTH, np.float32)
    tensors |= dict.fromkeys(("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"), (ones, F32))
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": LENGTH,
        "llama.embedding_length": WIDTH,
        "llama.block_count": 1,
        "llama.feed_forward_length": WIDTH,
        "llama.attention.head_count": HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    path = write(tmp_path / "llama.gguf", metadata | TOKENIZER, tensors)
    run, theirs = import_model(path, tmp_path / "run"), LlamaCpp(path, LENGTH)
    ids = run.tokenizer.encode("the quick brown fox")
    with torch.no_grad():
        ours = run.model.cpu()(torch.tensor([ids]))[0, -1].log_softmax(-1)
    found = theirs.log_probabilities(ids, 20)
    assert len(found) == 20
    error = max(abs(float(ours[id]) - value) for id, value in found.items())
    spread = float(ours.max() - ours.min())
    # llama.cpp rounds activations to 8 bits for quantised weights. Swapped neighbours in two of the matrices change the
    # log-probabilities by a tenth of the spread or more; of Q4_K and Q5_K, whose offsets dominate here, by 0.08.
    assert error < {"F32": 1e-3, "Q4_K": 0.02, "Q5_K": 0.02}.get(kind, 0.02 * spread)

"""What a training step keeps, by the tensors that torch saves; its peak on a GPU, by what was measured there."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from anyformer import presets
from anyformer.attention.choose import FLEX_MIN_PAIRS
from anyformer.config import MaskedLM, ModelConfig, NoHead, io
from anyformer.kernels import cross_entropy as loss, dropout
from anyformer.nn.aux_outputs import AuxOutputs
from anyformer.nn.inspection.memory import MAX_LOGIT_BYTES, MAX_MASK_PAIRS, Memory, Precision, training_memory
from anyformer.nn.model import Transformer
from anyformer.nn.transforms.substitute import substitute

D, H, V, T, B = 64, 2, 128, 64, 4


def small(name: str, dropped: float) -> ModelConfig:
    make = getattr(presets, name.removesuffix("-tanh"))
    depth = 1 if name == "vaswani" else 2  # of each stack
    config = make(depth=depth, width=D, heads=H, vocab=V, **({} if name == "llama" else {"dropout": dropped}))
    at = "encoder" if name == "bert" else "decoder"
    tie = {"output": "none", "all": "inputs"}.get(config.tie, config.tie)
    config = io.override(config, [f"{at}.blocks.*.mixer.dropout=0"])
    if name.endswith("-tanh"):
        config = io.override(config, [f"{at}.blocks.*.norm=tanh", f"{at}.final_norm=tanh"])
    return config.model_copy(update={"head": NoHead(), "tie": tie})


def saved(config: ModelConfig, precision: Precision, compiled: bool, recompute: bool = False) -> int:
    """Return the bytes of all tensors that autograd saves in a forward pass, without the weights."""
    torch.manual_seed(0)
    model = Transformer(config).train()
    substitute(model, "training")
    ids = torch.randint(2, V, (B, T))
    inputs = (ids, ids) if config.shape == "encoder-decoder" else (ids,)

    def forward() -> Tensor:
        return model(*inputs, aux=AuxOutputs(), recompute=recompute)

    run = torch.compile(forward, backend="aot_eager_decomp_partition") if compiled else forward
    weights = {p.data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights and x.dtype is not torch.int64:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), saved_tensors_hooks(pack, lambda x: x):
        out = run()
    assert out.requires_grad
    return sum(sizes.values())


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("name", ["gpt2", "gpt2-tanh", "vaswani", "bert", "llama"])
@pytest.mark.parametrize(
    ("precision", "compiled", "dropped"),
    [("fp32", False, 0.0), ("bf16", False, 0.0), ("fp32", True, 0.0), ("bf16", True, 0.1)],
)
def test_activations_equal_the_tensors_that_torch_saves(
    name: str, precision: Precision, compiled: bool, dropped: float, monkeypatch: pytest.MonkeyPatch
):
    """In half precision both include the copies of the weights."""
    if compiled:  # as on a GPU; an eager CPU saves wider dropout masks
        monkeypatch.setattr(dropout.Dropout, "forward", hashed)
        torch.compiler.reset()
    config = small(name, dropped)
    estimate = training_memory(config, T, batch=B, precision=precision, compiled=compiled)
    assert saved(config, precision, compiled) == pytest.approx(estimate.activations + estimate.casts, rel=0.05)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_recomputed_layers_save_only_their_input(name: str):
    config = small(name, 0.0)
    estimate = training_memory(config, T, batch=B, precision="fp32", compiled=False, recompute=True)
    assert saved(config, "fp32", compiled=False, recompute=True) == pytest.approx(estimate.activations, rel=0.1)


def hashed(self: dropout.Dropout, x: Tensor) -> Tensor:
    if not (self.training and self.p):
        return x
    return dropout.hashed_dropout(x, self.p, torch.randint(2**31 - 1, (), dtype=torch.int32))


# -- the peak ---------------------------------------------------------------------------------------------------------

MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/h200.json").read_text(encoding="utf-8"))
BERT = io.override(presets.bert(vocab=30592, head=MaskedLM()), ["encoder.blocks.*.mixer.dropout=0"])
WORK: dict[str, tuple[ModelConfig, int, int]] = {
    "train_gpt2": (presets.gpt2(vocab=50304, dropout=0.0), 1024, 64),
    "train_base": (presets.vaswani(vocab=32768, dropout=0.1), 64, 512),
    "train_bert": (BERT, 512, 128),
}


@pytest.mark.parametrize("key", WORK)
def test_the_peak_on_a_gpu_is_predicted(key: str):
    config, length, batch = WORK[key]
    estimate = training_memory(config, length, batch=batch)
    assert MEASURED[key]["memory"]["ours"] == pytest.approx(estimate.peak, rel=0.1)


def test_masks_are_stored_up_to_where_flex_begins():
    assert MAX_MASK_PAIRS == FLEX_MIN_PAIRS
    config = presets.gpt2()
    short, long = (training_memory(config, n, context=2).activations for n in (1024, 2048))
    assert short == training_memory(config, 512).activations + 2 * 512 * 1024
    assert long == training_memory(config, 1024).activations


def sums(memory: Memory) -> int:
    return memory.weights + memory.optimizer + memory.casts + memory.activations + memory.passing


def test_with_many_tokens_the_peak_is_at_the_loss():
    estimate = training_memory(presets.gpt2(), 1024, batch=8)
    assert estimate.peak == sums(estimate)
    assert str(estimate).startswith("training (bf16, compiled): 4.7 GiB at the peak")


def test_with_few_tokens_the_peak_is_at_the_end_of_the_backward_pass():
    estimate = training_memory(presets.gpt2(), 8, batch=1)
    assert estimate.gradients == estimate.weights
    assert sums(estimate) < estimate.weights + estimate.optimizer + estimate.gradients < estimate.peak
    assert "at the end with all gradients" in str(estimate)


@pytest.mark.parametrize("name", ["gpt2", "vaswani", "llama"])
def test_options_that_need_less_memory(name: str):
    config = getattr(presets, name)(depth=6, width=256, heads=4, vocab=8000)
    plain = training_memory(config, 128, batch=64, precision="fp32")
    for changes in ({"precision": "bf16"}, {"recompute": True}, {"asked": 0.01}):
        assert training_memory(config, 128, batch=64, **{"precision": "fp32", **changes}).peak < plain.peak
    assert training_memory(config, 128, batch=64, precision="fp32", compiled=False).peak >= plain.peak


def test_the_loss_uses_chunks_of_the_same_size():
    assert MAX_LOGIT_BYTES == loss.MAX_LOGIT_BYTES

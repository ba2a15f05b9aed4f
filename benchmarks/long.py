"""Long sequences: a whole BigBird, and a causal window alone, forward and backward in bf16."""

import os
from collections.abc import Callable

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyformer.attention.attend import attend, lower
from anyformer.attention.choose import Requirements
from anyformer.attention.layout import make_layout
from anyformer.attention.position_module import Positions
from anyformer.attention.scores import Scoring
from anyformer.config import (
    Attention,
    BigBird,
    Block,
    Gelu,
    LayerNorm,
    Learned,
    ModelConfig,
    NoHead,
    NoPosition,
    Plain,
    Projected,
    Stack,
    Tokens,
    Window,
)
from anyformer.kernels.runtime import Runtime
from anyformer.nn.model import Transformer
from benchmarks.sheet import DEVICE, Way

VOCAB, BLOCK = 50_358, 64
TOGETHER = 5  # runs of a window that are timed as one: the host starts one while another runs, as in a model


def bigbird_config(depth: int, width: int, heads: int, length: int) -> ModelConfig:
    """The shape of BigBird-base: neighbours, two global blocks, three links; no head, as in its peer."""
    pattern = BigBird(block=BLOCK, before=1, after=1, globals=2, randoms=3)
    mixer = Attention(heads=heads, bias=True, pattern=pattern, output=Projected(bias=True))
    feedforward = Plain(width=4 * width, activation=Gelu(approximate="tanh"), bias=True)
    block = Block(mixer=mixer, feedforward=feedforward, norm=LayerNorm(), placement="post", dropout=0.1)
    return ModelConfig(
        width=width,
        source=Tokens(vocab=VOCAB, types=2, norm=LayerNorm(), dropout=0.1),
        encoder=Stack(depth=depth, blocks=(block,), position=Learned(length=length)),
        head=NoHead(),
    )


def bigbird(depth: int, width: int, heads: int, length: int) -> tuple[int, dict[str, Way]]:
    """Return the number of tokens of a sequence, and the implementations; weights are bf16 on both sides."""
    ids = torch.randint(2, VOCAB, (1, length), device=DEVICE)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def ours() -> Callable[[], Tensor]:
        torch.manual_seed(0)
        model = Transformer(bigbird_config(depth, width, heads, length)).to(DEVICE, dtype).train()
        run = torch.compile(model) if DEVICE == "cuda" else model
        return lambda: descend(run(ids))

    def theirs() -> Callable[[], Tensor]:
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": heads}
        more = {"intermediate_size": 4 * width, "max_position_embeddings": length, "vocab_size": VOCAB}
        sparse = {"attention_type": "block_sparse", "block_size": BLOCK, "num_random_blocks": 3}
        config = transformers.BigBirdConfig(**sizes, **more, **sparse)
        model = transformers.BigBirdModel(config, add_pooling_layer=False).to(DEVICE, dtype).train()
        return lambda: descend(model(input_ids=ids).last_hidden_state)

    return length, {"ours": Way("ours", ours), "transformers": Way("transformers", theirs)}


def descend(hidden: Tensor) -> Tensor:
    total = hidden.float().sum()
    total.backward()
    return total.detach()


def window(heads: int, width: int, length: int, before: int) -> dict[str, Way]:
    """Attention alone: a causal window as the model runs it, and full causal attention by torch's kernels."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def timed(name: str, build: Callable[[], Callable[..., Tensor]]) -> Way:
        def make() -> Callable[[], None]:
            torch.manual_seed(0)
            shape, attention = (1, heads, length, width), build()
            qkv = [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3)]
            slope = torch.randn_like(qkv[0])

            def run() -> None:
                torch.autograd.grad(attention(*qkv), qkv, slope)

            return run

        return Way(name, make, each=TOGETHER)

    def ours() -> Callable[..., Tensor]:
        """Prepare once what the layers of a model share."""
        at, nowhere = make_layout(1, length, torch.device(DEVICE)), Positions(NoPosition(), 0, heads)
        needs, runtime = Requirements(width, width), Runtime(DEVICE, dtype, training=True)
        relation = lower(Window(before=before - 1, after=0), at, at, "self", nowhere, needs, runtime, "auto")
        return lambda *qkv: attend(*qkv, relation.lowered, Scoring(width**-0.5))

    def full(kernel: SDPBackend) -> Callable[[], Callable[..., Tensor]]:
        def attention(*qkv: Tensor) -> Tensor:
            with sdpa_kernel(kernel if DEVICE == "cuda" else SDPBackend.MATH):
                return F.scaled_dot_product_attention(*qkv, is_causal=True)

        return lambda: attention

    return {
        "ours": timed("ours", ours),
        "cuDNN, causal": timed("cuDNN", full(SDPBackend.CUDNN_ATTENTION)),
        "flash, causal": timed("flash", full(SDPBackend.FLASH_ATTENTION)),
    }

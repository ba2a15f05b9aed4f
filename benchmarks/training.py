"""Steps of training: the models of the table, ours and their peers', on the same random tokens."""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer import presets
from anyformer.config import MaskedLM, ModelConfig, io
from anyformer.nn.heads import Asked
from anyformer.nn.loss import token_loss
from anyformer.nn.model import Transformer
from anyformer.training.objective import Objective, few
from benchmarks.sheet import DEVICE, Way

MASKED = 0.15


class Words:
    """A task whose loss is that of words."""

    loss = staticmethod(token_loss)


def stepping(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step with AdamW: bf16 products on a GPU, master weights of fp32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda")
    run = torch.compile(loss) if DEVICE == "cuda" else loss

    def step() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            found = run()
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach()

    return step


def ours(config: Callable[[], ModelConfig], inputs: tuple[Tensor, ...], labels: Tensor, smoothing: float = 0.0) -> Way:
    """As the training loop runs it."""

    def make() -> Callable[[], Tensor]:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = Transformer(config()).train()
        objective = Objective(model, Words(), smoothing)
        wanted, asked = Asked(labels, smoothing), int((labels >= 0).sum())
        if (places := few(labels.cpu(), labels.numel())) is not None:
            at, some = (x.to(DEVICE) for x in places)
            wanted = Asked(some, smoothing, at)
        return stepping(model, lambda: objective(inputs, {}, wanted, None)[0] / asked)

    return Way("ours", make)


def theirs(build: Callable[[], nn.Module], loss: Callable[[Any], Tensor]) -> Way:
    def make() -> Callable[[], Tensor]:
        torch.manual_seed(0)
        model = build().to(DEVICE).train()
        return stepping(model, lambda: loss(model))

    return Way("theirs", make)


def tokens(vocab: int, *shape: int) -> Tensor:
    return torch.randint(2, vocab, shape, device=DEVICE)


def gpt2(depth: int, width: int, heads: int, vocab: int, length: int, rows: int) -> tuple[int, dict[str, Way]]:
    """Tokens of a step, and the ways."""
    ids, labels = tokens(vocab, rows, length), tokens(vocab, rows, length)

    def config() -> ModelConfig:
        return presets.gpt2(depth=depth, width=width, heads=heads, vocab=vocab, length=length, dropout=0.0)

    def hf() -> nn.Module:
        sizes = {"n_layer": depth, "n_embd": width, "n_head": heads, "vocab_size": vocab, "n_positions": length}
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **still))

    def loss(model: Any) -> Tensor:
        return token_loss(model(input_ids=ids).logits, labels) / labels.numel()

    return ids.numel(), {"ours": ours(config, (ids,), labels), "transformers": theirs(hf, loss)}


class TorchPair(nn.Module):
    """torch's own Transformer with tied embeddings and learned positions."""

    def __init__(self, width: int, heads: int, depth: int, ff: int, vocab: int, length: int, dropout: float):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.inner = nn.Transformer(width, heads, depth, depth, ff, dropout, batch_first=True, norm_first=False)

    def forward(self, source: Tensor, target: Tensor, pads: Tensor | None = None) -> Tensor:
        ahead = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.inner(
            self._embed(source),
            self._embed(target),
            tgt_mask=ahead,
            tgt_is_causal=True,
            src_key_padding_mask=pads,
            memory_key_padding_mask=pads,
        )
        return hidden @ self.tokens.weight.T

    def _embed(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


def marian(depth: int, width: int, heads: int, ff: int, vocab: int) -> nn.Module:
    sides = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", depth), ("attention_heads", heads), ("ffn_dim", ff))}  # fmt: skip
    rest = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": None}
    return transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=vocab,
            d_model=width,
            max_position_embeddings=512,
            activation_function="relu",
            dropout=0.1,
            scale_embedding=True,
            **sides,
            **rest,
        )
    )


def base(depth: int, width: int, heads: int, ff: int, vocab: int, length: int, rows: int) -> tuple[int, dict[str, Way]]:
    source, target, labels = (tokens(vocab, rows, length) for _ in range(3))

    def config() -> ModelConfig:
        return presets.vaswani(depth=depth, width=width, heads=heads, ff=ff, vocab=vocab, dropout=0.1)

    def smoothed(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)

    return 2 * source.numel(), {
        "ours": ours(config, (source, target), labels, 0.1),
        "torch.nn": theirs(
            lambda: TorchPair(width, heads, depth, ff, vocab, length, 0.1),
            lambda model: smoothed(model(source, target)),
        ),
        "transformers": theirs(
            lambda: marian(depth, width, heads, ff, vocab),
            lambda model: smoothed(model(input_ids=source, decoder_input_ids=target).logits),
        ),
    }


def bert(depth: int, width: int, heads: int, vocab: int, length: int, rows: int) -> tuple[int, dict[str, Way]]:
    ids = tokens(vocab, rows, length)
    labels = torch.where(torch.rand(ids.shape, device=DEVICE) < MASKED, ids, -100)
    at = (labels.flatten() >= 0).nonzero()[:, 0]

    def config() -> ModelConfig:
        sizes = {"depth": depth, "width": width, "heads": heads, "vocab": vocab, "length": length}
        return io.override(presets.bert(**sizes, head=MaskedLM()), ["encoder.blocks.*.mixer.dropout=0"])

    def hf() -> nn.Module:
        sizes = {"num_hidden_layers": depth, "hidden_size": width, "num_attention_heads": heads, "vocab_size": vocab}
        still = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
        more = {"intermediate_size": 4 * width, "max_position_embeddings": length}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **still, **more))

    def masked_only(model: Any) -> Tensor:
        hidden = model.bert(input_ids=ids).last_hidden_state.flatten(0, 1)[at]
        return F.cross_entropy(model.cls(hidden).float(), labels.flatten()[at])

    return ids.numel(), {
        "ours": ours(config, (ids,), labels),
        "transformers": theirs(hf, lambda model: model(input_ids=ids, labels=labels).loss),
        "transformers, masked only": theirs(hf, masked_only),
    }

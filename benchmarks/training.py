"""Steps of training: the models of the table, ours and their peers', on the same random tokens."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from anyformer import presets
from anyformer.config import MaskedLM, ModelConfig, io
from anyformer.interop import weight_conversion as weights, weight_files as files
from anyformer.interop.families import FAMILIES
from anyformer.kernels.cross_entropy import token_loss
from anyformer.nn.heads import LossTarget
from anyformer.nn.inspection.count import count
from anyformer.nn.model import Transformer
from anyformer.training.machine import compile_options
from anyformer.training.objective import Objective, labelled_positions
from anyformer.training.step_graphs import StepGraphs
from benchmarks import peer_files
from benchmarks.sheet import DEVICE, Way, token_task

MASKED = 0.15
TOGETHER = 3 if DEVICE == "cuda" else 1  # steps that are timed as one: the host starts one while another runs
transformers.utils.logging.disable_progress_bar()


def stepping(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A training step with AdamW, bf16 autocast on a GPU; ours is compiled and captured as in our loop."""
    ours = isinstance(model, Transformer)
    recorded = ours and DEVICE == "cuda"
    how = compile_options(model.config, fp8=False) if ours else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=DEVICE == "cuda", capturable=recorded)
    run = torch.compile(loss, options=how) if DEVICE == "cuda" else loss

    def step() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            found = run()
        found.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return found.detach()

    if not recorded:
        return step
    graphs = StepGraphs(torch.device(DEVICE))
    return lambda: graphs.run(lambda _: step(), ())


Build = Callable[[], tuple[nn.Module, Callable[[], Tensor]]]
"""A model, and its loss on the tokens."""


def way(name: str, build: Build, flops: float, slopes: bool = False) -> Way:
    """With `slopes` the first loss is computed with gradients enabled, as in training."""

    def make() -> Callable[[], Tensor]:
        model, loss = build()
        return stepping(model.train(), loss)

    def first() -> float:
        model, loss = build()
        model.eval()
        with torch.set_grad_enabled(slopes), torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            return float(loss().detach())

    return Way(name, make, first, flops, each=TOGETHER)


def ours(config: ModelConfig, inputs: tuple[Tensor, ...], labels: Tensor, smoothing: float = 0.0) -> Way:
    """As the training loop runs it."""

    def build() -> tuple[nn.Module, Callable[[], Tensor]]:
        model = begun(config)
        objective = Objective(model, token_task(), smoothing)
        wanted, asked = LossTarget(labels, smoothing), int((labels >= 0).sum())
        if (places := labelled_positions(labels.cpu(), labels.numel())) is not None:
            at, some = (x.to(DEVICE) for x in places)
            wanted = LossTarget(some, smoothing, at)
        return model, lambda: objective(inputs, wanted, None)[0] / asked

    return way("ours", build, flops(config, inputs, labels), slopes=True)


def theirs(build: Callable[[], nn.Module], loss: Callable[[Any], Tensor], flops: float) -> Way:
    """`build` makes a model with the weights of `begun`."""

    def both() -> tuple[nn.Module, Callable[[], Tensor]]:
        model = build().to(DEVICE)
        return model, lambda: loss(model)

    return way("theirs", both, flops)


def begun(config: ModelConfig) -> Transformer:
    """The model that all ways begin with."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Transformer(config)


@torch.no_grad()
def said(config: ModelConfig, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the top-1 tokens of the model as labels: they tell models apart, where random labels would give every
    model the same loss."""
    model = begun(config).eval()
    some = zip(*(x.split(8) for x in inputs), strict=True)
    return torch.cat([model(*few_rows).argmax(dim=-1) for few_rows in some])


def public(config: ModelConfig, kind: str, into: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The same as a model of `transformers`, of a family that has it."""
    family = FAMILIES[kind]
    with tempfile.TemporaryDirectory() as folder:
        files.write_json(Path(folder) / "config.json", family.fields(config))
        weights.write(Path(folder) / files.WEIGHTS, family, begun(config).to("cpu", dtype))
        model = into.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    return model


def flops(config: ModelConfig, inputs: tuple[Tensor, ...], labels: Tensor) -> float:
    """Return 3 × the forward FLOPs of `count`, with the head only at labelled positions."""
    rows, length = labels.shape
    table = count(config, length, batch=rows, source_length=inputs[0].shape[1] if len(inputs) > 1 else None)
    head = sum(row.flops for row in table.rows if row.part == "head")
    return 3 * (table.flops - head * float((labels < 0).float().mean()))


def tokens(vocab: int, *shape: int) -> Tensor:
    return torch.randint(2, vocab, shape, device=DEVICE)


def gpt2(depth: int, width: int, heads: int, vocab: int, length: int, rows: int) -> tuple[int, dict[str, Way]]:
    """Tokens of a step, and the ways."""
    ids = tokens(vocab, rows, length)
    config = presets.gpt2(depth=depth, width=width, heads=heads, vocab=vocab, length=length, dropout=0.0)
    labels = said(config, (ids,))
    mine = ours(config, (ids,), labels)

    def hf() -> nn.Module:
        return public(config, "gpt2", transformers.GPT2LMHeadModel)

    def loss(model: Any) -> Tensor:
        return token_loss(model(input_ids=ids).logits, labels) / labels.numel()

    def x_transformers() -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=width, depth=depth, heads=heads, attn_dim_head=width // heads, attn_flash=True)
        return TransformerWrapper(num_tokens=vocab, max_seq_len=length, attn_layers=layers, tie_embedding=True)

    ways = {"ours": mine, "transformers": theirs(hf, loss, mine.flops)}
    if peer_files.find("nanoGPT"):
        nano = partial(peer_files.nanogpt, length=length)
        ways["nanoGPT"] = theirs(lambda: nano(hf()), lambda model: model(ids, labels)[1], mine.flops)
    if find_spec("x_transformers"):  # same shape, different weights: its first loss differs
        own = theirs(x_transformers, lambda model: token_loss(model(ids), labels) / labels.numel(), mine.flops)
        ways["x-transformers"] = replace(own, first=None)
    return ids.numel(), ways


def experts(
    depth: int, width: int, heads: int, vocab: int, length: int, rows: int, choice: tuple[int, int]
) -> tuple[int, dict[str, Way]]:
    """GPT-2 with experts, of which each token chooses so many as are as wide as the dense model's feed-forward."""
    count, top_k = choice
    ids = tokens(vocab, rows, length)
    dense = presets.gpt2(depth=depth, width=width, heads=heads, vocab=vocab, length=length, dropout=0.0)
    one = f"{{kind = 'plain', width = {4 * width // top_k}, activation = {{kind = 'gelu', approximate = 'tanh'}}}}"
    network = f"{{kind = 'experts', count = {count}, top_k = {top_k}, balance = 0.01, expert = {one}}}"
    sparse: Any = io.override(dense, [f"decoder.blocks.*.feedforward={network}"])
    ways = {name: ours(config, (ids,), ids) for name, config in (("ours", sparse), ("ours, dense", dense))}
    return ids.numel(), {name: replace(way, first=None) for name, way in ways.items()}


class TorchPair(nn.Module):
    """torch's own Transformer as that of 2017: tied embeddings, sinusoids, dropout after sublayers only, no norm behind
    the last."""

    def __init__(self, width: int, heads: int, depth: int, ff: int, vocab: int, length: int, dropout: float):
        super().__init__()
        self.tokens, self.dropout, self.scale = nn.Embedding(vocab, width), nn.Dropout(dropout), width**0.5
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        angles = torch.arange(length)[:, None] / 10_000.0 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("places", torch.cat((angles.sin(), angles.cos()), dim=-1))
        self.inner = nn.Transformer(width, heads, depth, depth, ff, dropout, batch_first=True, norm_first=False)
        self.inner.encoder.norm = self.inner.decoder.norm = None
        for layer in (*self.inner.encoder.layers, *self.inner.decoder.layers):
            layer.dropout.p = layer.self_attn.dropout = 0.0
            if isinstance(layer, nn.TransformerDecoderLayer):
                layer.multihead_attn.dropout = 0.0

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
        return self.dropout(self.tokens(ids) * self.scale + self.places[: ids.shape[1]])

    @torch.no_grad()
    def begin(self, ours: Transformer) -> "TorchPair":
        """With the weights of ours."""
        mine = ours.state_dict()

        def take(layer: nn.Module, at: str, *norms: str) -> None:
            """Map the weights of encoder and decoder; norms are in the order of sublayers."""
            layer.self_attn.in_proj_weight.copy_(mine[f"{at}.mixer.inner.qkv.weight"])
            layer.self_attn.out_proj.weight.copy_(mine[f"{at}.mixer.inner.out.weight"])
            for linear, name in ((layer.linear1, "up"), (layer.linear2, "down")):
                linear.weight.copy_(mine[f"{at}.feedforward.inner.{name}.weight"])
                linear.bias.copy_(mine[f"{at}.feedforward.inner.{name}.bias"])
            for number, name in enumerate(norms, start=1):
                for part in ("weight", "bias"):
                    getattr(layer.get_submodule(f"norm{number}"), part).copy_(mine[f"{at}.{name}.norm_sum.{part}"])

        self.tokens.weight.copy_(mine["source.table.weight"])
        for i, layer in enumerate(self.inner.encoder.layers):
            take(layer, f"encoder.blocks.{i}", "mixer", "feedforward")
        for i, layer in enumerate(self.inner.decoder.layers):
            at = f"decoder.blocks.{i}"
            take(layer, at, "mixer", "cross", "feedforward")
            both = mine[f"{at}.cross.inner.q.weight"], mine[f"{at}.cross.inner.kv.weight"]
            layer.multihead_attn.in_proj_weight.copy_(torch.cat(both))
            layer.multihead_attn.out_proj.weight.copy_(mine[f"{at}.cross.inner.out.weight"])
        return self


def vaswani(**sizes: Any) -> ModelConfig:
    """As the peers have it: waves in Marian's order, and the norms of torch."""
    like = ("position.layout=halves", "blocks.*.norm.eps=1e-5")
    config: Any = presets.vaswani(**sizes)
    return io.override(config, [f"{side}.{what}" for side in ("encoder", "decoder") for what in like])


def base(depth: int, width: int, heads: int, ff: int, vocab: int, length: int, rows: int) -> tuple[int, dict[str, Way]]:
    source, target = (tokens(vocab, rows, length) for _ in range(2))
    config = vaswani(depth=depth, width=width, heads=heads, ff=ff, vocab=vocab, dropout=0.1)
    labels = said(config, (source, target))
    mine = ours(config, (source, target), labels, 0.1)

    def smoothed(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), label_smoothing=0.1)

    return 2 * source.numel(), {
        "ours": mine,
        "torch.nn": theirs(
            lambda: TorchPair(width, heads, depth, ff, vocab, length, 0.1).to(DEVICE).begin(begun(config)),
            lambda model: smoothed(model(source, target)),
            mine.flops,
        ),
        "transformers": theirs(
            lambda: public(config, "marian", transformers.MarianMTModel),
            lambda model: smoothed(model(input_ids=source, decoder_input_ids=target).logits),
            mine.flops,
        ),
    }


def bert(depth: int, width: int, heads: int, vocab: int, length: int, rows: int) -> tuple[int, dict[str, Way]]:
    ids = tokens(vocab, rows, length)
    sizes = {"depth": depth, "width": width, "heads": heads, "vocab": vocab, "length": length}
    config = io.override(presets.bert(**sizes, head=MaskedLM()), ["encoder.blocks.*.mixer.dropout=0"])
    labels = torch.where(torch.rand(ids.shape, device=DEVICE) < MASKED, said(config, (ids,)), -100)
    at = (labels.flatten() >= 0).nonzero()[:, 0]
    mine = ours(config, (ids,), labels)

    def hf() -> nn.Module:
        return public(config, "bert", transformers.BertForMaskedLM)

    def masked_only(model: Any) -> Tensor:
        hidden = model.bert(input_ids=ids).last_hidden_state.flatten(0, 1)[at]
        return F.cross_entropy(model.cls(hidden).float(), labels.flatten()[at])

    return ids.numel(), {
        "ours": mine,
        "transformers": theirs(hf, lambda model: model(input_ids=ids, labels=labels).loss, mine.flops),
        "transformers, masked only": theirs(hf, masked_only, mine.flops),
    }

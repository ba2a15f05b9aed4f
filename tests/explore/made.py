"""Untrained runs of every shape and task, with random weights that are large enough for uneven attention."""

from pathlib import Path

import torch

from anyformer.config import (
    LM,
    Alibi,
    Attention,
    Block,
    Classifier,
    Disentangled,
    DynamicTanh,
    Embedder,
    Experts,
    Gated,
    Latent,
    LayerNorm,
    Learned,
    LoRA,
    MaskedLM,
    ModelConfig,
    NoFeedForward,
    Parallel,
    Plain,
    Pooling,
    Position,
    Recurrent,
    RMSNorm,
    Rotary,
    Sinusoidal,
    Special,
    Stack,
    T5Bias,
    TokenLabels,
    Tokens,
    Window,
)
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.nn.model import Transformer
from anyformer.recipe import (
    AnyTask,
    Characters,
    Classify,
    Embed,
    LanguageModel,
    MaskedLanguageModel,
    PrefixLM,
    Regress,
    Seq2Seq,
    SpanCorruption,
    Tag,
    Words,
)
from anyformer.runs.run import Run, write_folder, write_model

WORDS = train_tokenizer(Words(), ["the quick brown fox jumps over the lazy dog 0 1 2 3 4 5 6 7 8 9"])
LETTERS = train_tokenizer(
    Characters(), ["the quick brown fox jumps over the lazy dog, 나는 학교에 간다 <script> \u202e"]
)
SPANS = WORDS.with_special([f"<extra_id_{i}>" for i in range(SpanCorruption().sentinels)])
HEADS = Attention(heads=2)
BLOCK = Block(mixer=HEADS, feedforward=Plain(width=16))
ACROSS = BLOCK.model_copy(update={"cross": Attention(heads=4, kv_heads=2)})
TEXT = "the quick fox jumps over the dog"


def stack(block: Block = BLOCK, position: Position | None = None, **fields: object) -> Stack:
    more = {"depth": 2, "position": position or Rotary(), "final_norm": LayerNorm()} | fields
    return Stack(blocks=(block,), **more)


def decoder(of: Stack, width: int = 16) -> ModelConfig:
    return ModelConfig(width=width, target=Tokens(vocab=1), decoder=of, head=LM())


def encoder(of: Stack, head: Classifier | Embedder | MaskedLM | TokenLabels) -> ModelConfig:
    return ModelConfig(width=16, source=Tokens(vocab=1), encoder=of, head=head)


def pair(of: Stack, across: Stack) -> ModelConfig:
    tokens = Tokens(vocab=1)
    return ModelConfig(width=16, source=tokens, target=tokens, encoder=of, decoder=across, head=LM(), tie="all")


WINDOW = Attention(heads=4, kv_heads=2, pattern=Window(before=3, after=0), cap=5.0, sinks=True, qk_norm=RMSNorm())
LATENT = Attention(heads=2, key_width=12, value_width=8, compress=Latent(rank=8, rotary_width=4))
GLOBAL = Attention(heads=2, pattern=Window(before=1, after=1, globals=1), global_projections=True)
RELU = Attention(heads=2, normalizer="relu")
MIXED = Block(
    mixer=HEADS, feedforward=Experts(count=3, top_k=2, expert=Gated(width=8)), order=Parallel(shared_norm=True)
)
NARROW = Block(mixer=HEADS, feedforward=NoFeedForward(), placement="sandwich")
CELL = Block(mixer=Recurrent(cell="gru", begin="encoder"), feedforward=NoFeedForward())
GIVER = Block(mixer=Recurrent(cell="gru"), feedforward=NoFeedForward())
TWO = Classifier(labels=2, pool="mean")
LORA = LoRA(rank=2, targets=("decoder",))

RUNS: dict[str, tuple[AnyTask, ModelConfig, TextTokenizer]] = {
    "pair": (Seq2Seq(max_target=6), pair(stack(position=T5Bias()), stack(ACROSS, Alibi())), WORDS),
    "sort": (Seq2Seq(max_target=6), decoder(stack(MIXED, Alibi())), WORDS),
    "lm": (LanguageModel(), decoder(stack(position=Learned(length=48), depth=3, share=True)), LETTERS),
    "window": (LanguageModel(), decoder(stack(BLOCK.model_copy(update={"mixer": WINDOW}))), LETTERS),
    "latent": (LanguageModel(), decoder(stack(BLOCK.model_copy(update={"mixer": LATENT}))), LETTERS),
    "relu": (LanguageModel(), decoder(stack(BLOCK.model_copy(update={"mixer": RELU, "norm": DynamicTanh()}))), LETTERS),
    "lora": (LanguageModel(), decoder(stack(NARROW)).model_copy(update={"adapter": LORA}), LETTERS),
    "prefix": (PrefixLM(), decoder(stack()), LETTERS),
    "spans": (SpanCorruption(), pair(stack(), stack(ACROSS)), SPANS),
    "cells": (Seq2Seq(max_target=6), pair(stack(GIVER, Sinusoidal()), stack(CELL, Sinusoidal())), WORDS),
    "classify": (Classify(labels=("no", "yes")), encoder(stack(position=Sinusoidal()), TWO), WORDS),
    "entail": (Classify(labels=("no", "yes"), pairs=True), encoder(stack(position=T5Bias()), TWO), WORDS),
    "several": (Classify(labels=("no", "yes"), separator=","), encoder(stack(), TWO), WORDS),
    "funnel": (Classify(labels=("no", "yes")), encoder(stack(pooling=Pooling(stages=(1, 1))), TWO), WORDS),
    "pooled": (MaskedLanguageModel(), encoder(stack(pooling=Pooling(stages=(1, 1))), MaskedLM()), WORDS),
    "regress": (
        Regress(mean=0.0, deviation=1.0),
        encoder(stack(), Classifier(labels=1, pool="mean")),
        WORDS,
    ),
    "apart": (Regress(apart=True, mean=0.0, deviation=1.0), encoder(stack(), Embedder()), WORDS),
    "embed": (Embed(), encoder(stack(), Embedder()), WORDS),
    "mlm": (MaskedLanguageModel(), encoder(stack(), MaskedLM()), WORDS),
    "distances": (
        MaskedLanguageModel(),
        encoder(stack(position=Disentangled(buckets=4, max_distance=8)), MaskedLM()),
        WORDS,
    ),
    "global": (
        Classify(labels=("no", "yes")),
        encoder(stack(BLOCK.model_copy(update={"mixer": GLOBAL}), Sinusoidal()), TWO),
        WORDS,
    ),
    "tag": (Tag(labels=("a", "b", "c")), encoder(stack(), TokenLabels(labels=3)), WORDS),
}
TARGETS = {"entail": "the lazy dog", "regress": "the lazy dog"}
TEXTS = {
    "mlm": "the <mask> fox",
    "distances": "the <mask> fox",
    "pooled": "the <mask> fox",
    "spans": "the <extra_id_0> fox",
}


def made(name: str, folder: Path = Path("nowhere")) -> Run:
    """Return one of the runs; its weights are the same every time."""
    return untrained(*RUNS[name], folder / name, seed=sum(map(ord, name)))


def untrained(spec: AnyTask, config: ModelConfig, tokenizer: TextTokenizer, folder: Path, seed: int = 0) -> Run:
    """Return a run of a task with random weights."""
    tokens = {"vocab": tokenizer.size}
    sides = {side: x.model_copy(update=tokens) for side in ("source", "target") if (x := getattr(config, side))}
    special = Special(pad=tokenizer.pad, bos=tokenizer.bos, eos=tokenizer.eos, start=tokenizer.bos)
    config = config.model_copy(update={**sides, "special": special})
    torch.manual_seed(seed)
    model = Transformer(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.5 if weight.dim() > 1 else 0.2)
    return Run(model, spec.build(tokenizer), spec, folder)


def written(name: str, folder: Path) -> Path:
    """Write one of the runs to a folder."""
    return write(made(name, folder))


def write(run: Run) -> Path:
    """Write a run to its folder."""
    write_folder(run.folder, lambda here: write_model(here, run.model.state_dict(), run.config, run.spec, run.task))
    return run.folder


def body(name: str, **more: object) -> dict[str, object]:
    """Return a request about the text of one of the runs."""
    return {"run": name, "text": TEXTS.get(name, TEXT), "target": TARGETS.get(name), "off": []} | more

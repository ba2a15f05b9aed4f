"""Checkpoints of nanochat (Karpathy 2025): model_STEP.pt beside meta_STEP.json, and tokenizer.pkl.

Read are models of the first architecture, from October 2025 to January 2026, the one of `NanoChatForCausalLM` in
`transformers`: rotary positions, RMS norms without weights (also of embeddings, queries and keys), squared ReLU, a soft
cap of 15 on the logits; and those of the middle of January 2026 with learned weights of the residual stream and of the
embeddings in each layer, and with windows. Later ones add weights that anyformer has no part for: they are refused by
these names.

nanochat rotates by minus the angle. With the second half of each head's queries and keys negated, the scores are those
of a rotation by the angle itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from anyformer import config as spec
from anyformer.config import ConfigError, Fault, ModelConfig
from anyformer.data.chat_template import DEFAULT
from anyformer.data.tokenizer import TextTokenizer
from anyformer.data.vocabulary import BYTES
from anyformer.interop import public_tokenizers, weight_conversion, weight_files
from anyformer.interop.config_fields import Fields
from anyformer.interop.family import WeightNames, tile_layers
from anyformer.interop.nanogpt import HEAD, POSITIONS, TABLE, tensors
from anyformer.interop.plain_pickle import StoredState, read_plain
from anyformer.interop.weight_conversion import ImportedModel
from anyformer.interop.weight_files import PickledTensor, wrong
from anyformer.interop.weight_rules import AnyRule, Rule

MODEL_FILE = re.compile(r"model_(\d+)\.pt")
TOKENIZER, ENCODING = "tokenizer.pkl", "tiktoken.core.Encoding"
EPS = torch.finfo(torch.float32).eps  # of torch's rms_norm by default
CAP, THETA = 15.0, 10_000.0
BOS, END = "<|bos|>", "<|assistant_end|>"
NORMS = "norm without weights, of width "  # prefix of the names of ones, which no file holds
SKIPS = ("resid_lambdas", "x0_lambdas")  # a and b of a x + b x₀, which a layer reads
# Weights of later architectures.
LATER = {
    "value_embeds": "value embeddings",
    "smear_gate": "smeared embeddings",
    "backout_lambda": "the subtraction of a middle layer",
}
CHARACTERS = {byte: character for character, byte in BYTES.items()}
CHAT = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role == 'system' and loop.first and messages[1] is defined %}"
    "{% elif message.role == 'user' %}<|user_start|>"
    "{% if loop.index0 == 1 and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}"
    "{{ message.content }}<|user_end|>"
    "{% elif message.role == 'assistant' %}<|assistant_start|>{{ message.content }}<|assistant_end|>"
    "{% else %}{{ raise_exception('roles are user and assistant, after at most one system message') }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)


def is_nanochat(content: Any) -> bool:
    """Return whether the content of a .pt file is a state dict of nanochat."""
    return isinstance(content, dict) and {TABLE, HEAD} <= content.keys() and POSITIONS not in content


def read_nanochat(path: Path, content: Mapping[str, Any], tokenizer: str | Path | None) -> ImportedModel:
    """Return the model of a model_STEP.pt; without a `tokenizer`, by the tokenizer.pkl beside it."""
    stored = tensors(path, content)
    if later := {what for name in stored for part, what in LATER.items() if name.split(".")[0] == part}:
        what = f"has {', '.join(sorted(later))}: only nanochat's architectures until 16 January 2026 are read"
        raise wrong(path, what)
    if not (found := MODEL_FILE.fullmatch(path.name)):
        raise wrong(path, "is a checkpoint of nanochat, whose name must be model_STEP.pt: meta_STEP.json belongs to it")
    meta = path.with_name(f"meta_{found[1]}.json")
    fields = Fields({}, meta).table("model_config", weight_files.read_json(meta).get("model_config") or {})
    with fields.named():
        config = _config(fields, skips=SKIPS[0] in stored)
    fields.finish()
    file = path.with_name(TOKENIZER) if tokenizer is None else Path(tokenizer)
    if not file.exists():
        what = f"is missing, and there is no {TOKENIZER} beside {path.name}: give {TOKENIZER} or a tokenizer.json"
        raise ConfigError([Fault("--tokenizer", what)])
    text = _tokenizer(file) if file.suffix == ".pkl" else TextTokenizer.load(file, foreign=True)
    public_tokenizers.check_size(text, config, file)
    ends = {role: id for role in ("bos", "eos") if (id := text.special_id(BOS)) is not None}
    end = text.special_id(END)
    config = config.model_copy(update={"special": spec.Special(**ends, stops=() if end is None else (end,))})
    weight_conversion.check_excess(config, stored, path)
    for name in (TABLE, HEAD):  # rows that make the size of a table a round number
        if isinstance(table := stored[name], PickledTensor) and table.tensor.dim() == 2:
            stored[name] = PickledTensor(path, table.tensor[: config.vocab])
    for width in (config.width, config.width // fields("n_head", 6)):
        stored[f"{NORMS}{width}"] = PickledTensor(path, torch.ones(width))
    return ImportedModel(weight_conversion.build(NAMES, config, stored, path), text)


# -- the model --------------------------------------------------------------------------------------------------------


def _config(fields: Fields, skips: bool) -> ModelConfig:
    width, heads = fields("n_embd", 768), fields("n_head", 6)
    norm = spec.RMSNorm(eps=EPS)
    mixer = spec.Attention(heads=heads, kv_heads=fields("n_kv_head", 6), qk_norm=norm)
    block = spec.Block(mixer=mixer, feedforward=spec.Plain(activation=spec.SquaredRelu(), bias=False), norm=norm)
    depth, length = fields.depth("n_layer", 12), fields("sequence_len", 1024)
    near = block.model_copy(
        update={"mixer": mixer.model_copy(update={"pattern": spec.Window(before=length // 2, after=0)})}
    )
    kinds = fields("window_pattern", "L").upper()
    if not kinds or set(kinds) - {"S", "L"}:
        raise ConfigError([fields.fault("window_pattern", "must consist of S and L")])
    layers = [near if kinds[i % len(kinds)] == "S" and i < depth - 1 else block for i in range(depth)]
    prefix, blocks = tile_layers(layers)
    return ModelConfig(
        width=width,
        target=spec.Tokens(vocab=fields("vocab_size", 50_304), norm=norm),
        decoder=spec.Stack(
            depth=depth,
            prefix=prefix,
            blocks=blocks,
            position=spec.Rotary(theta=THETA),
            final_norm=norm,
            embedding_skip=skips,
        ),
        head=spec.LM(cap=CAP),
        tie="none",
        context=length,
    )


@dataclass(frozen=True)
class Reflected:
    """Queries, keys and values as rows; of queries and keys, the second half of each head is negated."""

    sizes: tuple[int, ...]
    head: int  # k

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        q, k, v = parts
        return torch.cat((self._reflect(q), self._reflect(k), v))

    def part(self, whole: Tensor) -> list[Tensor]:
        q, k, v = whole.split(self.sizes)
        return [self._reflect(q), self._reflect(k), v]

    def _reflect(self, x: Tensor) -> Tensor:
        first, second = x.unflatten(0, (-1, 2, self.head // 2)).unbind(1)  # [h, k/2, d]
        return torch.stack((first, -second), 1).flatten(0, 2)


def _rules(config: ModelConfig) -> Iterator[AnyRule]:
    stack = config.decoder
    assert stack
    mixer = stack.blocks[0].mixer
    assert isinstance(mixer, spec.Attention)
    k = config.width // mixer.heads
    sizes = (mixer.heads * k, mixer.groups * k, mixer.groups * k)
    ones, head_ones = f"{NORMS}{config.width}", f"{NORMS}{k}"
    yield Rule("target.table.weight", TABLE)
    yield Rule("target.norm.weight", ones)
    for i in range(stack.depth):
        ours, theirs = f"decoder.blocks.{i}", f"transformer.h.{i}"
        qkv = (f"{theirs}.attn.c_{part}.weight" for part in "qkv")
        yield Rule(f"{ours}.mixer.norm_in.weight", ones)
        yield Rule(f"{ours}.mixer.inner.qkv.weight", *qkv, conversion=Reflected(sizes, k))
        yield Rule(f"{ours}.mixer.inner.q_norm.weight", head_ones)
        yield Rule(f"{ours}.mixer.inner.k_norm.weight", head_ones)
        yield Rule(f"{ours}.mixer.inner.out.weight", f"{theirs}.attn.c_proj.weight")
        yield Rule(f"{ours}.feedforward.norm_in.weight", ones)
        yield Rule(f"{ours}.feedforward.inner.up.weight", f"{theirs}.mlp.c_fc.weight")
        yield Rule(f"{ours}.feedforward.inner.down.weight", f"{theirs}.mlp.c_proj.weight")
    if stack.embedding_skip:
        yield Rule("decoder.skips.own", SKIPS[0])
        yield Rule("decoder.skips.embedding", SKIPS[1])
    yield Rule("decoder.final_norm.weight", ones)
    yield Rule("head.table", HEAD)


NAMES = WeightNames(kind="nanochat", rules=_rules)


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def _tokenizer(file: Path) -> TextTokenizer:
    """Read an encoding of tiktoken: byte pairs with ranks, a pattern of words, and special tokens."""
    content = read_plain(file, ENCODING)
    match content.state if isinstance(content, StoredState) else None:
        case {"pat_str": str(pattern), "mergeable_ranks": dict(ranks), "special_tokens": dict(special)}:
            known = all(isinstance(token, bytes) and token and type(i) is int for token, i in ranks.items())
            named = all(isinstance(token, str) and token and type(i) is int for token, i in special.items())
        case _:
            raise wrong(file, "is not an encoding of tiktoken")
    ids = [*sorted(ranks.values()), *sorted(special.values())] if known and named else []
    if ids != list(range(len(ids))) or len(ids) < len(BYTES) or BOS not in special:
        raise wrong(file, f"is damaged: its tokens do not have the ids from 0, or {BOS} is missing")
    vocab = {_written(token): i for token, i in ranks.items()}
    merges = [(_written(first), _written(second)) for first, second in _merges(ranks)]
    try:
        words = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:
        raise wrong(file, f"its pattern is not a regular expression: {error}") from None
    # tiktoken: a word that is a token is not merged from its bytes
    inner = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([words, to_bytes]), decoders.ByteLevel()
    inner.add_special_tokens(sorted(special, key=special.__getitem__))
    inner.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, special[BOS])])
    chat = {DEFAULT: CHAT} if END in special else None
    return TextTokenizer(inner, roles={"bos": BOS, "eos": BOS}, chat=chat)


def _written(token: bytes) -> str:
    """Return GPT-2's visible characters for the bytes of a token."""
    return "".join(CHARACTERS[byte] for byte in token)


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the two parts of each token, by rank: the last merge of its bytes by the tokens of lower rank."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            if (least := min(joined)) >= rank:
                break  # no merge leads to this token; only a whole word becomes it
            at = joined.index(least)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]

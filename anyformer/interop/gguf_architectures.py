"""Architectures of GGUF files: their metadata as the config.json of a family, and back; the names of their tensors.

The rules of the family do the rest (`families/`). Keys of metadata are without the architecture's name before them.
Their meaning is that of llama.cpp's src/models.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyformer.config import RMSNorm
from anyformer.interop import gguf_rope
from anyformer.interop.config_fields import Fields
from anyformer.interop.families import bert, gemma, gpt2, llama, phi
from anyformer.interop.families.block_fields import BlockFields
from anyformer.interop.gguf_file import GgufFile, GgufTensor
from anyformer.interop.rotary_fields import FULL, NEAR
from anyformer.interop.weight_files import StoredTensor
from anyformer.interop.weight_rules import Conversion, Names, RotaryPairs, StackedRows, Transposed

Data = dict[str, Any]
PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")  # a number, or one a layer

WINDOW = "attention.sliding_window"
UNCHANGED = StackedRows((1,))


@dataclass(frozen=True)
class PublicTensor:
    """A tensor of a GGUF file in its public form."""

    inner: GgufTensor
    change: Conversion

    @property
    def file(self) -> Path:
        return self.inner.file

    @property
    def dtype(self) -> torch.dtype:
        return self.inner.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.inner.shape
        return shape[::-1] if isinstance(self.change, Transposed) and len(shape) == 2 else shape

    def read(self) -> Tensor:
        return self.change.join([self.inner.read()])


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`."""

    name: str
    family: str
    model: str  # class of the model in config.json
    keys: Mapping[str, str]  # key of metadata to field of config.json
    modules: Mapping[str, str]  # name in a file to public name, without weight or bias; {} is the layer
    read: Callable[[Fields, Data, GgufFile], Data]  # further fields of config.json
    write: Callable[[Data], Data]  # further metadata
    change: Callable[[str, Data], Conversion] = lambda name, config: UNCHANGED  # of a tensor, by its name in a file

    def config(self, file: GgufFile) -> Data:
        """Return the config.json of a file; raise `ConfigError` for a key that is not supported."""
        before = f"{self.name}."
        given = {key.removeprefix(before): v for key, v in file.metadata.items() if key.startswith(before)}
        given |= {key: _uniform(given[key]) for key in PER_LAYER if key in given}
        given = {key: value for key, value in given.items() if key != WINDOW or value != 0}  # 0: none
        fields = Fields({}, file.path).table(self.name, given)
        found: Data = {}
        for key, name in self.keys.items():
            value = fields.maybe(key, float if key.endswith(("epsilon", "softcapping")) else int)
            found |= {} if value is None else {name: value}
        if (depth := fields.maybe("block_count", int) or 0) > len(file.tensors):  # before lists of that length are made
            fields.refuse("block_count", f"= {depth}: the file has {len(file.tensors):,} tensors")
            fields.finish()
        fields.silent("vocab_size")  # the table has as many rows
        if (table := file.tensors.get("token_embd.weight")) is not None:
            found["vocab_size"] = table.shape[0]
        found |= self.read(fields, found, file)
        fields.finish()
        return {"model_type": self.family, "architectures": [self.model], **found}

    def metadata(self, config: Data) -> Data:
        """Return the metadata of a config.json, with whole keys. What they cannot express is left out."""
        found = {key: config[name] for key, name in self.keys.items() if config.get(name) is not None}
        found |= {"vocab_size": config["vocab_size"], **self.write(config)}
        given = {f"{self.name}.{key}": value for key, value in found.items() if value is not None}
        return {"general.architecture": self.name, **given}

    def stored(self, file: GgufFile, config: Data) -> dict[str, StoredTensor]:
        """Return the tensors of a file in their public form, by public names; unknown ones under their own."""
        tensors = {name: x for name, x in file.tensors.items() if name not in gguf_rope.TENSORS}
        return {self.public_name(name): PublicTensor(x, self.change(name, config)) for name, x in tensors.items()}

    def public_name(self, name: str) -> str:
        """Return the public name of a tensor."""
        layer = re.match(r"blk\.(\d+)\.", name)
        module, _, end = (f"blk.{{}}.{name[layer.end() :]}" if layer else name).rpartition(".")
        if module not in self.modules:
            return name
        return f"{self.modules[module].format(layer[1] if layer else '')}.{end}"

    def file_name(self, name: str) -> str:
        """Return the name in a file of a tensor, by its public name."""
        layer = re.search(r"\.(\d+)\.", name)
        module, _, end = re.sub(r"\.\d+\.", ".{}.", name, count=1).rpartition(".")
        (found,) = (ours for ours, theirs in self.modules.items() if theirs == module)
        return f"{found.format(layer[1] if layer else '')}.{end}"


def _uniform(value: Any) -> Any:
    """Return the one number of all layers."""
    return value[0] if isinstance(value, list) and value and all(one == value[0] for one in value) else value


def _is_tied(file: GgufFile) -> bool:
    """Return whether the table of the head is that of the input, which some files hold twice."""
    table, head = file.tensors.get("token_embd.weight"), file.tensors.get("output.weight")
    if table is None or head is None:
        return True
    return (table.kind, table.shape) == (head.kind, head.shape) and bool((table.data() == head.data()).all())


def _has(file: GgufFile, name: str) -> bool:
    return f"blk.0.{name}" in file.tensors


# -- names ------------------------------------------------------------------------------------------------------------

# Parts of a layer of ours, each with its name in a file; the name of several parts in one matrix is in `JOINED`.
PARTS: Names = {
    "mixer.norm_in": "attn_norm",
    "mixer.norm_sum": "attn_output_norm",
    "mixer.norm_branch": "post_attention_norm",
    "mixer.inner.qkv": ("attn_q", "attn_k", "attn_v"),
    "mixer.inner.q_norm": "attn_q_norm",
    "mixer.inner.k_norm": "attn_k_norm",
    "mixer.inner.out": "attn_output",
    "feedforward.norm_in": "ffn_norm",
    "feedforward.norm_sum": "layer_output_norm",
    "feedforward.norm_branch": "post_ffw_norm",
    "feedforward.inner.gate_up": ("ffn_gate", "ffn_up"),
    "feedforward.inner.up": "ffn_up",
    "feedforward.inner.down": "ffn_down",
}
JOINED = {"mixer.inner.qkv": "attn_qkv", "feedforward.inner.gate_up": "ffn_up"}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _modules(layers: str, names: Names, ends: Mapping[str, str] = ENDS) -> dict[str, str]:
    """Return the names in a file with the public ones, by those of the parts of a layer and of the ends."""
    found = dict(ends)
    for part, public in names.items():
        stored = JOINED[part] if part in JOINED and isinstance(public, str) else PARTS[part]
        both = zip(*((one,) if isinstance(one, str) else one for one in (stored, public)), strict=True)
        found |= {f"blk.{{}}.{name}": f"{layers}.{{}}.{theirs}" for name, theirs in both}
    return found


def _keys(fields: BlockFields) -> dict[str, str]:
    """Return the keys of metadata with the fields of a family."""
    rms = "rms_" if fields.norm is RMSNorm else ""
    found = {
        "context_length": fields.context,
        "embedding_length": fields.width,
        "block_count": fields.depth,
        "feed_forward_length": fields.ff,
        "attention.head_count": fields.heads,
        "attention.head_count_kv": fields.kv_heads,
        "attention.key_length": fields.key_width,
        f"attention.layer_norm_{rms}epsilon": fields.eps,
    }
    return {key: name for key, name in found.items() if name is not None}


# -- Llama, Qwen2, Qwen3 ----------------------------------------------------------------------------------------------

LLAMA_KEYS, LLAMA_MODULES = _keys(llama.LlamaFields(kind="llama")), _modules("model.layers", llama.LAYER)


def _read_llama(fields: Fields, config: Data, file: GgufFile) -> Data:
    fields.must("expert_count", 0)
    fields.must("expert_used_count", 0)
    biases = {"attention_bias": _has(file, "attn_q.bias"), "mlp_bias": _has(file, "ffn_up.bias")}
    return {**biases, "tie_word_embeddings": _is_tied(file), **gguf_rope.read(fields, config, file)}


def _read_narrow(fields: Fields, config: Data, file: GgufFile) -> Data:
    """Read an architecture for which llama.cpp needs heads of width d / heads."""
    fields.must("attention.key_length", config.get("hidden_size", 0) // config.get("num_attention_heads", 1))
    return _read_plain(fields, config, file)


def _read_plain(fields: Fields, config: Data, file: GgufFile) -> Data:
    return {"tie_word_embeddings": _is_tied(file), **gguf_rope.read(fields, config, file)}


def _change_llama(name: str, config: Data) -> Conversion:
    if found := re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name):
        both = config.get("num_attention_heads"), config.get("num_key_value_heads")
        return RotaryPairs(both[found[1] == "k"] or both[0] or 1)
    return UNCHANGED


def _llama(name: str, title: str, read: Callable[[Fields, Data, GgufFile], Data], **more: Any) -> Architecture:
    return Architecture(
        name, name, f"{title}ForCausalLM", LLAMA_KEYS, LLAMA_MODULES, read=read, write=gguf_rope.write, **more
    )


LLAMA = _llama("llama", "Llama", _read_llama, change=_change_llama)
QWEN2, QWEN3 = _llama("qwen2", "Qwen2", _read_narrow), _llama("qwen3", "Qwen3", _read_plain)

# -- GPT-2 ------------------------------------------------------------------------------------------------------------

GPT2_KEYS = {"context_length": "n_positions"} | _keys(gpt2.FIELDS)
GPT2_ENDS = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}


def _read_gpt2(fields: Fields, config: Data, file: GgufFile) -> Data:
    fields.must("attention.head_count_kv", config.get("n_head"))
    return {"tie_word_embeddings": _is_tied(file)}


def _change_gpt2(name: str, config: Data) -> Conversion:
    return (
        Transposed() if re.fullmatch(r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", name) else UNCHANGED
    )


GPT2 = Architecture(
    "gpt2",
    "gpt2",
    "GPT2LMHeadModel",
    GPT2_KEYS,
    _modules("transformer.h", gpt2.LAYER, GPT2_ENDS),
    read=_read_gpt2,
    write=lambda config: {},
    change=_change_gpt2,
)

# -- Gemma ------------------------------------------------------------------------------------------------------------

GEMMA_KEYS = LLAMA_KEYS | {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    WINDOW: "sliding_window",
}
PATTERN, SWA_THETA = "attention.sliding_window_pattern", "rope.freq_base_swa"
PERIODS = {2: 2, 3: 6}  # the last layer of each period sees everything
SCALED_BY_WIDTH = {2: 46, 3: 62}  # layers of the models whose queries are scaled by d / heads, not by the key width


def _read_gemma(version: int, fields: Fields, config: Data, file: GgufFile) -> Data:
    rope = gguf_rope.read(fields, config, file)
    found = {"tie_word_embeddings": version < 3 or _is_tied(file), **rope}
    if version == 1:
        return found
    depth, width = config.get("num_hidden_layers", 0), rope["head_dim"]
    period = fields(PATTERN, PERIODS[version], least=0)
    windows = version == 2 or "sliding_window" in config
    near = [windows and (period == 0 or i % period < period - 1) for i in range(depth)]
    found["layer_types"] = [NEAR if one else FULL for one in near]
    if depth == SCALED_BY_WIDTH[version]:
        width = config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    found["query_pre_attn_scalar"] = width
    if version == 3:
        local = {"rope_type": "default", "rope_theta": fields(SWA_THETA, 10_000.0)}
        found["rope_parameters"] = {FULL: rope["rope_parameters"], NEAR: local}
    return found


def _write_gemma(version: int, config: Data) -> Data:
    if version == 1:
        return gguf_rope.write(config)
    kinds, rope = config["layer_types"], config["rope_parameters"]
    period = kinds.index(FULL) + 1 if FULL in kinds else 0
    found: Data = (
        {} if period in (0, 1, PERIODS[version]) else {PATTERN: period}
    )  # llama.cpp needs layers of both kinds
    if version == 3:
        found |= {SWA_THETA: rope[NEAR]["rope_theta"]} if NEAR in kinds else {WINDOW: None}
        rope = rope[FULL]
    return found | gguf_rope.write(config | {"rope_parameters": rope})


class PlusOne:
    """Gemma's norm weights: 1 + γ in GGUF files."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        (x,) = parts
        return x - 1

    def part(self, whole: Tensor) -> list[Tensor]:
        return [whole + 1]


def _change_gemma(name: str, config: Data) -> Conversion:
    return PlusOne() if name.endswith("norm.weight") else UNCHANGED


def _gemma(name: str, family: str, title: str, version: int) -> Architecture:
    keys, modules = LLAMA_KEYS, LLAMA_MODULES
    if version > 1:
        keys, modules = GEMMA_KEYS, _modules("model.layers", gemma.LAYER)
    read, write = partial(_read_gemma, version), partial(_write_gemma, version)
    return Architecture(name, family, f"{title}ForCausalLM", keys, modules, read, write, change=_change_gemma)


GEMMA = _gemma("gemma", "gemma", "Gemma", 1)
GEMMA2 = _gemma("gemma2", "gemma2", "Gemma2", 2)
GEMMA3 = _gemma("gemma3", "gemma3_text", "Gemma3", 3)

# -- Phi-3 ------------------------------------------------------------------------------------------------------------

PHI3 = Architecture(
    "phi3",
    "phi3",
    "Phi3ForCausalLM",
    LLAMA_KEYS | {WINDOW: "sliding_window"},
    _modules("model.layers", phi.LAYER),
    read=_read_narrow,
    write=gguf_rope.write,
)

# -- BERT -------------------------------------------------------------------------------------------------------------

BERT_ENDS = {
    "token_embd": "bert.embeddings.word_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "position_embd": "bert.embeddings.position_embeddings",
    "token_embd_norm": "bert.embeddings.LayerNorm",
}


def _read_bert(fields: Fields, config: Data, file: GgufFile) -> Data:
    fields.must("attention.causal", False)
    fields.silent("pooling_type")  # `gguf_import` reads it
    fields.must("attention.head_count_kv", config.get("num_attention_heads"))
    types = file.tensors.get("token_types.weight")
    return {} if types is None else {"type_vocab_size": types.shape[0]}


BERT = Architecture(
    "bert",
    "bert",
    "BertModel",
    _keys(bert.BERT_FIELDS),
    _modules("bert.encoder.layer", bert.LAYER, BERT_ENDS),
    read=_read_bert,
    write=lambda config: {"attention.causal": False},
)

ARCHITECTURES = {one.name: one for one in (GPT2, LLAMA, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, BERT)}

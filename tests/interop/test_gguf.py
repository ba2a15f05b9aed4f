"""GGUF files: headers as the package gguf writes them, models as `transformers` computes them, honest refusals."""

import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import HealthCheck, given, settings, strategies as st

import anyformer as af
from anyformer.config import ConfigError
from anyformer.interop import gguf_file, import_model
from anyformer.interop.gguf_architectures import ARCHITECTURES, PublicTensor
from anyformer.interop.gguf_file import FLOATS, QUANTISED
from anyformer.interop.gguf_rope import FACTORS
from anyformer.interop.weight_rules import RotaryPairs, Transposed
from tests.interop.public import TOLERANCE, loud
from tests.test_cli import refused

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
from tests.interop.gguf_files import F32, TOKENIZER, TOKENS, as_f32, named, write  # noqa: E402

WIDTH, HEADS, GROUPS, DEPTH, FF, LENGTH = 32, 4, 2, 2, 64, 48
KINDS = [gguf.GGMLQuantizationType[name] for name in (*FLOATS, *QUANTISED)]
numbers = st.integers(0, 2**32 - 1) | st.booleans() | st.floats(width=32, allow_nan=False) | st.text()
entries = st.dictionaries(st.text(min_size=1), numbers | st.lists(st.text(), min_size=1), max_size=4)


def llama(path: Path, tied: bool = False, bias: bool = False, **metadata: Any) -> hf.LlamaForCausalLM:
    """A Llama of `transformers`, written as llama.cpp's converter does."""
    config = hf.LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=FF,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        rope_theta=5000.0,
        attention_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    model = loud(hf.LlamaForCausalLM(config))
    tensors = named(model, "llama", DEPTH)
    for name, x in tensors.items():
        heads = HEADS if ".attn_q." in name else GROUPS if ".attn_k." in name else None
        if heads:
            tensors[name] = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    if tied:
        del tensors["output.weight"]
    known = {
        "general.architecture": "llama",
        "llama.context_length": LENGTH,
        "llama.embedding_length": WIDTH,
        "llama.block_count": DEPTH,
        "llama.feed_forward_length": FF,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": GROUPS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "llama.rope.dimension_count": WIDTH // HEADS,
    }
    write(path, known | TOKENIZER | metadata, as_f32(tensors))
    return model


# -- the file ---------------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metadata=entries, kind=st.sampled_from(KINDS), rows=st.integers(1, 3), seed=st.integers(0, 9))
def test_headers_and_values_are_those_of_the_package(
    tmp_path: Path, metadata: dict[str, Any], kind: Any, rows: int, seed: int
) -> None:
    rng, (block, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 60, (rows, 2 * size), np.uint8)  # small bytes: no scale is infinite
    first = rng.normal(size=(3, 5)).astype(np.float32)
    path = write(tmp_path / "one.gguf", metadata, {"first": (first, F32), "second": (data, kind)})
    file = gguf_file.read(path)
    assert {key: np.float32(v) if isinstance(v, float) else v for key, v in file.metadata.items()} == metadata
    assert torch.equal(file.tensors["first"].read(), torch.from_numpy(first))
    second = file.tensors["second"]
    assert second.shape == (rows, 2 * block)
    assert bytes(second.data()) == data.tobytes()
    assert np.array_equal(second.read().float().numpy(), gguf.quants.dequantize(data, kind), equal_nan=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.data())
def test_damaged_files_are_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "llama.gguf"
    if not path.exists():
        llama(path)
    whole = path.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    if data.draw(st.booleans(), "cut"):
        damaged.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1), "length")])
        with pytest.raises(ConfigError):
            gguf_file.read(damaged)
        return
    header = len(whole) - sum(x.size for x in gguf_file.read(path).tensors.values())
    at, bits = data.draw(st.integers(0, header - 1), "at"), data.draw(st.integers(1, 255), "bits")
    damaged.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
    with suppress(ConfigError):
        gguf_file.read(damaged)


def test_without_the_package_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama(tmp_path / "llama.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    (line,) = refused("import", tmp_path / "llama.gguf", "--out", tmp_path / "run")
    assert "pip install 'anyformer[gguf]'" in line
    assert not (tmp_path / "run").exists()


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tied", "bias"), [(False, False), (True, True)])
def test_a_llama_computes_what_transformers_does(tmp_path: Path, tied: bool, bias: bool) -> None:
    theirs = llama(tmp_path / "llama.gguf", tied, bias)
    run = import_model(tmp_path / "llama.gguf", tmp_path / "run")
    ids = torch.randint(len(TOKENS), (2, LENGTH))
    with torch.no_grad():
        torch.testing.assert_close(run.model.cpu()(ids), theirs(ids).logits, rtol=0, atol=TOLERANCE)
    assert (run.config.tie, run.config.context) == ("output" if tied else "none", LENGTH)
    assert (run.config.special.bos, run.config.special.eos, run.config.special.pad) == (1, 2, 3)
    assert [run.tokenizer.token(i) for i in run.tokenizer.encode("cab a<s>")] == ["cab", "▁a", *"<s>"]
    assert af.load(tmp_path / "run").tokenizer.encode("ab") == [TOKENS.index("ab")]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"kind": "none"}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"llama.rope.scale_linear": 2.0}, {"kind": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 12,
            },
            {"kind": "yarn", "factor": 4.0, "original_length": 12},
        ),
    ],
)
def test_rotary_scalings(tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    llama(tmp_path / "llama.gguf", **metadata)
    run = import_model(tmp_path / "llama.gguf", tmp_path / "run")
    assert run.config.decoder
    found = run.config.decoder.position.scaling.model_dump()
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"general.architecture": "lama"}, "general.architecture = 'lama': did you mean 'llama'?"),
        ({"general.type": "adapter"}, "general.type = 'adapter': only files of models are read"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8: only 0 is supported"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0: is not supported"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type = 'longrope': must be none, linear or yarn"),
        ({"llama.attention.value_length": 6}, "llama.attention.value_length = 6: only 8 is supported"),
        ({"llama.attention.head_count": [4, 2]}, "llama.attention.head_count = [4, 2]: must be of type int"),
        ({"llama.block_count": "2"}, "llama.block_count = '2': must be of type int"),
        ({"llama.block_count": 3}, "has no weight model.layers.2.self_attn.q_proj.weight"),
        ({"llama.block_count": 2**31}, "llama.block_count = 2147483648: the file has 21 tensors"),
        ({"llama.attention.head_count": 33}, "llama.attention.head_count = 33: must be at most embedding_length = 32"),
        ({"llama.attention.head_count": [[4], [4]]}, "llama.attention.head_count = [4]: must be of type int"),
        ({"llama.feed_forward_length": 60}, "has shape [64, 32], but the config needs [60, 32]"),
        ({"tokenizer.ggml.pre": "qwen3"}, "tokenizer.ggml.pre = 'qwen3': did you mean 'qwen2'?"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model = 't5': "),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "tokenizer.ggml.tokens has a token twice"),
        ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges must be pairs of tokens"),
        ({"tokenizer.chat_template": "{% if %}"}, "tokenizer.chat_template: is no chat template"),
        ({"split.count": 3}, "is one of 3 parts: join them with llama-gguf-split --merge"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, metadata: dict[str, Any], what: str) -> None:
    llama(tmp_path / "llama.gguf", **metadata)
    lines = refused("import", tmp_path / "llama.gguf", "--out", tmp_path / "run")
    assert any(what in line for line in lines), lines
    assert str(tmp_path / "llama.gguf") in lines[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("width", [2**31, 9])
def test_factors_of_another_width_are_refused(tmp_path: Path, width: int) -> None:
    path, metadata = tmp_path / "one.gguf", {"llama.attention.head_count": 1, "llama.attention.key_length": width}
    write(path, {"general.architecture": "llama"} | metadata, {FACTORS: (np.ones(4, np.float32), F32)})
    with pytest.raises(ConfigError, match="these factors are not those of a published Llama 3 model"):
        ARCHITECTURES["llama"].config(gguf_file.read(path))


@pytest.mark.parametrize("shape", [(30,), (30, 32), (2, 3, 4)])
def test_a_tensor_has_a_shape_that_its_change_does_not_fit(tmp_path: Path, shape: tuple[int, ...]) -> None:
    write(tmp_path / "one.gguf", {}, {"blk.0.attn_q.weight": (np.ones(shape, np.float32), F32)})
    (inner,) = gguf_file.read(tmp_path / "one.gguf").tensors.values()
    assert PublicTensor(inner, RotaryPairs(4)).shape == shape
    assert PublicTensor(inner, Transposed()).shape == (shape[::-1] if len(shape) == 2 else shape)


def test_a_tensor_without_values_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "one.gguf", {}, {"first": (np.ones((3, 5), np.float32), F32)})
    header = path.read_bytes()
    path.write_bytes(header.replace(struct.pack("<IQQ", 2, 5, 3), struct.pack("<IQQ", 2, 5, 0)))
    with pytest.raises(ConfigError, match=r"is damaged: first of F32 has the shape \[0, 5\]"):
        gguf_file.read(path)

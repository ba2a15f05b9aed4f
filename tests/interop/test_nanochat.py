"""Checkpoints of nanochat's first architecture: its logits, its tokenizer, and the refusal of later ones by name."""

import json
import math
import os
import pickle
import shutil
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

import anyformer as af
from anyformer.config import ConfigError
from anyformer.interop import import_model
from anyformer.interop.nanochat import LATER
from tests.test_cli import done, refused

DEPTH, WIDTH, HEADS, GROUPS = 3, 32, 4, 2
PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
PIECES = ["th", "the", " t", " the", "an", "nd", "and", " a", " and", "ing", "in", "é", "12", "\n\n", "ll", "'ll", "!!"]
RANKS = {**{bytes([i]): i for i in range(256)}, **{piece.encode(): 256 + i for i, piece in enumerate(PIECES)}}
NAMES = ("bos", "user_start", "user_end", "assistant_start", "assistant_end", "python_start")
SPECIAL = {f"<|{name}|>": len(RANKS) + i for i, name in enumerate(NAMES)}
ENDS = {SPECIAL["<|bos|>"], SPECIAL["<|assistant_end|>"]}
VOCAB = len(RANKS) + len(SPECIAL)
ROWS = math.ceil(VOCAB / 64) * 64


def state(skips: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    k = WIDTH // HEADS
    shapes: dict[str, tuple[int, int]] = {"transformer.wte.weight": (ROWS, WIDTH), "lm_head.weight": (ROWS, WIDTH)}
    for i in range(DEPTH):
        block = f"transformer.h.{i}"
        shapes |= {f"{block}.attn.c_q.weight": (WIDTH, WIDTH), f"{block}.attn.c_proj.weight": (WIDTH, WIDTH)}
        shapes |= {f"{block}.attn.c_{part}.weight": (GROUPS * k, WIDTH) for part in "kv"}
        shapes |= {f"{block}.mlp.c_fc.weight": (4 * WIDTH, WIDTH), f"{block}.mlp.c_proj.weight": (WIDTH, 4 * WIDTH)}
    weights = {name: torch.randn(shape) * (3.0 if name == "lm_head.weight" else 0.5) for name, shape in shapes.items()}
    if skips:
        weights |= {"resid_lambdas": 1 + torch.rand(DEPTH), "x0_lambdas": torch.rand(DEPTH) - 0.5}
    return weights | {"transformer.wte.weight": weights["transformer.wte.weight"].bfloat16()}


def forward(w: dict[str, Tensor], ids: Tensor, windows: list[int] | None = None) -> Tensor:
    """Logits [b, t, v]: norms without weights, keys and queries turned by minus the angle and then normed.

    A window is the largest distance that a layer sees.
    """
    w = {name: x.double() for name, x in w.items()}
    (b, t), k = ids.shape, WIDTH // HEADS
    angles = torch.arange(t).double()[:, None] / 10000 ** (torch.arange(0, k, 2).double() / k)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=torch.finfo(torch.float32).eps)

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)  # [b, t, h, k/2]
        return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)

    x, hidden = norm(w["transformer.wte.weight"][ids]), torch.ones(t, t, dtype=torch.bool).triu(1)
    x0, back = x, torch.arange(t)[:, None] - torch.arange(t)
    for i in range(DEPTH):
        if "resid_lambdas" in w:
            x = w["resid_lambdas"][i] * x + w["x0_lambdas"][i] * x0
        if windows is not None:
            hidden = (back < 0) | (back > windows[i])
        block, y = f"transformer.h.{i}", norm(x)
        q, key, v = (F.linear(y, w[f"{block}.attn.c_{part}.weight"]).view(b, t, -1, k) for part in "qkv")
        q, key = norm(turn(q)), norm(turn(key))
        q, key, v = (part.transpose(1, 2).repeat_interleave(HEADS // part.shape[2], 1) for part in (q, key, v))
        scores = (q @ key.mT / math.sqrt(k)).masked_fill(hidden, -math.inf)
        read = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + F.linear(read, w[f"{block}.attn.c_proj.weight"])
        inner = F.linear(norm(x), w[f"{block}.mlp.c_fc.weight"]).relu().square()
        x = x + F.linear(inner, w[f"{block}.mlp.c_proj.weight"])
    return 15 * torch.tanh(norm(x) @ w["lm_head.weight"][:VOCAB].T / 15)


def write_encoding(path: Path, **state: Any) -> None:
    """Pickle an object by the name of tiktoken's class, without that package."""
    package, core = types.ModuleType("tiktoken"), types.ModuleType("tiktoken.core")
    encoding = type("Encoding", (), {"__module__": "tiktoken.core", "__getstate__": lambda self: state})
    core.Encoding = encoding  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {"tiktoken": package, "tiktoken.core": core}):
        path.write_bytes(pickle.dumps(encoding()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint at step 650, with its tokenizer."""
    folder = tmp_path_factory.mktemp("d3")
    torch.save(state(), folder / "model_000650.pt")
    sizes = {"n_layer": DEPTH, "n_embd": WIDTH, "n_head": HEADS, "n_kv_head": GROUPS}
    config = {"sequence_len": 64, "vocab_size": VOCAB, **sizes}
    (folder / "meta_000650.json").write_text(json.dumps({"step": 650, "model_config": config}))
    write_encoding(
        folder / "tokenizer.pkl", name="rustbpe", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens=SPECIAL
    )
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Any:
    done("import", folder / "model_000650.pt", "--allow-pickle", "--out", folder / "run")
    return af.load(folder / "run")


def test_logits(run: Any) -> None:
    ids = torch.randint(VOCAB, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(run.model(ids).double(), forward(state(), ids), rtol=0, atol=1e-4)
    ids, start = ids[:1, :6], 6
    while ids.shape[1] < start + 8 and not {*ids[0, start:].tolist()} & ENDS:
        ids = torch.cat((ids, forward(state(), ids)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(af.generate(run.model, ids[:, :start], max_new_tokens=8)[:, : ids.shape[1]], ids)


def test_windows_and_skips(folder: Path, tmp_path: Path) -> None:
    """The middle of January 2026: a x + b x₀ is what a layer reads, and short layers see half of the context."""
    torch.save(state(skips=True), tmp_path / "model_000010.pt")
    meta = json.loads((folder / "meta_000650.json").read_text())
    meta["model_config"] |= {"window_pattern": "ssL", "sequence_len": 24}
    (tmp_path / "meta_000010.json").write_text(json.dumps(meta))
    shutil.copy(folder / "tokenizer.pkl", tmp_path)
    run = import_model(tmp_path / "model_000010.pt", tmp_path / "run", allow_pickle=True)
    ids = torch.randint(VOCAB, (2, 24))
    with torch.no_grad():
        found = run.model(ids).double()
    torch.testing.assert_close(found, forward(state(skips=True), ids, [12, 12, 24]), rtol=0, atol=1e-4)
    assert not torch.allclose(found, forward(state(skips=True), ids), atol=1e-2)


@given(st.text("thean dinglé12!'\n\tZ<|bos|>好"))
def test_ids_are_those_of_tiktoken(run: Any, text: str) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    theirs = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens=SPECIAL)
    assert run.tokenizer.encode(text) == theirs.encode_ordinary(text)
    assert run.tokenizer.decode(run.tokenizer.encode(text)) == text


def test_a_conversation(run: Any) -> None:
    messages = [
        {"role": "system", "content": "in"},
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": "and"},
        {"role": "user", "content": "an"},
    ]
    assert run.chat_template is not None
    names = [f"<|{name}|>" for name in NAMES]
    written = f"{names[0]}{names[1]}in\n\nthe{names[2]}{names[3]}and{names[4]}{names[1]}an{names[2]}{names[3]}"
    assert run.chat_template.render(messages) == written
    assert run.chat_template.end_of_turn == SPECIAL["<|assistant_end|>"]
    assert SPECIAL["<|assistant_end|>"] in run.config.special.stops


@pytest.mark.parametrize("name", LATER)
def test_later_architectures_are_refused_by_name(folder: Path, tmp_path: Path, name: str) -> None:
    torch.save(state() | {name: torch.ones(DEPTH)}, tmp_path / "model_000650.pt")
    (line,) = refused("import", tmp_path / "model_000650.pt", "--allow-pickle", "--out", tmp_path / "run")
    assert line.startswith(f"{tmp_path / 'model_000650.pt'}: has {LATER[name]}: only nanochat's architectures")


def test_other_files_are_refused(tmp_path: Path, folder: Path) -> None:
    torch.save(state(), tmp_path / "weights.pt")
    (line,) = refused("import", tmp_path / "weights.pt", "--allow-pickle", "--out", tmp_path / "run")
    assert "whose name must be model_STEP.pt" in line
    (tmp_path / "weights.pt").rename(tmp_path / "model_000650.pt")
    meta = json.loads((folder / "meta_000650.json").read_text())
    meta["model_config"]["window_pattern"] = "SSXL"
    (tmp_path / "meta_000650.json").write_text(json.dumps(meta))
    command = ("import", tmp_path / "model_000650.pt", "--allow-pickle", "--out", tmp_path / "run")
    assert "window_pattern: must consist of S and L" in refused(*command)[0]
    meta["model_config"]["window_pattern"] = "L"
    (tmp_path / "meta_000650.json").write_text(json.dumps(meta))
    assert refused(*command)[0].startswith("--tokenizer: is missing, and there is no tokenizer.pkl")
    write_encoding(tmp_path / "tokenizer.pkl", pat_str=PATTERN, mergeable_ranks={b"a": 3}, special_tokens=SPECIAL)
    assert "tokenizer.pkl: is damaged" in refused(*command)[0]
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(os.system))
    assert "which is code" in refused(*command)[0]


@pytest.mark.parametrize(
    ("config", "weights", "said"),
    [
        ([1], {}, "model_config = [1]: must be a table"),
        ({"n_embd": 6 * 2**40}, {}, "describes a model of"),
        ({}, {"transformer.wte.weight": torch.ones(())}, "transformer.wte.weight has shape []"),
        ({}, {"lm_head.weight": torch.ones(3)}, "lm_head.weight has shape [3]"),
    ],
)
def test_odd_checkpoints_are_refused(
    folder: Path, tmp_path: Path, config: Any, weights: dict[str, Tensor], said: str
) -> None:
    shutil.copy(folder / "tokenizer.pkl", tmp_path)
    torch.save(state() | weights, tmp_path / "model_000650.pt")
    meta = json.loads((folder / "meta_000650.json").read_text())["model_config"]
    meta = meta | config if isinstance(config, dict) else config
    (tmp_path / "meta_000650.json").write_text(json.dumps({"model_config": meta}))
    with pytest.raises(ConfigError) as error:
        import_model(tmp_path / "model_000650.pt", tmp_path / "run", allow_pickle=True)
    assert said in str(error.value)

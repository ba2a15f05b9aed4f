"""Checkpoints of nanoGPT and minGPT: the logits and samples of their formulas, their vocabularies, what is refused."""

import importlib.util
import json
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import anyformer as af
from anyformer.config import ConfigError
from anyformer.interop import import_model
from anyformer.interop.nanogpt import read_vocabulary
from anyformer.interop.plain_pickle import read_plain
from tests.test_cli import done, refused

TEXT = "To be, or not to be:\nthat is the question.\n"
CHARACTERS = sorted(set(TEXT))
DEPTH, WIDTH, HEADS, LENGTH = 2, 24, 3, 32
ARGS = {"n_layer": DEPTH, "n_head": HEADS, "n_embd": WIDTH, "block_size": LENGTH, "vocab_size": len(CHARACTERS)}


def state(bias: bool, tied: bool) -> dict[str, Tensor]:
    """Random weights by the names of both programs; linear layers are [out, in]."""
    torch.manual_seed(0)
    found = {"transformer.wte.weight": (len(CHARACTERS), WIDTH), "transformer.wpe.weight": (LENGTH, WIDTH)}
    for i in range(DEPTH):
        block = f"transformer.h.{i}"
        sizes = {"attn.c_attn": 3 * WIDTH, "attn.c_proj": WIDTH, "mlp.c_fc": 4 * WIDTH, "mlp.c_proj": WIDTH}
        for name, out in sizes.items():
            found[f"{block}.{name}.weight"] = (out, 4 * WIDTH if name == "mlp.c_proj" else WIDTH)
            found |= {f"{block}.{name}.bias": (out,)} if bias else {}
        for name in ("ln_1", "ln_2"):
            found |= {f"{block}.{name}.weight": (WIDTH,)} | ({f"{block}.{name}.bias": (WIDTH,)} if bias else {})
    found |= {"transformer.ln_f.weight": (WIDTH,)} | ({"transformer.ln_f.bias": (WIDTH,)} if bias else {})
    weights = {name: torch.randn(shape) * 0.4 for name, shape in found.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"] if tied else torch.randn(len(CHARACTERS), WIDTH)
    return weights


def forward(w: dict[str, Tensor], ids: Tensor, approximate: str) -> Tensor:
    """Logits [b, t, v] by GPT-2's formulas, in float64."""
    w = {name: x.double() for name, x in w.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    b, t = ids.shape
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:t]
    hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
    for i in range(DEPTH):
        block = f"transformer.h.{i}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").split(WIDTH, dim=2)
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in qkv)
        scores = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -math.inf)
        read = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + linear(read, f"{block}.attn.c_proj")
        inner = F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"), approximate=approximate)
        x = x + linear(inner, f"{block}.mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["lm_head.weight"].T


def sample(logits: Any, ids: Tensor, new: int, temperature: float, top_k: int) -> Tensor:
    """Draw as both programs do, from `logits(ids)`, by torch's generator."""
    torch.manual_seed(1337)
    for _ in range(new):
        last = logits(ids[:, -LENGTH:])[:, -1].float() / temperature
        least = last.topk(min(top_k, last.shape[-1])).values[:, -1:]
        ids = torch.cat((ids, last.masked_fill(last < least, -math.inf).softmax(-1).multinomial(1)), dim=1)
    return ids


def checkpoint(folder: Path, weights: dict[str, Tensor], **args: Any) -> Path:
    """A ckpt.pt with all that nanoGPT's training stores, and its data folder."""
    out, data = folder / "out", folder / "data" / "letters"
    out.mkdir(parents=True)
    data.mkdir(parents=True)
    content = {
        "model": {f"_orig_mod.{name}": x for name, x in weights.items()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "model_args": {**ARGS, "dropout": 0.1, **args},
        "iter_num": 200,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dataset": "letters", "learning_rate": 1e-3},
    }
    torch.save(content, out / "ckpt.pt")
    meta = {"vocab_size": len(CHARACTERS), "stoi": {c: i for i, c in enumerate(CHARACTERS)}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta | {"itos": {i: c for c, i in meta["stoi"].items()}}))
    return out / "ckpt.pt"


def same(run: Any, weights: dict[str, Tensor], approximate: str) -> None:
    """Equal logits, equal samples by their loop, and the same greedy text by ours."""
    ids = torch.tensor([run.tokenizer.encode(TEXT[:LENGTH])])
    assert ids.tolist() == [[CHARACTERS.index(c) for c in TEXT[:LENGTH]]]
    expected = forward(weights, ids, approximate)
    with torch.no_grad():
        torch.testing.assert_close(run.model(ids).double(), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
        drawn = [sample(one, ids[:, :6], 40, 0.8, 9) for one in (run.model, lambda x: forward(weights, x, approximate))]
    assert torch.equal(*drawn)
    greedy = sample(lambda x: forward(weights, x, approximate), ids[:, :6], 20, 1.0, 1)
    assert torch.equal(af.generate(run.model, ids[:, :6], max_new_tokens=20), greedy)
    text = "".join(CHARACTERS[i] for i in greedy[0])
    assert run.predict([TEXT[:6]], max_new_tokens=20) == [text]


@pytest.mark.parametrize("bias", [True, False])
def test_nanogpt(tmp_path: Path, bias: bool) -> None:
    weights = state(bias, tied=True)
    path = checkpoint(tmp_path, weights, bias=bias)
    done("import", path, "--allow-pickle", "--out", tmp_path / "run")
    run = af.load(tmp_path / "run")
    same(run, weights, "none")
    assert run.config.target is not None
    assert run.config.target.dropout == 0.1


def test_nanogpt_before_the_exact_gelu(tmp_path: Path) -> None:
    weights = state(True, tied=True)
    same(import_model(checkpoint(tmp_path, weights), tmp_path / "run", allow_pickle=True), weights, "tanh")


def test_the_training_text_replaces_the_vocabulary(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, state(True, tied=True), bias=True)
    (tmp_path / "input.txt").write_text(TEXT)
    by_text = import_model(path, tmp_path / "a", allow_pickle=True, tokenizer=tmp_path / "input.txt")
    assert by_text.tokenizer.to_json() == import_model(path, tmp_path / "b", allow_pickle=True).tokenizer.to_json()
    with pytest.raises(ConfigError, match=r"cannot read this text: .*; leave out characters that are not in"):
        by_text.tokenizer.encode("Z")


@pytest.mark.parametrize(
    "settings", [{"n_head": HEADS, "model_type": None}, {"n_head": None, "model_type": "gpt-nano"}]
)
def test_mingpt(tmp_path: Path, settings: dict[str, Any]) -> None:
    weights = state(True, tied=False)
    buffers = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, LENGTH, LENGTH).tril() for i in range(DEPTH)}
    torch.save(weights | buffers, tmp_path / "model.pt")
    (tmp_path / "input.txt").write_text(TEXT)
    command = ("import", tmp_path / "model.pt", "--out", tmp_path / "run", "--allow-pickle")
    (line,) = refused(*command)
    assert line.startswith("--tokenizer: is missing: minGPT stores no vocabulary")
    (line,) = refused(*command, "--tokenizer", tmp_path / "input.txt")
    assert line.startswith(f"{tmp_path / 'config.json'}: is missing")
    (tmp_path / "config.json").write_text(json.dumps({"system": {"seed": 1}, "model": settings}))
    done(*command, "--tokenizer", tmp_path / "input.txt")
    same(af.load(tmp_path / "run"), weights, "tanh")


def test_refusals(tmp_path: Path) -> None:
    path, out = checkpoint(tmp_path, state(True, tied=True), bias=True), tmp_path / "run"
    (line,) = refused("import", path, "--out", out)
    assert line == f"{path}: is a pickle, which can run code: --allow-pickle reads its weights and plain data alone"
    (line,) = refused("import", path.parent, "--out", out)
    assert line == f"{path.parent}: holds a checkpoint of nanoGPT: anyformer import {path} --allow-pickle"
    (line,) = refused("import", path, "--out", out, "--allow-pickle", "--family", "gpt2")
    assert line == "--family: is for folders with a config.json, not for .pt files"
    content = torch.load(path, weights_only=True)
    torch.save(content | {"model_args": content["model_args"] | {"n_experts": 4}}, path)
    (line,) = refused("import", path, "--out", out, "--allow-pickle")
    assert line.startswith(f"{path}: model_args: n_experts = 4: is not supported")
    torch.save(content | {"model_args": content["model_args"] | {"n_embd": 48}}, path)
    lines = refused("import", path, "--out", out, "--allow-pickle")
    assert "transformer.wte.weight has shape" in lines[0]
    assert "but the config needs" in lines[0]
    torch.save({"weights": torch.ones(2)}, path)
    (line,) = refused("import", path, "--out", out, "--allow-pickle")
    assert line == f"{path}: is not a checkpoint of nanoGPT (with model_args), minGPT or nanochat"
    torch.save(content, path)
    (tmp_path / "data" / "letters" / "meta.pkl").unlink()
    (line,) = refused("import", path, "--out", out, "--allow-pickle")
    assert line.startswith("--tokenizer: is missing, and there is no meta.pkl near ckpt.pt")
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "weights", "said"),
    [
        ({"block_size": 2**62}, {}, "describes a model of"),
        ({"n_embd": 3 * 2**40}, {}, "describes a model of"),
        ({}, {"lm_head.weight": torch.eye(3).to_sparse()}, "lm_head.weight is a sparse tensor"),
        ({}, {f"transformer.h.{'9' * 5000}.x": torch.ones(2)}, "999.x"),
    ],
)
def test_odd_checkpoints_are_refused(
    tmp_path: Path, args: dict[str, Any], weights: dict[str, Tensor], said: str
) -> None:
    path = checkpoint(tmp_path, state(True, tied=True) | weights, bias=True, **args)
    with pytest.raises(ConfigError) as error:
        import_model(path, tmp_path / "run", allow_pickle=True)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("transformer.wte.weight", torch.ones(3), r"wte.weight has shape \[3\]: it must be a matrix"),
        ("transformer.wpe.weight", torch.ones(()), r"wpe.weight has shape \[\]: it must be a matrix"),
        (f"transformer.h.{'9' * 5000}.x", torch.ones(2), "999.x"),
    ],
)
def test_odd_state_dicts_are_refused(tmp_path: Path, name: str, tensor: Tensor, said: str) -> None:
    torch.save(state(True, tied=False) | {name: tensor}, tmp_path / "model.pt")
    (tmp_path / "input.txt").write_text(TEXT)
    (tmp_path / "config.json").write_text(json.dumps({"model": {"n_head": HEADS}}))
    with pytest.raises(ConfigError, match=said):
        import_model(tmp_path / "model.pt", tmp_path / "run", allow_pickle=True, tokenizer=tmp_path / "input.txt")


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": {"\ud800": 0}}))
    with pytest.raises(ConfigError, match="has no `stoi` that numbers single characters from 0"):
        read_vocabulary(tmp_path / "meta.pkl")


class Code:
    """Pickled, an order to write a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_vocabulary_runs_no_code(tmp_path: Path) -> None:
    path, trace = checkpoint(tmp_path, state(True, tied=True), bias=True), tmp_path / "trace"
    meta = tmp_path / "data" / "letters" / "meta.pkl"
    meta.write_bytes(pickle.dumps({"stoi": Code(trace)}))
    (line,) = refused("import", path, "--out", tmp_path / "run", "--allow-pickle")
    assert line.startswith(f"{meta}: is not read: it holds pathlib")
    assert not trace.exists()
    torch.save({"model": Code(trace), "model_args": ARGS}, path)
    (line,) = refused("import", path, "--out", tmp_path / "run", "--allow-pickle")
    assert "which is code" in line
    assert not trace.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"\x80\x04]r\xff\xff\xff\x7f.", b"\x96" + b"\xff" * 7 + b"\x00."]
)
def test_damaged_pickles_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "meta.pkl").write_bytes(content)
    with pytest.raises(ConfigError, match=r"meta\.pkl: is (damaged|not read)"):
        read_plain(tmp_path / "meta.pkl")


@pytest.mark.system
@pytest.mark.skipif("NANOGPT" not in os.environ, reason="NANOGPT is not the folder of a checkout of nanoGPT")
def test_nanogpt_by_its_own_scripts(tmp_path: Path) -> None:
    """A checkpoint of train.py: the logits of model.py to 1e-5, and the samples of its `generate`."""
    home, data = Path(os.environ["NANOGPT"]), tmp_path / "data" / "letters"
    data.mkdir(parents=True)
    (tmp_path / "configurator.py").write_text((home / "configurator.py").read_text())
    ids = torch.tensor([CHARACTERS.index(c) for c in TEXT * 40], dtype=torch.uint16).numpy()
    for split in ("train", "val"):
        ids.tofile(data / f"{split}.bin")
    meta = {"vocab_size": len(CHARACTERS), "stoi": {c: i for i, c in enumerate(CHARACTERS)}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    sizes = {"n_layer": DEPTH, "n_head": HEADS, "n_embd": WIDTH, "block_size": LENGTH, "batch_size": 4, "dropout": 0.0}
    steps = {"max_iters": 20, "eval_interval": 10, "eval_iters": 2, "gradient_accumulation_steps": 1}
    places = {"device": "cpu", "compile": False, "dataset": "letters", "out_dir": "out"}
    options = [f"--{name}={value}" for name, value in (sizes | steps | places).items()]
    paths = os.pathsep.join([str(home), *sys.path])
    subprocess.run(
        [sys.executable, home / "train.py", *options], cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": paths}
    )
    content = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)
    run = import_model(tmp_path / "out" / "ckpt.pt", tmp_path / "run", allow_pickle=True)
    same(run, content["model"], "none")
    spec = importlib.util.spec_from_file_location("nanogpt_model", home / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    theirs = module.GPT(module.GPTConfig(**content["model_args"])).eval()
    theirs.load_state_dict(content["model"])
    prompt = torch.tensor([run.tokenizer.encode(TEXT[:8])])
    with torch.no_grad():
        torch.testing.assert_close(run.model(prompt), theirs(prompt, prompt)[0], rtol=0, atol=1e-5)
        torch.manual_seed(1337)
        expected = theirs.generate(prompt, 40, temperature=0.8, top_k=200)
        assert torch.equal(sample(run.model, prompt, 40, 0.8, 200), expected)

"""Public folders that are wrong: each is refused by the name of its file, and nothing is left half-written."""

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyformer as af
from anyformer.config import ConfigError, ModelConfig
from anyformer.data.tokenizer import TextTokenizer, train_tokenizer
from anyformer.interop import import_model
from anyformer.interop.weight_files import MAX_HEADER_BYTES
from anyformer.recipe import Characters, LanguageModel
from anyformer.runs.run import Run
from tests.test_cli import done, refused

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENIZER = train_tokenizer(Characters(), [TEXT])


def run_of(config: ModelConfig, tokenizer: TextTokenizer = TOKENIZER) -> Run:
    torch.manual_seed(0)
    return Run(af.Transformer(config).eval(), LanguageModel().build(tokenizer), LanguageModel(), Path("nowhere"))


@pytest.fixture(scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "gpt2"
    config = af.presets.gpt2(depth=1, width=8, heads=2, vocab=TOKENIZER.size, length=16)
    af.to_hf(run_of(config), folder)
    return folder


@pytest.fixture
def folder(_whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(_whole, tmp_path / "gpt2"))


def wrong(folder: Path, *said: str) -> None:
    """Refused with these words, and no run is left."""
    out = folder.parent / "run"
    with pytest.raises(ConfigError) as error:
        import_model(folder, out)
    for words in said:
        assert words in str(error.value)
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name]


def change(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in {**data, **changes}.items() if value != "drop"}))


def test_whole(folder: Path) -> None:
    run = import_model(folder, folder.parent / "run")
    again = af.load(folder.parent / "run")
    assert again.predict([TEXT[:5]]) == run.predict([TEXT[:5]])


# -- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt_2"}, "model_type = 'gpt_2': did you mean 'gpt2'?"),
        ({"model_type": "deberta"}, "model_type = 'deberta': is not supported: its keys have no bias"),
        ({"model_type": "zebra"}, "model_type = 'zebra': known here: "),
        ({"model_type": "drop"}, "model_type: is missing: name the family with --family"),
        ({"architectures": ["GPT2LMHeadModle"]}, "architectures = 'GPT2LMHeadModle': did you mean 'GPT2LMHeadModel'?"),
        ({"architectures": []}, "architectures: must name the class"),
        ({"n_head": 3}, "heads = 3: must divide width = 8"),
        ({"n_head": "two"}, "n_head = 'two': must be of type int"),
        ({"n_head": True}, "n_head = True: must be of type int"),
        ({"activation_function": "quick_silu"}, "activation_function = 'quick_silu'"),
        ({"add_cross_attention": True}, "add_cross_attention = True: only False is supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: is not supported"),
        ({"n_embd": 16}, "transformer.wte.weight has shape [33, 8], but the config needs [33, 16]"),
        ({"n_layer": 2}, "has no weight transformer.h.1.ln_1.weight, of shape [8]"),
        ({"vocab_size": 31}, "but the config needs [31, 8]"),
    ],
)
def test_config(folder: Path, changes: dict[str, Any], said: str) -> None:
    change(folder / "config.json", **changes)
    wrong(folder, said)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"model_type": "gpt2"', "\xff"])
def test_no_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    wrong(folder, "config.json")


def test_nothing_there(folder: Path) -> None:
    (folder / "config.json").unlink()
    wrong(folder, "config.json: cannot be read: No such file")
    with pytest.raises(ConfigError, match="is not a folder"):
        af.from_hf(folder / "nowhere")


# -- weights ----------------------------------------------------------------------------------------------------------


def spoil(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def reheaded(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A file with another header."""

    def spoilt(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return spoilt


WTE = "transformer.wte.weight"


@pytest.mark.parametrize(
    "how",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:40],
        lambda data: data[:7],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: struct.pack("<Q", len(data)) + data[8:],
        lambda data: struct.pack("<Q", 2**63) + data[8:],
        lambda data: struct.pack("<Q", MAX_HEADER_BYTES + 1) + data[8:],
        lambda data: data[:8] + bytes([data[8] ^ 1]) + data[9:],
        lambda data: data.replace(b'"F32"', b'"F3Z"', 1),
        reheaded(lambda header: header[WTE].update(shape=[64, 8])),
        reheaded(lambda header: header[WTE].update(shape=[-33, -8])),
        reheaded(lambda header: header[WTE].update(shape=[2**40, 2**40])),
        reheaded(lambda header: header[WTE].update(data_offsets=[4, 1028])),
        reheaded(lambda header: header[WTE].update(data_offsets="all")),
        reheaded(lambda header: header[WTE].pop("dtype")),
        reheaded(lambda header: header.update({WTE: 7})),
    ],
)
def test_damaged_weights(folder: Path, how: Callable[[bytes], bytes]) -> None:
    spoil(folder / "model.safetensors", how)
    wrong(folder, "model.safetensors")


def test_every_bit_of_a_header_is_read_with_care(folder: Path) -> None:
    """A bit that flips makes another file, or is refused: nothing else happens."""
    path, refusals = folder / "model.safetensors", 0
    whole = path.read_bytes()
    for at in range(0, 600, 7):
        for bit in (1, 32):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            with suppress(ConfigError):
                refusals += 1
                af.from_hf(folder)
                refusals -= 1
    assert refusals > 100


def test_names(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["transformer.h.0.attn.rotary"] = torch.zeros(2)
    del weights["transformer.ln_f.bias"]
    save_file(weights, folder / "model.safetensors")
    wrong(folder, "has no weight transformer.ln_f.bias", "transformer.h.0.attn.rotary is a weight that no gpt2")


def test_buffers_and_aliases_are_no_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16), "lm_head.weight": weights[WTE].clone()}
    save_file(weights, folder / "model.safetensors")
    found = af.from_hf(folder).model.state_dict()
    save_file({name.removeprefix("transformer."): x for name, x in weights.items()}, folder / "model.safetensors")
    bare = af.from_hf(folder).model.state_dict()  # as the published GPT-2 names them
    assert all(torch.equal(found[name], bare[name]) for name in found)
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    save_file(weights, folder / "model.safetensors")
    wrong(folder, "lm_head.weight is not transformer.wte.weight, but the config ties them")


def test_not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[WTE][3, 2] = float("nan")
    save_file(weights, folder / "model.safetensors")
    with pytest.warns(UserWarning, match=r"model\.safetensors: transformer\.wte\.weight: some values are not finite"):
        af.from_hf(folder)


def test_whole_numbers(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights[WTE] = weights[WTE].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    wrong(folder, "only floating-point weights are read")


# -- shards -----------------------------------------------------------------------------------------------------------


def shard(folder: Path) -> dict[str, str]:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: x for name, x in weights.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def test_shards(folder: Path) -> None:
    whole = af.from_hf(folder).model.state_dict()
    shard(folder)
    parts = af.from_hf(folder).model.state_dict()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize("name", ["../gpt2.safetensors", "/etc/passwd", "..", "", "sub/x.safetensors"])
def test_an_index_stays_in_its_folder(folder: Path, name: str) -> None:
    places = shard(folder)
    change(folder / "model.safetensors.index.json", weight_map={**places, WTE: name})
    wrong(folder, "model.safetensors.index.json", "which is not a file of this folder")


def test_wrong_index(folder: Path) -> None:
    places, index = shard(folder), folder / "model.safetensors.index.json"
    other = next(file for file in set(places.values()) if file != places[WTE])
    change(index, weight_map={**places, WTE: other})
    wrong(folder, f"places {WTE} in {other}, which does not hold it")
    change(index, weight_map={**places, WTE: "model-3.safetensors"})
    wrong(folder, "model-3.safetensors: is missing, and model.safetensors.index.json names it")
    change(index, weight_map=[1])
    wrong(folder, "has no weight_map")


# -- pickles ----------------------------------------------------------------------------------------------------------


class Mischief:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("mischief",)


def test_pickles(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, weights = af.from_hf(folder).model.state_dict(), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    wrong(folder, "pytorch_model.bin: is a pickle, which can run code")
    (said,) = refused("import", folder, "--out", folder.parent / "run")
    assert "--allow-pickle" in said
    read = af.from_hf(folder, allow_pickle=True).model.state_dict()
    assert all(torch.equal(whole[name], read[name]) for name in whole)
    assert "imported" in done("import", folder, "--out", folder.parent / "run", "--allow-pickle")
    shutil.rmtree(folder.parent / "run")
    torch.save({**weights, "x": Mischief()}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin: is not read: it holds (builtins\.)?print"):
        af.from_hf(folder, allow_pickle=True)
    assert "mischief" not in capsys.readouterr().out
    (folder / "pytorch_model.bin").unlink()
    wrong(folder, "holds no weights")


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def test_another_tokenizer(folder: Path) -> None:
    train_tokenizer(Characters(), [TEXT + "ABCDEFGHIJ"]).save(folder / "tokenizer.json")
    wrong(folder, "its tokenizer has 43 tokens, and the model's table 33 rows")
    train_tokenizer(Characters(), ["abc"]).save(folder / "tokenizer.json")
    wrong(folder, "its tokenizer has 9 tokens, and the model's table 33 rows")
    (folder / "tokenizer.json").write_text("{}")
    wrong(folder, "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    wrong(folder, "holds no tokenizer")


def test_a_tokenizer_from_elsewhere(folder: Path) -> None:
    other = folder.parent / "elsewhere"
    other.mkdir()
    (folder / "tokenizer.json").rename(other / "tokenizer.json")
    assert af.from_hf(folder, tokenizer=other).tokenizer.size == TOKENIZER.size
    assert af.from_hf(folder, tokenizer=other / "tokenizer.json").tokenizer.size == TOKENIZER.size


# -- the way out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder.position": '"alibi"'}, "decoder.position"),
        ({"decoder.blocks.0.feedforward": '{kind="gated"}'}, "decoder.blocks.0.feedforward"),
        ({"decoder.blocks.0.mixer.sinks": "true"}, "decoder.blocks.0.mixer.sinks = True: gpt2 has False"),
        ({"decoder.blocks.0.mixer.qk_norm": '"rms"'}, "decoder.blocks.0.mixer.qk_norm.kind = 'rms': gpt2 has 'none'"),
        ({"head.cap": "3.0"}, "head.cap = 3.0: gpt2 has nothing"),
    ],
)
def test_what_no_family_has_is_named(tmp_path: Path, changes: dict[str, str], said: str) -> None:
    config = af.presets.gpt2(depth=2, width=8, heads=2, vocab=TOKENIZER.size, length=16)
    config = af.config.io.override(config, [f"{key}={value}" for key, value in changes.items()])
    with pytest.raises(ConfigError) as error:
        af.to_hf(run_of(config), tmp_path / "out", family="gpt2")
    assert said in str(error.value)
    assert not list(tmp_path.iterdir())


def test_what_changes_nothing_is_no_hindrance(folder: Path, tmp_path: Path) -> None:
    """Other words for the same model, and how it was trained."""
    config = af.presets.gpt2(depth=2, width=8, heads=2, kv_heads=2, key_width=4, ff=32, vocab=TOKENIZER.size, length=16)
    changes = ["decoder.blocks.0.mixer.pattern=causal", "decoder.dropout=0.3", "init=xavier", "special.start=2"]
    assert af.to_hf(run_of(af.config.io.override(config, changes)), tmp_path / "out") == "gpt2"
    assert af.from_hf(tmp_path / "out").config.decoder
    with pytest.raises(ConfigError, match="exists already"):
        af.to_hf(run_of(config), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"family = 'gpt': did you mean"):
        af.to_hf(run_of(config), tmp_path / "more", family="gpt")

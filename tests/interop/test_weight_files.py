"""Weight files of other programs that are damaged, hostile or old: read, or refused in one line that names the file."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import anyformer as af
from anyformer.config import ConfigError
from anyformer.interop import weight_files as files
from tests.calls import CountedCalls
from tests.interop.test_bad_input import WTE, Mischief, _whole as _whole, change, folder as folder, shard, wrong

INDEX = "model.safetensors.index.json"


# -- an index of shards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [None, {}, [], 3, "all", {WTE: 3}, {WTE: None}, {WTE: ["a"]}, {WTE: {}}])
def test_an_index_places_every_weight(folder: Path, places: Any) -> None:
    shard(folder)
    change(folder / INDEX, weight_map=places)
    wrong(folder, f"{INDEX}: has no weight_map from weights to files")


@pytest.mark.parametrize("name", ["../gpt2/x", "/etc/hostname", "..", ".", "", "a/b", "a\0b", "\0"])
def test_an_index_names_files_of_its_folder(folder: Path, name: str) -> None:
    places = shard(folder)
    (folder.parent / "gpt2" / "x").write_bytes((folder / places[WTE]).read_bytes())
    change(folder / INDEX, weight_map={**places, WTE: name})
    wrong(folder, f"{INDEX}: names ", "which is not a file of this folder")


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    places = shard(folder)
    other = next(file for file in sorted(set(places.values())) if file != places[WTE])
    save_file({**load_file(folder / other), WTE: torch.zeros(33, 8)}, folder / other)
    wrong(folder, f"holds {WTE}, and so does ")


# -- headers ----------------------------------------------------------------------------------------------------------


def headed(folder: Path, text: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)


def test_a_deep_header(folder: Path) -> None:
    headed(folder, b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
    wrong(folder, "model.safetensors: is damaged: its header is not JSON")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": ["F32"], "shape": [], "data_offsets": [0, 4]},
        {"dtype": {}, "shape": [], "data_offsets": [0, 4]},
        {"dtype": None, "shape": [], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": {}, "data_offsets": {"0": 1}},
        {"dtype": "F32", "shape": [[]], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": None, "data_offsets": [0, 4]},
        {},
        [],
        None,
    ],
)
def test_an_entry_of_the_wrong_type(folder: Path, entry: Any) -> None:
    headed(folder, json.dumps({WTE: entry}).encode())
    wrong(folder, "model.safetensors: ")


def test_too_many_tensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_TENSORS", 10)
    wrong(folder, "model.safetensors: has 16 tensors: at most 10 are read")


# -- pickles ----------------------------------------------------------------------------------------------------------


def test_a_pickle_from_before_torch_1_6(folder: Path) -> None:
    whole, weights = af.from_hf(folder).model.state_dict(), load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    found = af.from_hf(folder, allow_pickle=True).model.state_dict()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_without_bad_advice(folder: Path, zipped: bool) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"x": Mischief()}, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ConfigError) as error:
        af.from_hf(folder, allow_pickle=True)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{folder / 'pytorch_model.bin'}: is not read: it holds ")
    assert "convert it to .safetensors" in line
    assert "weights_only" not in line


@pytest.mark.parametrize("data", [b"", b"\x80\x02", b"PK\x03\x04" + b"\0" * 40, b"\x80\x02}q\x00.", b"text"])
def test_a_damaged_pickle(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ConfigError) as error:
        af.from_hf(folder, allow_pickle=True)
    assert str(folder) in str(error.value)
    assert "weights_only" not in str(error.value)


# -- a config that its weights contradict -----------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["n_layer", "n_embd", "n_inner", "n_positions", "vocab_size"])
@pytest.mark.parametrize("size", [10**6, 10**12, 10**30])
def test_absurd_sizes_are_refused(folder: Path, field: str, size: int) -> None:
    change(folder / "config.json", **{field: size})
    with CountedCalls() as counted:
        wrong(folder, f"{folder / 'config.json'}: ")
    assert counted.count < 20_000


def test_the_figure_is_named(folder: Path) -> None:
    change(folder / "config.json", vocab_size=10**9)
    wrong(
        folder,
        "config.json: describes a model of 8,000,001,",
        " parameters, 30 GiB in fp32; the weights beside it hold 1,",
    )


def test_contradictions_name_tensors_with_both_shapes(folder: Path) -> None:
    change(folder / "config.json", n_embd=16)
    with pytest.raises(ConfigError) as error:
        af.from_hf(folder)
    lines = str(error.value).splitlines()
    file = folder / "model.safetensors"
    assert lines[0] == f"{file}: {WTE} has shape [33, 8], but the config needs [33, 16]"
    assert len(lines) == 6
    assert lines[5].endswith("more weights do not fit the config")
    assert all(line.startswith(str(folder)) for line in lines)

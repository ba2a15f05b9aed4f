"""Random damage to the files of a run folder. Each function changes the folder and returns what it did."""

import json
import os
import random
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from anyformer.runs.atomic_folder import MANIFEST, seal

VALUES = [None, True, -1, 0, 1, 3, 7, 2**31, 2**63, 10**400, -0.5, 1e308, "", "x", "rms", [], [[]], {}, {"kind": "x"}]
TEXTS = [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"NaN", b'{"files": {}}', b"\0" * 100, b"[" * 200_000, b'"x"']


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def picked(folder: Path, chance: random.Random, name: str = "*") -> Path:
    """A file; files of the run itself and of its newest checkpoint are picked more often than the others."""
    found = [path for path in files(folder) if fnmatch(path.name, name)]
    states = sorted((folder / "state").iterdir())
    near = [path for path in found if path.parent in (folder, states[-1])]
    return chance.choice(near if chance.random() < 0.8 else found)


# -- damage that the manifest shows -----------------------------------------------------------------------------------


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes() or b"\0")
    for _ in range(chance.choice([1, 1, 1, 8])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data) + 1)])


def extend(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.choice(TEXTS))


def replace(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.choice(TEXTS))


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def swap(path: Path, chance: random.Random) -> None:
    other = chance.choice([one for one in path.parent.iterdir() if one.is_file()])
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def as_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.symlink_to(chance.choice([path.name, "nowhere", "/dev/zero", "/dev/null", "."]))


PLAIN = (flip, flip, cut, extend, replace, delete, swap, as_folder, as_pipe, as_link)


def unsealed(folder: Path, chance: random.Random) -> str:
    path, harm = picked(folder, chance), chance.choice(PLAIN)
    harm(path, chance)
    return f"{harm.__name__} {path.relative_to(folder)}"


def unlisted(folder: Path, chance: random.Random) -> str:
    """Remove an entry of a manifest."""
    path = picked(folder, chance, MANIFEST)
    found = json.loads(path.read_text())
    name = chance.choice(sorted(found["files"]))
    del found["files"][name]
    path.write_text(json.dumps(found))
    return f"unlisted {path.parent.relative_to(folder) / name}"


def planted(folder: Path, chance: random.Random) -> str:
    """Add a file or folder that no one expects."""
    homes = [folder, folder / "state", *(folder / "state").iterdir()]
    names = ["step-x", "step-000000099", ".tmp-x", ".anyformer-lock", "source_tokenizer.json", "model.pt", "loss.png"]
    path = chance.choice(homes) / chance.choice(names)
    if not path.exists():
        path.mkdir() if chance.random() < 0.5 else path.write_bytes(chance.choice(TEXTS))
    return f"planted {path.relative_to(folder)}"


def misplaced(folder: Path, chance: random.Random) -> str:
    """Put something else in place of a folder."""
    path = chance.choice([folder / "state", *(folder / "state").iterdir()])
    shutil.rmtree(path)
    chance.choice([lambda: path.write_bytes(b"x"), lambda: os.mkfifo(path), lambda: path.symlink_to(path.name)])()
    return f"misplaced {path.relative_to(folder)}"


# -- damage that a new manifest hides ---------------------------------------------------------------------------------


def changed(data: Any, chance: random.Random) -> Any:
    """Plain data with one value at a random depth changed, removed or added."""
    if isinstance(data, dict) and data and chance.random() < 0.9:
        key = chance.choice(sorted(data))
        if chance.random() < 0.1:
            return {k: v for k, v in data.items() if k != key}
        return {**data, key: changed(data[key], chance)}
    if isinstance(data, list) and data and chance.random() < 0.8:
        at = chance.randrange(len(data))
        return [*data[:at], changed(data[at], chance), *data[at + 1 :]]
    return chance.choice(VALUES)


def edit(path: Path, chance: random.Random) -> None:
    path.write_text(json.dumps(changed(json.loads(path.read_text()), chance)))


def strange(x: torch.Tensor, chance: random.Random) -> torch.Tensor:
    return chance.choice(
        [
            lambda: x[..., :-1] if x.dim() else x[None],
            lambda: x[None],
            lambda: x.flatten(),
            lambda: torch.full_like(x, 7) if not x.is_floating_point() else torch.full_like(x, torch.nan),
            lambda: x.to(torch.int64),
            lambda: x.double() if x.is_floating_point() else x.bool(),
            lambda: torch.zeros(0),
        ]
    )().contiguous()


def retensor(path: Path, chance: random.Random) -> None:
    tensors = load_file(path)
    name = chance.choice(sorted(tensors))
    x = tensors[name]
    match chance.randrange(4):
        case 0:
            del tensors[name]
        case 1:
            tensors["strange"] = x.clone()
        case 2:
            other = chance.choice(sorted(tensors))
            tensors[name], tensors[other] = tensors[other], tensors[name]
        case _:
            tensors[name] = strange(x, chance)
    save_file(tensors, path)


def resealed(folder: Path, chance: random.Random) -> str:
    homes = [folder] if (folder / MANIFEST).exists() else []
    home = chance.choice([*homes, *homes, sorted((folder / "state").iterdir())[-1]])
    listed = json.loads((home / MANIFEST).read_text())["files"]
    path = home / chance.choice(sorted(listed))
    harms: dict[str, list[Callable[[Path, random.Random], None]]] = {
        ".json": [edit, edit, edit, replace, flip],
        ".safetensors": [retensor, retensor, replace, flip],
    }
    harm = chance.choice(harms.get(path.suffix, [replace, flip, cut]))
    try:
        harm(path, chance)
    except (ValueError, SafetensorError):
        return "nothing"
    seal(home, listed)
    return f"resealed {harm.__name__} {path.relative_to(folder)}"


KINDS: dict[str, Callable[[Path, random.Random], str]] = {
    "unsealed": unsealed,
    "unlisted": unlisted,
    "planted": planted,
    "misplaced": misplaced,
    "resealed": resealed,
}

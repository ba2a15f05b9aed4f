"""Pack folders of images into one `.npz` file: thousands of small files take minutes to open, one array takes a second.

A folder of class folders becomes the arrays `images` and `labels`. A folder of splits, such as `train/cat/1.png` and
`test/cat/1.png`, becomes `train_images`, `train_labels`, `test_images` and `test_labels`.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.media_files import PICTURES, BadFile, open_picture

MAX_BAD_FILES_SHOWN = 5


def find_images(folder: Path) -> dict[str, list[Path]]:
    """Return the images of class folders by the name of their split; that is empty if there are no splits."""
    if not folder.is_dir():
        raise ConfigError([Fault("", f"{visible(str(folder))} is not a folder")])
    splits = {path.name: path for path in _subfolders(folder) if _subfolders(path)}
    found = {
        name: [file for one in _subfolders(path) for file in sorted(one.iterdir()) if _is_image(file)]
        for name, path in (splits or {"": folder}).items()
    }
    if empty := [name for name, files in found.items() if not files]:
        what = f"no images in the class folders of {visible(str(folder / empty[0]))}: they are CLASS/NAME.png"
        raise ConfigError([Fault("", what)])
    return found


def pack_images(
    found: dict[str, list[Path]], out: Path, skip_bad: bool, progress: Callable[[int], None]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write the arrays of images to a file. Return them, and the reasons why some files were left out."""
    arrays: dict[str, np.ndarray] = {}
    bad = list[str]()
    shape: tuple[int, ...] | None = None
    for split, files in found.items():
        images, labels = list[np.ndarray](), list[str]()
        for file in files:
            progress(1)
            try:
                pixels = np.asarray(open_picture(str(file), None if shape is None else len(shape) == 2))
                shape = shape or pixels.shape
                if pixels.shape != shape:
                    sizes = f"{pixels.shape[1]}×{pixels.shape[0]} pixels, and the first image {shape[1]}×{shape[0]}"
                    raise BadFile(f"{visible(str(file))} has {sizes}: resize it")
            except BadFile as error:
                bad.append(str(error))
                continue
            images.append(pixels)
            labels.append(file.parent.name)
        prefix = f"{split}_" if split else ""
        if images:
            arrays |= {f"{prefix}images": np.stack(images), f"{prefix}labels": np.array(labels)}
    if bad and (not skip_bad or not arrays):
        more = [Fault("", f"... and {len(bad) - MAX_BAD_FILES_SHOWN} more")] if len(bad) > MAX_BAD_FILES_SHOWN else []
        raise ConfigError([*(Fault("", why) for why in bad[:MAX_BAD_FILES_SHOWN]), *more])
    _write(out, arrays)
    return arrays, bad


def _write(out: Path, arrays: dict[str, np.ndarray]) -> None:
    partial = out.with_name(f".{out.name}.partial")
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        os.replace(partial, out)
    except OSError as error:
        raise ConfigError([Fault("out", f"= {visible(str(out))}: cannot be written ({error.strerror})")]) from None
    finally:
        partial.unlink(missing_ok=True)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in PICTURES and not path.name.startswith(".")

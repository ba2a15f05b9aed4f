"""Rows of folders, one for each class: texts, or references to images and sounds. Imports no torch."""

from collections.abc import Iterable
from pathlib import Path

from anyformer.config.spec import ConfigError, Fault, visible
from anyformer.data.files import File, Parsed, locate, open_below
from anyformer.data.media_rows import refer
from anyformer.data.readers import Rows, collect, concatenate, part_of
from anyformer.recipe import ClassFolders, Root


def folder_rows(source: ClassFolders, data: Root) -> Rows:
    """Return a row for each file, in the order of names; whitespace around a text is removed."""
    paths, shown = part_of(source, _files(source, data)), visible(source.path)
    if source.media is not None:
        folder = File(shown, "utf-8", "")
        return collect(_references(source, paths), {"text": folder, "label": folder})
    rows = [_text(path, source) for path in paths]
    return concatenate(rows, shown) if rows else Rows({"text": [], "label": []}, shown, [])


def _text(path: Path, source: ClassFolders) -> Rows:
    file = open_below(source.path, path, source.encoding)
    text = file.text.replace("\r\n", "\n")
    flaws = ((number, why) for number, line in enumerate(text.split("\n"), 1) if (why := file.flaw(line)))
    row: tuple[int, dict[str, str] | str] = next(flaws, (1, {"text": text.strip(), "label": path.parent.name}))
    return collect(iter([row]), {"text": file, "label": file})


def _references(source: ClassFolders, members: Iterable[Path]) -> Parsed:
    """Yield a row for each file of all classes."""
    assert source.media is not None
    for number, path in enumerate(members, 1):
        try:
            if source.media == "audio" and "+" in str(path):
                raise ValueError(f"{str(path)!r}: the name of a sound must not have a +, which joins sounds")
            yield number, {"text": refer(source.media, str(path)), "label": path.parent.name}
        except ValueError as error:
            yield number, str(error)


def _files(source: ClassFolders, data: Root) -> list[Path]:
    """Return the files of all classes in the order of their names, without hidden ones."""

    def error(what: str) -> ConfigError:
        return ConfigError([Fault("path", f"= {source.path!r}: {what}")])

    try:
        root = locate(source.path, data)
        if not root.is_dir():
            raise error(f"{visible(str(root))} is not a folder")
        classes = [folder for folder in _visible(root) if folder.is_dir()]
        if not classes:
            raise error(f"no folder in {visible(str(root))}: each class is a folder, and each file in it a text")
        members = []
        for folder in classes:
            inside = _visible(folder)
            if not inside:
                raise error(f"no file in {visible(str(folder))}: each file in a class folder is a text")
            if deeper := [path for path in inside if path.is_dir()]:
                raise error(f"{visible(str(deeper[0]))} is a folder inside a class folder, which may hold files only")
            members += inside
    except OSError as failure:
        raise error(f"cannot be read ({failure.strerror})") from None
    return members


def _visible(folder: Path) -> list[Path]:
    """Return the entries of a folder that are not hidden, by name."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))

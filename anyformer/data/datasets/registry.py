"""Registered data sets: names, licences, addresses and checksums."""

import tomllib
from functools import cache
from importlib import resources

from anyformer.config.parse import build
from anyformer.config.spec import Flag, Size, Spec

HOST = "https://raw.githubusercontent.com"  # serves the files of public repositories by commit


class UpstreamFile(Spec):
    """A file of a public repository; size and checksum are those of its exact bytes."""

    path: str  # in the folder of the data set
    at: str  # in the repository; a .gz is unpacked
    bytes: Size
    sha256: str

    @property
    def packed(self) -> bool:
        return self.at.endswith(".gz")


class DataSet(Spec):
    """A data set: files of a public repository at one commit."""

    name: str  # also the folder with which the paths of recipes begin
    about: str
    licence: str
    repository: str  # OWNER/NAME
    commit: str
    files: tuple[UpstreamFile, ...]
    bundled: Flag = False  # inside the package
    verified: Flag = True  # whether the checksums were computed from the upstream files
    note: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def address(self, file: UpstreamFile) -> str:
        """Return the address of a file below its host; mirrors have the same layout."""
        return f"{self.repository}/{self.commit}/{file.at}"


@cache
def registry() -> dict[str, DataSet]:
    """Return all registered data sets by name."""
    text = (resources.files("anyformer.data.datasets") / "registry.toml").read_text(encoding="utf-8")
    return {name: build(DataSet, {"name": name, **fields}) for name, fields in tomllib.loads(text).items()}


def lookup(name: str) -> tuple[DataSet, UpstreamFile] | None:
    """Return the data set and the file of a name `SET/PATH`; None if no such file is registered."""
    one, _, path = name.partition("/")
    found = registry().get(one)
    return next(((found, file) for file in found.files if file.path == path), None) if found else None

"""Parts from outside the package: of installed packages, and of files that the user names. Imports no torch.

There are two ways in, and no other: the entry points `anyformer.parts` of installed packages, each the name of a module
with parts, and files given by `--import FILE`, or by `import_file`. What a run needs of them is recorded beside its
config, with a copy of each file. Nothing that a folder names is ever imported: loading such a run without its parts is
refused, by name.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from anyformer.config.part import PACKAGE, Part, all_parts, families, kind_of, register
from anyformer.config.spec import ConfigError, Fault, Spec, visible

GROUP = "anyformer.parts"  # of entry points
VARIABLE = "ANYFORMER_IMPORT"  # files that child processes import, too
RECORD = "parts.json"  # beside the config of a model with parts from outside


class Origin(NamedTuple):
    """Where the parts of a module come from: an installed package, or a file."""

    package: str = ""
    file: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        return f"the package {self.package}" if self.package else self.file or "a program"


_SOURCES: dict[str, Origin] = {}  # by the name of a module


def import_file(path: str | Path) -> None:
    """Import a Python file and register the parts in it; child processes of this one do the same."""
    file = Path(path).resolve()
    name = file.stem
    loaded = sys.modules.get(name)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() != file:
        raise ConfigError([Fault(str(path), f"cannot be imported: another module is called {name}: rename the file")])
    if name in _SOURCES:
        return
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError([Fault(visible(str(path)), f"cannot be read: {error.strerror}")]) from None
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # for what it imports, and where its classes are unpickled
    module = _imported(name, str(path), file)
    _register_all(module, Origin(file=str(file), sha256=digest), str(path))
    known = os.environ.get(VARIABLE, "").split(os.pathsep)
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*filter(None, known), str(file)]))


def _imported(name: str, place: str, file: Path | None = None) -> ModuleType:
    """Return a module: of a file, or the one that Python finds under this name."""
    try:
        if file is None:
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ConfigError([Fault(place, "cannot be imported: it must be a Python file, ending in .py")])
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except ConfigError:
        sys.modules.pop(name, None)
        raise
    except Exception as error:  # whatever the code of the user raises
        sys.modules.pop(name, None)
        raise ConfigError([Fault(place, f"cannot be imported: {type(error).__name__}: {error}")]) from error


def _register_all(module: ModuleType, source: Origin, place: str) -> None:
    """Register the parts that a module, or a package in its modules, defines."""
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    own = [value for value in classes if f"{value.__module__}.".startswith(f"{module.__name__}.")]
    parts = [value for value in own if issubclass(value, Part) and not value.is_family()]
    if not parts:
        raise ConfigError([Fault(place, "defines no part: a class with a `kind`, derived from a family of parts")])
    try:
        register(*parts)
    except ValueError as error:
        raise ConfigError([Fault(place, str(error))]) from None
    _SOURCES.update(dict.fromkeys((module.__name__, *(part.__module__ for part in parts)), source))


def find(group: str = GROUP) -> bool:
    """Import what installed packages and the user's files offer and is not known; return whether there was any."""
    before = len(_SOURCES)
    for entry in entry_points(group=group):
        if entry.module not in _SOURCES:
            package = entry.dist.name if entry.dist else entry.module
            _register_all(_imported(entry.module, f"package {package}"), Origin(package=package), f"package {package}")
    for file in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        import_file(file)
    return len(_SOURCES) > before


def parts_of(place: str) -> list[type[Part]]:
    """Return the parts of a file, or of an installed package or module; of PLACE:NAME those with this class or kind."""
    name, _, wanted = place.partition(":")
    module = name
    if name.endswith(".py"):
        import_file(name)
        module = Path(name).stem
    else:
        find()

    def own() -> list[type[Part]]:
        homes = {
            home for home, source in _SOURCES.items() if name == source.package or f"{home}.".startswith(f"{module}.")
        }
        return [part for part in all_parts() if part.__module__ in homes]

    if not own():
        _register_all(_imported(name, place), Origin(package=name), place)
    chosen = [part for part in own() if wanted in ("", part.__name__, kind_of(part))]
    if not chosen:
        names = ", ".join(part.__name__ for part in own())
        raise ConfigError([Fault(visible(place), f"there is no '{visible(wanted)}' in it, but {names}")])
    return chosen


def outside_parts(value: Any) -> Iterator[Part]:
    """Yield the parts of a spec that are not of this package."""
    if isinstance(value, Part) and type(value).__module__.partition(".")[0] != PACKAGE:
        yield value
    inner = (getattr(value, name) for name in type(value).model_fields) if isinstance(value, Spec) else value
    if isinstance(value, Spec | tuple | list):
        for each in inner:
            yield from outside_parts(each)


def record_of(path: Path) -> Path:
    """Return the file beside a saved spec that says which parts from outside it needs."""
    return path.with_name(f"{path.stem}.{RECORD}")


def record(specs: Spec | tuple[Spec | None, ...], path: Path) -> None:
    """Write what specs need from outside, if anything, to a file, and beside it a copy of each file with parts."""
    classes = dict.fromkeys(type(part) for part in outside_parts(specs))
    sources = {cls: _SOURCES.get(cls.__module__, Origin()) for cls in classes}
    for source in {source for source in sources.values() if source.file}:
        content = Path(source.file).read_bytes()
        if hashlib.sha256(content).hexdigest() == source.sha256:
            (path.parent / Path(source.file).name).write_bytes(content)
    if sources:
        found = {
            f"{families(cls)[-1].__name__} {kind_of(cls)}": source._asdict() | {"file": Path(source.file).name}
            for cls, source in sources.items()
        }
        path.write_text(json.dumps(found, indent=2), encoding="utf-8")


def check_record(path: Path) -> None:
    """Refuse a spec whose recorded parts from outside are not known, by name; warn of a file that has changed."""
    folder = path.parent
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        needed = [(*key.split(" ", 1), Origin(**source)) for key, source in recorded.items()]
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, AttributeError):
        raise ConfigError([Fault(visible(str(path)), "is damaged: it lists no parts")]) from None
    find()
    known = {(families(part)[-1].__name__, kind_of(part)): part for part in all_parts()}
    faults, place = list[Fault](), visible(str(folder))
    for family, kind, source in needed:
        part = known.get((family, kind))
        if part is None:
            faults.append(Fault(place, f"needs the part '{kind}' ({family}) of {source}: {_fix(folder, source)}"))
        elif source.sha256 and (now := _SOURCES.get(part.__module__)) and now.sha256 != source.sha256:
            warnings.warn(f"{place}: {now.file} has changed since the run was saved", stacklevel=2)
    if faults:
        raise ConfigError(faults)


def _fix(folder: Path, source: Origin) -> str:
    if source.package:
        return f"install it with pip install {visible(source.package)}"
    name = Path(source.file).name
    if not name:
        return "give its file with --import FILE, or call anyformer.register"
    copy = f"; the folder has a copy, {visible(str(folder / name))}: read it first" if (folder / name).is_file() else ""
    return f"give it with --import {visible(name)}{copy}"

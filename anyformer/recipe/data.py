"""The data of a recipe: its splits, sources that are made of others, and augmentation. Imports no torch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from anyformer.config import ConfigError, Fault, Spec
from anyformer.config.part import BY_KIND_OF_FAMILY
from anyformer.config.spec import Count, Flag
from anyformer.recipe import sources, synthetic, table  # noqa: F401  (all sources are known where this file is imported)
from anyformer.recipe.source import ANSWERING, SPLITS, Root, SingleSource, Source, Split, source_faults

if TYPE_CHECKING:
    from anyformer.data.readers import Rows

Angle = Annotated[float, Field(strict=True, ge=0, le=180)]
Change = Annotated[float, Field(strict=True, ge=0, lt=1)]
Amount = Annotated[float, Field(strict=True, ge=0, le=100)]


class SeveralSources(Source):
    """The rows of several sources, one after the other."""

    names_columns = True

    def fits(self, columns: tuple[str, ...]) -> bool:
        return True  # each part is checked

    def read(self, data: Root, split: Split, seed: int, by: str | None) -> "Rows":
        from anyformer.data.readers import joined_rows

        return joined_rows(self, data, split, seed, by)


class JoinedSources(SeveralSources):
    """The concatenated rows of several sources."""

    kind: Literal["joined"] = "joined"
    parts: Annotated[tuple[SingleSource, ...], Field(min_length=1)]  # the sources, in this order

    def inner(self) -> list[tuple[str, str, SingleSource]]:
        return [(f"parts.{i}", "", part) for i, part in enumerate(self.parts)]

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        if task in ANSWERING and len({"source" in part.required(task, columns) for part in self.parts}) > 1:
            yield Fault("parts", "have texts as prompts, and conversations: use one of them")
        for path, _, part in self.inner():
            yield from (fault.under(path) for fault in source_faults(part, task, columns))


class MixedSource(Spec):
    """The rows of one part of a mixture."""

    name: str  # name of the part, as in `task.parts`
    rows: SingleSource  # its source


class MixedSources(SeveralSources):
    """The rows of a mixture of tasks: one source for each name in `task.parts`."""

    kind: Literal["mixed"] = "mixed"
    parts: Annotated[tuple[MixedSource, ...], Field(min_length=1)]  # sources by the name of their part
    of_mixture = True

    def inner(self) -> list[tuple[str, str, SingleSource]]:
        return [(f"parts.{i}.rows", part.name, part.rows) for i, part in enumerate(self.parts)]

    def faults(self, task: str, columns: tuple[str, ...]) -> Iterator[Fault]:
        for path, _, part in self.inner():
            yield from (fault.under(path) for fault in source_faults(part, "seq2seq", columns))


class NamedSource(Spec):
    """The rows of a test set, and its name."""

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # name of the test set
    rows: Source  # its examples


class NamedSources(Spec):
    """Several test sets, each with its own metrics. A table of sources by name is the same."""

    kind: Literal["named"] = "named"
    parts: Annotated[tuple[NamedSource, ...], Field(min_length=1)]  # the test sets

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [part.name for part in self.parts]
        for i, name in enumerate(names):
            if name in SPLITS or name in names[:i]:
                what = "is the name of a split" if name in SPLITS else "is the name of two test sets"
                raise ConfigError([Fault(f"parts.{i}.name", f"= '{name}': {what}: choose another")])
        return self


def _by_name(value: Any) -> Any:
    """Return the data of `NamedSources` for a table of sources by name."""
    if not isinstance(value, dict) or value.get("kind", "named") != "named" or "parts" in value:
        return value
    parts = [{"name": name, "rows": rows} for name, rows in value.items() if name != "kind"]
    return {"kind": "named", "parts": parts}


TestSource = Annotated[Source | NamedSources, BY_KIND_OF_FAMILY, BeforeValidator(_by_name)]


# -- augmentation: the changes of a batch depend on the seed, the epoch and the number of the batch, so that a resumed
# training continues with the same ones


class ImageAugment(Spec):
    """Random changes of each image."""

    shift: Count = 0  # most pixels by which an image moves in each direction; the border is black
    flip: Flag = False  # mirror half of the images, left to right
    rotate: Angle = 0.0  # most degrees by which an image turns
    scale: Change = 0.0  # largest change of the size, as a fraction
    shear: Change = 0.0  # largest horizontal shear, as a fraction of the height
    erase: Count = 0  # side of a square that becomes grey, in pixels, at a random place
    brightness: Change = 0.0  # largest change of the brightness, as a fraction
    contrast: Change = 0.0  # largest change of the contrast, as a fraction
    saturation: Change = 0.0  # largest change of the saturation, as a fraction; grey images have none


class AudioAugment(Spec):
    """Random changes of each sound's log-mel frames; masks as in SpecAugment (Park et al. 2019)."""

    time_masks: Count = 0  # masks over time
    time_width: Count = 20  # most frames of a mask
    mel_masks: Count = 0  # masks over mel bands
    mel_width: Count = 15  # most bands of a mask
    gain: Amount = 0.0  # largest change of the loudness, in dB
    noise: Amount = 0.0  # standard deviation of white noise that is added to the frames


class Augment(Spec):
    """Random changes by kind of segment."""

    image: ImageAugment | None = None  # changes of images; None: none
    audio: AudioAugment | None = None  # changes of sounds; None: none


class Data(Spec):
    """Sources for training, validation and test.

    Relative paths are relative to `root`. Without a root, a path that begins with one of `sets` is found wherever that
    data set is on this machine.
    """

    train: Source  # examples for training
    valid: Source | None = None  # examples for validation, during training; None: none
    test: TestSource | None = None  # examples for `anyformer evaluate`, or a table of test sets by name; None: none
    sets: tuple[str, ...] = ()  # registered data sets (`anyformer data list`) with which paths begin
    # folder of relative paths; empty: the environment variable ANYFORMER_DATA, else the working directory
    root: str = ""
    augment: Augment | None = None  # random changes of the images and sounds in training; None: none
    on_bad_row: Literal["error", "skip"] = "error"  # error: report unreadable rows and stop; skip: leave them out


class NamedSplit(NamedTuple):
    """A source of a recipe: its name for `anyformer evaluate --split`, its key in the recipe, and its split."""

    name: str
    key: str
    split: Split
    source: Source


def splits(data: Data) -> list[NamedSplit]:
    """Return all sources of a recipe, each test set by its name."""
    found = [NamedSplit("train", "data.train", "train", data.train)]
    if data.valid is not None:
        found.append(NamedSplit("valid", "data.valid", "valid", data.valid))
    match data.test:
        case None:
            return found
        case NamedSources(parts=parts):
            named = (NamedSplit(p.name, f"data.test.parts.{i}.rows", "test", p.rows) for i, p in enumerate(parts))
            return [*found, *named]
        case _:
            return [*found, NamedSplit("test", "data.test", "test", data.test)]


def named_files(data: Data) -> Iterator[tuple[str, str]]:
    """Yield the keys of a recipe's data that name files or folders, and these names."""
    for at, source in single_sources(data):
        yield from ((f"{at}.{name}", getattr(source, name)) for name in source.files)


def single_sources(data: Data) -> Iterator[tuple[str, Source]]:
    """Yield the keys of a recipe's sources and these sources; each part of a joined or mixed one by itself."""
    for _, key, _, source in splits(data):
        inner = source.inner()
        yield from ((f"{key}.{path}", part) for path, _, part in inner)
        if not inner:
            yield key, source

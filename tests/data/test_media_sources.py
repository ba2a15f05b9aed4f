"""Sources of images and sounds: folders, tables, arrays, scenes; damaged files; packing."""

import wave
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from anyformer.config import AudioSegment, ConfigError, FeatureSegment, ImageSegment, Media, Pictures
from anyformer.data import scenes
from anyformer.data.fingerprint import fingerprint
from anyformer.data.image_pack import find_images, pack_images
from anyformer.data.media import MediaStore
from anyformer.data.media_files import BadFile, FeatureReader, fit_features, read_image
from anyformer.data.readers import Rows, read
from anyformer.recipe import (
    ArrayFile,
    ClassFolders,
    Data,
    Scenes,
    Source,
    TableFile,
)
from anyformer.tasks.base import readable

PIL = pytest.importorskip("PIL.Image")
SPEC = Media(image=ImageSegment(image_height=4, patch=2, channels=3), audio=AudioSegment(mels=3))


def picture(path: Path, size: int = 4, seed: int = 0) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.fromarray(pixels).save(path)
    return pixels


def sound(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(np.arange(800, dtype="<i2").tobytes())


def rows_of(source: Source, root: Path, **more: str) -> Rows:
    return read(source, Data(train=source, root=str(root), **more), "train", 0)


def pixels_of(reference: str) -> np.ndarray:
    assert SPEC.image is not None
    return read_image(reference.removeprefix("<image:").removesuffix(">"), SPEC.image, Pictures()).transpose(1, 2, 0)


def test_folders_of_images(tmp_path: Path):
    made = {label: picture(tmp_path / "all" / label / "1.png", seed=i) for i, label in enumerate(("cat", "dog"))}
    rows = rows_of(ClassFolders(path="all", media="image"), tmp_path)
    assert rows.columns["label"] == ["cat", "dog"]
    for label, text in zip(rows.columns["label"], rows.columns["text"], strict=True):
        assert np.array_equal(pixels_of(text), made[label])


def test_columns_of_paths_become_references(tmp_path: Path):
    made = picture(tmp_path / "set" / "images" / "7.png")
    sound(tmp_path / "set" / "a.wav")
    table = tmp_path / "set" / "rows.tsv"
    table.write_text("image\tclip\tquestion\tanswer\nimages/7.png\ta.wav+a.wav\twhat?\tcat\n\t\twhat?\tdog\n")
    source = TableFile(
        path="set/rows.tsv", source=("image", "clip", "question"), target="answer", images="image", sounds="clip"
    )
    rows = rows_of(source, tmp_path)
    image, _, rest = rows.columns["source"][0].partition(" ")
    assert np.array_equal(pixels_of(image), made)
    assert rest == f"<audio:{tmp_path / 'set' / 'a.wav'}+{tmp_path / 'set' / 'a.wav'}> what?"
    assert rows.columns["source"][1] == "what?"
    store = MediaStore(SPEC, in_decoder=False)
    assert len(readable(rows, store)) == 2


@pytest.mark.parametrize("labels", [np.array([3, 1]), np.array(["three", "one"])])
def test_arrays(tmp_path: Path, labels: np.ndarray):
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "all.npz", images=images, labels=labels)
    rows = rows_of(ArrayFile(path="all.npz"), tmp_path)
    assert rows.columns["label"] == [str(label) for label in labels]
    for text, image in zip(rows.columns["text"], images, strict=True):
        assert np.array_equal(pixels_of(text), image)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pixels": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(2, np.int64)}, "array = 'images': no such array"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros(3, np.int64)}, "there are 3 labels"),
        ({"images": np.zeros((2, 4, 4), np.uint8), "labels": np.zeros((2, 2))}, "labels are strings or whole numbers"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str):
    np.savez(tmp_path / "all.npz", **arrays)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        rows_of(ArrayFile(path="all.npz"), tmp_path)


def test_a_damaged_array_file(tmp_path: Path):
    (tmp_path / "all.npz").write_bytes(b"PK\3\4 no archive")
    with pytest.raises(ConfigError, match="is no readable array file"):
        rows_of(ArrayFile(path="all.npz"), tmp_path)


def test_damaged_images_are_named_and_can_be_skipped(tmp_path: Path):
    folder = tmp_path / "all" / "cat"
    picture(folder / "good.png")
    picture(folder / "large.png", size=6)
    (folder / "cut.png").write_bytes((folder / "good.png").read_bytes()[:40])
    (folder / "text.png").write_text("no picture")
    rows = rows_of(ClassFolders(path="all", media="image"), tmp_path)
    (folder / "gone.png").unlink(missing_ok=True)
    store = MediaStore(SPEC, in_decoder=False)
    good = readable(rows, store)
    assert len(good) == 1
    said = {bad.why for bad in good.bad}
    assert any("large.png has 6×6 pixels, and the model reads 4×4" in why for why in said)
    for name in ("cut.png", "text.png"):
        assert any(f"{name} is no readable picture" in why for why in said)
    assert SPEC.image is not None
    with pytest.raises(BadFile, match="does not exist"):
        read_image(str(folder / "gone.png"), SPEC.image, Pictures())


def test_missing_pillow_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    picture(tmp_path / "a.png")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    assert SPEC.image is not None
    with pytest.raises(BadFile, match=r"needs Pillow: pip install 'anyformer\[vision\]'"):
        read_image(str(tmp_path / "a.png"), SPEC.image, Pictures())


def test_packed_images_equal_the_files(tmp_path: Path):
    made = [picture(tmp_path / "all" / "train" / label / "1.png", seed=i) for i, label in enumerate("ab")]
    picture(tmp_path / "all" / "test" / "a" / "1.png")
    pack_images(find_images(tmp_path / "all"), tmp_path / "all.npz", False, lambda n: None)
    rows = rows_of(ArrayFile(path="all.npz", array="train_images", labels="train_labels"), tmp_path)
    assert rows.columns["label"] == ["a", "b"]
    for text, pixels in zip(rows.columns["text"], made, strict=True):
        assert np.array_equal(pixels_of(text), pixels)


def test_packing_names_damaged_images(tmp_path: Path):
    picture(tmp_path / "all" / "a" / "1.png")
    picture(tmp_path / "all" / "a" / "2.png", size=5)
    with pytest.raises(ConfigError, match=r"2\.png has 5×5 pixels"):
        pack_images(find_images(tmp_path / "all"), tmp_path / "all.npz", False, lambda n: None)
    assert [path.name for path in tmp_path.iterdir()] == ["all"]
    arrays, bad = pack_images(find_images(tmp_path / "all"), tmp_path / "all.npz", True, lambda n: None)
    assert len(arrays["images"]) == len(bad) == 1


@pytest.mark.parametrize("kind", ["folders", "table", "arrays"])
def test_fingerprints_see_the_pictures(tmp_path: Path, kind: str):
    file = tmp_path / "all" / "cat" / "1.png"
    picture(file)
    (tmp_path / "rows.tsv").write_text("image\tlabel\nall/cat/1.png\tcat\n")
    source: Source
    match kind:
        case "folders":
            source = ClassFolders(path="all", media="image")
        case "table":
            source = TableFile(path="rows.tsv", text="image", label="label", images="image")
        case _:
            source = ArrayFile(path="all.npz")
    marks = []
    for seed in (1, 2, 1):
        picture(file, seed=seed)
        pack_images(find_images(tmp_path / "all"), tmp_path / "all.npz", False, lambda n: None)
        marks.append(fingerprint(Data(train=source, root=str(tmp_path))))
    assert marks[0] == marks[2] != marks[1]


# -- scenes -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=8)
def test_scenes_of_one_split_never_occur_in_another(seed: int, most: int):
    found = {
        split: {*scenes.generate(Scenes(count=60, most=most), split, seed)["source"]} for split in ("train", "test")
    }
    assert len(found["test"]) == 60
    assert not found["train"] & found["test"]
    assert found["test"] == {*scenes.generate(Scenes(count=60, most=most), "test", seed + 1)["source"]}


def test_a_compositional_split():
    pairs = ("red circle", "blue square")
    train = scenes.generate(Scenes(count=100, without=pairs), "train", 0)["target"]
    test = scenes.generate(Scenes(count=100, only=pairs), "test", 0)["target"]
    assert not any(pair in text for pair in pairs for text in train)
    assert all(any(pair in text for pair in pairs) for text in test)
    with pytest.raises(ConfigError, match=r"without.0 = 'red circl': not a colour and a shape; did you mean"):
        scenes.generate(Scenes(count=1, without=("red circl",)), "train", 0)


def test_a_picture_shows_what_the_sentence_says():
    """Each shape is there in its colour, and pictures of different sentences differ."""
    columns = scenes.generate(Scenes(count=200), "train", 1)
    seen: dict[bytes, str] = {}
    for reference, sentence in zip(columns["source"], columns["target"], strict=True):
        picture = scenes.draw(reference.removeprefix("<image:").removesuffix(">"))
        for colour, levels in scenes.COLOURS.items():
            assert (colour in sentence) == bool((picture == levels).all(axis=-1).any())
        assert seen.setdefault(picture.tobytes(), sentence) == sentence


def test_a_wrong_scene_is_refused():
    assert SPEC.image is not None
    with pytest.raises(BadFile, match="is no scene, such as"):
        read_image("scene:48 huge red circle 3 3", SPEC.image, Pictures())


# -- feature vectors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [None, 5])
@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float64])
def test_rows_of_an_array_are_read_as_one_by_one(tmp_path: Path, values: int | None, dtype: type):
    file, spec = str(tmp_path / "a.npz"), FeatureSegment(size=6, values=values)
    array = np.random.default_rng(0).integers(0, 5, (4, 2, 3)).astype(dtype)
    np.savez(file, x=array)
    for i, row in enumerate(array):
        found, expected = FeatureReader(spec).read(f"{file}#x/{i}"), fit_features(row.ravel(), spec, "")
        assert np.array_equal(found, expected)
        assert found.dtype == expected.dtype


def test_a_bad_row_of_an_array_is_named_and_others_are_read(tmp_path: Path):
    file = str(tmp_path / "a.npz")
    for bad in (5.0, -1.0, 0.5, np.nan):
        np.savez(file, x=np.array([[0.0, 1.0, 2.0], [0.0, 1.0, bad]]), y=np.zeros((2, 4)), none=np.zeros((0, 3)))
        reader = FeatureReader(FeatureSegment(size=3, values=5))
        assert reader.read(f"{file}#x/0").tolist() == [0, 1, 2]
        with pytest.raises(BadFile, match=r"a\.npz#x/1 has other numbers than 0, 1, ..., 4"):
            reader.read(f"{file}#x/1")
    for name, why in {
        "x/2": "the array has 2 entries",
        "y/1": r"a\.npz#y/1 has 4 numbers, and the model reads 3",
        "none/0": "the array has 0 entries",
        "z/0": "has no array 'z'",
        "0": "has the arrays x, y, none: name one",
    }.items():
        with pytest.raises(BadFile, match=why):
            reader.read(f"{file}#{name}")
    assert reader.read("0 1, 4").tolist() == [0, 1, 4]


def test_bare_paths_are_references(tmp_path: Path):
    """Alone, or before a question and a tab; a path that does not exist is an error, not a text."""
    made = tmp_path / "my cat.png"
    picture(made)
    store = MediaStore(SPEC, in_decoder=False)

    def encode(text: str) -> list[int]:
        return store.encode([text], lambda texts: [[7] * len(text.split()) for text in texts])[0]

    places = [-1] * 4
    assert encode(str(made)) == places
    assert encode(f"{made}\twhat is this?") == [*places, 7, 7, 7]
    assert encode(f"<image:{made}> what is this?") == [*places, 7, 7, 7]
    assert encode("what is a .png?") == [7] * 4
    with pytest.raises(ConfigError, match=r"none\.png does not exist"):
        encode("none.png")

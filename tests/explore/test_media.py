"""Texts with images and sounds: labels, pixels, generation, and the files that may be read."""

import json
import wave
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from anyformer.cli import app
from anyformer.config import (
    LM,
    AudioSegment,
    Classifier,
    ConfigError,
    FeatureSegment,
    ImageSegment,
    Learned,
    Media,
    ModelConfig,
    Patches,
    Pictures,
    Tokens,
    io,
)
from anyformer.explore.open_runs import Workspace, open_runs
from anyformer.explore.path_place import PathPlace
from anyformer.explore.requests import StageRequest, TextRequest
from anyformer.explore.show import show
from anyformer.explore.trace import last_side
from anyformer.nn.model import Transformer
from anyformer.recipe import (
    AdamW,
    Classify,
    Data,
    Encoder,
    LanguageModel,
    Padded,
    PrefixLM,
    Recipe,
    Seq2Seq,
    TableFile,
    Train,
    Words,
)
from anyformer.runs.run import Run, load, write_folder, write_model
from anyformer.runs.run_inspection import attention_maps, read
from tests.explore import made
from tests.explore.formula_symbols import recompute
from tests.explore.test_path import every_stage

MEDIA = Media(
    image=ImageSegment(image_height=12, image_width=16, patch=4, channels=3),
    audio=AudioSegment(rate=800, window=40, hop=20, mels=8),
    features=FeatureSegment(size=2),
)
TOKENS = Tokens(vocab=1, media=MEDIA)
ONE, ACROSS = made.stack(), made.stack(made.ACROSS)
PAIR = ModelConfig(
    width=16, source=TOKENS, target=Tokens(vocab=1), encoder=ONE, decoder=ACROSS, head=LM(), tie="none"
)  # fmt: skip
DECODER = made.decoder(ONE).model_copy(update={"target": TOKENS})
SHORT = made.decoder(made.stack(position=Learned(length=20))).model_copy(update={"target": TOKENS})
RUNS = {
    "label": (
        Classify(labels=("no", "yes")),
        made.encoder(ONE, made.TWO).model_copy(update={"source": TOKENS}),
        made.WORDS,
    ),
    "question": (Seq2Seq(max_target=6), PAIR, made.WORDS),
    "stream": (LanguageModel(), DECODER, made.WORDS),
    "prefix": (PrefixLM(), DECODER, made.WORDS),
    "short": (LanguageModel(), SHORT, made.WORDS),
}
IMAGE, SOUND = [f"▦ {i},{j}" for i in range(3) for j in range(4)], ["0.00 s", "0.05 s", "0.10 s"]
LABELS = [*IMAGE, "the", "fox", *SOUND, "f", "dog"]


def write_media(folder: Path) -> None:
    """Write a picture of 12 × 16 pixels, and a sound of five frames."""
    pixels = np.random.default_rng(0).integers(0, 256, (1, 12, 16, 3), dtype=np.uint8)
    np.savez(folder / "a.npz", images=pixels)
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(800)
        file.writeframes((8000 * np.sin(np.arange(100) / 3)).astype("<i2").tobytes())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with runs, a picture `a.npz` and a sound `a.wav`; a further picture is outside."""
    folder = tmp_path_factory.mktemp("media") / "here"
    folder.mkdir()
    write_media(folder)
    (folder.parent / "b.npz").write_bytes((folder / "a.npz").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, parts in RUNS.items():
            patch.setitem(made.RUNS, name, parts)
            made.written(name, folder)
        yield folder


@pytest.fixture(scope="module")
def workspace(home: Path) -> Workspace:
    return open_runs([home / name for name in RUNS])


TEXT = "<image:a.npz#images/0> the fox <audio:a.wav> <features:1 2> dog"


@pytest.mark.parametrize("run", RUNS)
def test_every_view_answers(workspace: Workspace, run: str) -> None:
    """With the labels of places, and plain values only."""
    body = {"run": run, "text": TEXT}
    about = next(one for one in workspace.about() if one["name"] == run)
    assert about["media"]
    found = workspace.answer("read", body)
    side = "decoder" if about["shape"] == "decoder" else "encoder"
    places = found["tokens"][side]
    assert places[places.index(IMAGE[0]) :][: len(LABELS)] == LABELS
    assert json.loads(json.dumps(found, allow_nan=False))["pictures"][side] == found["pictures"][side]
    for kind in about["kinds"]:
        heads = workspace.answer("heads", {**body, "kind": kind, "layer": 1})
        assert "induction" not in heads["names"]
        workspace.answer("model", {**body, "kind": kind})
        workspace.answer("matrix", {**body, "kind": kind, "layer": 0, "head": 1})
        workspace.answer("neuron", {**body, "kind": kind, "layer": 0, "head": 1, "query": 0, "key": 0})
    for stage, layer in every_stage(workspace.answer("path", body)):
        where = {**body, "stage": stage, "layer": layer, "at": -1, "key": 1}
        kind, shown = stage.partition(".")[0], workspace.answer("stage", where)
        kind = last_side(workspace.runs[run].run) if kind == "head" else kind
        place = PathPlace(workspace.trace(TextRequest(**body)), kind, shown["position"] or 0, StageRequest(**where))
        recompute(place, stage, shown)
    if about["tokens"]:
        assert workspace.answer("next", body)["lens"]
    workspace.answer("block", body)
    if about["shape"] != "encoder":
        workspace.answer("cache", body)


def test_answers_are_those_of_the_run(workspace: Workspace) -> None:
    """Labels by `predict`; generated text by `generate`, token by token and as the decoder's tokens."""
    runs = {name: one.run for name, one in workspace.runs.items()}
    assert [workspace.answer("answer", {"run": "label", "text": TEXT})["answer"]] == runs["label"].predict([TEXT])
    for name in ("question", "stream", "prefix"):
        options = {"temperature": 0, "max_new_tokens": 6}
        *_, last = workspace.answer("write", {"run": name, "text": TEXT, **options})
        assert [last["text"]] == runs[name].generate([TEXT], **options)
    assert [workspace.answer("answer", {"run": "question", "text": TEXT})["answer"]] == runs["question"].predict([TEXT])


def test_an_image_and_a_sound_are_sent_as_pixels(workspace: Workspace, home: Path) -> None:
    """The image as it is, the sound as a spectrogram with low bands at the bottom; places are in row order."""
    image, sound = workspace.answer("read", {"run": "label", "text": TEXT})["pictures"]["encoder"]
    stored = np.load(home / "a.npz")["images"][0]
    assert b64decode(image.pop("pixels")) == stored.tobytes()
    assert image == {"kind": "image", "start": 1, "grid": [3, 4], "size": [12, 16], "channels": 3}
    pixels = np.frombuffer(b64decode(sound.pop("pixels")), np.uint8).reshape(8, 6)
    assert sound == {"kind": "audio", "start": 15, "grid": [1, 3], "size": [8, 6], "channels": 1}
    assert pixels[4:].mean() > pixels[:4].mean()  # 42 Hz of 400 Hz
    assert (pixels[:, -1] == 0).all()  # a place of two frames, of which the sound has one


def test_the_mask_groups_patches(workspace: Workspace) -> None:
    """In a decoder, patches of an image see each other, and tokens are causal."""
    body = {"run": "stream", "text": TEXT, "kind": "decoder", "layer": 0, "head": 0, "what": "mask"}
    found = workspace.answer("matrix", body)
    mask = np.frombuffer(b64decode(found["values"]), "<f4").reshape(found["shape"])
    first = found["rows"].index(IMAGE[0])
    expected = np.tril(np.ones_like(mask))
    for start, size in ((first, len(IMAGE)), (first + len(IMAGE) + 2, len(SOUND))):
        expected[start : start + size, start : start + size] = 1
    assert (mask == expected).all()


def test_long_texts_are_cut_after_the_last_reference(workspace: Workspace) -> None:
    found = workspace.answer("read", {"run": "short", "text": f"<image:a.npz#images/0> {'fox ' * 30}"})
    assert found["tokens"]["decoder"].count("fox") < 20
    assert "only its first" in found["notes"][0]
    with pytest.raises(ConfigError, match="shorten it"):
        workspace.answer("read", {"run": "short", "text": "<image:a.npz#images/0> " * 2 + "fox"})


@pytest.mark.parametrize(
    "reference",
    [
        "image:../b.npz#images/0",
        "image:{outside}/b.npz#images/0",
        "image:link.npz#0",
        "image:/proc/self/environ",
        "image:b\0.npz",
        "audio:a.wav+../b.wav",
        "features:../b.npz#images/0",
    ],
)
def test_files_outside_are_not_read(workspace: Workspace, home: Path, reference: str) -> None:
    """A path, a path with .., a link, the second part of a sound; with one line that names the file."""
    link = home / "link.npz"
    if not link.exists():
        link.symlink_to(home.parent / "b.npz")
    text = f"<{reference.format(outside=home.parent)}> fox"
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"outside of|cannot be the name of a file") as caught:
            workspace.answer("read", {"run": "label", "text": text})
        assert len(str(caught.value).splitlines()) == 1
        with pytest.raises(ConfigError):
            list(workspace.answer("write", {"run": "stream", "text": text}))


def test_files_of_the_data_are_read(home: Path, tmp_path: Path) -> None:
    """Those beside the table, and that of the example, wherever it is; it is not cut."""
    elsewhere = tmp_path / ("a folder with a long name, so that the reference is long " * 2)
    elsewhere.mkdir()
    for folder in (tmp_path, elsewhere):
        (folder / "c.npz").write_bytes((home / "a.npz").read_bytes())
    (tmp_path / "rows.tsv").write_text(f"label\ttext\nno\t<image:{elsewhere}/c.npz#images/0> fox\n")
    folder = tmp_path / "label"
    made.written("label", tmp_path)
    task, config, _ = RUNS["label"]
    source = TableFile(path=str(tmp_path / "rows.tsv"), text="text", label="label")
    parts = {"model": config, "task": task, "data": Data(train=source), "tokenizer": Words()}
    recipe = Recipe(**parts, batches=Padded(tokens=64), train=Train(steps=1, optimizer=AdamW(lr=1e-3)))
    io.save(recipe, folder / "recipe.toml")
    opened = open_runs([folder])
    (about,) = opened.about()
    assert about["example"] == f"<image:{elsewhere}/c.npz#images/0> fox"
    for text in (about["example"], f"<image:{tmp_path}/c.npz#images/0>", "<image:a.npz#images/0>"):
        assert opened.answer("read", {"run": "label", "text": text})["pictures"]["encoder"]


def test_python_reads_files_from_anywhere(home: Path) -> None:
    run, text = load(home / "label"), f"<image:{home.parent}/b.npz#images/0>"
    assert "▦ 2,3" in show(run, text).document
    assert {maps.shape[-1] for maps in attention_maps(run, text).values()} == {14}  # with tokens around the text


def test_a_model_of_patches_reads_a_picture(home: Path) -> None:
    """Its text is a path: every view answers, with the label of `predict`; a picture here is the example."""
    patches = Patches(image_height=12, image_width=16, patch=4)
    config = ModelConfig(width=16, source=patches, encoder=ONE, head=Classifier(labels=2, pool="first"))
    spec = Encoder(labels=("cat", "dog"), pictures=Pictures())
    run = Run(Transformer(config).eval(), spec.build(made.WORDS), spec, home / "patches")
    write_folder(run.folder, lambda here: write_model(here, run.model.state_dict(), config, spec, run.task))
    Image.fromarray(np.load("a.npz")["images"][0]).save("cat.png")
    opened = open_runs([run.folder])
    (about,) = opened.about()
    assert about["example"] == str(home / "cat.png")
    body = {"run": "patches", "text": "cat.png"}
    found = opened.answer("read", body)
    assert found["tokens"]["encoder"] == ["<class>", *IMAGE]
    (picture,) = found["pictures"]["encoder"]
    assert (picture["start"], picture["grid"]) == (1, [3, 4])
    assert b64decode(picture["pixels"]) == np.load("a.npz")["images"].tobytes()
    assert [opened.answer("answer", body)["answer"]] == load(run.folder).predict(["cat.png"])
    where = {**body, "kind": "encoder", "layer": 0}
    assert opened.answer("matrix", {**where, "head": 0})["shape"] == [13, 13]
    assert opened.answer("heads", where)["rows"] == ["<class>", *IMAGE]
    trace = opened.trace(TextRequest(**body))
    for at in (0, 7):  # the class token, and a patch
        for stage, layer in every_stage(opened.answer("path", body)):
            request = {**body, "stage": stage, "layer": layer, "at": at}
            shown, side = opened.answer("stage", request), stage.partition(".")[0].replace("head", "encoder")
            recompute(PathPlace(trace, side, at, StageRequest(**request)), stage, shown)
            assert (shown.get("patch") is not None) == (stage == "encoder.embed" and at == 7)
    assert opened.answer("stage", {**body, "stage": "encoder.tokens"})["patches"]
    for view in ("model", "block"):
        opened.answer(view, {**body, "kind": "encoder"} if view == "model" else body)
    for text in ("../x.png", f"<image:{home.parent}/b.npz#images/0>", "a cat"):
        with pytest.raises(ConfigError):
            opened.answer("read", {"run": "patches", "text": text})
    assert CliRunner().invoke(app, ["inspect", str(run.folder), "cat.png"]).exit_code == 0


def test_a_target_of_tokens_has_no_reference(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match=r"target: has a reference"):
        workspace.answer("read", {"run": "question", "text": TEXT, "target": "<features:1 2>"})


def test_inspect_shows_places(home: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(home / "question"), TEXT])
    assert result.exit_code == 0, result.output
    assert "▦ 2,3" in result.output
    assert "0.05 s" in result.output


def test_places_have_distinct_ids(home: Path) -> None:
    """So that no head is called an induction head for places of one image."""
    ids = read(load(home / "stream"), TEXT).distinct_ids("decoder")[0].tolist()
    places = [id for id in ids if id < 0]
    assert len(places) == len(set(places)) == 16

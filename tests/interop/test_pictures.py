"""Picture files: the values that a model reads are those of `transformers`, and so are the labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from typer.testing import CliRunner

import anyformer as af
from anyformer.cli.app import app
from anyformer.config import ConfigError, ImageSegment, Media
from anyformer.data.media import MediaStore
from anyformer.interop import import_model, pictures
from anyformer.interop.hf_folder import to_hf
from tests.interop.test_encoders import LABELS, vit

SIDE = 24
ROUNDING = 2e-6  # of values of about 1


def draw(path: Path, height: int = 31, width: int = 47, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth picture with an edge, which a wrong filter or crop changes."""
    rng = np.random.Generator(np.random.PCG64(seed))
    small = rng.integers(0, 256, (5, 7, len(Image.new(mode, (1, 1)).getbands())), dtype=np.uint8)
    picture = Image.fromarray(small.squeeze(), mode).resize((width, height), Image.Resampling.BICUBIC)
    picture.save(path)
    return picture


PROCESSORS: dict[str, Any] = {
    "vit": ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}),
    "vit-bicubic": ViTImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, resample=3, image_mean=[0.485, 0.456, 0.406], image_std=[0.2, 0.3, 0.25]
    ),
    "vit-cropped": ViTImageProcessorPil(
        size={"height": 30, "width": 28}, do_center_crop=True, crop_size={"height": SIDE, "width": SIDE}
    ),
    "vit-bytes": ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_rescale=False, do_normalize=False),
    "clip": CLIPImageProcessorPil(size={"shortest_edge": 26}, crop_size={"height": SIDE, "width": SIDE}),
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize(("height", "width", "mode"), [(31, 47, "RGB"), (80, 29, "RGB"), (30, 30, "RGBA")])
def test_values(name: str, height: int, width: int, mode: str, tmp_path: Path) -> None:
    theirs = PROCESSORS[name]
    theirs.save_pretrained(tmp_path)
    found = pictures.read(tmp_path, (3, SIDE, SIDE))
    assert found is not None
    picture = draw(tmp_path / "a.png", height, width, mode)
    white = Image.new("RGBA", picture.size, "white")
    picture = Image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    expected = theirs(picture, return_tensors="pt")["pixel_values"]
    store = MediaStore(Media(image=ImageSegment(image_height=SIDE, patch=SIDE)), False, pictures=found)
    values = store.images([str(tmp_path / "a.png")])
    assert values.shape == expected.shape
    assert float((values - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


@pytest.mark.parametrize("name", PROCESSORS)
def test_settings_come_back(name: str, tmp_path: Path) -> None:
    PROCESSORS[name].save_pretrained(tmp_path)
    found = pictures.read(tmp_path, (3, SIDE, SIDE))
    assert found is not None
    pictures.write(tmp_path, found, "CLIP" if name == "clip" else "ViT", (3, SIDE, SIDE))
    assert pictures.read(tmp_path, (3, SIDE, SIDE)) == found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_processor_type": "BeitImageProcessor"}, "= 'BeitImageProcessor': must be ViTImageProcessor or"),
        ({"size": {"height": 32, "width": 32}}, r"size = .*32.*: config.json has images of 24×24"),
        ({"do_center_crop": True, "crop_size": 20}, r"crop_size = .*20.*: config.json has images of 24×24"),
        ({"resample": 9}, "resample = 9: must be a filter of Pillow"),
        ({"image_mean": ["x"]}, "image_mean = .*: must be numbers"),
        ({"image_std": [0.5, 0.5]}, "deviation: has 2 values, and an image has 3 channels"),
        ({"size": {"longest_edge": 24}}, "must be height and width, or shortest_edge"),
        ({"do_pad": True}, "do_pad = True"),
    ],
)
def test_unsupported_settings_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    usual = {"image_processor_type": "ViTImageProcessor", "size": SIDE}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**usual, **settings}))
    with pytest.warns(UserWarning, match=message):
        assert pictures.read(tmp_path, (3, SIDE, SIDE)) is None


@torch.no_grad()
def test_a_vit_labels_picture_files(tmp_path: Path) -> None:
    """From a public folder to labels on the command line; an exported run has the same settings."""
    theirs = vit("ForImageClassification", **LABELS).built()
    processor = PROCESSORS["vit-bicubic"]
    files = [tmp_path / f"{i}.png" for i in range(6)]
    values = processor([draw(path, seed=i) for i, path in enumerate(files)], return_tensors="pt")["pixel_values"]
    theirs.classifier.bias.sub_(theirs(values).logits.mean(0))  # so that pictures differ in their label
    theirs.save_pretrained(tmp_path / "there")
    processor.save_pretrained(tmp_path / "there")
    run = import_model(tmp_path / "there", tmp_path / "run")
    logits = theirs(values).logits
    expected = [theirs.config.id2label[i] for i in logits.argmax(-1).tolist()]
    assert len(set(expected)) > 1
    for one in (run, af.load(tmp_path / "run")):
        assert one.predict([str(path) for path in files]) == expected
        assert one.predict([f"<image:{files[1]}>"]) == expected[1:2]
    said = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(files[0])])
    assert said.stdout.splitlines() == expected[:1]
    to_hf(run, tmp_path / "back")
    assert import_model(tmp_path / "back", tmp_path / "again").spec == run.spec
    assert isinstance(hf.AutoImageProcessor.from_pretrained(tmp_path / "back"), hf.ViTImageProcessor)


def test_what_is_no_picture_is_named(tmp_path: Path) -> None:
    vit("ForImageClassification", **LABELS).built().save_pretrained(tmp_path / "there")
    PROCESSORS["vit"].save_pretrained(tmp_path / "there")
    run = import_model(tmp_path / "there", tmp_path / "run")
    draw(tmp_path / "right.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with pytest.raises(ConfigError) as caught:
        run.predict([str(tmp_path / "right.png"), "a cat", str(tmp_path / "bad.png"), "<image:gone.png>"])
    assert [fault.path for fault in caught.value.faults] == ["text 2", "text 3", "text 4"]
    assert "is not the path of a picture" in caught.value.faults[0].message

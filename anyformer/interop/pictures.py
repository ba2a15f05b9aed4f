"""Settings of picture files beside a public model: preprocessor_config.json, or a part of processor_config.json."""

import warnings
from pathlib import Path
from typing import Any, get_args

from anyformer.config import ExactSize, NoResize, Pictures, Resample, Resize, ShortSide
from anyformer.config.parse import to_data
from anyformer.config.spec import ConfigError
from anyformer.interop.config_fields import Fields, shown
from anyformer.interop.weight_files import read_json, write_json

FILE, NESTED = "preprocessor_config.json", "processor_config.json"
RESAMPLE = get_args(Resample)  # by Pillow's numbers
CLASSES = ("FeatureExtractor", "ImageProcessor", "ImageProcessorFast", "ImageProcessorPil")
CLIP_MEAN, CLIP_DEVIATION = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
# what a class does where the file leaves a field out
DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {
        "size": {"height": 224, "width": 224},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_center_crop": False,
    },
    "CLIP": {
        "size": {"shortest_edge": 224},
        "resample": 3,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_DEVIATION,
        "do_center_crop": True,
    },
}


def read(folder: Path, shape: tuple[int, int, int]) -> Pictures | None:
    """Return the settings of a folder, for a model of images [channels, height, width].

    None if the folder has none, or none that are supported, with a warning.
    """
    try:
        return _read(folder, *shape)
    except ConfigError as error:
        warnings.warn(f"{error}; these settings of picture files are left out", stacklevel=3)
        return None


def read_clip(folder: Path, shape: tuple[int, int, int]) -> Pictures:
    """Return the settings of a folder, or else, with a warning, those of the published CLIP models."""
    if (found := read(folder, shape)) is not None:
        return found
    warnings.warn(f"{folder}: pictures are read with the settings of CLIP: {FILE} is missing", stacklevel=3)
    settings = {"resize": ShortSide(length=min(shape[1:])), "resample": "bicubic", "crop": True}
    colours = {"mean": tuple(CLIP_MEAN), "deviation": tuple(CLIP_DEVIATION)} if shape[0] == 3 else {}
    return Pictures.model_validate({**settings, **colours})


def _read(folder: Path, channels: int, height: int, width: int) -> Pictures | None:
    if (folder / FILE).is_file():
        fields = Fields(read_json(folder / FILE), folder / FILE)
    elif (folder / NESTED).is_file() and "image_processor" in (data := read_json(folder / NESTED)):
        fields = Fields(data, folder / NESTED).table("image_processor", data["image_processor"])
    else:
        return None
    with fields.named():
        found = _pictures(fields, (height, width))
        if faults := list(found.faults(channels)):
            raise ConfigError(faults)
    fields.finish()
    return found


def _pictures(fields: Fields, model: tuple[int, int]) -> Pictures:
    older = fields("feature_extractor_type", "")
    name = fields("image_processor_type", older)
    kind = next((kind for kind in DEFAULTS if name.removeprefix(kind) in CLASSES), None)
    if kind is None:
        known = " or ".join(f"{kind}ImageProcessor" for kind in DEFAULTS)
        raise ConfigError([fields.fault("image_processor_type", f"= {shown(name)}: must be {known}")])
    usual = DEFAULTS[kind]
    resample = fields("resample", usual["resample"], least=0)
    if resample >= len(RESAMPLE):
        raise ConfigError([fields.fault("resample", f"= {resample}: must be a filter of Pillow, 0 to 5")])
    crop = fields("do_center_crop", usual["do_center_crop"])
    resize = _size(fields, "size", usual["size"]) if fields("do_resize", True) else NoResize()
    fields.silent("size", "crop_size", "processor_class", "do_convert_rgb", "data_format", "input_data_format")
    fields.must("do_pad", False)
    exact = ExactSize(height=model[0], width=model[1])
    cut = _size(fields, "crop_size", {"height": model[0], "width": model[1]}, square=True) if crop else resize
    if cut != exact and not isinstance(resize, NoResize):
        name = "crop_size" if crop else "size"
        what = f"= {shown(to_data(cut))}: config.json has images of {model[1]}×{model[0]}"
        raise ConfigError([fields.fault(name, what)])
    mean, deviation = (_numbers(fields, name, usual[name]) for name in ("image_mean", "image_std"))
    normal, scale = fields("do_normalize", True), fields("rescale_factor", 1 / 255)
    return Pictures(
        resize=resize,
        resample=RESAMPLE[resample],
        crop=crop,
        scale=scale if fields("do_rescale", True) else 1.0,
        mean=mean if normal else (0.0,),
        deviation=deviation if normal else (1.0,),
    )


def _numbers(fields: Fields, name: str, usual: list[float]) -> tuple[float, ...]:
    given = fields(name, usual)
    if not all(type(x) in (int, float) for x in given):
        raise ConfigError([fields.fault(name, f"= {shown(given)}: must be numbers, one for each channel")])
    return tuple(map(float, given))


def _size(fields: Fields, name: str, usual: dict[str, Any], square: bool = False) -> Resize:
    """Return a size: {height, width}, {shortest_edge}, or one number in older files."""
    try:
        given = fields(name, usual)
    except ConfigError:
        side = fields(name, 0)
        return ExactSize(height=side, width=side) if square or "height" in usual else ShortSide(length=side)
    given = {key: value for key, value in given.items() if value is not None}
    match given:
        case {"height": height, "width": width} if len(given) == 2:
            return ExactSize(height=height, width=width)
        case {"shortest_edge": length} if len(given) == 1:
            return ShortSide(length=length)
        case _:
            what = f"= {shown(given)}: must be height and width, or shortest_edge"
            raise ConfigError([fields.fault(name, what)])


def write(folder: Path, pictures: Pictures, kind: str, shape: tuple[int, int, int]) -> None:
    """Write the settings for the image processor of a family, whose models read images of this shape."""
    found: dict[str, Any] = {"image_processor_type": f"{kind}ImageProcessor"}
    match pictures.resize:
        case ExactSize(height=height, width=width):
            found |= {"do_resize": True, "size": {"height": height, "width": width}}
        case ShortSide(length=length):
            found |= {"do_resize": True, "size": {"shortest_edge": length}}
        case NoResize():
            found["do_resize"] = False
    crop = {"height": shape[1], "width": shape[2]}
    write_json(
        folder / FILE,
        {
            **found,
            "resample": RESAMPLE.index(pictures.resample),
            "do_center_crop": pictures.crop,
            **({"crop_size": crop} if pictures.crop else {}),
            "do_rescale": True,
            "rescale_factor": pictures.scale,
            "do_normalize": True,
            "image_mean": list(pictures.mean),
            "image_std": list(pictures.deviation),
        },
    )

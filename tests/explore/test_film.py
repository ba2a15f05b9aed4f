"""The film of a training: every view at every step is that of the weights of the step, and pictures become a GIF."""

import sys
from base64 import b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from anyformer.config import ConfigError
from anyformer.explore import film as film_module, open_runs as open_runs_module
from anyformer.explore.film import gif
from anyformer.explore.live_run import result_step
from anyformer.explore.open_runs import open_runs, views as all_views
from anyformer.explore.requests import GifRequest
from anyformer.explore.show import collect, key
from anyformer.explore.view import TextView
from anyformer.runs.run import load, remove, snapshots, write_folder, write_model
from tests.explore.filmed import LAST, STEPS, filmed
from tests.explore.made import TEXT
from tests.training import small

PLACE = {"kind": "decoder", "layer": 1, "head": 1}
FIELDS: dict[str, dict[str, Any]] = {
    "heads": {"kind": "decoder", "layer": 1},
    "model": {"kind": "decoder"},
    "matrix": PLACE,
    "neuron": PLACE | {"query": 5, "key": 2},
    "stage": {"stage": "decoder.softmax", "at": 5},
    "follow": {"level": "parts"},
    "cell": {"layer": 1, "at": 5},
    "patch": {"donor": TEXT[::-1]},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filmed(tmp_path)


def request(step: int | None = None, **more: Any) -> dict[str, Any]:
    return {"run": "film", "text": TEXT, "step": step, **more}


def views() -> list[str]:
    """The views whose fields are known here; a new view is added to `FIELDS` if it needs some."""
    texts = [view for view in all_views().values() if isinstance(view, TextView)]
    return [view.kind for view in texts if view.kind in FIELDS or not required(view.request)]


def required(spec: Any) -> set[str]:
    return {name for name, field in spec.model_fields.items() if field.is_required()} - {"run", "text"}


def test_a_view_at_a_step_is_that_of_the_snapshot(folder: Path) -> None:
    """The numbers of a step equal those of its snapshot, opened as a run by itself."""
    workspace = open_runs([folder])
    assert len(views()) >= 11
    different = set()
    for step, path in zip(STEPS, snapshots(folder), strict=True):
        alone = open_runs([path])
        for view in views():
            fields = FIELDS.get(view, {})
            shown = workspace.answer(view, request(step, **fields))
            assert shown == alone.answer(view, {**request(**fields), "run": path.name}), (view, step)
            different |= {view} if shown != workspace.answer(view, request(**fields)) else set()
    assert {"heads", "model", "matrix", "neuron", "next", "stage", "follow"} <= different


def test_the_steps_of_a_run(folder: Path) -> None:
    (about,) = open_runs([folder]).about()
    assert about["steps"] == [*STEPS, LAST]
    assert (about["step"], about["result"]) == (None, LAST)
    (folder / "manifest.json").unlink()
    remove(folder / "state" / f"step-{LAST:09}")
    (about,) = open_runs([folder]).about()  # as if it were being trained
    assert about["steps"] == [*STEPS]
    assert (about["step"], about["result"]) == (STEPS[-1], None)


def test_the_result_of_a_training_is_known_by_its_step(tmp_path: Path) -> None:
    """That of the last or the best step; an average of weights is that of no step."""
    small.run(small.pairs("decoder", steps=6, snapshots="auto"), tmp_path / "last")
    small.run(small.pairs("decoder", steps=6, snapshots="auto", ema=0.8), tmp_path / "average")
    assert result_step(tmp_path / "last") == 6
    assert result_step(tmp_path / "average") is None


def test_few_runs_at_steps_stay_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the limit, one is kept: neither it nor a trace of another keeps weights alive. Answers stay the same."""
    free, small_ = open_runs([folder]), open_runs([folder])
    fields = FIELDS["heads"]
    expected = {step: free.answer("heads", request(step, **fields)) for step in STEPS}
    monkeypatch.setattr(open_runs_module, "MAX_STEP_BYTES", 1)
    for _ in range(2):
        for step in STEPS:
            assert small_.answer("heads", request(step, **fields)) == expected[step]
            assert [key.step for key in small_.traces if key.step is not None] == [step]
    assert [key.step for key in free.traces] == [*STEPS]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_weights_in_half_precision_are_widened(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """The sums of the page add up in fp32."""
    run = load(folder)
    weights = {name: weight.to(dtype) for name, weight in run.model.state_dict().items()}
    write_folder(tmp_path / "half", lambda path: write_model(path, weights, run.config, run.spec, run.task))
    workspace = open_runs([tmp_path / "half"])
    assert {weight.dtype for weight in workspace.runs["half"].run.model.parameters()} == {torch.float32}
    found = workspace.answer("stage", {"run": "half", "text": TEXT, "stage": "decoder.softmax"})
    assert found["check"] < 1e-5


def test_a_saved_page_has_the_step(folder: Path) -> None:
    answers = collect(open_runs([folder]), {**request(4), "target": None, "off": []})
    body = {"run": "film", "text": TEXT, "step": 4}
    assert key("read", body) in answers
    assert key("heads", {**body, **FIELDS["heads"]}) in answers


# -- GIF --------------------------------------------------------------------------------------------------------------


def png(colour: str, size: tuple[int, int] = (40, 30)) -> str:
    out = BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return b64encode(out.getvalue()).decode()


def test_pictures_become_a_gif() -> None:
    colours = ["#ff0000", "#00ff00", "#0000ff"]
    made = Image.open(BytesIO(gif(GifRequest(frames=tuple(map(png, colours)), milliseconds=500))))
    assert (made.format, made.size, made.n_frames, made.info["loop"]) == ("GIF", (40, 30), 3, 0)
    times = []
    for at, colour in enumerate(colours):
        made.seek(at)
        times.append(made.info["duration"])
        assert made.convert("RGB").getpixel((20, 15)) == Image.new("RGB", (1, 1), colour).getpixel((0, 0))
    assert times == [500, 500, 1500]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ((png("red"), png("red", (40, 31))), "one size"),
        (("no base64!",), r"frames\[0\]: is not a PNG"),
        ((b64encode(b"GIF89a, not a PNG").decode(),), r"frames\[0\]: is not a PNG"),
        ((png("red", (1000, 1000)),), "the limit is"),
    ],
)
def test_wrong_pictures_are_refused(frames: tuple[str, ...], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(film_module, "MAX_PIXELS", 500_000)
    with pytest.raises(ConfigError, match=reason):
        gif(GifRequest(frames=frames, milliseconds=500))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigError, match="pip install 'anyformer\\[vision\\]'"):
        gif(GifRequest(frames=(png.__name__,), milliseconds=500))

"""docs/figures/readme.gif: attention and answer of the sorting model over its training, then the explore page.

`anyformer train sort train.snapshots=40 --out runs/sort`, then `python -m figures.readme_animation runs/sort`.
Needs the packages playwright and pillow, and Chromium.
"""

import io
import shutil
import sys
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import torch
from PIL import Image

from anyformer.explore.live_run import by_step
from anyformer.explore.open_runs import open_runs
from anyformer.explore.server import ExploreServer
from anyformer.nn.inspection.plot import pyplot
from anyformer.runs.run import load
from anyformer.runs.run_inspection import attention_maps, read
from figures.style import FOLDER, HEATMAP, STYLE

TEXT = "7 3 9 1 4 1 8"
SIZE = (880, 580)  # pixels
STEPS = 12  # of training
VIEWS = ("heads", "matrix", "neuron", "block")


def training_frames(folder: Path) -> list[Image.Image]:
    """One frame for each of some steps of training: where the digits of the answer attend, and the model's answer."""
    known = by_step(folder)
    late = list(known)[len(known) % STEPS :: max(1, len(known) // STEPS)]
    return [_training_frame(load(known[step]), step) for step in late]


def _training_frame(run: Any, step: int) -> Image.Image:
    target = " ".join(sorted(TEXT.split()))
    maps = attention_maps(run, TEXT, target=target)["decoder"][-1, 0].mean(0)  # last layer, mean over heads
    tokens = read(run, TEXT, target).tokens["decoder"]
    plt = pyplot()
    with plt.rc_context(STYLE | {"axes.grid": False}):
        figure, axis = plt.subplots(figsize=(SIZE[0] / 100, SIZE[1] / 100), layout="constrained")
        start = tokens.index("<sep>")
        axis.imshow(maps[start:], cmap=HEATMAP, vmin=0, vmax=0.6, aspect="auto")
        axis.set_xticks(range(len(tokens)), tokens, fontsize=13)
        axis.set_yticks(range(len(tokens) - start), tokens[start:], fontsize=13)
        (answer,) = run.predict([TEXT])
        right = "✓" if answer == target else "✗"
        axis.set_title(f"step {step:,}:  sort {TEXT}  →  {answer or '(nothing)'}  {right}", fontsize=15, loc="left")
        axis.set(xlabel="key: token that is read", ylabel="query: last token written")
        buffer = io.BytesIO()
        figure.savefig(buffer, dpi=100)
        plt.close(figure)
    return Image.open(buffer).convert("RGB")


def page_frames(folder: Path) -> list[Image.Image]:
    """Screenshots of the explore page on the same text."""
    from playwright.sync_api import sync_playwright

    frames = []
    with ExploreServer(open_runs([folder])) as server, sync_playwright() as playwright:
        Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1320, "height": 870}, color_scheme="light", locale="en-US")
        for view in VIEWS:
            tab.goto(f"{server.address}#{urlencode({'text': TEXT, 'view': view, 'layer': 1})}")
            tab.wait_for_selector("#view:not([aria-busy]) > *", state="attached")
            tab.evaluate("document.getElementById('language').hidden = true")  # this machine may lack a Korean font
            tab.wait_for_timeout(300)
            frames.append(
                Image.open(io.BytesIO(tab.screenshot())).convert("RGB").resize(SIZE, Image.Resampling.LANCZOS)
            )
        browser.close()
        server.shutdown()
    return frames


def main() -> None:
    torch.set_grad_enabled(False)
    folder = Path(sys.argv[1])
    training, page = training_frames(folder), page_frames(folder)
    durations = [500] * (len(training) - 1) + [2500] + [2500] * len(page)  # milliseconds
    frames = [frame.quantize(64, dither=Image.Dither.NONE) for frame in (*training, *page)]
    path = FOLDER / "readme.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True)
    print(path, f"{path.stat().st_size / 1e6:.2f} MB, {len(frames)} frames")


if __name__ == "__main__":
    main()

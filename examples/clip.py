"""Two towers learn which caption belongs to which picture (CLIP), from drawings of coloured shapes.

python examples/clip.py --out runs/clip
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console

import anyformer as af

SIDE = 16
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "cross", "ring")
CAPTIONS = [f"a {size} {colour} {shape}" for size in ("small", "large") for colour in COLOURS for shape in SHAPES]

RECIPE = """
tokenizer = { kind = "words", size = 40 }

[task]
kind = "embed"
temperature = "learned"

[data]
train = { kind = "table", path = "train.tsv", format = "tsv", header = false, text = "0", pair = "1" }
valid = { kind = "table", path = "valid.tsv", format = "tsv", header = false, text = "0", pair = "1" }
test = { kind = "table", path = "test.tsv", format = "tsv", header = false, text = "0", pair = "1" }

[model]
width = 32
head = { kind = "embedder", pool = "last", projection = 24, normalize = true, learned_scale = true }

[model.target]

[model.decoder]
depth = 1
position = { kind = "learned", length = 12 }
final_norm = "layer"
blocks = { mixer = { kind = "attention", heads = 2 } }

[model.image_tower]
width = 48
source = { image_height = 16, patch = 4, norm = "layer" }

[model.image_tower.encoder]
depth = 2
position = { kind = "learned", length = 17 }
final_norm = "layer"
blocks = { mixer = { kind = "attention", heads = 2 } }

[batches]
kind = "padded"
tokens = 512

[train]
steps = 300
optimizer = { kind = "adamw", lr = 3e-3 }
schedule = { kind = "cosine", warmup = 30, floor = 0.0 }
best = "mrr"
evaluate_every = 100
"""


def draw(caption: str, rng: np.random.Generator) -> np.ndarray:
    """Draw a caption on a grey ground, at a random place: uint8 [height, width, 3]."""
    _, size, colour, shape = caption.split()
    radius = 3 if size == "small" else 6
    row, column = rng.uniform(radius, SIDE - 1 - radius, 2)
    down, across = np.abs(np.arange(SIDE)[:, None] - row), np.abs(np.arange(SIDE)[None] - column)
    distance = np.hypot(down, across)
    inside = {
        "circle": distance <= radius,
        "square": np.maximum(down, across) <= radius,
        "cross": (np.minimum(down, across) <= radius / 4) & (np.maximum(down, across) <= radius),
        "ring": np.abs(distance - 0.8 * radius) <= radius / 5,
    }[shape]
    picture = np.full((SIDE, SIDE, 3), 128.0)
    picture[inside] = COLOURS[colour]
    return np.clip(picture + rng.normal(0, 6, picture.shape), 0, 255).astype(np.uint8)


def write_data(folder: Path, copies: int = 40) -> None:
    """Write pictures of all captions and tables of pairs: `copies` of each for training, one for each other split."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for split, times in (("train", copies), ("valid", 1), ("test", 1)):
        captions = CAPTIONS * times
        file = folder / f"{split}.npz"
        np.savez(file, images=np.stack([draw(caption, rng) for caption in captions]))
        rows = (f"<image:{file}#images/{i}>\t{caption}\n" for i, caption in enumerate(captions))
        (folder / f"{split}.tsv").write_text("".join(rows), encoding="utf-8")
    (folder / "clip.toml").write_text(RECIPE, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Two towers learn which caption belongs to which picture.")
    parser.add_argument("--out", type=Path, default=Path("runs/clip"), help="folder of the run")
    parser.add_argument("--data", type=Path, default=Path("runs/clip-data"), help="folder of the drawings")
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="changes of the recipe")
    options = parser.parse_args()
    write_data(options.data)
    run = af.train(options.data / "clip.toml", options.out, [f"data.root={options.data}", *options.changes])
    console, found = Console(), af.evaluate(options.out)
    console.print(f"of {found.count} new pictures, {found.values['accuracy']:.0%} have the nearest caption")
    pictures = [f"<image:{options.data / 'test.npz'}#images/{i}>" for i in range(0, len(CAPTIONS), 5)]
    for i, said in zip(range(0, len(CAPTIONS), 5), run.predict(pictures, labels=CAPTIONS), strict=True):
        console.print(f"  {CAPTIONS[i]:<22} →  {said}")


if __name__ == "__main__":
    main()

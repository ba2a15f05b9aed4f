"""Figures of the tutorials, drawn from the results beside them."""

import json
import statistics
from typing import Any

from figures.style import BLUE, FOLDER, RED, figure

RESULTS = FOLDER.parent / "tutorials" / "results"
CHANGES = {
    "nanogpt": "nanoGPT's parts",
    "rotary": "rotary\npositions",
    "rms": "RMS norm",
    "swiglu": "SwiGLU",
    "qknorm": "q/k norm",
    "grouped": "grouped\nheads",
}


@figure("tutorials/modern-decoder")
def modern_decoder(plt: Any) -> Any:
    """Validation loss after each change: every seed, mean and standard deviation."""
    rows = json.loads((RESULTS / "modern-decoder.json").read_text(encoding="utf-8"))["rows"]
    drawing, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
    for i, recipe in enumerate(CHANGES):
        losses = [row["loss"] for row in rows if row["recipe"] == recipe]
        mean, spread = statistics.mean(losses), statistics.stdev(losses)
        axis.plot([i] * len(losses), losses, "o", color=BLUE, alpha=0.6, label="one seed" if i == 0 else None)
        axis.errorbar(i + 0.18, mean, spread, fmt="s", color=RED, capsize=4,
                      label="mean ± standard deviation" if i == 0 else None)  # fmt: skip
        axis.annotate(f"{mean:.3f}", (i + 0.27, mean), va="center", color=RED)
    axis.set_xticks(range(len(CHANGES)), [f"+ {name}" if i else name for i, name in enumerate(CHANGES.values())])
    axis.set(ylabel="validation loss (nats per character)", xlim=(-0.4, len(CHANGES) - 0.2))
    axis.grid(axis="x", visible=False)
    axis.legend(loc="upper right")
    return drawing

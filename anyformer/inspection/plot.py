"""Figures, by matplotlib (the `plot` extra)."""

from pathlib import Path
from typing import Any

from torch import Tensor


def pyplot() -> Any:
    """Matplotlib without a screen, or an error that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("figures need matplotlib: pip install 'anyformer[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_map(weights: Tensor, rows: list[str], columns: list[str], path: str | Path, title: str = "") -> Path:
    """Draws one head's [t, s] or several heads' [h, t, s] maps; rows are queries, columns keys."""
    plt = pyplot()
    heads = weights[None] if weights.dim() == 2 else weights
    size = max(3.0, 0.28 * len(columns))
    shape = (size * len(heads) + 0.8, size + 0.6)
    figure, axes = plt.subplots(1, len(heads), figsize=shape, squeeze=False, layout="constrained")
    for number, (axis, head) in enumerate(zip(axes[0], heads, strict=True)):
        image = axis.imshow(head.detach().cpu().float().numpy(), vmin=0, vmax=1, cmap="viridis")
        axis.set_xticks(range(len(columns)), columns, fontsize=8)
        axis.set_yticks(range(len(rows)), rows, fontsize=8)
        axis.set_xlabel("key")
        axis.set_title(f"head {number}" if len(heads) > 1 else "", fontsize=9)
    axes[0][0].set_ylabel("query")
    figure.suptitle(title)
    figure.colorbar(image, ax=axes.ravel().tolist(), label="weight")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path

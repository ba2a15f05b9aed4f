"""`python -m figures [NAME…]`: draw figures of the documentation."""

import importlib
import sys

from figures.style import FIGURES, save

MODULES = (
    "blocks",
    "networks",
    "costs",
    "recurrences",
    "added_parts",
    "attention",
    "positions",
    "models",
    "streams",
    "training",
    "optimisers",
    "processes",
    "decoding",
    "tutorials",
)


def load() -> dict[str, object]:
    """Import every module of drawings and return the register."""
    for module in MODULES:
        importlib.import_module(f"figures.{module}")
    return dict(FIGURES)


def main() -> None:
    known = load()
    names = sys.argv[1:] or sorted(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"no such figure: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    for name in names:
        print(save(name))


if __name__ == "__main__":
    main()

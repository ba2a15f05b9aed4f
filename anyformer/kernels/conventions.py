"""Values with one meaning in every tensor of the package, the category of notes, and the user's cache folder.

Imports no torch.
"""

import os
from pathlib import Path

IGNORE = -100  # label: no loss at this token
PADDING = -1  # segment: padding, or an empty slot of a cache
PLAIN, SEEN, SEER = 0, 1, 2  # marks: see `docs/masks.md`; a SEER is SEEN as well; -1, -2, ... number groups


class Note(UserWarning):
    """Warning about something that is normal: commands print it as a note."""


def user_cache(name: str) -> Path:
    """Return a folder for files that can be made again: `anyformer/NAME` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "anyformer", name)


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n, so that few different sizes are compiled."""
    return 1 << (n - 1).bit_length()

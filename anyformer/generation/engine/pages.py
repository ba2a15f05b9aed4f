"""Pages of a pool on the host: their users, and the beginnings of texts that they hold."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b


class PagePool:
    """Pages 1, 2, ... with reference counts. A full page may be kept by the hash of all tokens up to its end.

    A page that no row uses, but whose hash is known, is free and can be found again until it is taken for other tokens:
    the least recently used first.
    """

    def __init__(self, count: int, size: int):
        self.size, self.total = size, max(0, count - 1)
        self._free = list(range(count - 1, 0, -1))
        self._counts = [0] * count
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known and not in use, the least recently used first

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.available

    def take(self, count: int) -> list[int] | None:
        """Return pages for new tokens; None if fewer are available."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
        self._counts[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Count one more user of pages."""
        for page in pages:
            self._idle.pop(page, None)
            self._counts[page] += 1

    def is_shared(self, page: int) -> bool:
        return self._counts[page] > 1

    def release(self, pages: Iterable[int], clean: bool = True) -> list[int]:
        """Count one user less. Return the pages without users that are not `clean`: they may hold NaN."""
        unclean = []
        for page in pages:
            self._counts[page] -= 1
            if self._counts[page]:
                continue
            if not clean:
                self._forget(page)
                unclean.append(page)
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)
        return unclean

    def _forget(self, page: int) -> None:
        if (key := self._key_of.pop(page, None)) is not None:
            del self._page_of[key]

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the pages of the longest known beginning of a chain of hashes."""
        found = []
        for key in keys:
            if (page := self._page_of.get(key)) is None:
                break
            found.append(page)
        return found

    def remember(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Keep full pages by their hashes, unless other pages have them already."""
        for page, key in zip(pages, keys, strict=True):
            if key not in self._page_of and page not in self._key_of:
                self._page_of[key], self._key_of[page] = page, key


def chain(ids: Sequence[int], size: int, salt: str) -> Iterator[bytes]:
    """Yield the hash of each full page of ids: of its tokens, all before them, and the weights that read them."""
    key = salt.encode()
    for end in range(size, len(ids) + 1, size):
        key = blake2b(array("q", ids[end - size : end]).tobytes(), key=blake2b(key).digest()).digest()
        yield key


def count_pages_for(tokens: int, size: int) -> int:
    return -(-tokens // size)

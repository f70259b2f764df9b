"""Page pool and prefix cache: which page of the KV cache belongs to whom.

Pages are reference counted, since equal prompt prefixes share them. A page that nobody holds but whose
content is known keeps it until the space is needed: such pages are evicted least recently used first. Page 0
is the null page and is never handed out.

A cached page is found by the SHA-256 of the hash of the page before it and its own tokens, so a hit means
equal tokens from the start of the sequence; a hash that can be guessed would let one user read another's
prefix (vllm#12621).
"""

from __future__ import annotations

import array
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kernels.batch import NULL_PAGE


def root_hash(salt: str = "", adapter: str = "", rotation: int = 0) -> bytes:
    """Where a chain starts: what is cached depends on the adapter and on how keys are rotated. Fields are
    length-prefixed, so no salt can pass for an adapter."""
    digest = hashlib.sha256(b"pagefleet prefix 1")
    for field in (salt, adapter):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    digest.update(rotation.to_bytes(8, "little"))
    return digest.digest()


def page_hashes(parent: bytes, tokens: Sequence[int], page_size: int) -> list[bytes]:
    """Hashes of the full pages that begin behind `parent`, each of its tokens and everything before them."""
    data = array.array("q", tokens)
    width = data.itemsize * page_size
    view, hashes = memoryview(data).cast("B"), []
    for start in range(0, len(view) - width + 1, width):
        parent = hashlib.sha256(parent + view[start : start + width]).digest()
        hashes.append(parent)
    return hashes


class PagePool:
    """Pages 1 .. num_pages - 1, handed out one by one and returned at once."""

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages (one is the null page), not {num_pages}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self._references = [0] * num_pages
        self._empty = list(
            range(num_pages - 1, NULL_PAGE, -1)
        )  # a stack: recently used pages are warm in cache
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached, held by nobody; oldest first
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def capacity(self) -> int:
        """Pages that sequences can hold."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._empty) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Pages that sequences hold, shared ones counted once."""
        return self.capacity - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with unknown content, or None (and nothing changed) when there are not so many."""
        if count > self.num_free:
            return None
        pages = []
        for _ in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._evictable.popitem(last=False)
                del self._page_of[self._hash_of.pop(page)]
            self._references[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give up one reference to each page. Later pages of a sequence are evicted before earlier ones."""
        for page in reversed(list(pages)):
            count = self._references[page] - 1
            if count < 0:
                raise RuntimeError(f"page {page} was released more often than it was taken")
            self._references[page] = count
            if count == 0:
                if page in self._hash_of:
                    self._evictable[page] = None
                else:
                    self._empty.append(page)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The cached pages of the longest known prefix of `hashes`. They aren't held yet: see `hold`."""
        pages = []
        for key in hashes:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def idle(self, pages: Iterable[int]) -> int:
        """How many of these cached pages nobody holds, so that holding them makes `num_free` smaller."""
        return sum(self._references[page] == 0 for page in pages)

    def held_once(self, pages: Iterable[int]) -> int:
        """How many of these pages `release` would free."""
        return sum(self._references[page] == 1 for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Take one more reference to each of these cached pages."""
        for page in pages:
            if self._references[page] == 0:
                del self._evictable[page]
            self._references[page] += 1

    def publish(self, page: int, key: bytes) -> None:
        """Make a full, held page findable. When equal content is cached already, that page stays the one
        found."""
        if self.prefix_cache and key not in self._page_of and page not in self._hash_of:
            self._page_of[key] = page
            self._hash_of[page] = key

    def reset_cache(self) -> None:
        """Forget all cached content. Pages that sequences hold stay theirs."""
        self._empty.extend(self._evictable)
        self._evictable.clear()
        self._page_of.clear()
        self._hash_of.clear()

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """RuntimeError unless the books balance for sequences that hold these lists of pages."""
        counts = [0] * self.num_pages
        for pages in held:
            for page in pages:
                counts[page] += 1
        if counts != self._references:
            wrong = [p for p in range(self.num_pages) if counts[p] != self._references[p]]
            raise RuntimeError(f"pages {wrong[:8]} have references that no sequence accounts for")
        free = [*self._empty, *self._evictable]
        if len(set(free)) != len(free) or any(counts[page] for page in free) or NULL_PAGE in free:
            raise RuntimeError("a page is free twice, or free and held")
        if len(free) + sum(count > 0 for count in counts) != self.capacity:
            raise RuntimeError(f"{len(free)} free pages and those held are not all {self.capacity}")
        if {page: key for key, page in self._page_of.items()} != self._hash_of:
            raise RuntimeError("the prefix cache's two maps disagree")

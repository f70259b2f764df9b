"""Prefixes of requests: which of their pages are cached, which are being computed for others, and what of
their own is worth publishing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from worker.engine.blocks import PagePool, page_hashes, root_hash
from worker.request import Request


class Prefixes:
    """Of requests whose pages are `pool`'s. Without a prefix cache there is nothing to find or to publish.

    `worth_waiting`: tokens of a prefix for which a request waits until they are cached.
    """

    def __init__(self, pool: PagePool, worth_waiting: int) -> None:
        self.pool = pool
        self._worth_waiting = worth_waiting

    def cached(self, request: Request) -> list[int]:
        """Cached pages of the request's prefix. At most length - 1 tokens: one must run to give the next."""
        if not self.pool.prefix_cache:
            return []
        return self.pool.find(self._chain(request, self._readable(request)))

    def computing(self, running: Iterable[Request]) -> set[bytes]:
        """Hashes of prompt pages that running requests will have published within a few steps."""
        return set().union(*(self.unpublished(request) for request in running))

    def unpublished(self, request: Request) -> set[bytes]:
        full = (request.prompt_length - 1) // self.pool.page_size
        if not self.pool.prefix_cache or request.published >= full:
            return set()
        return set(self._hashes(request, full)[request.published :])

    def worth_waiting_for(self, request: Request, cached: int, computing: set[bytes]) -> bool:
        """Whether so many of the request's next pages are being computed for others already that it had
        better find them cached: of many equal prefixes that arrive together, one is computed."""
        if not computing:
            return False
        enough = cached + -(-self._worth_waiting // self.pool.page_size)
        further = itertools.islice(self._chain(request, self._readable(request)), cached, enough)
        return sum(1 for _ in itertools.takewhile(computing.__contains__, further)) == enough - cached

    def publish(self, request: Request) -> None:
        """Makes pages that are full of known tokens by now findable by others."""
        if not self.pool.prefix_cache:
            return
        full = min(request.computed, len(request.tokens)) // self.pool.page_size
        if full > request.published:
            hashes = self._hashes(request, full)
            for i in range(request.published, full):
                self.pool.publish(request.pages[i], hashes[i])
            request.published = full

    def _readable(self, request: Request) -> int:
        """How many leading pages may come from the cache: tokens whose states are needed must run."""
        if request.pooling == "mean":
            return 0
        tokens = request.scored if request.scores else request.length
        return (tokens - 1) // self.pool.page_size

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        """Hashes of the first `count` pages, which are full of known tokens."""
        size, hashes = self.pool.page_size, request.hashes
        if len(hashes) < count:
            hashes += request.prompt_hashes[len(hashes) : count]
            parent = hashes[-1] if hashes else root_hash(request.cache_salt, rotation=request.first_row)
            hashes += page_hashes(parent, request.tokens[len(hashes) * size : count * size], size)
            full = min(len(hashes), request.prompt_length // size)
            request.prompt_hashes += hashes[len(request.prompt_hashes) : full]
        return hashes[:count]

    def _chain(self, request: Request, count: int) -> Iterator[bytes]:
        """The same one by one, not computed much further than they are asked for: most prompts that wait
        differ from all cached ones within a page, and a thousand long ones would take a second."""
        for place in range(count):
            if place == len(request.hashes):
                self._hashes(request, min(count, 2 * place + 8))
            yield request.hashes[place]

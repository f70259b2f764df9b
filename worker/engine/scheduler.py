"""Scheduler: which tokens run in the next step.

Continuous batching with chunked prefill: one step mixes sequences that decode (one token each) with pieces of
prompts, within a token budget (Sarathi-Serve, arXiv 2403.02310; paging and preemption by recompute after
vLLM, arXiv 2309.06180).

It is pure bookkeeping: no clock but what is passed in, no device. Steps may overlap: `schedule` can be called
again before the last step's tokens are known; see Request.pending.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from worker.engine.blocks import PagePool
from worker.engine.classes import preemptible
from worker.engine.pace import Pace, Share
from worker.engine.prefixes import Prefixes
from worker.ipc.messages import FinishReason
from worker.request import Request, Row, Step

MOST_HELD_BACK = 64  # requests looked at behind one that waits for a prefix


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True
    # Tokens of a prefix for which a request waits until they are cached: as many as take the device longer
    # than a step takes anyway.
    worth_waiting: int = 256


class Scheduler:
    """Waiting and running requests, and the pages they hold. `pace` bounds what prompts add to a step; by
    default nothing does but the token budget."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, pace: Pace | None = None) -> None:
        self.config = config
        self.pool = pool
        self.prefixes = Prefixes(pool, config.worth_waiting)
        self.pace = pace or Pace()
        self.waiting: list[Request] = []  # sorted by turn
        self.running: list[Request] = []  # sorted by order
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._now = 0.0
        self._soonest = math.inf  # no deadline of those that wait is before it
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._leaving: list[Request] = []  # finished, but a step in flight still writes their pages

    # ---- entering and leaving

    def add(self, request: Request) -> None:
        """Queue a request. Its token_limit must fit the pool, or it would wait for ever.

        Prompts take turns by when each would be done if it had been alone: a short one goes before a long
        one that came earlier, and no long one waits for much longer than it takes anyway.
        """
        alone = 0.0
        if self.pace.token or self.pace.read:  # one of them may be too small to tell
            start = len(self.prefixes.cached(request)) * self.pool.page_size
            alone = self.pace.seconds(start, request.length - start)
        request.turn = (request.order[0] + alone, request.order[1])
        bisect.insort(self.waiting, request, key=_turn)
        if request.deadline:
            self._soonest = min(self._soonest, request.deadline)

    def late(self, now: float) -> list[Request]:
        """Waiting requests whose deadline has passed before their first step. They are to be finished."""
        if now < self._soonest:
            return []
        timed = [request for request in self.waiting if request.deadline and not request.first_scheduled]
        self._soonest = min((r.deadline for r in timed if r.deadline > now), default=math.inf)
        return [request for request in timed if request.deadline <= now]

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Take a request out; its pages go back now, or when the last step that writes them has been
        collected."""
        request.finish_reason = reason
        if request.row >= 0:
            _remove(self.running, request, _order)
        else:
            _remove(self.waiting, request, _turn)
        if request.in_flight:
            self._leaving.append(request)
        else:
            self._release(request)

    def collected(self, request: Request) -> None:
        """A step that held the request has been read back."""
        request.in_flight -= 1
        if request.finish_reason is not None and request.in_flight == 0:
            self._leaving.remove(request)
            self._release(request)

    def drop_running(self) -> None:
        """After an exception half way through a step: forget all requests but those that wait and are in no
        step, and what is cached. Every page and every row is free."""
        self.waiting = [
            request
            for request in self.waiting
            if not (request.in_flight or request.pages or request.row >= 0)
        ]
        self.running, self._leaving = [], []
        self._free_rows = list(range(self.config.max_num_seqs - 1, -1, -1))
        self.pool = PagePool(self.pool.num_pages, self.pool.page_size, prefix_cache=self.pool.prefix_cache)
        self.prefixes = Prefixes(self.pool, self.config.worth_waiting)

    # ---- one step

    def schedule(self, now: float) -> Step:
        """The next step; empty when there is nothing to run. Marks its tokens as computed."""
        self._now = now
        budget = self.config.max_num_batched_tokens
        rows: dict[Request, Row] = {}
        preempted_before = self.preemptions

        prefilling = []
        for request in list(self.running):
            if request.row < 0 or _exhausted(request):
                continue  # preempted just now for the sake of an earlier one, or its last token is on its way
            if not request.decoding:
                prefilling.append(request)
            elif budget > 0:
                budget -= self._extend(request, 1, rows)
        if prefilling or self.waiting:
            self._prefill(prefilling, rows, preempted_before)
        ordered = sorted(rows.values(), key=lambda row: not row.decode)
        step = Step(ordered)
        for row in ordered:
            request = row.request
            request.computed = row.start + row.count
            request.in_flight += 1
            if row.sample:
                request.pending += 1
            elif request.pooling is not None:
                step.pools = True
            if request.scores:
                step.scores = True
        return step

    def update(self, request: Request, token: int) -> FinishReason | None:
        """Add the token that a collected step sampled; publishes pages that are full by now. Not for finished
        requests."""
        request.pending -= 1
        reason = request.append(token)
        self._publish(request)
        if reason is not None:
            self.finish(request, reason)
        return reason

    def prefilled(self, request: Request) -> None:
        """A collected step computed a piece of the prompt: publish its full pages."""
        self._publish(request)

    # ---- numbers

    def slots(self) -> tuple[int, int]:
        """Token slots of held pages, and how many of them hold a token."""
        size = self.pool.page_size
        taken = self.pool.num_used * size
        holders = [*self.running, *self._leaving]
        return taken, taken - sum(len(r.pages) * size - r.computed for r in holders)

    def check(self) -> None:
        """RuntimeError unless pages and rows balance."""
        holders = [*self.running, *self._leaving]
        self.pool.check([request.pages for request in holders])
        rows = [request.row for request in holders] + self._free_rows
        if sorted(rows) != list(range(self.config.max_num_seqs)):
            raise RuntimeError("a row of the batch is lost or held twice")
        if any(request.pages or request.row >= 0 for request in self.waiting):
            raise RuntimeError("a waiting request holds pages or a row")

    # ---- inside

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _extend(self, request: Request, count: int, rows: dict[Request, Row]) -> int:
        """Give a running request `count` more tokens in this step, preempting others for pages. Tokens
        scheduled."""
        need = self._pages_for(request.computed + count) - len(request.pages)
        while need > 0:
            pages = self.pool.allocate(need)
            if pages is not None:
                request.pages += pages
                break
            victim = self._victim(request)
            self._preempt(victim, request)
            rows.pop(victim, None)
            if victim is request:
                return 0
        self._schedule_row(request, count, rows)
        return count

    def _schedule_row(self, request: Request, count: int, rows: dict[Request, Row]) -> None:
        start = request.computed
        generates = request.pooling is None
        sample = generates and start + count == request.length
        rows[request] = Row(request, start, count, sample, decode=generates and count == 1 and start > 0)

    def _prefill(self, prefilling: list[Request], rows: dict[Request, Row], preempted_before: int) -> None:
        """Share what is left of the step among prompts that run and those that wait, in turn. Nobody new
        starts in a step that had to preempt."""
        budget = self.config.max_num_batched_tokens - sum(row.count for row in rows.values())
        # Other answers to a prompt find its pages cached: all together they want what it wants.
        candidates = itertools.chain(prefilling, self.waiting[: len(self._free_rows)])
        prompts = max(1, sum(not request.sibling for request in candidates))
        share = self.pace.share(budget, prompts, decoding=bool(rows))
        prefilling.sort(key=_turn)
        if self.waiting and self.preemptions == preempted_before:
            self._admit(prefilling, share, rows)
        while prefilling:
            self._continue(prefilling.pop(0), share, rows)

    def _continue(self, request: Request, share: Share, rows: dict[Request, Row]) -> None:
        """The next piece of a running prompt."""
        if request.row < 0:
            return
        count = share.take(request.computed, request.length - request.computed)
        if count:
            share.give_back(count - self._extend(request, count, rows))

    def _admit(self, prefilling: list[Request], share: Share, rows: dict[Request, Row]) -> None:
        """Start waiting requests, in turn, while their whole prompts fit next to what running prompts still
        need, or can be made to fit at the cost of less urgent classes. Takes those out of `prefilling` whose
        turn came earlier, and continues them."""
        promised = self._promised()
        # Room for running sequences to grow, or admission would preempt at once. Two per cent keep most of
        # the pool usable.
        watermark = min(len(self.running), self.pool.capacity // 50) if self.running else 0
        computing = self.prefixes.computing(self.running)
        held_back = 0
        while held_back < min(len(self.waiting), MOST_HELD_BACK) and share.tokens > 0:
            request = self.waiting[held_back]
            if request.in_flight:
                break  # preempted in this step, and only the device knows its last token, by the row it had
            if prefilling and prefilling[0].turn < request.turn:
                before = self.preemptions
                self._continue(prefilling.pop(0), share, rows)
                if self.preemptions > before:
                    break
                promised = self._promised()
                continue
            if held_back and _follows(request, self.waiting[held_back - 1]):
                held_back += 1  # for the same pages
                continue
            cached = self.prefixes.cached(request)
            if self.prefixes.worth_waiting_for(request, len(cached), computing):
                held_back += 1
                continue
            start = len(cached) * self.pool.page_size
            remaining = request.length - start
            if remaining > share.tokens and not self.config.chunked_prefill and rows:
                break
            need = self._pages_for(request.length) - len(cached) + self.pool.idle(cached)
            short = need + promised + watermark - self.pool.num_free
            if short > 0 or not self._free_rows:
                returned = self._reclaim(request, short, rows)
                if returned is None:
                    break
                share.give_back(returned)
                prefilling[:] = [other for other in prefilling if other.row >= 0]
                promised = self._promised()
                continue
            count = share.take(start, remaining) if self.config.chunked_prefill else remaining
            if not count:
                break
            if not self.config.chunked_prefill:
                share.give_back(-count)
            del self.waiting[held_back]
            self._start(request, cached, count)
            self._schedule_row(request, count, rows)
            computing |= self.prefixes.unpublished(request)
            promised += self._pages_for(request.length) - len(request.pages)

    def _start(self, request: Request, cached: list[int], count: int) -> None:
        self.pool.hold(cached)
        request.pages = list(cached)
        request.published = len(cached)
        request.computed = len(cached) * self.pool.page_size
        fresh = self.pool.allocate(self._pages_for(request.computed + count) - len(cached))
        assert fresh is not None
        request.pages += fresh
        request.row = self._free_rows.pop()
        if not request.first_scheduled:
            request.first_scheduled = self._now
            request.cached_tokens = request.computed
            self.prefix_queries += request.length
            self.prefix_hits += request.computed
        bisect.insort(self.running, request, key=_order)

    def _publish(self, request: Request) -> None:
        if request.row >= 0:  # else it was preempted meanwhile
            self.prefixes.publish(request)

    def _victim(self, grower: Request) -> Request:
        """Whose pages a running request gets: those of less urgent classes first, then the last of its own,
        which may be itself; never those of a more urgent one."""
        below = self._below(grower)
        own = (other for other in reversed(self.running) if other.service_class == grower.service_class)
        return below[0] if below else next(own)

    def _below(self, request: Request) -> list[Request]:
        return preemptible(self.running, request, self.pool.capacity, self.config.max_num_seqs)

    def _reclaim(self, request: Request, pages: int, rows: dict[Request, Row]) -> int | None:
        """Preempts running requests of less urgent classes until `pages` more are free, and a row. The tokens
        that this step gets back; None when there aren't enough such requests, and then nothing happens."""
        if all(other.service_class <= request.service_class for other in self.running):
            return None
        victims, gained = [], 0
        for victim in self._below(request):
            victims.append(victim)
            gained += self.pool.held_once(victim.pages)
            if gained >= pages:
                break
        if not victims or gained < pages:
            return None
        for victim in victims:
            self._preempt(victim, request)
        return sum(row.count for row in (rows.pop(victim, None) for victim in victims) if row is not None)

    def _promised(self) -> int:
        """Pages that running prompts still need."""
        return sum(self._pages_for(r.length) - len(r.pages) for r in self.running if not r.decoding)

    def _preempt(self, request: Request, cause: Request) -> None:
        """Back to waiting; what it computed is lost, except for pages that the prefix cache keeps until they
        are needed."""
        _remove(self.running, request, _order)
        if request.service_class > cause.service_class:
            request.reclaim(self._now)
        self.preemptions += 1
        self._release(request)
        request.computed = 0
        request.published = 0
        self.add(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.pages)
        request.pages = []
        if request.row >= 0:
            self._free_rows.append(request.row)
            request.row = -1


def _order(request: Request) -> tuple[float, int]:
    return request.order


def _follows(request: Request, other: Request) -> bool:
    """Whether `request` is another answer to the prompt of `other`, the next to come after it."""
    return request.sibling and request.order[1] == other.order[1] + 1


def _turn(request: Request) -> tuple[float, int]:
    return request.turn


def _remove(requests: list[Request], request: Request, key: Callable[[Request], tuple[float, int]]) -> None:
    """Delete from a list sorted by `key`, by bisection."""
    index = bisect.bisect_left(requests, key(request), key=key)
    assert requests[index] is request
    del requests[index]


def _exhausted(request: Request) -> bool:
    """Its last allowed token is being sampled already, or its prompt pooled: another step would be thrown
    away."""
    if request.pooling is not None:
        return request.computed == request.length
    return request.pending > 0 and request.length >= request.token_limit

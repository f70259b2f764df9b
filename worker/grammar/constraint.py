"""Constraint: where one answer stands in its form. MaskWriter: the tokens that may come next, for many."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from worker.grammar.compiling import readable

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

SLOW_STEP = 0.25  # seconds of a processor: a form that takes longer for one token holds everybody up
_TOO_SLOW = "following it takes too long; make it simpler or less ambiguous"


class Original:
    """A compiled form. Each answer follows a copy of its matcher; copies share llguidance's lexer and its
    lock, so masks of one original's copies are worked out one after the other, those of several side by side.

    Args:
        matcher: before the first token of an answer.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.tokens = 0  # that answers have had which followed it
        self.followers: weakref.WeakSet[Constraint] = weakref.WeakSet()

    def __len__(self) -> int:
        """Answers that follow it now."""
        return len(self.followers)


class Constraint:
    """Follows the tokens of one answer. Its matcher is behind by the last of them until a mask is wanted.

    `error` says why the answer can't go on, once it can't. `pending` is the token that the matcher has still
    to follow, if any.

    Args:
        original: whose matcher it copies.
        ends: tokens that end an answer, which they may where its form is complete.
        keep_on: an answer goes on while its form allows more, for this many tokens (min_tokens, ignore_eos).
    """

    __slots__ = ("__weakref__", "_keep_on", "_tokens", "ends", "error", "matcher", "original", "pending")

    def __init__(self, original: Original, ends: frozenset[int], keep_on: int = 0) -> None:
        self.ends = ends
        self.error = ""
        self.pending: int | None = None
        self._keep_on = keep_on
        self._tokens: list[int] = []
        self._join(original, original.matcher.deep_copy())

    def move(self, original: Original, most: int) -> None:
        """Follow this one instead, compiled from the same form, unless that takes more than `most` tokens."""
        if len(self._tokens) <= most and not self.error:
            matcher = original.matcher.deep_copy()
            if matcher.consume_tokens(self._tokens):
                self.original.followers.discard(self)
                self._join(original, matcher)
                self.pending = None

    def _join(self, original: Original, matcher: LLMatcher) -> None:
        self.original, self.matcher = original, matcher
        original.followers.add(self)

    def take(self, token: int) -> bool:
        """The answer's next token; True when it ends the answer."""
        if token in self.ends:
            return True
        self.follow()
        self._tokens.append(token)
        self.pending = token
        self.original.tokens += 1
        return False

    def follow(self) -> None:
        """Bring the matcher up to date."""
        if self.pending is not None:
            self.matcher.consume_token(self.pending)
            self.pending = None

    def fail(self, why: str) -> None:
        """The answer must end with an error."""
        self.error = self.error or why

    @property
    def keeps_on(self) -> bool:
        """Ends must wait while anything else is possible."""
        return len(self._tokens) < self._keep_on


class MaskWriter:
    """Writes masks of `words` 32-bit words: bit i of word w stands for token 32 w + i.

    Args:
        vocab_size: of the matchers' tokenizer.
        ends: tokens that end an answer.
        threads: that work out masks side by side.
    """

    def __init__(self, vocab_size: int, ends: frozenset[int], threads: int) -> None:
        from llguidance import LLExecutor

        self.words = -(-vocab_size // 32)
        self._executor = LLExecutor(threads) if threads > 1 else None
        self._wary = False  # a step took long: see whose fault it is
        self._end_words = np.array(sorted({token // 32 for token in ends}), np.int64)
        self._ends = np.zeros(len(self._end_words), np.uint32)  # bits of the ends in these words
        for token in ends:
            self._ends[self._end_words == token // 32] |= np.uint32(1 << token % 32)

    def write(self, constraints: Sequence[Constraint], masks: np.ndarray) -> None:
        """Write to `masks` [G, words], contiguous uint32, the tokens that may come next. A constraint that
        fails, or has, gets a mask that masks nothing: its answer is dropped."""
        started = time.perf_counter()
        if self._executor is not None and len(constraints) > 1 and not self._wary:
            _write_side_by_side(self._executor, constraints, masks)
        else:
            for constraint, mask in zip(constraints, masks):
                _write_one(constraint, mask)
        self._wary = time.perf_counter() - started > SLOW_STEP
        for constraint, mask in zip(constraints, masks):
            if constraint.matcher.is_error():
                constraint.fail(readable(constraint.matcher.get_error()))
            if constraint.error:
                mask.fill(0xFFFFFFFF)
        self._go_on(masks, [i for i, one in enumerate(constraints) if one.keeps_on and not one.error])

    def _go_on(self, masks: np.ndarray, places: list[int]) -> None:
        """Take the ends out of these masks, where something else is left."""
        if not places:
            return
        ending = (masks[np.array(places)[:, None], self._end_words] & self._ends).any(axis=1)
        for mask in (masks[places[i]] for i in np.flatnonzero(ending)):
            words = mask[self._end_words]
            mask[self._end_words] &= ~self._ends
            if not mask.any():
                mask[self._end_words] = words


def _write_side_by_side(executor: LLExecutor, constraints: Sequence[Constraint], masks: np.ndarray) -> None:
    """On the executor's threads, which don't hold the interpreter's lock."""
    # A thread takes neighbours: those who wait for each other anyway.
    order = sorted(range(len(constraints)), key=lambda place: id(constraints[place].original))
    ordered = [constraints[place] for place in order]
    behind = [(one.matcher, one.pending) for one in ordered if one.pending is not None]
    if behind:
        executor.consume_token_par(behind)
    for one in ordered:
        one.pending = None
    matchers = [(constraints[place].matcher, place) for place in order]
    executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(constraints))


def _write_one(constraint: Constraint, mask: np.ndarray) -> None:
    started = time.thread_time()
    constraint.follow()
    constraint.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if time.thread_time() - started > SLOW_STEP:
        constraint.fail(_TOO_SLOW)

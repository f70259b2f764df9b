"""Constraint: where one answer stands in its form. MaskWriter: the tokens that may come next, for many."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from worker.grammar.compiling import readable

if TYPE_CHECKING:
    from llguidance import LLMatcher

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
    """Follows the tokens of one answer.

    `error` says why the answer can't go on, once it can't.

    Args:
        original: whose matcher it copies.
        ends: tokens that end an answer, which they may where its form is complete.
        keep_on: an answer goes on while its form allows more, for this many tokens (min_tokens, ignore_eos).
    """

    __slots__ = ("__weakref__", "_keep_on", "_tokens", "ends", "error", "matcher", "original")

    def __init__(self, original: Original, ends: frozenset[int], keep_on: int = 0) -> None:
        self.ends = ends
        self.error = ""
        self._keep_on = keep_on
        self._tokens: list[int] = []
        self._follow(original, original.matcher.deep_copy())

    def move(self, original: Original, most: int) -> None:
        """Follow this one instead, compiled from the same form, unless that takes more than `most` tokens."""
        if len(self._tokens) <= most and not self.error:
            matcher = original.matcher.deep_copy()
            if matcher.consume_tokens(self._tokens):
                self.original.followers.discard(self)
                self._follow(original, matcher)

    def _follow(self, original: Original, matcher: LLMatcher) -> None:
        self.original, self.matcher = original, matcher
        original.followers.add(self)

    def take(self, token: int) -> bool:
        """The answer's next token; True when it ends the answer."""
        if token in self.ends:
            return True
        self._tokens.append(token)
        self.original.tokens += 1
        started = time.thread_time()
        if not self.matcher.consume_token(token):
            self.fail(readable(self.matcher.get_error()))
        elif time.thread_time() - started > SLOW_STEP:
            self.fail(_TOO_SLOW)
        return False

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
        self._ends = np.zeros(self.words, np.uint32)
        for token in ends:
            self._ends[token // 32] |= np.uint32(1 << token % 32)

    def write(self, constraints: Sequence[Constraint]) -> np.ndarray:
        """Masks [G, words] uint32 of the tokens that may come next. A constraint that fails, or has, gets one
        that masks nothing: its answer is dropped."""
        masks = np.empty((len(constraints), self.words), np.uint32)
        started = time.perf_counter()
        if self._executor is not None and len(constraints) > 1 and not self._wary:
            # A thread takes neighbours: those who wait for each other anyway.
            order = sorted(range(len(constraints)), key=lambda place: id(constraints[place].original))
            matchers = [(constraints[place].matcher, place) for place in order]
            self._executor.unsafe_compute_mask_ptr(
                matchers, masks.ctypes.data, self.words * 4, len(constraints)
            )
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
        return masks

    def _go_on(self, masks: np.ndarray, places: list[int]) -> None:
        """Take the ends out of these masks, where something else is left."""
        if places:
            others = masks[places] & ~self._ends
            masks[places] = np.where(others.any(axis=1, keepdims=True), others, masks[places])


def _write_one(constraint: Constraint, mask: np.ndarray) -> None:
    started = time.thread_time()
    constraint.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    if time.thread_time() - started > SLOW_STEP:
        constraint.fail(_TOO_SLOW)

"""Grammars: what answers must look like, compiled beside the engine's loop."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from worker.grammar.compiling import STACK_BYTES, GrammarError, compile_matcher
from worker.grammar.constraint import Constraint, MaskWriter, Original
from worker.grammar.vocabulary import token_table
from worker.params import StructuredOutputs
from worker.request import Request
from worker.runner.form_masks import FormMask
from worker.text.tokenizer import Tokenizer, TokenizerError
from worker.weights.source import ModelSource

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_REMEMBERED_BYTES = 512 << 20  # that compiled forms take, as estimated
# llguidance doesn't tell what a form takes, and all answers of a form add to what is kept of it: states of
# its lexer, made as text is followed for the first time. Upper estimates, from what glibc's malloc counted:
_BASE_BYTES = 256 << 10
_BYTES_PER_CHARACTER = 80  # of the form as it is written
_BYTES_PER_SECOND = 32 << 20  # of a processor, that compiling took
_BYTES_PER_TOKEN = 13 << 10  # that was followed ...
_MOST_FOLLOWED_BYTES = 24 << 20  # ... until its limit of states is near
_THREADS = 2  # that compile: one large form doesn't hold all others up
# At most, and no more than half the engine's: on two cores that torch uses too, two threads take four times
# as long for a few masks as one does.
_MASK_THREADS = 8
_SHARERS = 4  # answers of a form that follow one original; for more it is compiled again ...
_QUICK = 0.25  # ... if that takes no more seconds of a processor
_REPLAYED = 64  # tokens of an answer that follows another original from now on, at most
_ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A form that was compiled; or, without an original, what is wrong with it."""

    form: StructuredOutputs
    original: Original | None
    error: str
    seconds: float  # of a processor, that it took

    @property
    def nbytes(self) -> int:
        """What is kept of it, at most (nearly always)."""
        form = self.form
        written = (form.json, form.regex, form.grammar, *form.choice)
        characters = sum(len(text) for text in written if isinstance(text, str))
        followed = self.original.tokens if self.original is not None else 0
        states = min(followed * _BYTES_PER_TOKEN, _MOST_FOLLOWED_BYTES)
        compiled = characters * _BYTES_PER_CHARACTER + int(self.seconds * _BYTES_PER_SECOND)
        return _BASE_BYTES + compiled + states


@dataclass(slots=True)
class _Known:
    """A form, compiled as often as its answers need it. `ordered`: so many more are on their way."""

    compiled: list[_Compiled]
    ordered: int = 0

    @property
    def originals(self) -> list[Original]:
        """None of a form with which something is wrong."""
        return [each.original for each in self.compiled if each.original is not None]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.compiled)

    def spread(self) -> None:
        """Have answers that have just begun follow the newest original, as many as it is due."""
        *older, newest = self.originals
        share = sum(map(len, older)) // (len(older) + 1)
        for original in older:
            for constraint in list(original.followers)[share:]:
                if len(newest) < share:
                    constraint.move(newest, _REPLAYED)


class Grammars:
    """Gives requests their constraints. One thread may use it.

    The tokenizer is loaded with the first form, on the thread that compiles it.

    Args:
        source, tokenizer: see Tokenizer.from_source.
        eos_token_ids: the model's ends, beside the tokenizer's.
        threads: of the engine.
    """

    def __init__(
        self, source: ModelSource, tokenizer: str | None, eos_token_ids: frozenset[int], threads: int
    ) -> None:
        self._workshop = _Workshop(source, tokenizer, eos_token_ids)
        weakref.finalize(self, self._workshop.close)
        self._mask_threads = max(1, min(threads // 2, _MASK_THREADS))
        self._ends: frozenset[int] = frozenset()
        self._writer: MaskWriter | None = None
        self._known: OrderedDict[StructuredOutputs, _Known] = OrderedDict()  # the last used last
        self._ordered = 0  # beyond those that requests wait for
        self._waiting: dict[StructuredOutputs, list[Request]] = {}

    @staticmethod
    def needed(request: Request) -> bool:
        """Whether the request's answer must have a form."""
        return request.params.structured_outputs is not None and request.params.max_tokens != 0

    @property
    def compiling(self) -> bool:
        """Whether `ready` has something to take."""
        return bool(self._waiting or self._ordered)

    def begin(self, request: Request) -> bool:
        """Whether the request has its constraint now; else `ready` hands it out later."""
        form = request.params.structured_outputs
        assert form is not None
        known = self._known.get(form)
        if known is not None and known.originals:
            self._constrain(request, form)
            return True
        if form not in self._waiting:
            self._workshop.order(form, known.compiled[0] if known is not None else None)
        self._waiting.setdefault(form, []).append(request)
        return False

    def waits(self, request: Request) -> bool:
        """Whether the request waits for its constraint."""
        form = request.params.structured_outputs
        return form is not None and request in self._waiting.get(form, ())

    def forget(self, request: Request) -> bool:
        """Whether the request was waiting for its constraint; it waits no more."""
        form = request.params.structured_outputs
        if form is None or not self.waits(request):
            return False
        self._waiting[form].remove(request)
        return True

    def ready(self, wait: float = 0.0) -> list[tuple[Request, str]]:
        """Requests that have their constraints since the last call, or can't have one: then with the reason.
        Waits up to `wait` seconds for the first."""
        found: list[tuple[Request, str]] = []
        while self.compiling:
            try:
                compiled = self._workshop.collect(wait)
            except queue.Empty:
                break
            wait = 0.0
            requests = self._waiting.pop(compiled.form, [])
            known = self._known.get(compiled.form)
            if known is not None and known.originals:
                known.compiled.append(compiled)
                if known.ordered:  # else it was ordered before the form was forgotten
                    known.ordered -= 1
                    self._ordered -= 1
                known.spread()
            else:
                self._known[compiled.form] = _Known([compiled])
            for request in requests if compiled.original is not None else ():
                self._constrain(request, compiled.form)
            self._forget_oldest()
            found += [(request, compiled.error) for request in requests]
        return found

    def mask(self, requests: list[Request], begin: Callable[[list[int], int], FormMask]) -> FormMask | None:
        """What may come next for those of the requests, a row each, whose answers must have a form and still
        go on, None without any; the tokens they have must all be known. `begin` gives a mask's memory:
        FormMasks.begin."""
        going_on = [
            (place, request.constraint)
            for place, request in enumerate(requests)
            if request.constraint is not None and request.finish_reason is None
        ]
        if not going_on:
            return None
        assert self._writer is not None
        form = begin([place for place, _ in going_on], self._writer.words)
        self._writer.write([constraint for _, constraint in going_on], form.bits)
        return form

    def prepare(self) -> None:
        """Load the tokenizer on a thread, before the first form comes."""
        threading.Thread(target=self._workshop.prepare, daemon=True).start()

    # ---- inside

    def _forget_oldest(self) -> None:
        """Down to the bytes that are kept. An answer under way has what it needs of its form."""
        size = sum(known.nbytes for known in self._known.values())
        while size > _REMEMBERED_BYTES:
            _, oldest = self._known.popitem(last=False)
            size -= oldest.nbytes
            self._ordered -= oldest.ordered

    def _constrain(self, request: Request, form: StructuredOutputs) -> None:
        self._known.move_to_end(form)
        if self._writer is None:
            table = self._workshop.token_table()
            self._ends = frozenset(table.eos_tokens)
            self._writer = MaskWriter(table.vocab_size, self._ends, self._mask_threads)
        keep_on = _ENDLESS if request.params.ignore_eos else request.params.min_tokens
        known = self._known[form]
        request.constraint = Constraint(min(known.originals, key=len), self._ends, keep_on)
        if known.compiled[0].seconds < _QUICK:
            due = min(self._mask_threads, sum(map(len, known.originals)) // _SHARERS)
            while len(known.compiled) + known.ordered < due:
                known.ordered += 1
                self._ordered += 1
                self._workshop.order(form)


class _Workshop:
    """Threads that compile forms, and what they need. They end when it is closed."""

    def __init__(self, source: ModelSource, tokenizer: str | None, eos_token_ids: frozenset[int]) -> None:
        self._source, self._tokenizer, self._eos_token_ids = source, tokenizer, eos_token_ids
        self._loading = threading.Lock()
        self._table: LLTokenizer | None = None
        self._jobs: queue.SimpleQueue[StructuredOutputs | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[_Compiled] = queue.SimpleQueue()
        self._threads = 0

    def order(self, form: StructuredOutputs, known: _Compiled | None = None) -> None:
        """Have a form compiled, unless it is known what comes of that."""
        if known is not None:
            self._done.put(known)
            return
        self._jobs.put(form)
        if self._threads == _THREADS:
            return
        self._threads += 1
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._work, daemon=True).start()
        finally:
            threading.stack_size(before)

    def collect(self, wait: float) -> _Compiled:
        """The next that is done; queue.Empty after `wait` seconds."""
        return self._done.get(timeout=wait) if wait else self._done.get_nowait()

    def token_table(self) -> LLTokenizer:
        """Of the model's tokenizer, loaded when first asked for. Raises GrammarError, TokenizerError."""
        with self._loading:
            if self._table is None:
                tokenizer = Tokenizer.from_source(self._source, self._tokenizer)
                if tokenizer is None:
                    raise GrammarError("this model has no tokenizer, and structured output needs one")
                self._table = token_table(tokenizer, self._eos_token_ids)
            return self._table

    def prepare(self) -> None:
        """Load the tokenizer; what is wrong with it is said when a form comes."""
        with contextlib.suppress(GrammarError, TokenizerError):
            self.token_table()

    def close(self) -> None:
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (form := self._jobs.get()) is not None:
            original, error = None, ""
            started = time.thread_time()
            try:
                table = self.token_table()
                started = time.thread_time()
                original = Original(compile_matcher(table, form))
            except (GrammarError, TokenizerError) as failure:
                error = str(failure)
            except Exception as failure:
                error = f"it can't be compiled: {type(failure).__name__}"
            self._done.put(_Compiled(form, original, error, time.thread_time() - started))

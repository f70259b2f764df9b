"""A process that tries out forms: `python -m worker.grammar.checker`.

Standard input has a line of settings, then a form (StructuredOutputs as JSON) a line; standard output gets a
JSON string a line: what is wrong, or nothing. Compiling is bounded by llguidance's own limits nearly always;
where it isn't, the kernel ends this process, and the server starts another one.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from worker.grammar.compiling import NOTHING_MATCHES, STACK_BYTES, GrammarError, compile_matcher
from worker.grammar.endless import is_endless
from worker.params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a form may take, and the names of the model's special tokens."""

    special_tokens: list[str] = []
    cpu_seconds: int = 5  # of a processor, for one form
    memory_bytes: int = 1 << 30  # of the process, STACK_BYTES included


class _Bytes:
    """A vocabulary of single bytes, and the model's special tokens by name: where it takes a grammar, every
    vocabulary does."""

    bos_token_id = None

    def __init__(self, special_tokens: Sequence[str]) -> None:
        # llguidance marks a special token by a first byte that no text has.
        named = [b"\xff" + name.encode() for name in special_tokens]
        self.tokens = [*(bytes([value]) for value in range(256)), b"\xff<|end of answer|>", *named]
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_tokenizer(special_tokens: Sequence[str] = ()) -> LLTokenizer:
    """llguidance's view of a vocabulary of single bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Bytes(special_tokens)
    size = len(vocabulary.tokens)
    return LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=size, eos_token=256, slices=[])


def problem(tokenizer: LLTokenizer, form: StructuredOutputs) -> str:
    """What is wrong with the form, or nothing."""
    found = ""

    def work() -> None:
        nonlocal found
        try:
            compile_matcher(tokenizer, form)
            if isinstance(form.json, str) and is_endless(json.loads(form.json)):
                found = NOTHING_MATCHES
        except GrammarError as error:
            found = str(error)
        except Exception as error:
            found = f"it can't be compiled: {type(error).__name__}"

    thread = threading.Thread(target=work)  # for its stack
    thread.start()
    thread.join()
    return found


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # end-of-file ends it
    threading.stack_size(STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    tokenizer = byte_tokenizer(settings.special_tokens)
    resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes, settings.memory_bytes))
    for line in sys.stdin.buffer:
        form = msgspec.json.decode(line, type=StructuredOutputs)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + 1 + settings.cpu_seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        sys.stdout.buffer.write(json.dumps(problem(tokenizer, form)).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

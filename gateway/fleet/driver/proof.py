"""What a standby must show before it gets a user: who it is, that it computes, and that it answers right."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gateway.fleet.driver.peer import Lost, Peer, Refused
from gateway.settings import Golden

WARM_UP_LENGTHS = (8, 64, 512)  # tokens
WARM_UP_AT_ONCE = 4
WARM_UP_TOKENS = 4
GOLDEN_TOKENS = 128
_CHECK_TOKENS = 8
_CHECK_LENGTHS = (3, 11)
_NO_TEMPLATE = "no chat template"
MATCH_WITHIN = 30.0  # seconds
_SEARCH = """
import json, re, signal, sys
signal.alarm({})  # should whoever asks be gone by then
expression, text = json.loads(sys.stdin.buffer.read())
sys.exit(re.search(expression, text, re.DOTALL) is None)
"""


class Unproven(Exception):
    """Why the standby gets no users."""


async def check_identity(peer: Peer) -> None:
    """Whether the process that answers is the one that was started. Unproven when another one does."""
    answer = await _asked(peer.get("/internal/whoami"))
    slot, generation = answer.get("slot"), answer.get("generation")
    if (slot, generation) != (peer.slot, peer.generation):
        raise Unproven(f"{slot}.{generation} answers on the socket of {peer.target}")


async def warm_up(peer: Peer) -> None:
    """Prompts of several lengths, then some at once. Those that are too long for the model are left out."""
    for length in WARM_UP_LENGTHS:
        await _warm(peer, length)
    await asyncio.gather(*(_warm(peer, WARM_UP_LENGTHS[0] + extra) for extra in range(WARM_UP_AT_ONCE)))


async def _warm(peer: Peer, length: int) -> None:
    try:
        await peer.prompt("/generate", prompt=tokens(length), max_tokens=WARM_UP_TOKENS)
    except Refused as error:
        if error.code != "context_length_exceeded":
            raise Unproven(f"{peer.target}, warming up: {error}") from None
    except Lost as error:
        raise Unproven(f"{peer.target}, warming up: {error}") from None


def tokens(length: int) -> list[int]:
    """A prompt of small token ids, which every vocabulary has; a model without a tokenizer takes it too."""
    return [1 + (37 * place) % 97 for place in range(length)]


async def run_golden(peer: Peer, prompts: Sequence[Golden]) -> None:
    """Prompts of our own, which must be answered with something, twice the same, and by finite numbers; then
    the fleet file's golden prompts."""
    for length in _CHECK_LENGTHS:
        await _checked(peer, tokens(length))
    for golden in prompts:
        answer = await _answer(peer, golden.prompt)
        if golden.expect is not None and not await matches(golden.expect, answer):
            raise Unproven(
                f"{peer.target} answered {golden.prompt!r:.80} with {answer!r:.120}, "
                f"not with {golden.expect!r:.80}"
            )


async def matches(expect: str, answer: str) -> bool:
    """`expect` is a substring, or a /regular expression/ that is found anywhere in the answer.

    Expressions are tried in a process of their own: some never come to an end, and the supervisor would stand
    still meanwhile. Unproven when it takes too long.
    """
    if len(expect) < 2 or not (expect.startswith("/") and expect.endswith("/")):
        return expect in answer
    argv = [sys.executable, "-I", "-S", "-c", _SEARCH.format(round(2 * MATCH_WITHIN))]
    process = await asyncio.create_subprocess_exec(*argv, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(MATCH_WITHIN):
            await process.communicate(json.dumps([expect[1:-1], answer]).encode())
    except TimeoutError:
        raise Unproven(f"{expect!r:.80} wasn't found in {answer!r:.120} within {MATCH_WITHIN:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode == 0


async def _answer(peer: Peer, prompt: str) -> str:
    """Greedy, as a chat where the model has a template. What a model thinks counts too: it may need all the
    tokens for that."""
    messages = [{"role": "user", "content": prompt}]
    try:
        body = await peer.prompt("/v1/chat/completions", messages=messages, max_tokens=GOLDEN_TOKENS)
        message = _choice(peer, body).get("message")
        said = [message.get(part) for part in ("reasoning", "content")] if isinstance(message, dict) else []
        text: Any = "\n".join(one for one in said if isinstance(one, str) and one)
    except Refused as error:
        if _NO_TEMPLATE not in str(error):
            raise Unproven(f"{peer.target}, golden prompt: {error}") from None
        completion = peer.prompt("/v1/completions", prompt=prompt, max_tokens=GOLDEN_TOKENS)
        text = _choice(peer, await _asked(completion)).get("text")
    except Lost as error:
        raise Unproven(f"{peer.target}, golden prompt: {error}") from None
    if not isinstance(text, str) or not text:
        raise Unproven(f"{peer.target} answered {prompt!r:.80} with nothing")
    return text


async def _checked(peer: Peer, prompt: list[int]) -> None:
    """The second time computes anew: it shares no cached prompt with the first."""
    answers = []
    for salt in ("golden-1", "golden-2"):
        body = {"prompt": prompt, "max_tokens": _CHECK_TOKENS, "ignore_eos": True, "logprobs": 0}
        answer = await _asked(peer.prompt("/generate", **body, cache_salt=salt))
        entries = answer.get("logprobs")
        if not isinstance(entries, list) or not entries or not all(map(_is_finite, entries)):
            raise Unproven(f"{peer.target} computes numbers that aren't finite")
        answers.append(answer.get("token_ids"))
    if not answers[0]:
        raise Unproven(f"{peer.target} answered a prompt with nothing")
    if answers[0] != answers[1]:
        raise Unproven(f"{peer.target} answered the same prompt with {answers[0]}, then with {answers[1]}")


def _is_finite(entry: Any) -> bool:
    number = entry.get("logprob") if isinstance(entry, dict) else None
    return isinstance(number, (int, float)) and -math.inf < number < math.inf


async def _asked(question: Any) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = await question
        return answer
    except (Lost, Refused) as error:
        raise Unproven(str(error)) from None


def _choice(peer: Peer, body: dict[str, Any]) -> dict[str, Any]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise Unproven(f"{peer.target} gave an answer without choices")
    return choices[0]

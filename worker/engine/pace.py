"""How long steps take, and with it how many prompt tokens a step takes beside sequences that decode.

A step in which sequences decode takes `decode` seconds; tokens of prompts in it take `token` seconds each and
`read` seconds for each earlier token that one attends to. All three are estimated while the engine runs, from
the times of its steps. What prompts may add to a step (Sarathi-Serve's stall-free batching, arXiv 2403.02310,
with the bound in time instead of tokens) is then a number of tokens, whatever the machine, the model, and how
far into its prompt a request is.
"""

from __future__ import annotations

import math

from worker.model.config import ModelConfig
from worker.model.shapes import weight_bytes
from worker.request import Step

# Without a target: each prompt in line may lengthen the steps of those who decode by so many times their own
# time. One long prompt then leaves a stream gaps of about twice its usual ones, and a burst of prompts, which
# would otherwise wait for each other, still fills the whole step. With 0.6 a prompt of 30,000 tokens takes
# half as long again, for gaps a fifth shorter.
STRETCH = 1.0
LEAST = 0.25  # so many times that time prompts have in any case, or they would starve under a low target
FIRST = 16  # tokens beside decoding sequences, before any were timed
GROWTH = 2.0  # no more than so many times the largest number that was timed: small steps are often flat
PROBE = 16  # after so many steps with prompts one goes without: what decoding takes alone changes meanwhile
_DECODE_WEIGHT = 0.2  # of the newest step in the mean
_MEMORY = 0.95  # what of earlier steps is left in the sums with each newer one
_PRIOR = 0.001  # weight of the ratio expected between `read` and `token`; decides where steps can't tell


def read_share(model: ModelConfig) -> float:
    """The arithmetic of attending to one token over that of all matrix products of a token."""
    return 2 * model.num_layers * model.num_heads * model.head_dim / weight_bytes(model, 1)


class Pace:
    """Online estimates of step times.

    Args:
        target: seconds that a step should take while sequences decode; None: by STRETCH; inf: no bound.
        expected: `read` / `token` as far as the shape says (`read_share`).
        least: the first prompt of a step gets so many tokens in any case. Fewer take no less time where a
            kernel computes that many rows at once, and pieces smaller than that would look ever more
            expensive a token.
    """

    def __init__(self, target: float | None = math.inf, expected: float = 0.0, least: int = 1) -> None:
        self.target = target
        self.least = least
        self.decode = 0.0  # seconds; 0: not known yet
        self.token = 0.0
        self.read = 0.0
        self._expected = expected
        self._largest = 0
        self._without_probe = 0
        # Sums over steps with prompts, each weighted by 1 / seconds²: relative errors count.
        self._tt = self._tr = self._rr = self._ts = self._rs = 0.0

    def observe(self, step: Step, seconds: float) -> None:
        """A step has taken so long."""
        decodes, tokens, reads = False, 0, 0.0
        for row in step.rows:
            if row.decode and row.sample:
                decodes = True
            else:
                tokens += row.count
                reads += row.count * (row.start + row.count / 2)
        if not tokens:
            self._observe_decode(seconds)
        else:
            # A step of prompts alone reads the weights too, but has no sequences to attend for.
            own = self.decode if decodes else min(self.decode, seconds / 2)
            self._observe_prompts(tokens, reads, max(seconds - own, 0.02 * seconds), seconds)

    def budget(self, tokens: int) -> int:
        """How many of `tokens` the beginning of a prompt would get beside sequences that decode."""
        bounded = self.decode and self.target != math.inf
        return self._bounded(tokens, 1).take(0, tokens) if bounded else tokens

    def share(self, tokens: int, prompts: int, decoding: bool) -> Share:
        """What a step has for prompts: `tokens` at most, less where `prompts` that want some would hold up
        sequences that decode in it for too long, or others whose last piece is in it."""
        if self.target == math.inf:
            return Share(self, tokens, math.inf)
        if not decoding or not self.decode:
            return Share(self, tokens, math.inf, stretch=STRETCH)
        self._without_probe += 1
        if self._without_probe > PROBE:
            self._without_probe = 0
            return Share(self, 0, 0.0)
        return self._bounded(tokens, prompts)

    def _bounded(self, tokens: int, prompts: int) -> Share:
        if self.target is None:
            seconds = STRETCH * self.decode * prompts
        else:
            seconds = max(self.target - self.decode, LEAST * self.decode)
        known = GROWTH * self._largest if self._largest else FIRST
        return Share(self, min(tokens, int(known * max(1, prompts))), seconds)

    def seconds(self, start: int, tokens: int) -> float:
        """What `tokens` of a prompt from `start` on add to a step."""
        return tokens * (self.token + self.read * (start + tokens / 2))

    def tokens_in(self, seconds: float, start: int, most: int) -> int:
        """The inverse: how many tokens from `start` on, and no more than `most`, take so long."""
        each = self.token + self.read * start
        # tokens² · read / 2 + tokens · each = seconds
        divisor = each + math.sqrt(each * each + 2 * self.read * seconds)
        return int(min(most, 2 * seconds / divisor)) if divisor > 0.0 else most

    def _observe_decode(self, seconds: float) -> None:
        if not self.decode:
            self.decode = seconds
        # One step that the machine held up is no reason to expect it of all.
        usual = min(max(seconds, self.decode / 2), 2 * self.decode)
        self.decode += _DECODE_WEIGHT * (usual - self.decode)

    def _observe_prompts(self, tokens: int, reads: float, added: float, seconds: float) -> None:
        self._largest = max(self._largest, tokens)
        weight = 1 / (seconds * seconds)
        self._tt = _MEMORY * self._tt + weight * tokens * tokens
        self._tr = _MEMORY * self._tr + weight * tokens * reads
        self._rr = _MEMORY * self._rr + weight * reads * reads
        self._ts = _MEMORY * self._ts + weight * tokens * added
        self._rs = _MEMORY * self._rs + weight * reads * added
        self.token, self.read = self._solve()

    def _solve(self) -> tuple[float, float]:
        """The least squares of token and read, neither negative."""
        prior, ratio = _PRIOR * self._rr, self._expected
        tt, tr, rr = self._tt + prior * ratio * ratio, self._tr - prior * ratio, self._rr + prior
        determinant = tt * rr - tr * tr
        if determinant > 0.0:
            token = (rr * self._ts - tr * self._rs) / determinant
            read = (tt * self._rs - tr * self._ts) / determinant
            if token >= 0.0 and read >= 0.0:
                return token, read
            if token < 0.0:
                return 0.0, self._rs / self._rr
        return self._ts / self._tt, 0.0


class Share:
    """What is left of a step for prompts.

    Args:
        stretch: where prompts end in the step, and so wait for it with their first tokens, those that don't
            may lengthen it by so many times what these take; inf: by whatever fits.
    """

    __slots__ = ("_ending", "_first", "_pace", "_stretch", "seconds", "tokens")

    def __init__(self, pace: Pace, tokens: int, seconds: float, stretch: float = math.inf) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self._pace = pace
        self._first = True
        self._stretch = stretch
        self._ending = 0.0  # seconds of the prompts that end in this step

    def take(self, start: int, wanted: int) -> int:
        """Tokens for a prompt that has come to `start` and wants so many more; 0: none in this step. The
        first to ask gets `Pace.least` in any case."""
        count = min(wanted, max(0, self.tokens))
        if count < wanted and self._ending and self.seconds == math.inf:
            self.seconds, self._first = self._stretch * self._ending, True
        if self.seconds < math.inf and count:
            least = min(self._pace.least, count) if self._first else 0
            count = max(least, self._pace.tokens_in(max(0.0, self.seconds), start, count))
            self.seconds -= self._pace.seconds(start, count)
        if count == wanted:
            self._ending += self._pace.seconds(start, count)
        self._first = False
        self.tokens -= count
        return count

    def give_back(self, tokens: int) -> None:
        """Tokens that were taken, by this or by others, and aren't used."""
        self.tokens += tokens

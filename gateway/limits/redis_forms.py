"""Rules in the words of `limits.lua`, made once for each caller where they are the same for all requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.limits.limiter import Charge, rules_of
from gateway.limits.rules import LeaseRule, Rule

MAX_KNOWN = 8192


class Form(NamedTuple):
    """What `acquire` says of some rules, and those of them that are leases. Not to be changed."""

    rules: Sequence[Rule]
    keys: list[str]
    words: list[str | int]
    leases: list[LeaseRule]


class Forms:
    """`prefix` comes before all keys."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        # By the charges' id, with the charges, which so keep it.
        self._known: dict[int, tuple[Sequence[Charge], Form]] = {}

    def of_charges(self, charges: Sequence[Charge], tokens: int) -> Form:
        """Costs a look-up, if they are the very charges of an earlier request and none is of tokens."""
        known = self._known.get(id(charges))
        if known is not None and known[0] is charges:
            return known[1]
        form = self.of_rules(rules_of(charges, tokens))
        if isinstance(charges, tuple) and all(charge.limit.tokens is None for charge in charges):
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[id(charges)] = charges, form
        return form

    def of_rules(self, rules: Sequence[Rule]) -> Form:
        keys: list[str] = []
        words: list[str | int] = []
        for rule in rules:
            key = self._prefix + rule.key
            keys.append(key)
            words += rule.words(key)
        return Form(rules, keys, words, [rule for rule in rules if isinstance(rule, LeaseRule)])

"""Service classes beside each other: whose memory a more urgent request may have."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.headers import PRIORITIES
from worker.request import Request

# A class may lose pages and rows to a more urgent one, but not the last eighth of both, and a request only so
# many times: so batch work goes on beside any number of interactive requests.
FLOOR = 8
MOST_RECLAIMED = 3


def preemptible(
    running: Sequence[Request], request: Request, capacity: int, max_num_seqs: int
) -> list[Request]:
    """Running requests of less urgent classes that may be preempted for `request`, the first to go first.

    `running` is in order; `capacity`: pages of the pool. What more urgent classes and its own have is not
    touched, however late they came.
    """
    pages, rows = [0] * len(PRIORITIES), [0] * len(PRIORITIES)
    for other in running:
        pages[other.service_class] += len(other.pages)
        rows[other.service_class] += 1
    victims: list[Request] = []
    for level in range(len(PRIORITIES) - 1, request.service_class, -1):
        if not rows[level]:
            continue
        for victim in reversed(running):
            if pages[level] <= capacity // FLOOR and rows[level] <= max_num_seqs // FLOOR:
                break
            if victim.service_class == level and victim.reclaimed < MOST_RECLAIMED:
                victims.append(victim)
                pages[level] -= len(victim.pages)
                rows[level] -= 1
    return victims

"""A rollout as data: what is asked for, how far it is, what is kept of it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.fleet.errors import EXIT_FAILED
from gateway.fleet.judge import Verdict
from gateway.fleet.state import FULL_WEIGHT

VERSION = 1  # of the persisted form
EXIT_ROLLED_BACK = 4
LOG_LENGTH = 200

Side = Literal["primary", "standby"]
Outcome = Literal["completed", "rolled_back", "aborted", "failed"]
Phase = Literal[
    "starting",  # the standby's process starts and loads
    "checking",  # who answers there?
    "warming",  # warm-up prompts
    "proving",  # golden prompts
    "proven",  # fit for users; waits while paused
    "holding",  # recreate: users' requests are made to wait
    "shifting",  # a step's weights are set; waits until all gateways have them
    "judging",  # users are on both; waits for the verdict
    "clearing",  # `leaving` has weight 0 everywhere; waits until no gateway has a request on it
    "draining",  # `leaving` is fenced; waits until it has none itself
    "cutting",  # the drain limit is over: what is left is ended with an error event
    "stopping",  # `leaving` is stopped; waits until it is gone, and its memory free
    "restoring",  # recreate, going back: the old version starts again
    "reverting",  # going back: the old version gets all weight; waits until all gateways know
    "completed",
    "rolled_back",
    "aborted",
    "failed",
]
TERMINAL: frozenset[Phase] = frozenset({"completed", "rolled_back", "aborted", "failed"})
EXIT_CODES: dict[Outcome, int] = {
    "completed": 0,
    "rolled_back": EXIT_ROLLED_BACK,
    "aborted": EXIT_ROLLED_BACK,
    "failed": EXIT_FAILED,
}


MOST_STEPS = 100
LONGEST = 30 * 86400.0  # seconds


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """A model's weights and how they run: `worker` are the options that are set, by the fleet file or
    `--set`."""

    source: str
    worker: dict[str, Any] = {}


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`steps`: percent of users on the standby; `hold`: least seconds on each; `drain_limit`: seconds that
    requests in flight may take to end; `probes`: the judge may send requests of its own."""

    steps: tuple[float, ...] = (5, 25, 100)
    hold: float = 120.0
    strategy: Literal["canary", "recreate"] = "canary"
    drain_limit: float = 900.0
    probes: bool = True

    def problems(self) -> list[str]:
        """What is wrong with them, each with the way out."""
        found = []
        ascending = all(a < b for a, b in zip(self.steps, self.steps[1:]))
        if not self.steps or not ascending or self.steps[0] * FULL_WEIGHT < 100 or self.steps[-1] != 100:
            given = ",".join(f"{step:g}%" for step in self.steps) or "none"
            found.append(
                "steps must be ascending percentages from 0.01 % on, the last one 100 %, as in 5%,25%,100%; "
                f"these are {given:.100}"
            )
        if len(self.steps) > MOST_STEPS:
            found.append(f"{len(self.steps)} steps are too many; {MOST_STEPS} are the most")
        if not 0 <= self.hold <= LONGEST:
            found.append("hold must be a time from 0 s to 30d, as in 2m")
        if not 0 <= self.drain_limit <= LONGEST:
            found.append("the drain limit must be a time from 0 s to 30d, as in 15m")
        return found


class Entry(msgspec.Struct, frozen=True):
    """One line of a rollout's log; `at`: Unix time."""

    at: float
    phase: Phase
    what: str


class Clock(msgspec.Struct, frozen=True):
    """How the machine's clock was set: Unix time is `offset` on top of the steady one of this boot."""

    boot: str
    offset: float


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of one model. Times are Unix times, since they outlive a process, by the `clock` as it was
    set when the rollout began.

    `step`: index into the options' steps, -1 before the first. `change` numbers the weights that were set:
    facts about other changes are stale. `hold`: requests wait in the gateways. `leaving`: which side is being
    stopped. `outcome`: how it will end, as soon as that is decided. `due`: when the phase's time is over (a
    step's hold, the proof, the drain). `suspended`: Redis is down, nothing advances. `full`: no more judging.
    `verdicts`: the last one of each step ("5%"). `primary_crashes`: of the old version on the present step,
    as far as they matter. `cut`: streams that outlived the drain limit. `revision` grows with every change of
    this record, which whoever keeps it compares before he overwrites.
    """

    id: str
    model: str
    old: Version
    new: Version
    options: Options
    started: float
    version: int = VERSION
    revision: int = 0
    phase: Phase = "starting"
    step: int = -1
    change: int = 0
    primary_bp: int = FULL_WEIGHT
    standby_bp: int = 0
    hold: bool = False
    leaving: Side | None = None
    outcome: Outcome | None = None
    reason: str = ""
    paused: bool = False
    suspended: bool = False
    full: bool = False
    due: float | None = None
    verdicts: dict[str, Verdict] = {}
    primary_crashes: int = 0
    cut: int = 0
    ended: float | None = None
    log: tuple[Entry, ...] = ()
    clock: Clock | None = None

    @property
    def terminal(self) -> bool:
        return self.phase in TERMINAL

    @property
    def recreate(self) -> bool:
        return self.options.strategy == "recreate"

    @property
    def steps(self) -> tuple[float, ...]:
        """Percentages; recreate has no users to split: there is only one version at a time."""
        return (100.0,) if self.recreate else self.options.steps

    @property
    def step_name(self) -> str:
        return f"{self.steps[self.step]:g}%" if self.step >= 0 else ""

    @property
    def last_step(self) -> bool:
        return self.step == len(self.steps) - 1

    @property
    def going_back(self) -> bool:
        return self.outcome is not None and self.outcome != "completed"

    @property
    def past_return(self) -> bool:
        """Whether it is too late for `abort`: the old version is fenced, and refuses requests, or is gone.

        Never with recreate, which can start the old version again until it is over.
        """
        fenced = self.leaving == "primary" and self.phase in ("draining", "cutting", "stopping")
        return self.phase == "completed" or (fenced and not self.recreate)

    @property
    def exit_code(self) -> int | None:
        """Of the command that waits for it; None while it runs."""
        return EXIT_CODES[self.outcome] if self.terminal and self.outcome is not None else None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What `swap history` shows of a rollout that is over."""

    id: str
    model: str
    old: Version
    new: Version
    options: Options
    started: float
    ended: float
    outcome: Outcome
    reason: str
    exit_code: int
    verdicts: dict[str, Verdict]
    cut: int
    log: tuple[Entry, ...]


def record_of(rollout: Rollout) -> Record:
    """The history record; ValueError while it runs."""
    if rollout.exit_code is None or rollout.outcome is None or rollout.ended is None:
        raise ValueError(f"rollout {rollout.id} isn't over")
    return Record(
        id=rollout.id,
        model=rollout.model,
        old=rollout.old,
        new=rollout.new,
        options=rollout.options,
        started=rollout.started,
        ended=rollout.ended,
        outcome=rollout.outcome,
        reason=rollout.reason,
        exit_code=rollout.exit_code,
        verdicts=rollout.verdicts,
        cut=rollout.cut,
        log=rollout.log,
    )


def encode(rollout: Rollout) -> bytes:
    """The persisted form: JSON."""
    return msgspec.json.encode(rollout)


def decode(data: bytes) -> Rollout:
    """A rollout from its persisted form; ValueError when it isn't one, or of another version."""
    rollout = msgspec.json.decode(data, type=Rollout)
    if rollout.version != VERSION:
        raise ValueError(f"rollout {rollout.id} is of version {rollout.version}; this one reads {VERSION}")
    weights_are_some = all(0 <= share <= FULL_WEIGHT for share in (rollout.primary_bp, rollout.standby_bp))
    if rollout.options.problems() or not weights_are_some or not -1 <= rollout.step < len(rollout.steps):
        raise ValueError(f"rollout {rollout.id} has steps or shares that can't be")
    return rollout

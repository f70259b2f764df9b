"""The memory ledger: what all workers of a fleet take together, before anything starts.

What one worker takes is asked of the worker's own formula (`python -m worker.plan`, a process without torch);
this adds it up per card and says what is left, and what fits beside.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from contracts.plan import Answer, Estimate, Question
from contracts.units import format_bytes
from gateway.config import FleetFile
from gateway.fleet.commands import PYTHON, Slot, slots_of
from gateway.fleet.errors import EXIT_FAILED, EXIT_INVALID, EXIT_MISFIT, FleetError

HOST = "host"
GATEWAY_BYTES = 128 << 20  # of one gateway process, and of the supervisor
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's line; `place`: ``gpu0`` or ``host``; `swap`: how a new version could come in; `invalid`: its
    problem isn't one of memory."""

    slot: str
    model: str
    place: str
    estimate: Estimate | None
    total: int | None
    problem: str | None
    unknown: str | None
    swap: str | None = None
    invalid: bool = False


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A card, or the host's memory: its bytes, what is taken and what is left (negative: too much)."""

    name: str
    total: int
    taken: int
    left: int


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The whole sum. `problems`: why the fleet doesn't fit or can't run, each with the option to change."""

    workers: tuple[Worker, ...]
    places: tuple[Place, ...]
    problems: tuple[str, ...]

    @property
    def unknown(self) -> bool:
        return any(worker.unknown for worker in self.workers)

    @property
    def exit_code(self) -> int:
        """Of the command that asks. What is invalid comes first: nobody knows how large it would be."""
        if any(worker.invalid for worker in self.workers):
            return EXIT_INVALID
        return EXIT_MISFIT if self.problems else EXIT_FAILED if self.unknown else 0

    @property
    def refusals(self) -> list[str]:
        """The problems as they are told: which of them are of memory."""
        invalid = {f"{worker.slot}: {worker.problem}" for worker in self.workers if worker.invalid}
        return [
            ("can't run: " if problem in invalid else "doesn't fit: ") + problem for problem in self.problems
        ]


@dataclass(frozen=True)
class Machine:
    """Bytes of each card by index, and of the host."""

    cards: Mapping[int, int]
    host: int


def this_machine(card_memory: int | None = None) -> Machine:
    """Cards as nvidia-smi lists them, each `card_memory` large if that is given; the host's memory, or what
    its control group allows."""
    cards = _nvidia_smi()
    if card_memory is not None:
        cards = dict.fromkeys(cards or [0], card_memory)
    host = psutil.virtual_memory().total
    with contextlib.suppress(OSError, ValueError):  # no such group, or "max"
        host = min(host, int(_CGROUP_LIMIT.read_text()))
    return Machine(cards, host)


def _nvidia_smi() -> dict[int, int]:
    argv = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split(",") for line in out.splitlines()]
    return {int(row[0]): int(row[1]) << 20 for row in rows if len(row) == 2 and row[1].strip().isdecimal()}


def make_ledger(fleet: FleetFile, machine: Machine, workers: Sequence[Slot] | None = None) -> Ledger:
    """Asks for each worker and adds up. FleetError when the workers' side doesn't answer."""
    slots = list(workers or slots_of(fleet))
    places = [_place(slot, machine) for slot in slots]
    return add_up(slots, places, _ask(slots, places, machine), machine, fleet.gateway.processes)


def add_up(
    slots: Sequence[Slot], places: Sequence[str], answers: Sequence[Answer], machine: Machine, gateways: int
) -> Ledger:
    """The ledger of answers that are there."""
    sizes = {f"gpu{index}": size for index, size in machine.cards.items()} | {HOST: machine.host}
    taken = dict.fromkeys(sizes, 0)
    taken[HOST] = GATEWAY_BYTES * (gateways + 1)
    problems = []
    for slot, place, answer in zip(slots, places, answers, strict=True):
        taken[place] = taken.get(place, 0) + (answer.total or 0)
        if answer.problem:
            problems.append(f"{slot.name}: {answer.problem}")
    for place, size in sizes.items():
        if taken[place] > size:
            problems.append(_too_much(place, size, taken[place], slots, places))
    lines = [
        _line(slot, place, answer, sizes.get(place, 0) - taken[place])
        for slot, place, answer in zip(slots, places, answers, strict=True)
    ]
    rows = [
        Place(name=name, total=size, taken=taken[name], left=size - taken[name])
        for name, size in sizes.items()
    ]
    return Ledger(workers=tuple(lines), places=tuple(rows), problems=tuple(dict.fromkeys(problems)))


def _line(slot: Slot, place: str, answer: Answer, left: int) -> Worker:
    """`swap`: a canary needs as much again beside what runs."""
    swap = None if answer.total is None else "canary" if answer.total <= left else "recreate"
    return Worker(
        slot=slot.name,
        model=slot.entry.name,
        place=place,
        estimate=answer.estimate,
        total=answer.total,
        problem=answer.problem,
        unknown=answer.unknown,
        swap=swap,
        invalid=answer.invalid,
    )


def _too_much(place: str, size: int, taken: int, slots: Sequence[Slot], places: Sequence[str]) -> str:
    names = ", ".join(slot.name for slot, where in zip(slots, places, strict=True) if where == place)
    option = "kv_cache_memory_bytes" if place == HOST else "gpu_memory"
    return (
        f"{place}: {names} take {format_bytes(taken)} of {format_bytes(size)}, "
        f"{format_bytes(taken - size)} too much; lower {option} of one, or move one elsewhere"
    )


def _place(slot: Slot, machine: Machine) -> str:
    options = slot.entry.worker
    if options.device == "cpu" or (options.device == "auto" and not machine.cards):
        return HOST
    return f"gpu{options.gpus[0] if options.gpus else 0}"


def _ask(slots: Sequence[Slot], places: Sequence[str], machine: Machine) -> list[Answer]:
    """One process for all workers; a card that isn't there is answered here."""
    questions: list[Question] = []
    answers: list[Answer | None] = []
    for slot, place in zip(slots, places, strict=True):
        card = None if place == HOST else machine.cards.get(int(place.removeprefix("gpu")))
        if place != HOST and card is None:
            known = ", ".join(f"gpu{index}" for index in machine.cards) or "none"
            why = (
                f"needs {place}, and the cards here are: {known}; set gpus or device: cpu, or plan for other "
                "cards with --card-memory"
            )
            answers.append(Answer(problem=why))
            continue
        options = slot.entry.worker.model_dump(exclude_unset=True)
        questions.append(Question(slot.entry.source, options, card))
        answers.append(None)
    asked = iter(_run(questions) if questions else [])
    return [given if given is not None else next(asked) for given in answers]


def _run(questions: list[Question]) -> list[Answer]:
    try:
        process = subprocess.run(
            [*PYTHON, "worker.plan"], input=msgspec.json.encode(questions), capture_output=True, timeout=120
        )
        answers = msgspec.json.decode(process.stdout, type=list[Answer])
    except (OSError, subprocess.SubprocessError) as error:
        raise FleetError(f"the workers' sizes can't be had: {error}") from None
    except msgspec.MsgspecError:
        words = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise FleetError(f"the workers' sizes can't be had: {' '.join(words)}") from None
    if len(answers) != len(questions):
        raise FleetError("the workers' sizes can't be had: an answer is missing")
    return answers

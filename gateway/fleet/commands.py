"""Names of slots, and the command lines that fill them."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from contracts.options import WorkerOptions
from gateway.config import FleetFile
from gateway.settings import ModelEntry

_LONGEST_SLUG = 40

# -P: a folder named `worker` or `gateway` in the user's directory must not shadow ours.
PYTHON = (sys.executable, "-P", "-m")


Variant = Literal["", "b"]


@dataclass(frozen=True)
class Slot:
    """A place for one worker: replica `index` of a model.

    A model's versions take turns in its two variants: while one has the slots ``NAME-0``, ``NAME-1`` …, a new
    one starts in ``NAME-alt-0`` …, and the next one after that in the first again. `entry` is what the slot
    runs, which needn't be what the fleet file says.
    """

    name: str
    entry: ModelEntry
    index: int
    variant: Variant = ""


def other(variant: Variant) -> Variant:
    """The variant that a new version of the model starts in."""
    return "" if variant else "b"


def slugs_of(entries: Iterable[ModelEntry], known: Mapping[str, str] = {}) -> dict[str, str]:
    """What the slots of each model are named after, in characters that suit file names. Slots of two models
    never collide, in either variant, nor with those of `known` models, which stay what they are."""
    slugs: dict[str, str] = {}
    taken = {name for slug in known.values() for name in (slug, f"{slug}-alt")}
    for entry in entries:
        if entry.name in known:
            slugs[entry.name] = known[entry.name]
            continue
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", entry.name)
        if not taken.isdisjoint((slug, f"{slug}-alt")) or len(slug) > _LONGEST_SLUG:
            digest = hashlib.sha256(entry.name.encode()).hexdigest()[:8]
            slug = f"{slug[:_LONGEST_SLUG]}-{digest}"
        taken |= {slug, f"{slug}-alt"}
        slugs[entry.name] = slug
    return slugs


def slots_for(entry: ModelEntry, slug: str, variant: Variant = "") -> list[Slot]:
    """One slot per replica of a model."""
    stem = f"{slug}-alt" if variant else slug
    return [Slot(f"{stem}-{index}", entry, index, variant) for index in range(entry.replicas)]


def slots_of(fleet: FleetFile) -> list[Slot]:
    """The slots of a whole fleet as its file says."""
    slugs = slugs_of(fleet.models)
    return [slot for entry in fleet.models for slot in slots_for(entry, slugs[entry.name])]


def gateway_slots(processes: int) -> list[str]:
    """The slots of a fleet's gateway processes. A model's slot ends in a dash and a number, so never one of
    these."""
    return [f"gateway{index}" for index in range(processes)] if processes > 1 else ["gateway"]


def option_flags(options: WorkerOptions) -> list[str]:
    """The flags that bring a worker from its defaults to `options`."""
    flags: list[str] = []
    for name, field in WorkerOptions.model_fields.items():
        value = getattr(options, name)
        flag = name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def _takes_any_core(entry: ModelEntry) -> bool:
    return entry.worker.threads is None and entry.worker.device != "cuda"


def _shared_threads(fleet: FleetFile) -> int | None:
    """Threads of each of several workers that may compute on the CPU and say nothing about it.

    On the same cores they would wait for each other at every barrier: two workers of two threads on two cores
    were nine times as slow as two of one.
    """
    workers = sum(_takes_any_core(slot.entry) for slot in slots_of(fleet))
    return max(1, len(os.sched_getaffinity(0)) // workers) if workers > 1 else None


# What a process may have been started with otherwise and yet be the one that is wanted: names it can be told,
# the rest holds from its next start on (as gateway/fleet/reconcile.py says).
_OF_NO_CONSEQUENCE = ("--served-model-name", "--shutdown-timeout", "--stall-limit", "--start-timeout")
# One word, unlike an option of the file: the share of the cores, which changes with every model that comes or
# goes.
_SHARED_THREADS = "--threads="


def is_as_good(running: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether a process that runs by one command line may stay where another is wanted."""
    return _essence(running) == _essence(wanted)


def _essence(argv: Sequence[str]) -> list[str]:
    essence, is_left_out = [], False
    for word in argv:
        if word.startswith("--"):
            is_left_out = word in _OF_NO_CONSEQUENCE or word.startswith(_SHARED_THREADS)
        if not is_left_out:
            essence.append(word)
    return essence


class Commands:
    """Builds the command lines of a fleet. `parent` is the supervisor, whose end ends them all; None: they
    outlive it."""

    def __init__(self, parent: int | None, fleet: FleetFile) -> None:
        self._parent_pid = parent
        self._parent = [] if parent is None else ["--parent-pid", str(parent)]
        threads = _shared_threads(fleet)
        self._threads = [] if threads is None else [f"{_SHARED_THREADS}{threads}"]
        self._common = [
            *("--shutdown-timeout", str(fleet.supervisor.drain_timeout)),
            *("--stall-limit", str(fleet.supervisor.stall_timeout)),
            *("--start-timeout", str(fleet.supervisor.start_timeout)),
            *("--max-body", str(fleet.gateway.max_body)),
        ]
        tracing = fleet.gateway.tracing
        if tracing.endpoint is not None:
            self._common += ["--otlp-traces-endpoint", tracing.endpoint]
            self._common += ["--trace-sample-ratio", str(tracing.sample_ratio)]

    def of(self, fleet: FleetFile) -> Commands:
        """The same for another fleet file."""
        return type(self)(self._parent_pid, fleet)

    def worker(self, slot: Slot, generation: int, uds: Path) -> list[str]:
        entry = slot.entry
        return [
            *PYTHON,
            "worker",
            *("--model", entry.source),
            *("--served-model-name", entry.name, *entry.aliases),
            *("--uds", str(uds), "--slot", slot.name, "--generation", str(generation)),
            *self._parent,
            *self._common,
            *(self._threads if _takes_any_core(entry) else ()),
            *option_flags(entry.worker),
        ]

    def gateway(self, slot: str, generation: int, config: Path, state_dir: Path, fd: int) -> list[str]:
        return [
            *PYTHON,
            "gateway",
            *("--config", str(config), "--state-dir", str(state_dir)),
            *("--slot", slot, "--generation", str(generation)),
            *("--fd", str(fd)),
            *self._parent,
        ]

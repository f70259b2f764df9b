"""The fleet's units of systemd, made of the fleet file and deploy/systemd/*.j2.

Values from elsewhere (paths, names) go through `word` or `line` into the templates, so nothing can end a
setting and begin another.
"""

from __future__ import annotations

import ipaddress
import os
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from contracts.units import format_bytes
from gateway.config import ENV_PREFIX, FleetFile
from gateway.fleet.backends.systemd import SOCKET_UNIT, unit_name
from gateway.fleet.commands import other, slots_for, slugs_of
from gateway.fleet.errors import FleetError, InvalidFleet
from gateway.fleet.ledger import HOST, Ledger, Worker
from gateway.fleet.listen import BACKLOG
from gateway.fleet.statedir import MAX_SOCKET_PATH, StateDir
from gateway.fleet.systemctl import Manager

TEMPLATES = "systemd"
HEAD = "Written by `pagefleet systemd render`; what is to differ goes into a drop-in (systemctl edit)."
UNITS = (
    "pagefleet.target",
    "pagefleet-workers.target",
    "pagefleet-gateways.target",
    "pagefleet-supervisor.service",
    SOCKET_UNIT,
    "pagefleet-gateway.service",
    "pagefleet-gateway@.service",
    "pagefleet-worker@.service",
)
MPS_UNIT = "pagefleet-mps.service"
POLKIT_RULES = "50-pagefleet.rules"
WORKER_MARGIN, GATEWAY_MARGIN = 20, 10  # seconds, over the drain limit: the last answers, the last call
HOST_MARGIN = 1 << 30  # of a worker's memory: what its estimate doesn't know of
HOST_OF_GPU_WORKER = 6 << 30  # beside its weights, which pass through: CUDA, compilers, interpreters

_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


class SystemdInvalid(FleetError):
    """systemd refuses the units, or isn't there to ask; the message is its own."""


@dataclass(frozen=True)
class SystemdOptions:
    """What the fleet file doesn't say.

    user_manager: for the manager of the user who renders, not the system's. user: as whom the system's runs
    them. file: the fleet file. directory: what relative paths in it and in its state_dir count from.
    """

    file: Path
    directory: Path
    user_manager: bool = False
    user: str = "pagefleet"
    mps: bool = False


@dataclass(frozen=True)
class _Unit:
    """What the templates are filled with."""

    system: bool
    user: str
    python: str
    file: str
    directory: str
    run: str
    listen: str
    backlog: int
    start_seconds: int
    stall_seconds: int
    worker_stop_seconds: int
    gateway_stop_seconds: int
    memory: int | None
    writable: tuple[str, ...]
    mps: bool
    mps_directory: str
    true_program: str
    head: str = HEAD


def render(fleet: FleetFile, options: SystemdOptions, ledger: Ledger | None = None) -> dict[str, str]:
    """File names with their texts. InvalidFleet says what can't be. `ledger`: for the bounds of memory."""
    unit = _unit(fleet, options, ledger)
    names = [*UNITS, *([MPS_UNIT] if options.mps else []), *([POLKIT_RULES] if unit.system else [])]
    return {name: _fill(f"{name}.j2", unit) for name in names}


def memory_limit(worker: Worker) -> int | None:
    """Bytes of the host's that a worker may take, None where its size isn't known: its estimate, and room for
    what that doesn't know of. It bounds a leak; it isn't what the worker is planned by."""
    if worker.estimate is None:
        return None
    if worker.place == HOST:
        return worker.estimate.total * 5 // 4 + HOST_MARGIN
    return worker.estimate.weights + HOST_OF_GPU_WORKER


def warnings(fleet: FleetFile, options: SystemdOptions, ledger: Ledger | None) -> Iterator[str]:
    """What works and yet isn't what one would want, and what is still to be done."""
    state = StateDir(options.directory / fleet.supervisor.state_dir)
    if not options.user_manager and not _is_user(options.user):
        yield (
            f"the units run the fleet as {options.user}, and there is no such user here: "
            f"`useradd --system {options.user}` makes one, who must own {state.root} "
            "and be able to read the rest"
        )
    for place in () if options.user_manager else _writable(fleet, state):
        if not place.is_dir():
            yield (
                f"{place} isn't there, and no unit starts without it (226/NAMESPACE): "
                f"`install -d -o {options.user} -m 700 {place}` makes it"
            )
    for worker in ledger.workers if ledger else ():
        if worker.estimate is None:
            why = worker.unknown or worker.problem or "its size is unknown"
            yield f"{worker.slot} gets no MemoryMax: {why}"
    overriding = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    if overriding:
        yield (
            f"{', '.join(overriding)}: in this environment, and not in the units'; "
            "put it into the fleet file, or into the environment file that they read"
        )


def check_with_systemd(units: Mapping[str, str], user_manager: bool) -> None:
    """SystemdInvalid with the words of `systemd-analyze verify` when it has any."""
    program = shutil.which("systemd-analyze")
    if program is None:
        raise SystemdInvalid("systemd-analyze isn't installed, so nothing was tested")
    with tempfile.TemporaryDirectory(prefix="pagefleet-systemd-") as folder:
        for name, text in units.items():
            Path(folder, name).write_text(text)
        paths = [str(Path(folder, name)) for name in units if name != POLKIT_RULES]
        mode = ["--user"] if user_manager else []
        argv = [program, *mode, "verify", "--man=no", *paths]
        # Ours before the machine's own. A user's manager wants to know its directory, and uses nothing in it.
        environment = {"XDG_RUNTIME_DIR": folder, **os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"}
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment, check=False)
    words = [line for line in done.stderr.splitlines() if "pagefleet" in line]
    if done.returncode != 0 or words:
        raise SystemdInvalid("systemd refuses the units:\n" + ("\n".join(words) or done.stderr.strip()))


def check_units(fleet: FleetFile, state: StateDir, manager: Manager) -> None:
    """InvalidFleet unless the manager has units, and for this fleet."""
    names = (unit_name("worker", "none"), unit_name("gateway", "none"), SOCKET_UNIT)
    *services, port = manager.show_now(names, "LoadState", "ExecStart", "Listen")
    flag = " --user" if manager.user else ""
    render = f"`pagefleet systemd render FILE{flag} --out DIR` writes them"
    remedy = f"{render}, `{manager.command} daemon-reload` reads them"
    if any(unit["LoadState"] != "loaded" for unit in (*services, port)):
        raise InvalidFleet(
            f"supervisor.backend is systemd, and {manager.command} doesn't know the units: {remedy}"
        )
    if any(f" {state.run} " not in unit["ExecStart"] for unit in services):
        raise InvalidFleet(
            f"the units that {manager.command} knows are for another state_dir than {state.root}: {remedy}"
        )
    address = socket_address(fleet.gateway.host, fleet.gateway.port)
    if port["Listen"] != f"{address} (Stream)":
        raise InvalidFleet(
            f"{SOCKET_UNIT} listens on {port['Listen'].removesuffix(' (Stream)')}, "
            f"and the fleet file says {address}: {remedy}"
        )


def word(value: object) -> str:
    """One word of a setting that takes several: quoted, its specifiers and variables taken literally."""
    text = line(value).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return text if re.fullmatch(r"[A-Za-z0-9._/:@+=,%-]+", text) else f'"{text}"'


def line(value: object) -> str:
    """The whole of a setting that takes one path as it is."""
    text = str(value)
    if not text.isprintable():
        raise InvalidFleet(f"{text!r}: line breaks and the like can't be in a unit")
    return text.replace("%", "%%")


def template_folder() -> Path:
    """deploy/systemd of the source tree, or where an installed package has it."""
    source = Path(__file__).resolve().parents[2] / "deploy" / TEMPLATES
    return source if source.is_dir() else Path(sysconfig.get_path("data"), "share", "pagefleet", TEMPLATES)


def _unit(fleet: FleetFile, options: SystemdOptions, ledger: Ledger | None) -> _Unit:
    settings = fleet.supervisor
    state = StateDir(options.directory / settings.state_dir)
    _check(fleet, options, state)
    limits = [memory_limit(worker) for worker in (ledger.workers if ledger else ())]
    known = [limit for limit in limits if limit is not None]
    drain = -int(-settings.drain_timeout // 1)
    return _Unit(
        system=not options.user_manager,
        user=options.user,
        python=sys.executable,
        file=str(options.file.absolute()),
        directory=str(options.directory.absolute()),
        run=str(state.run),
        listen=socket_address(fleet.gateway.host, fleet.gateway.port),
        backlog=BACKLOG,
        start_seconds=max(1, round(settings.start_timeout)),
        stall_seconds=round(settings.stall_timeout),
        worker_stop_seconds=drain + WORKER_MARGIN,
        gateway_stop_seconds=drain + GATEWAY_MARGIN,
        memory=max(known) if known and len(known) == len(limits) else None,
        writable=tuple(map(str, _writable(fleet, state))),
        mps=options.mps,
        mps_directory="%t/pagefleet-mps",
        true_program=shutil.which("true") or "/bin/true",
    )


def _writable(fleet: FleetFile, state: StateDir) -> list[Path]:
    """Directories that the system's units may write to."""
    audit = fleet.gateway.audit.file
    return [state.root, *([audit.parent] if audit else [])]


def _check(fleet: FleetFile, options: SystemdOptions, state: StateDir) -> None:
    if fleet.supervisor.backend != "systemd":
        raise InvalidFleet(
            f"supervisor.backend is {fleet.supervisor.backend}; "
            "units are for `supervisor: {backend: systemd}`"
        )
    if fleet.gateway.port == 0:
        raise InvalidFleet("gateway.port is 0, any free one; set it, for systemd listens there")
    _check_socket_paths(fleet, state)
    if options.user_manager:
        return
    if not _USER.fullmatch(options.user):
        raise InvalidFleet(f"--user-name {options.user!r} is no name of a user")
    if options.user != SystemdOptions.user and not _is_user(options.user):
        raise InvalidFleet(f"--user-name {options.user}: there is no such user")


def _check_socket_paths(fleet: FleetFile, state: StateDir) -> None:
    """Elsewhere (see StateDir.place_sockets) would be a directory that a unit's private /tmp doesn't show."""
    slugs = slugs_of(fleet.models)
    names = [slot.name for entry in fleet.models for slot in slots_for(entry, slugs[entry.name], other(""))]
    room = MAX_SOCKET_PATH - len(os.fsencode(state.run / f"{max(names, key=len)}.99999999.sock"))
    if room < 0:
        raise InvalidFleet(
            f"supervisor.state_dir {state.root} is {-room} bytes too long for Unix sockets below it"
        )


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def socket_address(host: str, port: int) -> str:
    """``127.0.0.1:8000``, ``[::1]:8000``, as a socket unit takes and shows it; it takes no host names."""
    host = {"localhost": "127.0.0.1"}.get(host, host)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise InvalidFleet(
            f"gateway.host {host!r}: a socket of systemd needs an address, not a name"
        ) from None
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def _fill(template: str, unit: _Unit) -> str:
    import jinja2  # only here: it takes 50 ms to load

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # no markup; `word` quotes
    )
    environment.filters.update(word=word, line=line, size=format_bytes)
    return environment.get_template(template).render(unit=unit).strip() + "\n"

"""A real user manager of systemd, with a home, a runtime directory and a control group of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAM = Path("/lib/systemd/systemd")
BOOTED = Path("/run/systemd/system")  # without it systemd refuses to be anybody's manager
CGROUPS = Path("/sys/fs/cgroup")
PATIENCE = 120.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class UserManager:
    """`home` and `runtime` are its HOME and XDG_RUNTIME_DIR; `environment` is for who talks to it."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.runtime = folder / "runtime"
        self.log = folder / "manager.log"
        self.units = self.home / ".config/systemd/user"
        self.units.mkdir(parents=True)
        self.runtime.mkdir(mode=0o700)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_RUNTIME_DIR": str(self.runtime),
        }
        self.process: subprocess.Popen[bytes] | None = None
        self._groups: list[Path] = []

    def start(self) -> None:
        """OSError with the manager's words when it can't run here."""
        groups = self._groups = _own_groups(f"pagefleet-test-{os.getpid()}")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [str(PROGRAM), "--user", "--log-target=console", "--log-level=info"],
                env=self.environment,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: _enter(groups),
            )
        deadline = time.monotonic() + PATIENCE
        while self.call("is-system-running", check=False).strip() not in ("running", "degraded", "starting"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"no user manager of systemd can run here: {self.log.read_text()[-500:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends its units, then the manager: killed, since an orderly end touches the machine's mounts."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.SubprocessError):
            self.call("kill", "--signal=SIGKILL", "pagefleet*", check=False)
            self.call("stop", "pagefleet*", check=False)
        self.process.kill()
        self.process.wait()
        for group in self._groups:
            for folder, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def call(self, *arguments: str, check: bool = True) -> str:
        """What `systemctl --user` prints."""
        done = subprocess.run(
            ["systemctl", "--user", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert not check or done.returncode == 0, (
            f"{arguments}: {done.stderr}\n{self.log.read_text()[-2000:]}"
        )
        return done.stdout

    def show(self, unit: str, *names: str) -> dict[str, str]:
        lines = self.call("show", unit, f"--property={','.join(names)}").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def pid(self, unit: str) -> int:
        return int(self.show(unit, "MainPID")["MainPID"])

    def drop_in(self, unit: str, text: str) -> None:
        folder = self.units / f"{unit}.d"
        folder.mkdir(exist_ok=True)
        (folder / "test.conf").write_text(text)


@contextlib.contextmanager
def user_manager(place: Path | None = None) -> Iterator[UserManager]:
    """`place`: where its directory is to be, instead of /tmp."""
    if not BOOTED.exists():
        BOOTED.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="pf-sd-", dir=place) as folder:  # short: its sockets are in there
        manager = UserManager(Path(folder))
        try:
            manager.start()
            yield manager
        finally:
            manager.stop()


def _own_groups(name: str) -> list[Path]:
    """A control group for the manager in each hierarchy that it would use, below ours; two managers in one
    group would end each other's units."""
    made = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mount = {"name=systemd": CGROUPS / "systemd", "": CGROUPS / "unified"}.get(controllers)
        if controllers == "" and not (CGROUPS / "unified").is_dir():
            mount = CGROUPS
        if mount is not None and mount.is_dir():
            group = Path(f"{mount}{path.rstrip('/')}/{name}")
            with contextlib.suppress(OSError):
                group.mkdir(exist_ok=True)
                made.append(group)
    return made


def _enter(groups: list[Path]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # a run that is killed leaves nothing
    for group in groups:
        with contextlib.suppress(OSError):
            (group / "cgroup.procs").write_text(str(os.getpid()))

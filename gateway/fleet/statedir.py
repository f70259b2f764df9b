"""The directory of a fleet's sockets, logs, records and routes; one supervisor at a time owns it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

from gateway.board import make_board
from gateway.fleet.errors import Conflict, InvalidFleet

MAX_SOCKET_PATH = 107  # bytes in sockaddr_un, without the closing NUL
_LONGEST_GENERATION = ".99999999.sock"
_PREFIX = "pagefleet-"
MEMORY = Path("/dev/shm")  # a file system without a disk
_ROOM = 16 << 20  # bytes free there, for boards that grow
LINK = "link"  # a file there, for who wonders whose it is: the link that leads there
LOCK = "lock"  # holds its owner's process id
_ENDINGS = (".json", ".jsonl", ".log", ".db", ".tmp")  # of the files that we keep there
SUPERVISOR_LOG = "supervisor"  # of a detached one


class StateDir:
    """Paths below `root`, and the lock on it. Nothing is created before `acquire`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.run = self.root / "run"
        self.logs = self.root / "logs"
        self.routes = self.root / "routes.json"
        self.records = self.run / "processes.json"
        self.config = self.run / "fleet.json"
        self.systemd = self.run / "systemd.json"  # which manager has the fleet's units, when one has
        self.rollouts = self.root / "rollouts"  # states and histories
        self.versions = self.root / "versions.json"
        self.boards = self.run / "boards"  # or a link to where they are
        self._sockets_elsewhere = self.run / "sockets"  # names the directory, when that isn't `run`
        self._elsewhere: Path | None = None  # with mode 0700
        self._longest = "admin.sock"
        self._lock: int | None = None
        self._is_new = False

    @property
    def admin_socket(self) -> Path:
        return self.sockets / "admin.sock"

    @property
    def sockets(self) -> Path:
        """`run`, or a private directory with a short path, when `run` is too long for a Unix socket."""
        try:
            if not self._sockets_elsewhere.is_file():  # who opens a pipe waits
                return self.run
            named = Path(self._sockets_elsewhere.read_text())
        except (OSError, ValueError):
            return self.run
        is_one = named.is_absolute() and named.name.startswith(_PREFIX) and len(named.name) < MAX_SOCKET_PATH
        return named if is_one else self.run

    def board(self, slot: str) -> Path:
        """Where the gateway process in that slot shows its numbers."""
        return self.boards / f"{slot}.board"

    def log(self, slot: str) -> Path:
        return self.logs / f"{slot}.log"

    def make(self) -> None:
        """Creates the directories, for their owner only; InvalidFleet when they can't be had."""
        self._is_new |= not self.root.exists()
        try:
            for directory in (self.root, self.run, self.logs, self.rollouts):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> InvalidFleet:
        return InvalidFleet(f"state_dir {self.root} can't be used: {error.strerror}: {error.filename}")

    def acquire(self) -> None:
        """Creates the directories and takes the lock; Conflict names the process that holds it."""
        self.make()
        self._lock = self._locked()

    def check(self) -> None:
        """InvalidFleet where something else is in the place of one of our files: a directory that can't be
        replaced, a pipe or a device on which whoever reads or writes it waits for ever."""
        for directory in (self.root, self.run, self.logs, self.rollouts):
            for path in directory.iterdir():
                ours = path.suffix in _ENDINGS or path == self._sockets_elsewhere
                if ours or (path.suffix == ".sock" and path.is_dir()):
                    self._check_file(path)

    def _check_file(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:  # a link to nothing: who writes it says what is wrong, or replaces it
            return
        except OSError as error:
            raise self._unusable(error) from None
        if not stat.S_ISREG(mode):
            what = "a directory" if stat.S_ISDIR(mode) else "no file"
            raise InvalidFleet(f"state_dir {self.root} can't be used: {path} is {what}; move it away")

    def _locked(self) -> int:
        try:
            self._check_file(self.root / LOCK)
            lock = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            raise Conflict(
                f"a fleet is already up in {self.root} (supervisor is process {holder}); "
                f"`pagefleet down --state-dir {self.root}` stops it; another state_dir can run beside it"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: it is held all the same
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    @property
    def holder(self) -> str:
        """The process id that the lock's last owner has left in it, or nothing."""
        try:
            return (self.root / LOCK).read_text(errors="replace")[:32].strip()
        except OSError:
            return ""

    def is_held(self) -> bool:
        """Whether some supervisor has the lock."""
        try:
            lock = os.open(self.root / LOCK, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(lock)

    def is_ours(self) -> bool:
        """Whether the lock that is held is the one that others find."""
        try:
            return self._lock is not None and os.path.samestat(
                os.fstat(self._lock), os.stat(self.root / LOCK)
            )
        except OSError:
            return False

    def mend(self) -> None:
        """Brings back what somebody has taken from under a running fleet: directories, the lock, the places
        of the sockets and boards. Conflict when the directory is another supervisor's by now; InvalidFleet or
        OSError when it can't be done."""
        self.make()
        if not self.is_ours():
            lock = self._locked()
            self.release()
            self._lock = lock
        self._make_boards()
        if self._elsewhere is not None and not (self._elsewhere.is_dir() and self.sockets == self._elsewhere):
            self._place_elsewhere()

    def discard(self) -> None:
        """Takes away a directory that this object made, for a fleet that was not started after all."""
        if self._is_new:
            shutil.rmtree(self.root, ignore_errors=True)
            self._is_new = False

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def place_sockets(self, slots: Iterable[str]) -> None:
        """Sockets live in `run` if all their paths are short enough, else in a private directory."""
        self._longest = max((f"{slot}{_LONGEST_GENERATION}" for slot in slots), key=len, default="admin.sock")
        if len(os.fsencode(self.run / self._longest)) > MAX_SOCKET_PATH:
            self._place_elsewhere()

    def _place_elsewhere(self) -> None:
        if self._elsewhere is None or not self._elsewhere.is_dir():
            place = Path(tempfile.gettempdir())  # which TMPDIR may make a long path, too
            room = MAX_SOCKET_PATH - len(os.fsencode(place / f"{_PREFIX}xxxxxxxx" / self._longest))
            self._elsewhere = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place if room >= 0 else "/tmp"))
        self._sockets_elsewhere.write_text(str(self._elsewhere))

    def socket_problem(self, slot: str) -> str | None:
        """Why a worker that comes later can't have a socket where the others have theirs."""
        path = self.sockets / f"{slot}{_LONGEST_GENERATION}"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
            return None
        return f"the path of the socket of {slot} would be over {MAX_SOCKET_PATH} bytes; shorten the name"

    def place_boards(self, slots: Collection[str], *, afresh: bool = True) -> None:
        """A board for each gateway process, and none of an earlier fleet's; a new one when `afresh`, else
        the one that a process which lives may have."""
        if afresh:
            self.remove_boards()
        try:
            self._make_boards()
            for path in self.boards.glob("*.board"):
                if path.stem not in slots:
                    path.unlink(missing_ok=True)
            for slot in slots:
                make_board(self.board(slot))
        except OSError as error:
            raise self._unusable(error) from None

    def _make_boards(self) -> None:
        """The boards' directory, in memory where that can be had: a process that stores into a page which is
        being written to a disk waits for the disk, and all its requests with it."""
        if self.boards.is_dir():
            return
        self.boards.unlink(missing_ok=True)  # a link to what a new boot or a logout took away
        with contextlib.suppress(OSError):
            if shutil.disk_usage(MEMORY).free > _ROOM:
                elsewhere = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=MEMORY))  # mode 0700
                self.boards.symlink_to(elsewhere)
                (elsewhere / LINK).write_text(str(self.boards))
        if not self.boards.is_dir():
            self.boards.mkdir(mode=0o700)

    def remove_boards(self) -> None:
        """Takes away what gateways showed; for when none of them lives."""
        if self._lock is not None and not self.is_ours():
            return
        if self.boards.is_symlink():
            elsewhere = self.boards.readlink()
            if elsewhere.parent == MEMORY and _is_our_own(elsewhere):
                shutil.rmtree(elsewhere, ignore_errors=True)
            self.boards.unlink(missing_ok=True)
        elif self.boards.is_dir():
            shutil.rmtree(self.boards, ignore_errors=True)
        else:
            self.boards.unlink(missing_ok=True)

    def remove_sockets(self, keep: Collection[str] = ()) -> None:
        """Takes away every socket, also those of a predecessor that crashed; not those that are named, nor
        those of a supervisor to whom the directory belongs by now."""
        if self._lock is not None and not self.is_ours():
            return
        directory = self.sockets
        for path in directory.glob("*.sock"):
            if path.name not in keep:
                with contextlib.suppress(IsADirectoryError):  # somebody's, not ours
                    path.unlink(missing_ok=True)
        if directory != self.run:
            if _is_our_own(directory):
                shutil.rmtree(directory, ignore_errors=True)
            self._sockets_elsewhere.unlink(missing_ok=True)


def _is_our_own(directory: Path) -> bool:
    """Whether it is a temporary directory of this user's fleets: its name comes from a file, and what isn't
    ours stays."""
    return (
        directory.name.startswith(_PREFIX) and directory.is_dir() and directory.stat().st_uid == os.getuid()
    )


def read_file(path: Path) -> bytes:
    """What is in a file. OSError also where something else is in its place: a pipe would be waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def write_private(path: Path, data: bytes) -> None:
    """Replaces a file as a whole; only its owner can read it."""
    temporary = path.with_name(path.name + ".tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    os.replace(temporary, path)


def write_durably(path: Path, data: bytes) -> None:
    """The same, and it is still there after a power cut. OSError when there is no room."""
    temporary = path.with_name(path.name + ".tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)

"""The system's units, with all that they are denied, in a user's manager: the system's is none for tests.

Untested by that: that another user than root runs them. test_systemd_polkit.py asks a real polkit of the
rules for him.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.cli.swap_client import Swaps
from gateway.config import FleetFile
from gateway.fleet.driver.asked import StartRequest
from gateway.fleet.rollout import Options
from gateway.fleet.systemd import POLKIT_RULES, SystemdOptions, render
from tests.conftest import unavailable
from tests.gateway.test_systemd import ROOT, Fleet, pids
from tests.gateway.user_manager import user_manager

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(300)]

PLACE = Path("/srv")  # not below /tmp and /home, which they see as empty or read-only
# A container's /proc lacks what these hide; and a tree in /tmp can't be run from where /tmp is empty.
ABSENT = (
    "ProtectKernelLogs",
    "ProtectKernelTunables",
    *(["PrivateTmp"] if ROOT.is_relative_to("/tmp") else []),
)


class SystemFleet(Fleet):
    """With the units of the system's manager."""

    def units_of(self, fleet: FleetFile) -> dict[str, str]:
        units = render(fleet, SystemdOptions(self.file, ROOT, user="root"))
        del units[POLKIT_RULES]
        pattern = re.compile(rf"^({'|'.join(ABSENT)})=yes$", re.MULTILINE)
        assert all(pattern.search(text) for name, text in units.items() if name.endswith("@.service"))
        return {name: pattern.sub("", text) for name, text in units.items()}


@pytest.fixture
def fleet() -> Iterator[SystemFleet]:
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pf-", dir=PLACE))
            manager = stack.enter_context(user_manager(PLACE))
        except OSError as error:
            unavailable(str(error))
        yield SystemFleet(manager, Path(folder))


def facts(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def writable(pid: int) -> set[str]:
    """Where it may write on a disk."""
    mounts = [line.split() for line in Path(f"/proc/{pid}/mounts").read_text().splitlines()]
    virtual = {"tmpfs", "devtmpfs", "devpts", "proc", "sysfs", "mqueue", "hugetlbfs", "cgroup", "cgroup2"}
    virtual |= {"tracefs", "debugfs", "securityfs", "configfs", "pstore", "bpf"}  # mounted when first used
    return {where for _, where, kind, how, *_ in mounts if kind not in virtual and "rw" in how.split(",")}


def test_a_fleet_lives_swaps_and_is_taken_over_with_all_that_is_denied(fleet: SystemFleet) -> None:
    fleet.state.root.mkdir()
    fleet.write("a")
    fleet.manager.call("start", "pagefleet.target")
    before = fleet.until_ready()
    assert fleet.ask("a").status_code == 200
    supervisor = fleet.manager.pid("pagefleet-supervisor.service")
    for pid in (supervisor, *(unit.pid or 0 for unit in before.values())):
        found = facts(pid)
        assert (int(found["CapBnd"], 16), found["NoNewPrivs"], found["Seccomp"]) == (0, "1", "2")
        cache = str(fleet.manager.home / ".cache/pagefleet")
        private = () if "PrivateTmp" in ABSENT else ("/tmp", "/var/tmp")
        assert writable(pid) == {str(fleet.state.root), cache, *private}

    fleet.manager.call("kill", "--signal=SIGKILL", "pagefleet-supervisor.service")
    fleet.until(lambda: (now := fleet.status()) and now.supervisor != supervisor)
    assert pids(fleet.until_ready()) == pids(before)

    Swaps(fleet.state).start(
        "a", StartRequest(set={"max_num_seqs": 8}, options=Options(steps=(100.0,), hold=0))
    )
    fleet.until(lambda: fleet.rollouts()[0].terminal)
    assert fleet.rollouts()[0].phase == "completed", fleet.account()
    assert fleet.ask("a").status_code == 200
    fleet.manager.call("stop", "pagefleet.target")
    listed = ("list-units", "--state=active,deactivating", "--plain", "--no-legend", "pagefleet*")
    fleet.until(lambda: fleet.manager.call(*listed) == "")

"""The rules by which the system's manager lets the fleet's user do its work, asked of a real polkitd.

On a bus of its own, in a mount namespace in which the rules are the only ones.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from gateway.config import load_fleet
from gateway.fleet.systemd import POLKIT_RULES, SystemdOptions, render

POLKITD = Path("/usr/lib/polkit-1/polkitd")
RULES = Path("/etc/polkit-1/rules.d")
ACTION = "org.freedesktop.systemd1.manage-units"
FLEETS_USER, ANOTHER = "nobody", "daemon"
PATIENCE = 60.0

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not POLKITD.exists() or not all(map(shutil.which, ("pkcheck", "dbus-daemon"))),
    reason="a polkitd, and root to run it, is needed",
)

BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/><allow own="*"/><allow send_type="method_call"/><allow send_type="signal"/>
    <allow send_requested_reply="true"/><allow receive_type="method_call"/>
    <allow receive_type="method_return"/><allow receive_type="error"/><allow receive_type="signal"/>
  </policy>
</busconfig>
"""
# Ends with its standard input, and all it has started with it.
SCRIPT = f"""
mount --make-rprivate / && mount --bind "$1/rules" {RULES} || exit 77
dbus-daemon --config-file="$1/bus.conf" --nofork --nopidfile & bus=$!
until [ -S "$1/bus" ]; do sleep 0.05; done
{POLKITD} --no-debug >/dev/null 2>&1 & polkit=$!
cat >/dev/null
kill $polkit $bus; wait
"""
Ask = Callable[[str, str, str], bool]


@pytest.fixture(scope="module")
def allowed() -> Iterator[Ask]:
    """Whether polkitd lets a user do that to a unit."""
    with tempfile.TemporaryDirectory(prefix="pf-polkit-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # polkitd is a user of its own
        (folder / "rules").mkdir()
        (folder / "rules" / POLKIT_RULES).write_text(rules_of(folder))
        (folder / "bus.conf").write_text(BUS.format(path=folder / "bus"))
        environment = {**os.environ, "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={folder / 'bus'}"}
        daemons = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", name], stdin=subprocess.PIPE, env=environment
        )

        def ask(user: str, verb: str, unit: str) -> bool:
            uid = pwd.getpwnam(user).pw_uid
            subject = subprocess.Popen(["sleep", str(PATIENCE)], user=uid)
            try:
                details = ("--detail", "unit", unit, "--detail", "verb", verb)
                argv = ["pkcheck", "--action-id", ACTION, "--process", str(subject.pid), *details]
                done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
            finally:
                subject.kill()
                subject.wait()
            if done.returncode not in (0, 2):  # 2: by a password, which a service has none to give
                raise ConnectionError(done.stderr)
            return done.returncode == 0

        try:
            until_it_answers(daemons, lambda: ask(FLEETS_USER, "start", "none.service"))
            yield ask
        finally:
            daemons.communicate(timeout=PATIENCE)


def rules_of(folder: Path) -> str:
    file = folder / "fleet.yaml"
    content = {
        "gateway": {"port": 8000},
        "supervisor": {"backend": "systemd", "state_dir": "/srv/fleet"},
        "models": [{"name": "smollm2", "source": "org/name"}],
    }
    file.write_text(yaml.safe_dump(content))
    return render(load_fleet(file), SystemdOptions(file, folder, user=FLEETS_USER))[POLKIT_RULES]


def until_it_answers(daemons: subprocess.Popen[bytes], ask: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        if daemons.poll() is not None:
            pytest.skip("this machine allows no mount namespace")
        try:
            ask()
            return
        except ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize("verb", ["start", "stop", "kill", "reset-failed", "set-property"])
def test_the_fleets_user_may_do_that_to_its_units(allowed: Ask, verb: str) -> None:
    for unit in (
        "pagefleet-worker@smollm2-alt-0.service",
        "pagefleet-gateway@gateway0.service",
        "pagefleet-gateway.socket",
    ):
        assert allowed(FLEETS_USER, verb, unit)
        assert not allowed(ANOTHER, verb, unit)


@pytest.mark.parametrize(
    ("verb", "unit"),
    [
        ("stop", "ssh.service"),
        ("start", "pagefleet-worker@a/../ssh.service"),
        ("start", "pagefleet-worker@a.service ssh.service"),
        ("start", "evil-pagefleet-worker@a.service"),
        ("restart", "pagefleet-worker@a.service"),
        ("stop", "pagefleet-supervisor.service"),
        ("stop", "pagefleet.target"),
    ],
)
def test_and_nothing_else(allowed: Ask, verb: str, unit: str) -> None:
    assert not allowed(FLEETS_USER, verb, unit)

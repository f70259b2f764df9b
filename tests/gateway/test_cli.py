"""The `pagefleet` command: what it prints, and the codes it ends with."""

from __future__ import annotations

import http.server
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.cli.display import banner, describe
from gateway.config import load_fleet
from gateway.fleet.admin import FleetStatus
from gateway.fleet.state import Routes, RoutesFile, Target, write_routes
from gateway.fleet.unit import UnitStatus

FAKE_FLEET = [sys.executable, str(Path(__file__).with_name("fake_fleet.py"))]
FLEET = "gateway: {port: 0}\nmodels:\n  - {name: a, aliases: [x], source: o/n, worker: {max_num_seqs: 3}}\n"


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return path


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="pagefleet")


def test_help_names_every_command_and_the_exit_codes() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("up", "down", "status", "logs", "chat", "config", "worker", "gateway", "version"):
        assert f"\n  {command} " in result.output
    assert "Exit codes" in result.output
    assert "..." not in result.output.partition("Commands:")[2]
    assert invoke("nonsense").exit_code == 2


@pytest.mark.parametrize("command", ["worker", "gateway"])
def test_one_process_in_the_foreground_gets_its_arguments_as_they_are(command: str, tmp_path: Path) -> None:
    """Also --help, and also where a folder of the same name lies around."""
    (tmp_path / f"{command}.py").write_text("raise SystemExit('the wrong module')")
    for arguments, code in ((["--help"], 0), (["--no-such-option"], 2)):
        argv = [sys.executable, "-P", "-m", "gateway.cli", command, *arguments]
        result = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == code, result.stderr
    assert "--no-such-option" in result.stderr


def test_version() -> None:
    assert invoke("version").output.startswith("pagefleet 0.")
    assert set(json.loads(invoke("version", "--json").output)) == {"pagefleet", "python"}


def test_config_check(fleet: Path) -> None:
    assert invoke("config", "check", str(fleet)).output == f"{fleet}: ok, 1 model\n"
    assert json.loads(invoke("config", "check", str(fleet), "--json").output) == {"ok": True, "problems": []}
    fleet.write_text(FLEET + "    limits: {qps: 1}\nmodel: []\n")
    fleet.write_text(FLEET.replace("source: o/n", "sorce: o/n"))
    result = invoke("config", "check", str(fleet))
    assert result.exit_code == 2
    assert f"{fleet}:3: models[0].sorce: unknown key; did you mean 'source'?" in result.stderr
    assert result.stderr.endswith(f"2 problems in {fleet}\n")
    assert invoke("up", str(fleet)).stderr.endswith(f"2 problems in {fleet}; nothing was started\n")
    answer = json.loads(invoke("config", "check", str(fleet), "--json").output)
    assert [problem["key"] for problem in answer["problems"]] == ["models[0].source", "models[0].sorce"]


def test_config_show_is_itself_a_fleet_file(fleet: Path, tmp_path: Path) -> None:
    shown = tmp_path / "shown.yaml"
    shown.write_text(invoke("config", "show", str(fleet)).output)
    assert load_fleet(shown) == load_fleet(fleet)
    assert json.loads(invoke("config", "show", str(fleet), "--json").output) == yaml.safe_load(
        shown.read_text()
    )


def test_what_has_no_effect_is_said(fleet: Path) -> None:
    fleet.write_text(FLEET.replace("{port: 0}", "{port: 0, audit: {prompts: true}}"))
    result = invoke("config", "check", str(fleet))
    assert result.exit_code == 0
    assert result.stderr == "warning: gateway.audit.prompts has no effect without gateway.audit.file\n"


def test_dry_run_prints_and_starts_nothing(fleet: Path) -> None:
    result = invoke("up", str(fleet), "--dry-run")
    assert result.exit_code == 0
    assert "--max-num-seqs 3" in result.output
    assert "--served-model-name a x" in result.output
    assert list(json.loads(invoke("up", str(fleet), "--dry-run", "--json").output)) == ["a-0"]
    assert not (fleet.parent / ".pagefleet").exists()


def test_without_a_fleet(fleet: Path) -> None:
    for arguments in (["status"], ["chat", "a", "-p", "hi"], ["status", "--state-dir", "elsewhere"]):
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert "no fleet is up in" in result.stderr
    assert invoke("down").exit_code == 0
    assert invoke("logs", "a").exit_code == 2
    assert "not both" in invoke("status", "-f", str(fleet), "--state-dir", "x").stderr
    assert invoke("up", "none.yaml").exit_code == 2


def test_status_watched_from_a_pipe_is_a_line_for_each_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(state: str) -> FleetStatus:
        units = tuple(
            UnitStatus(slot=slot, role="worker", state=state if slot == "b-0" else "ready", phase=state)
            for slot in ("a-0", "b-0")
        )
        return FleetStatus(
            supervisor=1, state_dir="", url="", started=0, stopping=False, epoch=1, units=units
        )

    answers = iter([told("starting"), told("starting"), told("ready"), None])
    monkeypatch.setattr("gateway.cli.status.require_fleet", lambda state: next(answers))
    monkeypatch.setattr("gateway.cli.status.ask_supervisor", lambda *arguments: next(answers))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    lines = invoke("status", "-w").stdout.splitlines()
    assert [line.partition(" ")[2] for line in lines[:2]] == ["a-0: ready: starting", "b-0: starting"]
    assert [line.partition(" ")[2] for line in lines[2:-1]] == ["a-0: ready", "b-0: ready"]
    assert lines[-1] == "the fleet is down"


def test_logs(fleet: Path) -> None:
    logs = fleet.parent / ".pagefleet" / "logs"
    logs.mkdir(parents=True)
    (logs / "a-0.log").write_text("one\ntwo\n")
    (logs / "gateway.log").write_text("three\n")
    assert invoke("logs", "a", "-n", "1").output == "two\n"
    assert invoke("logs", "gateway").output == "three\n"
    (logs / "a-1.log").write_text("four\n")
    assert invoke("logs", "a").output == "a-0 | one\na-0 | two\na-1 | four\n"
    result = invoke("logs", "b")
    assert result.exit_code == 2
    assert "there are: a-0, a-1, gateway" in result.stderr
    assert "only a fleet started with --detach has that" in invoke("logs", "supervisor").stderr


def test_logs_by_any_name_of_a_model(fleet: Path) -> None:
    state = fleet.parent / ".pagefleet"
    (state / "logs").mkdir(parents=True)
    (state / "logs" / "org-m-1f2e-0.log").write_text("one\n")
    target = Target(slot="org-m-1f2e-0", generation=1, address="unix:/x", state="down")
    routes = Routes(model="org/m", epoch=1, aliases=("x",), targets=(target,))
    write_routes(state / "routes.json", RoutesFile(epoch=1, models={"org/m": routes}))
    for name in ("org-m-1f2e-0", "org-m-1f2e", "org/m", "x"):
        assert invoke("logs", name).output == "one\n"


def test_words_for_a_start(fleet: Path) -> None:
    text = banner(load_fleet(fleet), "http://127.0.0.1:8000", ["b-0"], "Ctrl-C stops it.")
    assert "pagefleet is up at http://127.0.0.1:8000, without b-0" in text
    assert "models: a (x)" in text
    status = UnitStatus(slot="a-0", role="worker", state="starting", phase="weights", pid=7)
    assert describe(status).endswith("a-0: starting: weights")


def test_the_banner_says_who_may_call(fleet: Path) -> None:
    text = banner(load_fleet(fleet), "http://x", [], "")
    assert "authentication: none; whoever reaches this address may use it\n" in text
    assert "KEY" not in text
    fleet.write_text(FLEET.replace("port: 0", "port: 0, auth: {mode: keys}"))
    text = banner(load_fleet(fleet), "http://x", [], "")
    assert "authentication: API keys\n" in text
    assert "  export PAGEFLEET_API_KEY=$(pagefleet keys create --user me)\n" in text
    assert ' -H "authorization: Bearer $PAGEFLEET_API_KEY" ' in text


@pytest.mark.parametrize(
    ("started_as", "shown"),
    [
        ("/opt/p/gateway/cli/__main__.py", "pagefleet"),
        ("/opt/my env/bin/pagefleet", "'/opt/my env/bin/pagefleet'"),
    ],
)
def test_the_command_to_paste_can_be_typed(
    fleet: Path, monkeypatch: pytest.MonkeyPatch, started_as: str, shown: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", [started_as])
    assert f"  {shown} chat a\n" in banner(load_fleet(fleet), "http://x", [], "")
    fleet.write_text("supervisor: {state_dir: my fleet}\n" + FLEET)
    elsewhere = f"--state-dir '{fleet.parent / 'my fleet'}'"
    assert f"  {shown} chat a {elsewhere}\n" in banner(load_fleet(fleet), "http://x", [], "")


def test_on_a_terminal_a_line_per_worker_lives(fleet: Path) -> None:
    fleet.write_text("gateway: {port: 0}\nmodels: [{name: ok, source: o/n}, {name: slow, source: o/n}]\n")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        [*FAKE_FLEET, "up", str(fleet)], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    output = b""
    try:
        while b"Ctrl-C stops it" not in output:
            output += os.read(ours, 65536)
        process.terminate()
        while process.poll() is None:
            output += os.read(ours, 65536)
    except OSError:  # the terminal is gone with its last user
        pass
    finally:
        os.close(ours)
        process.terminate()
    assert process.wait(timeout=60) == 0
    assert "━".encode() in output
    assert b"loading weights" in output


class Scripted(http.server.BaseHTTPRequestHandler):
    """A gateway that answers as the model's name says."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        piece = {"choices": [{"delta": {"content": "héllo"}}]}
        error = {"error": {"message": "the worker ended", "type": "server_error", "param": None, "code": "x"}}
        if body["model"] == "refused":
            self.send_response(503)
            self.end_headers()
            self.wfile.write(json.dumps(error).encode())
            return
        self.send_response(200)
        self.end_headers()
        if not body.get("stream"):
            self.wfile.write(json.dumps({"echo": body}).encode())
            return
        thought = {"choices": [{"delta": {"reasoning_content": "hm", "reasoning": "hm"}}]}
        events = {
            "whole": [piece, "[DONE]"],
            "thoughtful": [thought, thought, piece, "[DONE]"],
            "broken": [piece, error],
            "cut": [piece],
        }[body["model"]]
        for event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("model", "code", "error"),
    [
        ("whole", 0, ""),
        ("thoughtful", 0, "hmhm\n\n"),
        ("broken", 1, "pagefleet: the worker ended\n"),
        ("cut", 1, "pagefleet: the answer broke off\n"),
        ("refused", 1, "pagefleet: the worker ended\n"),
    ],
)
def test_chat_once(url: str, model: str, code: int, error: str) -> None:
    result = invoke("chat", model, "-p", "hi", "--url", url)
    assert (result.exit_code, result.stderr) == (code, error)
    assert ("héllo\n" in result.stdout) == (model != "refused")


def test_chat_as_json_and_in_a_row(url: str) -> None:
    result = invoke("chat", "whole", "-p", "hi", "--system", "be brief", "--json", "--url", url)
    assert [m["role"] for m in json.loads(result.stdout)["echo"]["messages"]] == ["system", "user"]
    assert "max_tokens" not in json.loads(result.stdout)["echo"]
    asked = invoke("chat", "whole", "-p", "hi", "--max-tokens", "5", "--json", "--url", url)
    assert json.loads(asked.stdout)["echo"]["max_tokens"] == 5
    assert invoke("chat", "whole", "--json", "--url", url).exit_code == 2
    result = CliRunner().invoke(
        main, ["chat", "whole", "--url", url], input="hi\n\n/reset\n/help\nagain\n/quit\n"
    )
    assert result.exit_code == 0
    assert result.stdout.count("héllo") == 2
    assert result.stderr.count("/reset forgets") == 2
    assert "> " not in result.stdout  # nobody is asked: it comes from a pipe
    result = CliRunner().invoke(main, ["chat", "refused", "--url", url], input="hi\nagain\n")
    assert (result.exit_code, result.stderr.count("the worker ended")) == (1, 1)
    assert "127.0.0.1:1" in invoke("chat", "a", "-p", "hi", "--url", "http://127.0.0.1:1").stderr

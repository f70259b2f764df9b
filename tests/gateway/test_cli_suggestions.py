"""What the `pagefleet` command says of words that it doesn't know, and that are like some that it does."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from contracts.suggest import closest, did_you_mean
from gateway.cli import main
from gateway.config_check import ABOUT_ROLLOUTS
from gateway.fleet.driver.rollouts import Rollouts
from gateway.fleet.driver.routes import rollout_routes
from gateway.fleet.errors import no_such_model
from gateway.fleet.state import Routes, RoutesFile, write_routes
from worker.config import ConfigError, read_config

STATE = "state"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="pagefleet")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of a fleet that is down."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / STATE
    (root / "logs").mkdir(parents=True)
    model = Routes(model="smollm2", epoch=1, aliases=("small",), targets=())
    write_routes(root / "routes.json", RoutesFile(epoch=1, models={"smollm2": model}))
    return root


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("stauts",), "'status'"),
        (("woker", "--model", "m"), "'worker'"),
        (("swap", "strat", "m"), "'start'"),
        (("keys", "crate"), "'create'"),
        (("limits", "gett"), "'get'"),
        (("up", "--detahc", "fleet.yaml"), "'--detach'"),
        (("swap", "start", "m", "--stpes", "5%"), "'--steps'"),
        (("limits", "set", "user", "u", "--qsp", "5"), "'--qps'"),
        (("status", "--jsn"), "'--json'"),
    ],
)
def test_commands_and_options(words: tuple[str, ...], meant: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert "Did you mean" in result.stderr
    assert meant in result.stderr


def test_what_is_like_nothing_gets_no_suggestion() -> None:
    result = invoke("xyzzy")
    assert result.exit_code == 2
    assert "No such command 'xyzzy'" in result.stderr
    assert "mean" not in result.stderr
    assert did_you_mean("xyzzy", ["status"]) == ""
    assert closest("gamma", ["gemma", "llama"]) == "gemma"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-num-seq", "4"], "--max-num-seq: no such option; did you mean '--max-num-seqs'?"),
        (["--max_modle_len=8"], "--max-modle-len: no such option; did you mean '--max-model-len'?"),
        (["--tensor-parallel-sizes", "1"], "did you mean '--tensor-parallel-size'?"),
        (["--xyzzy"], "--xyzzy: no such option; see --help"),
    ],
)
def test_options_of_a_worker(words: list[str], message: str) -> None:
    """One line an option: what follows it isn't told as a mistake of its own."""
    with pytest.raises(ConfigError) as caught:
        read_config(["--model", "m", *words])
    (problem,) = caught.value.problems
    assert problem.endswith(message)


def test_variables_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEFLEET_WORKER_MAX_NUM_SEQ", "4")
    with pytest.raises(ConfigError, match="did you mean 'PAGEFLEET_WORKER_MAX_NUM_SEQS'"):
        read_config(["--model", "m"])


def test_names_of_models(fleet: Path) -> None:
    assert no_such_model("smolm2", ["smollm2", "qwen"]) == (
        "the fleet has no model 'smolm2'; it has smollm2, qwen; did you mean 'smollm2'?"
    )
    (fleet / "logs" / "smollm2-0.log").touch()
    for words in (("logs", "smolm2"), ("keys", "create", "--user", "u", "--model", "smolm2")):
        result = invoke(*words, "--state-dir", str(fleet))
        assert "did you mean 'smollm2" in result.stderr, (words, result.output)


class _Gateway(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._answer(200, {"data": [{"id": "smollm2"}, {"id": "small"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        error = {"message": "There is no model 'smolm2'.", "code": "model_not_found"}
        self._answer(404, {"error": error})

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_model_of_a_chat(gateway: str) -> None:
    for form in ((), ("--json",)):
        result = invoke("chat", "smolm2", "-p", "Hi", "--url", gateway, *form)
        assert result.exit_code == 1
        assert result.stderr == "pagefleet: There is no model 'smolm2'; did you mean 'smollm2'?\n"


def test_words_that_no_name_may_end_with_are_those_that_the_supervisor_is_asked() -> None:
    paths = [route.path for route in rollout_routes(Rollouts.__new__(Rollouts))]
    words = {path.rpartition("/")[2] for path in paths if path.startswith("/rollouts/{model:path}/")}
    assert words == set(ABOUT_ROLLOUTS)

"""Rollouts, asked of the supervisor on its admin socket."""

from __future__ import annotations

from typing import TypeVar, cast
from urllib.parse import quote

import httpx
import msgspec

from gateway.cli.common import ANSWER_WITHIN, PATIENCE, refusal_in, supervisor_client, why_unreachable
from gateway.fleet.driver.asked import Plan, StartRequest
from gateway.fleet.driver.routes import RolloutStatus
from gateway.fleet.errors import EXIT_CONFLICT, EXIT_FAILED
from gateway.fleet.rollout import Record, no_rollout
from gateway.fleet.statedir import StateDir

T = TypeVar("T")


class SwapRefused(Exception):
    """Why nothing was done, and the exit code for it."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Unreachable(SwapRefused):
    """No supervisor is there, or no longer."""


class Swaps:
    """The supervisor of the fleet in `state`. All raise SwapRefused."""

    def __init__(self, state: StateDir) -> None:
        self._state = state
        self._client = supervisor_client(state)

    @property
    def comes_back(self) -> bool:
        """Whether rollouts go on when the supervisor dies, and systemd starts it again."""
        return self._state.systemd.exists()

    def plan(self, model: str, asked: StartRequest) -> Plan:
        return self._ask("POST", f"{_path(model)}?dry_run=1", Plan, asked, within=ANSWER_WITHIN)

    def start(self, model: str, asked: StartRequest) -> RolloutStatus:
        return self._ask("POST", _path(model), RolloutStatus, asked, within=ANSWER_WITHIN)

    def undo(self, model: str) -> RolloutStatus:
        return self._ask("POST", f"{_path(model)}/undo", RolloutStatus, within=ANSWER_WITHIN)

    def command(self, model: str, command: str) -> RolloutStatus:
        return self._ask("POST", f"{_path(model)}/{command}", RolloutStatus)

    def latest(self, model: str) -> RolloutStatus | None:
        """What is under way, or was last; None: the model never had a rollout."""
        kind = cast("type[RolloutStatus | None]", RolloutStatus | None)
        return self._ask("GET", _path(model), kind)

    def status(self, model: str) -> RolloutStatus:
        """The same; refused when it never had one."""
        found = self.latest(model)
        if found is None:
            raise SwapRefused(no_rollout(model), EXIT_CONFLICT)
        return found

    def next(self, model: str, revision: int, seconds: float) -> RolloutStatus:
        """As soon as its revision is another one, or after so many seconds."""
        return self._ask(
            "GET",
            f"{_path(model)}?revision={revision}&wait={seconds:g}",
            RolloutStatus,
            within=PATIENCE + seconds,
        )

    def all(self) -> list[RolloutStatus]:
        return self._ask("GET", "/rollouts", list[RolloutStatus])

    def history(self, model: str) -> list[Record]:
        return self._ask("GET", f"{_path(model)}/history", list[Record])

    def _request(self, method: str, path: str, content: bytes | None, within: float) -> httpx.Response:
        """A question that was given up for others (gateway/fleet/admin_connections.py) is asked once more."""
        try:
            return self._client.request(method, path, content=content, timeout=within)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            if method != "GET":
                raise
            return self._client.request(method, path, timeout=within)

    def _ask(self, method: str, path: str, kind: type[T], body: object = None, within: float = PATIENCE) -> T:
        """`within`: seconds; a start or an undo asks the memory ledger first."""
        content = None if body is None else msgspec.json.encode(body)
        try:
            response = self._request(method, path, content, within)
        except (httpx.HTTPError, OSError) as error:
            raise Unreachable(why_unreachable(self._state, error)) from None
        try:
            if response.status_code >= 400:
                refusal = refusal_in(response)
                raise SwapRefused(refusal.message, refusal.exit_code)
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError:
            raise SwapRefused(
                f"the supervisor in {self._state.root} answered in a way this version doesn't understand"
            ) from None


def _path(model: str) -> str:
    """Whatever somebody writes is a name in there: `..` would lead to other endpoints."""
    parts = quote(model, safe="/").split("/")
    return "/".join(["/rollouts", *("%2E" * len(part) if part in (".", "..") else part for part in parts)])

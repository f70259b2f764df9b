"""How a rollout looks: a step bar with the judge's numbers on a terminal, else a line for each transition."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from contracts.units import format_duration
from gateway.cli.common import print_json
from gateway.cli.display import can_be_live, make_console, start_words, unit_table
from gateway.cli.swap_client import SwapRefused, Swaps, Unreachable
from gateway.fleet.driver.asked import changes_between
from gateway.fleet.driver.routes import RolloutStatus
from gateway.fleet.judge import Measure
from gateway.fleet.judge import Outcome as Finding
from gateway.fleet.rollout import Rollout, Version
from gateway.fleet.rollout.model import Entry, Phase
from gateway.fleet.unit import UnitStatus

POLL = 10.0  # seconds that one question to the supervisor waits for news
BACK_WITHIN = 60.0  # seconds that a supervisor may be away, where it is started again
_STYLES: dict[Finding, str] = {"pass": "green", "hold": "yellow", "fail": "bold red"}
_ENDS = {"completed": "green", "rolled_back": "bold red", "aborted": "yellow", "failed": "bold red"}
_STARTS: frozenset[Phase] = frozenset({"starting", "restoring"})  # how far a process is, is news as well
LAST_LINES = 4
_NAMES = {"error_rate": "errors", "ttft": "first token", "tpot": "per token", "crashes": "crashes"}


class Watch:
    """Shows one rollout as it goes on."""

    def __init__(self, *, as_json: bool) -> None:
        self._json = as_json
        self._console = make_console()
        self._said: Entry | None = None  # the last line of its log that was shown
        self._starts: dict[str, str] = {}  # what was said of processes that start, by slot
        self._live: Live | None = None
        if can_be_live(self._console) and not as_json:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def follow(self, swaps: Swaps, found: RolloutStatus, timeout: float | None) -> int | None:
        """Until it is over: its exit code; None when the time was."""
        model, rollout_id = found.rollout.model, found.rollout.id
        deadline = None if timeout is None else time.monotonic() + timeout
        self.show(found)
        while found.exit_code is None:
            left = POLL if deadline is None else min(POLL, deadline - time.monotonic())
            if left <= 0:
                return None
            moves = self._live is not None or found.rollout.phase in _STARTS
            news = _next(swaps, found.rollout, min(left, 1.0) if moves else left)
            if news.rollout.id != rollout_id:  # it is over, and somebody has begun another one
                return _recorded_code(swaps, model, rollout_id)
            is_news = news.rollout.revision != found.rollout.revision or self._starts != _milestones(news)
            if is_news or self._live is not None:
                self.show(news)
            found = news
        return found.exit_code

    def show(self, found: RolloutStatus) -> None:
        said, self._starts = self._starts, _milestones(found)
        if self._json:
            print_json(found)
        elif self._live is not None:
            self._live.update(page(found.rollout, found.starting), refresh=True)
        else:
            for entry in _after(self._said, found.rollout.log):
                click.echo(log_line(found.rollout, entry))
                self._said = entry
            for slot, words in self._starts.items():
                if said.get(slot) != words:
                    click.echo(log_line(found.rollout, Entry(time.time(), found.rollout.phase, words)))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _recorded_code(swaps: Swaps, model: str, rollout_id: str) -> int:
    """How a rollout ended that isn't the model's last one any more."""
    for record in swaps.history(model):
        if record.id == rollout_id:
            return record.exit_code
    raise SwapRefused(f"rollout {rollout_id} is over, and not on record; see the supervisor's log")


def _next(swaps: Swaps, known: Rollout, wait: float) -> RolloutStatus:
    """Also from a supervisor that was killed meanwhile and comes back."""
    deadline = time.monotonic() + BACK_WITHIN
    while True:
        try:
            return swaps.next(known.model, known.revision, wait)
        except Unreachable:
            if not swaps.comes_back or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def _milestones(found: RolloutStatus) -> dict[str, str]:
    """What is worth a line of each process that starts: its phase, and each quarter of that."""
    return {unit.slot: f"{unit.slot}: {start_words(unit, every=25)}" for unit in found.starting}


def log_line(rollout: Rollout, entry: Entry) -> str:
    """One transition of a rollout."""
    clock = time.strftime("%H:%M:%S", time.localtime(entry.at))
    return f"{clock} {rollout.model}: {entry.phase}: {entry.what}"


def _after(last: Entry | None, log: tuple[Entry, ...]) -> tuple[Entry, ...]:
    """What came after a line; all when that is no longer in the log."""
    return log[log.index(last) + 1 :] if last in log else log


def page(rollout: Rollout, starting: Sequence[UnitStatus] = (), lines: int = LAST_LINES) -> RenderableType:
    """A rollout: its steps, what it waits for, the processes that start, the judge's numbers, the last
    `lines` of its log."""
    old, new = describe_version(rollout.old), describe_version(rollout.new, rollout.old)
    head = Text(f"{rollout.model}: {old} → {new}")
    parts: list[RenderableType] = [head, _bar(rollout), Text(_state(rollout), style=_style(rollout))]
    parts += [unit_table(starting)] if starting else []
    verdict = rollout.verdicts.get(rollout.step_name)
    if verdict is not None:
        judged = Text(f"judge at {rollout.step_name}, {verdict.reference}: ")
        judged.append(verdict.outcome, style=_STYLES[verdict.outcome])
        judged.append(f", {verdict.reason}")
        parts += [judged, _measures(verdict.measures)]
    last = rollout.log[-lines:] if lines else ()
    parts += [Text(log_line(rollout, entry), style="dim") for entry in last]
    return Group(*parts)


def _bar(rollout: Rollout) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    share = 100 if rollout.phase == "completed" else rollout.standby_bp / 100
    steps = Text()
    for number, step in enumerate(rollout.steps):
        done = rollout.phase == "completed" or number < rollout.step
        style = "green" if done else "bold yellow" if number == rollout.step else "dim"
        steps.append(f" {step:g}%", style=style)
    table.add_row(ProgressBar(total=100, completed=share, width=40), Text(f"{share:g}%"), steps)
    return table


def _state(rollout: Rollout) -> str:
    if rollout.terminal:
        took = age((rollout.ended or rollout.started) - rollout.started)
        cut = f", {rollout.cut} streams outlived the drain limit and were cut" if rollout.cut else ""
        return f"{rollout.phase} after {took}: {rollout.reason}{cut}"
    marks = [mark for mark in ("paused", "suspended") if getattr(rollout, mark)]
    back = f", going back: {rollout.reason}" if rollout.going_back else ""
    left = f", {age(rollout.due - time.time())} left" if rollout.due and rollout.due > time.time() else ""
    return f"{rollout.phase}{''.join(f', {mark}' for mark in marks)}{left}{back}"


def _style(rollout: Rollout) -> str:
    return _ENDS[rollout.phase] if rollout.terminal else "yellow" if rollout.going_back else ""


def _measures(measures: tuple[Measure, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "NEW", "OLD", "RATIO", "LIMIT", "SAMPLES", ""):
        table.add_column(column)
    for measure in measures:
        samples = f"{measure.canary_samples}/{measure.primary_samples}" if measure.name != "crashes" else ""
        table.add_row(
            _NAMES[measure.name],
            _value(measure, measure.canary),
            _value(measure, measure.primary),
            f"{measure.ratio:.2f}" if measure.ratio is not None else "",
            f"{measure.limit:.2%}" if measure.name == "error_rate" else f"{measure.limit:g}",
            samples,
            Text(measure.outcome, style=_STYLES[measure.outcome]),
        )
    return table


def _value(measure: Measure, value: float | None) -> str:
    if value is None:
        return "-"
    if measure.name == "error_rate":
        return f"{value:.2%}"
    return f"{value:g}" if measure.name == "crashes" else f"{value * 1000:.1f} ms"


def describe_version(version: Version, beside: Version | None = None) -> str:
    """Its source, without the folders that lead to it; the options in which it differs from another one."""
    name = version.source.rstrip("/").rpartition("/")[2] or version.source
    if beside is None:
        return name
    try:
        changes = changes_between(beside, version)
    except ValueError:  # an option that another release had
        return name
    changed = [f"{option}={show_option(value)}" for option, (_, value) in changes.items()]
    return f"{name} ({', '.join(changed)})" if changed else name


def show_option(value: object) -> str:
    """As a worker option is written; None is one that nobody has set."""
    return "default" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def age(seconds: float) -> str:
    """``1m5s``"""
    return format_duration(round(max(0.0, seconds), 1))

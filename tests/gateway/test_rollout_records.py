"""How a rollout begins and what it leaves: refusals, steps, undo, the record, the log."""

from __future__ import annotations

import msgspec
import pytest

from gateway.fleet.rollout import Options, Record, Refusal, command, decode, encode, record_of
from gateway.fleet.rollout import events as e
from tests.gateway.rollout_run import NEW, OLD, Run


def test_start_is_refused_with_a_reason_and_a_code():
    asked = e.Start(id="r", model="m", old=OLD, new=NEW)
    bad = msgspec.structs.replace(asked, options=Options(steps=(50, 25), hold=-1))
    answer = command(None, bad, 0)
    assert isinstance(answer, Refusal)
    assert answer.exit_code == 2
    assert "steps" in answer.reason
    assert "hold" in answer.reason

    big = msgspec.structs.replace(asked, misfit="20 GiB + 20 GiB > 32 GiB")
    answer = command(None, big, 0)
    assert isinstance(answer, Refusal)
    assert answer.exit_code == 5
    assert "recreate" in answer.reason
    fits_alone = msgspec.structs.replace(big, options=Options(strategy="recreate"))
    assert not isinstance(command(None, fits_alone, 0), Refusal)

    assert Run().refused(asked).exit_code == 6


@pytest.mark.parametrize("asked", [e.Pause(), e.Resume(), e.Promote(), e.Abort(), e.Undo(id="u")])
def test_without_a_rollout_there_is_nothing_to_command(asked: e.Command):
    answer = command(None, asked, 0)
    assert isinstance(answer, Refusal)
    assert answer.exit_code == 6


@pytest.mark.parametrize(
    "steps",
    [
        (),
        (0, 100),
        (50,),
        (100, 100),
        (5, 101),
        (float("nan"), 100),
        (-5, 100),
        (0.001, 100),
        tuple(n / 2 for n in range(1, 201)),
    ],
)
def test_bad_steps(steps: tuple[float, ...]):
    assert Options(steps=steps).problems()
    assert not Options(steps=(0.01, 100)).problems()


def completed() -> Run:
    run = Run(steps=(100,))
    run.prove()
    run.applied()
    run.ask(e.Promote())
    run.leave("primary")
    return run


def test_undo_is_a_rollout_back_without_judging():
    run = completed()
    run.ask(e.Undo(id="r2", completed=record_of(run.rollout)))
    undo = run.rollout
    assert (undo.id, undo.old, undo.new, undo.full) == ("r2", NEW, OLD, True)
    assert (undo.phase, undo.terminal) == ("starting", False)
    assert completed().refused(e.Abort()).reason.endswith("`undo` goes back")


def test_what_changed_nothing_is_not_what_is_undone():
    run = Run()
    assert run.refused(e.Undo(id="u")).exit_code == 6
    run.ask(e.Abort())
    run.tell(e.Stopped, side="standby")
    assert run.rollout.phase == "aborted"
    reason = run.refused(e.Undo(id="u")).reason
    assert reason == "nothing to undo: no rollout of m has changed anything; the last one, r1, was aborted"
    run.ask(e.Undo(id="r2", completed=record_of(completed().rollout)))
    assert (run.rollout.old, run.rollout.new) == (NEW, OLD)


def test_the_record_for_the_history():
    record = record_of(completed().rollout)
    assert msgspec.json.decode(msgspec.json.encode(record), type=Record) == record
    assert (record.outcome, record.exit_code, record.new) == ("completed", 0, NEW)
    assert [entry.phase for entry in record.log][:3] == ["starting", "checking", "warming"]
    with pytest.raises(ValueError, match="isn't over"):
        record_of(Run().rollout)


def test_only_its_own_version_of_the_file_is_read():
    saved = encode(Run().rollout)
    with pytest.raises(ValueError, match="version 2"):
        decode(saved.replace(b'"version":1', b'"version":2'))
    with pytest.raises(ValueError, match="truncated"):
        decode(saved[:-5])
    with pytest.raises(ValueError, match="phase"):
        decode(saved.replace(b'"phase":"starting"', b'"phase":"dancing"'))


def test_the_log_is_bounded():
    run = Run()
    run.prove()
    for _ in range(500):
        run.ask(e.Pause())
        run.ask(e.Resume())
    assert len(run.rollout.log) == 200

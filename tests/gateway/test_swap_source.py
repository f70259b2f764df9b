"""A source that is there and is no model is refused before anything starts, in equal words everywhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner, Result

from gateway.cli import main as pagefleet
from gateway.fleet.commands import Slot
from gateway.fleet.ledger import Ledger, Worker, make_ledger
from tests.gateway.swapping import fleet_file, swapping

NEEDED = "; needed is a .gguf file, or a directory with config.json and *.safetensors"


async def run(*words: object) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, pagefleet, [str(word) for word in words])


async def test_what_is_no_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model, but long enough to have a header")
    (tmp_path / "magic.gguf").write_bytes(b"GGML" + bytes(60))
    (tmp_path / "none").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    not_gguf = "not a GGUF file (it doesn't start with 'GGUF')"
    refused = {
        "notes.txt": (2, f"notes.txt: {not_gguf}{NEEDED}"),
        "magic.gguf": (2, f"magic.gguf: {not_gguf}{NEEDED}"),
        "pipe.gguf": (2, f"pipe.gguf: neither a file nor a directory{NEEDED}"),
        "none": (2, "none holds no model: neither config.json nor a .gguf file is in it"),
    }
    path = fleet_file(tmp_path)
    fleet_text = path.read_text()
    async with swapping(path, make_ledger) as fleet:
        before = {(unit.slot, unit.pid) for unit in fleet.supervisor.statuses if unit.role == "worker"}
        where = ("--state-dir", fleet.state.root)
        for name, (code, reason) in refused.items():
            source = tmp_path / name
            path.write_text(fleet_text.replace("fake/ok", str(source)))
            commands: list[tuple[object, ...]] = [("swap", "start", "m", "--to", source, *where)]
            if name == "notes.txt":  # a second each
                commands += [
                    (*commands[0], "--dry-run"),
                    ("config", "apply", path, *where),
                    ("config", "apply", path, "--dry-run", *where),
                    ("plan", path),
                ]
            for command in commands:
                done = await run(*command)
                assert (done.exit_code, reason in done.stderr) == (code, True), (command, done.output)
        assert fleet.rollouts.latest("m") is None
        units = [unit for unit in fleet.history if unit.role == "worker" and unit.pid is not None]
        assert {(unit.slot, unit.pid) for unit in units} == before


async def test_an_undo_to_what_is_no_model_any_more_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """A source that was deleted, or written over, since it was swapped away."""
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    for file in (old, new):
        file.write_bytes(b"GGUF")
    path = fleet_file(tmp_path)
    path.write_text(path.read_text().replace("fake/ok", str(old)))

    def ledger(_fleet: object, _machine: object, slots: Sequence[Slot]) -> Ledger:
        """A model is a file that is there and isn't empty."""
        workers = [
            Worker(
                slot=slot.name, model=slot.entry.name, place="host", estimate=None, total=1,
                problem=None if is_model(slot.entry.source) else f"{slot.entry.source} is no model",
                unknown=None, invalid=not is_model(slot.entry.source),
            )
            for slot in slots
        ]  # fmt: skip
        return Ledger(workers=tuple(workers), places=(), problems=())

    async with swapping(path, ledger) as fleet:
        where = ("--state-dir", fleet.state.root)
        await fleet.start(str(new))
        assert (await fleet.over()).phase == "completed"
        for spoil in (lambda: old.write_bytes(b""), old.unlink):
            spoil()
            done = await run("swap", "undo", "m", *where)
            assert (done.exit_code, f"{old} is no model" in done.stderr) == (2, True), done.output
        assert [record.outcome for record in fleet.rollouts.history("m")] == ["completed"]
        assert set(fleet.slots().values()) == {"ready"}
        old.write_bytes(b"GGUF")
        assert (await run("swap", "undo", "m", *where)).exit_code == 0
        assert fleet.rollouts.history("m")[-1].new.source == str(old)


def is_model(source: str) -> bool:
    path = Path(source)
    return path.is_file() and path.stat().st_size > 0

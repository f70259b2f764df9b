"""The `pagefleet` command; one module per group of commands, imported when it is used."""

from __future__ import annotations

import errno
import importlib
import os
from pathlib import Path
from typing import Any

import click

_DENIED = (errno.EACCES, errno.EPERM)
_COMMANDS = {
    "up": "gateway.cli.up:up",
    "down": "gateway.cli.down:down",
    "status": "gateway.cli.status:status",
    "top": "gateway.cli.top:top",
    "logs": "gateway.cli.logs:logs",
    "chat": "gateway.cli.chat:chat",
    "swap": "gateway.cli.swap:swap",
    "config": "gateway.cli.config:config",
    "keys": "gateway.cli.keys:keys",
    "limits": "gateway.cli.limits:limits",
    "cache": "gateway.cli.cache:cache",
    "usage": "gateway.cli.usage:usage",
    "audit": "gateway.cli.audit:audit",
    "plan": "gateway.cli.plan:plan",
    "nginx": "gateway.cli.nginx:nginx",
    "systemd": "gateway.cli.systemd:systemd",
    "worker": "gateway.cli.process:worker",
    "gateway": "gateway.cli.process:gateway",
    "version": "gateway.cli.process:version",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, whose suggestions for a command that there isn't come from those it has imported."""
        if args and args[0] not in _COMMANDS and not ctx.resilient_parsing and args[0][:1] != "-":
            raise click.exceptions.NoSuchCommand(args[0], possibilities=_COMMANDS, ctx=ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """What can't be read or written is said, and no traceback. A fleet's files are its user's alone:
        whoever else comes is told who that is."""
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.filename is None:
                raise
            from gateway.cli.common import as_owner, fail

            owner = as_owner(Path(os.fsdecode(error.filename)).absolute())
            fail(f"{error.filename}: {error.strerror}{f' ({owner})' if error.errno in _DENIED else ''}")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The first sentence of each command's help, whole: lines are broken where click would cut them."""
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(1000)) for name, command in commands.items() if command]
            )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.command(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pagefleet", message="%(prog)s %(version)s")
def main() -> None:
    """Several language models behind one HTTP endpoint.

    Exit codes: 0 ok, 1 failed, 2 invalid use or configuration, 3 timed out and still running,
    4 rolled back, 5 doesn't fit, 6 conflict, 7 degraded, 130 interrupted.
    """

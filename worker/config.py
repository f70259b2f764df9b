"""The worker's configuration: command line over environment (`PAGEFLEET_WORKER_…`) over defaults.

The one frozen object of the process; nothing else reads flags or the environment.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NoReturn

from pydantic import Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from contracts.options import WorkerOptions
from contracts.plain import describe_value
from contracts.spans import Endpoint
from contracts.suggest import did_you_mean
from contracts.units import ByteSize, Duration
from worker import spellings

ENV_PREFIX = "PAGEFLEET_WORKER_"
EXIT_INVALID = 2


class WorkerConfig(WorkerOptions):
    """Worker options and what only the serving process needs: names, addresses, its place in the fleet."""

    model: str = Field(description="Directory, file.gguf, hub id, or random:CONFIG.json for random weights.")
    served_model_name: tuple[str, ...] = Field(
        (), description="Names that requests may use, the first in answers; default: the model as given."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8001, description="TCP port; 0: any free one.")
    uds: str | None = Field(None, description="Unix socket to listen on, in place of host and port.")
    slot: str = Field("standalone", description="Place in the fleet that this process fills.")
    generation: Annotated[int, Field(ge=0)] = Field(
        0, description="Counts the processes that filled the slot."
    )
    parent_pid: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Process whose end ends this one as well; none: it stands alone."
    )
    max_body: Annotated[ByteSize, Field(ge=1024)] = Field(
        64 << 20, description="Largest request body; default: 64MiB."
    )
    shutdown_timeout: Duration = Field(
        900.0, description="Drain limit: how long running answers may go on after SIGTERM; default: 15m."
    )
    start_timeout: Duration = Field(
        120.0,
        description="How long a start may show no progress before systemd, if that runs it, ends it; "
        "default: 2m.",
    )
    otlp_traces_endpoint: Endpoint = Field(
        None, description="OpenTelemetry collector (OTLP over HTTP) for spans of requests; none: no tracing."
    )
    trace_sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="Share of requests traced, of those whose sender doesn't say (traceparent)."
    )
    stall_limit: Duration = Field(
        120.0,
        description="/health answers 503 when the engine has work but took no step for so long; default: 2m.",
    )

    @field_validator("gpus", "served_model_name", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """Lists come as `0,1` from the environment, as `0 1` or `0,1` from the command line."""
        items = [value] if isinstance(value, (str, int)) else value
        if not isinstance(items, (list, tuple)):
            return value
        return tuple(
            part for item in items for part in (item.split(",") if isinstance(item, str) else [item])
        )

    @field_validator("block_size", mode="before")
    @classmethod
    def _whole_number(cls, value: object) -> object:
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names the worker answers to; never empty."""
        return self.served_model_name or (self.model,)


class _FromEnvironment(WorkerConfig, BaseSettings):
    """Reads what the command line leaves open from the environment."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, enable_decoding=False, frozen=True, extra="forbid"
    )


_GROUPS: dict[str, tuple[str, ...]] = {
    "model": (
        "model",
        "served_model_name",
        "revision",
        "tokenizer",
        "chat_template",
        "dtype",
        "rope_theta",
        "seed",
        "runner",
        "pooling_type",
    ),
    "tools and reasoning": ("tool_call_parser", "reasoning_parser"),
    "device": ("device", "gpus", "threads", "enforce_eager"),
    "memory": (
        "gpu_memory_utilization",
        "gpu_memory",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "block_size",
        "kv_cache_dtype",
        "enable_prefix_caching",
    ),
    "scheduling": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "tpot_target_ms",
        "max_waiting",
    ),
    "server": ("host", "port", "uds", "max_body", "shutdown_timeout", "stall_limit", "disable_log_stats"),
    "tracing": ("otlp_traces_endpoint", "trace_sample_ratio"),
    "fleet": ("slot", "generation", "parent_pid", "start_timeout"),
}


class ConfigError(ValueError):
    """Everything that is wrong with the command line and the environment, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def read_config(argv: Sequence[str]) -> WorkerConfig:
    """WorkerConfig from flags and environment; ConfigError lists every problem at once.

    `--help` prints and exits. Underscores in flag names are accepted for dashes.
    """
    given, unknown = _parser().parse_known_args([_with_dashes(word) for word in argv])
    flags = [*map(_flag, WorkerConfig.model_fields), *spellings.taken()]
    mistyped = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    problems = [_no_such_option(word, flags) for word in mistyped or unknown]
    problems += spellings.problems(vars(given))
    if given.model_tag is not None and given.model is None:
        given.model = given.model_tag
    elif given.model_tag is not None and not mistyped:  # else it may be the value of that
        problems.append(f"{given.model_tag}: no such option, and --model is given; see --help")
    values = {name: vars(given)[name] for name in WorkerConfig.model_fields if vars(given)[name] is not None}
    names = {ENV_PREFIX + name.upper() for name in WorkerConfig.model_fields}
    problems += [
        f"{name}: no such option{did_you_mean(name, names)}"
        for name in os.environ
        if name.startswith(ENV_PREFIX) and name not in names
    ]
    try:
        return _checked(values, problems)
    except ValidationError as error:
        problems += [_describe(dict(item), values) for item in error.errors()]
    raise ConfigError(problems)


def read_config_or_exit(argv: Sequence[str]) -> WorkerConfig:
    """`read_config` for the command line: problems go to stderr and the process ends with code 2."""
    try:
        return read_config(argv)
    except ConfigError as error:
        _exit(error.problems)


def _exit(problems: Sequence[str]) -> NoReturn:
    for problem in problems:
        print(f"worker: {problem}", file=sys.stderr)
    raise SystemExit(EXIT_INVALID)


def _checked(values: dict[str, Any], problems: Sequence[str]) -> WorkerConfig:
    settings = _FromEnvironment(**values)
    if problems:
        raise ConfigError(problems)
    # Back to the plain class: a copy of the configuration must never read the environment again.
    return WorkerConfig(**{name: getattr(settings, name) for name in WorkerConfig.model_fields})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pagefleet worker",
        usage="%(prog)s [--model] MODEL [options]",
        description="Serve one model over HTTP.",
        epilog=f"Every option can be set in the environment as {ENV_PREFIX}<NAME>; the command line wins. "
        "Sizes read 20GiB or 512MB, durations 2s or 15m.",
        allow_abbrev=False,
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="The same as --model.")
    for title, names in _GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add_option(group, name, WorkerConfig.model_fields[name])
    spellings.add_flags(parser)
    return parser


def _add_option(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    flag = "--" + name.replace("_", "-")
    help_text = (f"{field.description}" + _default_note(field)).replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(
            flag, dest=name, action=argparse.BooleanOptionalAction, default=None, help=help_text
        )
    else:
        nargs = "+" if isinstance(field.default, tuple) else None
        metavar = name.rsplit("_", 1)[-1].upper()
        group.add_argument(flag, dest=name, nargs=nargs, default=None, metavar=metavar, help=help_text)


def _default_note(field: FieldInfo) -> str:
    default = field.default
    if field.is_required():
        return " (required)"
    if default is None or default == () or "default:" in (field.description or ""):
        return ""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    return f" (default: {f'{default:g}' if isinstance(default, float) else default})"


def _no_such_option(word: str, flags: Sequence[str]) -> str:
    return f"{word}: no such option{did_you_mean(word, flags) or '; see --help'}"


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _describe(error: dict[str, Any], values: Mapping[str, Any]) -> str:
    message = describe_value(error)
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return f"{_flag(name)}: is required" + ("; `pagefleet worker MODEL`" if name == "model" else "")
    variable = ENV_PREFIX + name.upper()
    label = variable if name not in values and variable in os.environ else _flag(name)
    return f"{label}: {message}"

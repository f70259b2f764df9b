"""The fleet file: one frozen configuration object, read once, with everything that is wrong reported at once.

Relative paths: a model's `source`, `tokenizer` and `chat_template` are looked up from the fleet file's
directory, then from the working directory; `supervisor.state_dir` is relative to the working directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from contracts.options import WorkerOptions
from contracts.spans import Endpoint
from contracts.units import ByteSize, Duration
from gateway.config_check import check_names, check_paths, check_variable, describe
from gateway.identity.settings import AuthSettings
from gateway.limits.bounds import bounds_of
from gateway.yaml_source import KeyPath, Problem, YamlSource, dotted, parse_yaml

ENV_PREFIX = "PAGEFLEET_"


class ConfigError(Exception):
    """A fleet file that can't be used; `problems` holds everything found, each with its place."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def _only(allowed: Collection[object], hint: str) -> AfterValidator:
    """Values that the design knows and this version can't do are refused, never ignored."""

    def check(value: Any) -> Any:
        if value not in allowed:
            raise ValueError(f"{value!r} is not supported yet; {hint}")
        return value

    return AfterValidator(check)


def _redis_url(value: str | None) -> str | None:
    if value is not None:
        from gateway.limits.redis_link import check_url  # only where it is used: it takes long to load

        check_url(value)
    return value


def _not_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def _positive(value: float) -> float:
    if not 0 < value <= 7 * 86400:
        raise ValueError("a duration must be more than 0 and at most 7d")
    return value


def _days(value: float) -> float:
    if not 86400 <= value <= 36_500 * 86400:
        raise ValueError("a duration must be from 1d to 36500d")
    return value


def _regex_compiles(value: str) -> str:
    if len(value) > 1 and value.startswith("/") and value.endswith("/"):
        try:
            re.compile(value[1:-1])
        except re.error as error:
            raise ValueError(f"this is no regular expression: {error}") from None
    return value


Count = Annotated[int, BeforeValidator(_not_bool)]
Timeout = Annotated[Duration, AfterValidator(_positive)]
ModelName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]*$", max_length=128)]


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LimitSettings(_Block):
    """Requests per second and at once, requests in flight, tokens per minute; null: no limit."""

    qps: Annotated[float, BeforeValidator(_not_bool), Field(gt=0)] | None = None
    burst: Annotated[Count, Field(ge=1)] | None = None
    concurrency: Annotated[Count, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[Count, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> LimitSettings:
        bounds_of(self).check()
        return self

    @property
    def any(self) -> bool:
        return bool(bounds_of(self))


class GatewayLimits(_Block):
    """Limits of every user, and what holds while Redis is away, or takes over `redis_timeout` seconds."""

    default: LimitSettings = LimitSettings()
    on_redis_error: Literal["local", "open", "closed"] = "local"
    redis_timeout: Timeout = 0.05


class Timeouts(_Block):
    """In seconds. `first_byte`: until a stream begins; `idle`: between two pieces of it; `total`: for any
    answer."""

    connect: Timeout = 2.0
    first_byte: Timeout = 120.0
    idle: Timeout = 60.0
    total: Timeout = 900.0


class HealthSettings(_Block):
    """When a worker gets no requests, while another can take them. In seconds.

    After `max_fails` failures within `fail_timeout` none for `fail_timeout`, then one for a trial; 0:
    failures aren't counted. Every `probe_interval` each worker is asked who and how it is, and has
    `probe_timeout` to answer.
    """

    max_fails: Annotated[Count, Field(ge=0, le=1_000_000)] = 3
    fail_timeout: Timeout = 10.0
    probe_interval: Timeout = 2.0
    probe_timeout: Timeout = 5.0


class QueueSettings(_Block):
    """Requests that may wait, per model and gateway process, for a worker that isn't full; 0: none."""

    size: Annotated[Count, Field(ge=0, le=100_000)] = 1024


def _home_expanded(value: Path) -> Path:
    try:
        return value.expanduser()
    except RuntimeError as error:  # no such user
        raise ValueError(f"{value}: {error}") from None


def _absolute(value: Path) -> Path:
    return _home_expanded(value).absolute()


class TracingSettings(_Block):
    """Where spans of requests go, and the share that is traced of those whose callers don't say."""

    endpoint: Endpoint = None
    sample_ratio: Annotated[float, BeforeValidator(_not_bool), Field(ge=0, le=1)] = 1.0


class AuditSettings(_Block):
    """Where requests are written down, one line each; null: nowhere. Over `max_size` bytes the file is moved
    away, and `keep` such files are kept. `prompts`: with the beginning of each body."""

    file: Annotated[Path, AfterValidator(_absolute)] | None = None
    prompts: bool = False
    max_size: Annotated[ByteSize, Field(ge=64 * 1024)] = 64 * 1024**2
    keep: Annotated[Count, Field(ge=1, le=1000)] = 5


class GatewaySettings(_Block):
    """The gateway's processes, all on one port; 0 takes a free one, which `pagefleet status` shows."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[Count, Field(ge=0, le=65535)] = 8000
    processes: Annotated[Count, Field(ge=1, le=64)] = 1
    redis_url: Annotated[str | None, AfterValidator(_redis_url)] = None
    auth: AuthSettings = AuthSettings()
    limits: GatewayLimits = GatewayLimits()
    timeouts: Timeouts = Timeouts()
    health: HealthSettings = HealthSettings()
    queue: QueueSettings = QueueSettings()
    max_body: Annotated[ByteSize, Field(ge=1024)] = 64 * 1024**2
    audit: AuditSettings = AuditSettings()
    tracing: TracingSettings = TracingSettings()
    usage: bool = True
    usage_by_hour: Annotated[Duration, AfterValidator(_days)] = 90 * 86400.0


class SupervisorSettings(_Block):
    """Who runs the processes, and where their sockets, logs and records live.

    In seconds: a start that makes no progress for `start_timeout` has failed, however long the whole takes;
    an engine that has work and takes no step for `stall_timeout` hangs; a stop waits `drain_timeout` for
    requests in flight.
    """

    backend: Annotated[
        Literal["local", "systemd", "ray"], _only(("local", "systemd"), "use local or systemd")
    ] = "local"
    state_dir: Annotated[Path, AfterValidator(_home_expanded)] = Path(".pagefleet")
    start_timeout: Annotated[
        Timeout, Field(description="A start without any progress for so long has failed.")
    ] = 120.0
    stall_timeout: Annotated[
        Timeout, Field(description="An engine that has work and takes no step for so long hangs.")
    ] = 50.0
    drain_timeout: Annotated[Timeout, Field(description="How long a stop waits for requests in flight.")] = (
        30.0
    )


class Golden(_Block):
    """A prompt that a standby must answer with `expect`: a substring, or a /regular expression/."""

    prompt: str
    expect: Annotated[str, AfterValidator(_regex_compiles)] | None = None


class Judge(_Block):
    """When a canary passes: see gateway/fleet/judge.py."""

    min_requests: Annotated[Count, Field(ge=1)] = 50
    max_error_rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    max_ttft_ratio: Annotated[float, Field(gt=0, le=1000)] = 1.5
    max_tpot_ratio: Annotated[float, Field(gt=0, le=1000)] = 1.3


class ModelEntry(_Block):
    """One model: its names, where it comes from, and how its workers run."""

    name: ModelName
    aliases: tuple[ModelName, ...] = ()
    source: Annotated[str, Field(min_length=1)]
    replicas: Annotated[Count, Field(ge=1, le=64)] = 1
    limits: LimitSettings | None = None
    golden: tuple[Golden, ...] = ()
    judge: Judge | None = None
    worker: WorkerOptions = WorkerOptions.model_validate({})


class FleetFile(BaseSettings):
    """A whole fleet. `load_fleet` builds it, since only that reads the environment and knows places."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter="__", validate_default=False
    )

    gateway: GatewaySettings = GatewaySettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    defaults: WorkerOptions = WorkerOptions.model_validate({})
    models: tuple[ModelEntry, ...]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """`load_fleet` merges the environment itself, so that a problem's place is known."""
        return (init_settings,)

    def warnings(self) -> list[str]:
        """One line for each setting that is valid but has no effect, in this version or beside the others."""
        lines = list(self.gateway.auth.without_effect())
        if self.gateway.audit.prompts and self.gateway.audit.file is None:
            lines.append("gateway.audit.prompts has no effect without gateway.audit.file")
        if self.gateway.redis_url is None:
            given, default = self.gateway.limits, GatewayLimits()
            lines += [
                f"gateway.limits.{key} has no effect without gateway.redis_url"
                for key in ("on_redis_error", "redis_timeout")
                if getattr(given, key) != getattr(default, key)
            ]
        return lines


def load_fleet(path: str | Path, *, check_sources: bool = True, data: bytes | None = None) -> FleetFile:
    """Reads and checks a fleet file; PAGEFLEET_GATEWAY__PORT=9000 and the like override it.

    Raises ConfigError with every problem found, each with file and line. Gateways need no models on
    their disk and go without `check_sources`. `data`: what the file holds, where it has been read.
    """
    path = Path(path)
    source = parse_yaml(_text(path, data), str(path))
    if source.data is None:
        raise ConfigError(source.problems)
    if not isinstance(source.data, dict):
        raise ConfigError(
            [Problem(str(path), 1, "", "the top level must be a mapping with the key 'models'")]
        )
    problems = list(source.problems)
    overrides = _environment(problems)
    reporter = _Reporter(source, overrides, problems)
    raw = _merged(source.data, overrides)
    _apply_defaults(raw)
    for key_path, message in check_names(raw):
        reporter.add(key_path, message)
    if check_sources:
        for key_path, message in check_paths(raw, (path.resolve().parent, Path.cwd())):
            reporter.add(key_path, message)
    fleet: FleetFile | None = None
    try:
        fleet = FleetFile(**raw)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            reporter.add(detail["loc"], describe(FleetFile, detail))
    else:
        for key_path, message in _uncountable(fleet):
            reporter.add(key_path, message)
    if fleet is None or problems:
        raise ConfigError(sorted(problems, key=lambda problem: problem.line or 0))
    return fleet


def _uncountable(fleet: FleetFile) -> Iterator[tuple[KeyPath, str]]:
    """Limits that this fleet's gateway processes could not count together."""
    gateway = fleet.gateway
    limited = gateway.limits.default.any or any(entry.limits and entry.limits.any for entry in fleet.models)
    if gateway.processes > 1 and gateway.redis_url is None and limited:
        yield (
            ("gateway", "processes"),
            f"{gateway.processes} processes can't count limits together without Redis; set gateway.redis_url "
            "or processes: 1, or take the limits out",
        )


def _text(path: Path, data: bytes | None) -> str:
    try:
        return (path.read_bytes() if data is None else data).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([Problem(str(path), None, "", f"can't be read: {error.strerror}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [Problem(str(path), None, "", f"isn't UTF-8: byte {error.start} is invalid")]
        ) from None


class _Reporter:
    """Turns key paths into places, and says each thing once."""

    def __init__(self, source: YamlSource, overrides: dict[str, Any], problems: list[Problem]) -> None:
        self._source = source
        self._overrides = overrides
        self._problems = problems

    def add(self, path: KeyPath, message: str) -> None:
        path = self._origin(path)
        variable = _variable(self._overrides, path)
        if variable is None:
            problem = Problem(self._source.name, self._source.line(path), dotted(path), message)
        else:
            problem = Problem(f"environment {variable}", None, dotted(path), message)
        if problem not in self._problems:
            self._problems.append(problem)

    def _origin(self, path: KeyPath) -> KeyPath:
        """A worker option that a model has from `defaults` is reported there, once."""
        from_model = path[:4] in self._source.lines or _variable(self._overrides, path[:1])
        if len(path) >= 3 and path[0] == "models" and path[2] == "worker" and not from_model:
            return ("defaults", *path[3:])
        return path


def _environment(problems: list[Problem]) -> dict[str, Any]:
    """The PAGEFLEET_ variables as a nested mapping; one that leads nowhere but was meant to is a problem."""
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX):
            message = check_variable(FleetFile, name, os.environ[name], ENV_PREFIX)
            if message:
                problems.append(Problem(f"environment {name}", None, "", message))
    try:
        return EnvSettingsSource(FleetFile)()
    except SettingsError as error:
        problems.append(Problem("environment", None, "", f"{error}; write lists and blocks as JSON"))
        return {}


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        ours = result.get(key)
        result[key] = _merged(ours, value) if isinstance(ours, dict) and isinstance(value, dict) else value
    return result


def _apply_defaults(raw: dict[str, Any]) -> None:
    defaults, models = raw.get("defaults"), raw.get("models")
    if not isinstance(defaults, dict) or not isinstance(models, list):
        return
    for index, entry in enumerate(models):
        if isinstance(entry, dict) and isinstance(entry.get("worker", {}), dict):
            models[index] = {**entry, "worker": {**defaults, **entry.get("worker", {})}}


def _variable(overrides: dict[str, Any], path: KeyPath) -> str | None:
    """The environment variable that set this key, if one did."""
    here: Any = overrides
    for part in path:
        if not isinstance(here, dict) or part not in here:
            return None
        here = here[part]
    return ENV_PREFIX + "__".join(str(part).upper() for part in path)

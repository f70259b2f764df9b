"""What a fleet file may say, block by block: types, bounds, defaults. `gateway/config.py` reads it."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from contracts.options import WorkerOptions
from contracts.spans import Endpoint
from contracts.units import ByteSize, Duration
from gateway.identity.settings import AuthSettings
from gateway.limits.bounds import bounds_of


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

"""The fleet file: one frozen configuration object, read once, with everything that is wrong reported at once.

Relative paths: a model's `source`, `tokenizer` and `chat_template` are looked up from the fleet file's
directory, then from the working directory; `supervisor.state_dir` is relative to the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from contracts.options import WorkerOptions
from gateway.config_check import check_names, check_paths, check_variable, describe
from gateway.settings import GatewayLimits, GatewaySettings, ModelEntry, SupervisorSettings
from gateway.yaml_source import KeyPath, Problem, YamlSource, dotted, parse_yaml

ENV_PREFIX = "PAGEFLEET_"


class ConfigError(Exception):
    """A fleet file that can't be used; `problems` holds everything found, each with its place."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


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

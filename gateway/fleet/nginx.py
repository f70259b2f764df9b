"""nginx in front of a fleet: its configuration, made of the fleet file and deploy/nginx/*.j2.

Everything that comes from elsewhere (names, paths, addresses) goes through `word` into the template, so
nothing can end a directive and begin another.
"""

from __future__ import annotations

import ipaddress
import math
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from gateway.config import FleetFile
from gateway.fleet.commands import slots_of
from gateway.fleet.errors import FleetError, InvalidFleet
from gateway.fleet.nginx_values import (
    duration,
    listen_address,
    network,
    pattern_word,
    upstream_address,
    word,
)
from gateway.fleet.state import RoutesFile, Target
from gateway.identity.proxies import TrustedProxies

TEMPLATES = "nginx"
MARGIN_SECONDS = 5  # that nginx waits longer than the gateway, whose own answer says what was wrong
PATHS = ("/v1/", "/generate", "/generate_stream", "/tokenize", "/detokenize")  # for everybody
MONITORING_PATHS = ("/ready", "/version", "/metrics", "/metrics/workers")


class NginxError(FleetError):
    """nginx isn't there, or refuses the configuration; the message is its own."""


@dataclass(frozen=True)
class NginxOptions:
    """What the fleet file doesn't say.

    listen: ``443``, ``127.0.0.1:8080``, ``[::]:443`` or ``unix:/path``; empty: 443 with TLS, else
    127.0.0.1:8080. upstreams: gateways, ``host:port`` or ``unix:/path``; empty: the fleet file's. user_id:
    whose word X-User-Id is, nobody's ("drop") or the client's ("client"); with `htpasswd` it is the user that
    nginx has checked. monitoring: networks that may see metrics, readiness and version.
    """

    listen: tuple[str, ...] = ()
    server_names: tuple[str, ...] = ("_",)
    certificate: str | None = None
    key: str | None = None
    upstreams: tuple[str, ...] = ()
    max_fails: int = 3
    fail_timeout: int = 10
    user_id: Literal["drop", "client"] = "drop"
    htpasswd: str | None = None
    monitoring: tuple[str, ...] = ()
    access_log: str = "/var/log/nginx/pagefleet.log"
    error_log: str = "/var/log/nginx/error.log"
    standalone: bool = False
    per_model: Literal["path", "port"] | None = None
    first_port: int = 9001
    user: str | None = None  # whom nginx's workers become when root starts a standalone one

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.listen or (("443",) if self.certificate else ("127.0.0.1:8080",))


class Server(NamedTuple):
    """One line of an upstream."""

    address: str
    weight: int = 1
    down: bool = False


@dataclass(frozen=True)
class Upstream:
    name: str
    servers: tuple[Server, ...]
    least_conn: bool = False
    model: str | None = None


@dataclass(frozen=True)
class Route:
    """A location: an exact path, a prefix or, without `path`, a pattern; None as upstream answers 503."""

    upstream: str | None
    path: str | None = None
    exact: bool = False
    pattern: str = ""
    strip: str | None = None
    allow: tuple[str, ...] | None = None
    open: bool = False  # also without a password


@dataclass(frozen=True)
class VirtualServer:
    listen: tuple[str, ...]
    routes: tuple[Route, ...] = field(default=())


def render(fleet: FleetFile, options: NginxOptions, routes: RoutesFile | None = None) -> str:
    """The configuration as text; `routes` is needed for the per-model form.

    InvalidFleet says what can't be: a value that doesn't suit, or a form that would open what is closed.
    """
    _check(fleet, options)
    if options.per_model is None:
        upstreams, servers = _through_gateways(fleet, options)
    else:
        upstreams, servers = _per_model(fleet, options, routes or RoutesFile())
    inner = _fill(
        "pagefleet.conf.j2",
        upstreams=upstreams,
        servers=servers,
        direct=options.per_model is not None,
        tls=options if options.certificate else None,
        server_names=options.server_names,
        max_fails=options.max_fails,
        fail_timeout=f"{options.fail_timeout}s",
        access_log=options.access_log,
        htpasswd=options.htpasswd,
        max_body=fleet.gateway.max_body,
        connect=duration(fleet.gateway.timeouts.connect),
        next_upstream=duration(2 * fleet.gateway.timeouts.connect),
        idle=duration(fleet.gateway.timeouts.idle),
        read=duration(_longest(fleet) + MARGIN_SECONDS),
        forwarded=fleet.gateway.auth.forwarded_header == "forwarded",
        user_id=_user_id(options),
    )
    if not options.standalone:
        return inner
    return _fill("nginx.conf.j2", inner=inner, error_log=options.error_log, user=options.user)


def warnings(fleet: FleetFile, options: NginxOptions) -> Iterator[str]:
    """What works and yet isn't what one would want."""
    auth = fleet.gateway.auth
    if options.per_model is not None:
        yield "requests go to the workers past the gateway: past its keys, limits, queue, usage and audit"
        return
    if auth.mode == "none":
        proxies = TrustedProxies(auth.trusted_proxies, auth.forwarded_header)
        for peer in dict.fromkeys(map(_own_address, _gateways(fleet, options))):
            if peer is not None and not proxies.origin([], peer or None).trusted:
                yield (
                    "the gateway doesn't take nginx's word on who calls, so all clients count as one user; "
                    f"add {peer[0] if peer else 'unix:'} to gateway.auth.trusted_proxies"
                )
    if not options.certificate and any(not _is_local(address) for address in options.addresses):
        yield "without TLS, keys and prompts cross the network in the clear; give --tls-cert and --tls-key"


def check_with_nginx(text: str, program: str = "nginx") -> str:
    """What `nginx -t` says of a whole configuration; NginxError with its words when it refuses it."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise NginxError(f"{program} isn't installed, so nothing was tested")
    with tempfile.TemporaryDirectory(prefix="pagefleet-nginx-") as folder:
        path = Path(folder, "nginx.conf")
        path.write_text(text)
        argv = [found, "-t", "-p", folder, "-c", str(path)]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    words = result.stderr.strip()
    if result.returncode != 0:
        raise NginxError(f"nginx refuses the configuration:\n{words}")
    return words


def _through_gateways(fleet: FleetFile, options: NginxOptions) -> tuple[list[Upstream], list[VirtualServer]]:
    servers = tuple(Server(address) for address in _gateways(fleet, options))
    upstream = Upstream("pagefleet", servers, least_conn=len(servers) > 1)
    routes = [Route("pagefleet", path, exact=not path.endswith("/")) for path in PATHS]
    routes.append(Route("pagefleet", "/health", exact=True, open=True))
    if options.monitoring:
        allow = tuple(network(name) for name in options.monitoring)
        routes += [Route("pagefleet", path, True, allow=allow, open=True) for path in MONITORING_PATHS]
    return [upstream], [VirtualServer(tuple(map(listen_address, options.addresses)), tuple(routes))]


def _per_model(
    fleet: FleetFile, options: NginxOptions, documents: RoutesFile
) -> tuple[list[Upstream], list[VirtualServer]]:
    """One port or path a model, to its workers. Upstreams go by number: nginx ignores the case of names."""
    upstreams, servers, routes = [], [], []
    for number, (name, slug) in enumerate(model_slugs(fleet)):
        document = documents.models.get(name)
        upstream = f"pagefleet_model_{number}"
        lines = weighted(document.targets) if document else ()
        if lines:
            upstreams.append(Upstream(upstream, lines, model=name))
        target = upstream if lines else None
        if options.per_model == "port":
            host = options.addresses[0].rpartition(":")[0]
            address = f"{host}:{options.first_port + number}" if host else str(options.first_port + number)
            exact = [Route(target, path, exact=not path.endswith("/")) for path in PATHS]
            servers.append(VirtualServer((listen_address(address),), tuple(exact)))
        else:
            prefix = re.escape(f"/models/{slug}")
            paths = "|".join(path + ".+" if path.endswith("/") else path for path in PATHS)
            strip = None if target is None else f"^{prefix}(/.*)$"
            routes.append(Route(target, pattern=f"^{prefix}({paths})$", strip=strip))
    if options.per_model == "path":
        servers.append(VirtualServer(tuple(map(listen_address, options.addresses)), tuple(routes)))
    return upstreams, servers


def model_slugs(fleet: FleetFile) -> list[tuple[str, str]]:
    """Each model's name with one that suits a path; no two are the same."""
    slots = {slot.entry.name: slot.name.removesuffix("-0") for slot in slots_of(fleet) if slot.index == 0}
    return list(slots.items())


def weighted(targets: Sequence[Target]) -> tuple[Server, ...]:
    """Targets as lines of an upstream: weights in their smallest whole numbers, so that nginx's round is
    short; who gets nothing is `down`, since nginx knows no weight of 0."""
    live = [target.weight_bp for target in targets if target.state == "ready" and target.weight_bp > 0]
    unit = math.gcd(*live) or 1
    return tuple(
        Server(upstream_address(target.address), target.weight_bp // unit)
        if target.state == "ready" and target.weight_bp > 0
        else Server(upstream_address(target.address), down=True)
        for target in targets
    )


def _fill(template: str, **values: object) -> str:
    import jinja2  # only here: it takes 50 ms to load

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_folder()),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # no markup; `word` quotes
    )
    environment.filters.update(word=word, regex=pattern_word)
    return environment.get_template(template).render(**values).strip() + "\n"


def template_folder() -> Path:
    """deploy/nginx of the source tree, or where an installed package has it."""
    source = Path(__file__).resolve().parents[2] / "deploy" / TEMPLATES
    return source if source.is_dir() else Path(sysconfig.get_path("data"), "share", "pagefleet", TEMPLATES)


def _check(fleet: FleetFile, options: NginxOptions) -> None:
    if (options.certificate is None) != (options.key is None):
        raise InvalidFleet("TLS needs both a certificate and its key: --tls-cert and --tls-key")
    mode = fleet.gateway.auth.mode
    if options.per_model is not None and mode != "none":
        raise InvalidFleet(
            f"--per-model leads past the gateway, which alone checks callers, and gateway.auth.mode "
            f"is {mode}; leave it out, or use mode none"
        )
    if options.htpasswd and (mode != "none" or options.user_id == "client" or options.per_model):
        raise InvalidFleet(
            "--htpasswd is for gateway.auth.mode none, and without --user-id client and --per-model"
        )
    if options.per_model == "port":
        if options.addresses[0].startswith("unix:"):
            raise InvalidFleet("--per-model port needs --listen HOST:PORT, for the host; not a Unix socket")
        last = options.first_port + len(fleet.models) - 1
        if not 0 < options.first_port <= last < 65536:
            raise InvalidFleet(
                f"--first-port: ports {options.first_port} to {last} are not all between 1 and 65535"
            )


def _gateways(fleet: FleetFile, options: NginxOptions) -> list[str]:
    if options.upstreams:
        return list(dict.fromkeys(map(upstream_address, options.upstreams)))
    host, port = fleet.gateway.host, fleet.gateway.port
    if port == 0:
        raise InvalidFleet("gateway.port is 0, any free one; set it, or say where the gateway is: --upstream")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return [upstream_address(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")]


def _own_address(gateway: str) -> tuple[str, int] | tuple[()] | None:
    """From where nginx on this machine reaches a gateway; () for a Unix socket, None where unknown."""
    if gateway.startswith("unix:"):
        return ()
    host = gateway.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return "127.0.0.1", 0
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return (str(address), 0) if address.is_loopback else None


def _is_local(address: str) -> bool:
    return address.startswith(("unix:", "127.", "localhost:", "[::1]:"))


def _user_id(options: NginxOptions) -> str:
    if options.htpasswd:
        return "$remote_user"
    return "$http_x_user_id" if options.user_id == "client" else '""'


def _longest(fleet: FleetFile) -> float:
    """Seconds that an answer may show nothing: one that isn't streamed comes at its end."""
    timeouts = fleet.gateway.timeouts
    return max(timeouts.first_byte, timeouts.idle, timeouts.total)

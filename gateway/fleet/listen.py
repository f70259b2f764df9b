"""The listening socket of all gateway processes: bound before anything starts, and kept over their restarts.

Since it is one, what waits in its queue is taken by whichever process is there, and none of it is reset when
one ends. When all are to end, the supervisor closes its own first, and each gateway empties the queue before
it does: the last one closes the port.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from pathlib import Path

import psutil

from gateway.fleet.errors import InvalidFleet
from gateway.fleet.statedir import LOCK

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; InvalidFleet names the address and, where it can be known, who has the port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise InvalidFleet(f"gateway.host '{host}' can't be resolved: {error.strerror}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidFleet(_why(host, port, error)) from None
    listener.setblocking(False)
    return listener


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"gateway.port {port} on {host} is in use{_holder(port)}; stop that, or choose another port "
            f"(gateway.port, or PAGEFLEET_GATEWAY__PORT)"
        )
    if error.errno == errno.EACCES:
        return f"gateway.port {port} needs privileges; choose one from 1024 on"
    return f"gateway.host {host}, port {port} can't be listened on: {error.strerror}"


def _holder(port: int) -> str:
    """`` by process 123 (name)``, empty when the system does not tell."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,)
            if listens and connection.pid is not None:
                process = psutil.Process(connection.pid)
                return f" by process {process.pid} ({process.name()}){_fleet_of(process)}"
    return ""


def _fleet_of(process: psutil.Process) -> str:
    """Which fleet a supervisor or its gateway belongs to, by the lock that the supervisor holds."""
    for candidate in filter(None, (process, process.parent())):
        for file in candidate.open_files():
            path = Path(file.path)
            if path.name == LOCK and path.read_text().strip() == str(candidate.pid):
                return f" of the fleet in {path.parent} (`pagefleet down --state-dir {path.parent}`)"
    return ""


def base_url(listener: socket.socket) -> str:
    """Where this machine's clients reach the socket; a wildcard address becomes loopback."""
    return url_of(*listener.getsockname()[:2])


def url_of(host: str, port: int) -> str:
    """The same for an address; ``localhost`` is the only name that it takes."""
    host = "127.0.0.1" if host == "localhost" else host
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"

"""The socket a worker listens on: TCP or Unix, bound before anything slow begins."""

from __future__ import annotations

import socket
from pathlib import Path

from worker.config import WorkerConfig


class BindError(RuntimeError):
    """The address can't be listened on; the message says why."""


def bind(config: WorkerConfig) -> socket.socket:
    """The listening socket. BindError when the address is taken or can't be had.

    A Unix socket that a dead process left behind is replaced; one that answers is not.
    """
    if config.uds:
        return _bind_unix(Path(config.uds))
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((config.host, config.port))
    except OSError as error:
        sock.close()
        raise BindError(
            f"can't listen on {config.host} port {config.port}: {error.strerror}; choose another --port"
        ) from error
    return _listening(sock)


def _bind_unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()
        sock.bind(str(path))
        path.chmod(0o660)
    except OSError as error:
        sock.close()
        raise BindError(f"can't listen on {path}: {error.strerror or error}; choose another --uds") from error
    return _listening(sock)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _listening(sock: socket.socket) -> socket.socket:
    # A long queue: a worker busy with one turn of its loop must not make connections fail.
    sock.listen(2048)
    sock.setblocking(False)
    return sock


def address(sock: socket.socket) -> str:
    """Where `sock` listens, as the gateway writes addresses."""
    name = sock.getsockname()
    return f"unix:{name}" if isinstance(name, str) else f"http://{name[0]}:{name[1]}"

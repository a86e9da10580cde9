"""Listening sockets of ports, and their addresses; the same for every protocol."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from hps.errors import ConfigError

BACKLOG = 2048


def listen(
    host: str, port: int, setting: str, *, one_of_many: bool = False, is_optional: bool = False
) -> socket.socket:
    """Return a listening TCP socket. Raises ``ConfigError`` naming ``setting``.

    ``one_of_many``: other processes of this user may listen on the port too, and connections are spread over
    them. ``is_optional``: ``setting`` may be null.
    """
    remedy = f", or {setting}: null" if is_optional else ""
    return _bound(host, port, setting, one_of_many=one_of_many, listens=True, remedy=remedy)


def listen_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket at ``path``. Raises ``ConfigError``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        sock.bind(str(path))
    except OSError:
        sock.close()
        raise ConfigError(
            f"cannot listen on the Unix socket {path}: its path may have at most 107 characters, "
            "and its file system must be writable; set server.runtime to another folder"
        ) from None
    sock.listen(BACKLOG)
    sock.setblocking(False)
    return sock


def reserve_port(host: str, port: int, setting: str, *, one_of_many: bool = False) -> socket.socket:
    """Return a socket that reserves the port and takes no connections; else as `listen`."""
    return _bound(host, port, setting, one_of_many=one_of_many, listens=False)


def _bound(
    host: str, port: int, setting: str, *, one_of_many: bool, listens: bool, remedy: str = ""
) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"{setting}.host is {host!r}, which is not a usable address: {error}"
        ) from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if one_of_many:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        if listens:
            sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        action = "choose another address or port"
        if error.errno == errno.EADDRINUSE:
            action = (
                f"stop the process that listens there, or set {setting}.port (0 takes a free one)"
            )
        raise ConfigError(
            f"{setting}: cannot listen on {host}:{port}: {error.strerror or error}; {action}{remedy}"
        ) from None
    return sock


def url_of(sock: socket.socket, *, secured: bool) -> str:
    """Return the base URL of the server that listens at ``sock``."""
    scheme = "https" if secured else "http"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://{host_of(host)}:{port}"


def host_of(host: str) -> str:
    """Return the host as written in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host

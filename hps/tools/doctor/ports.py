"""Checks of the ports: free or taken by this server, certificates, authentication."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hps.config.server_settings import opened_ports
from hps.errors import (
    DeadlineExceeded,
    HpsError,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from hps.tools.doctor.certificate_validity import file
from hps.tools.doctor.check import DoctorCheck, attempt

if TYPE_CHECKING:
    from hps.client import Tls
    from hps.config.schema import Settings
    from hps.config.server_settings import Listener

_TIMEOUT_S = 5.0


def ports(
    settings: Settings, running: RunningServer, api_key: str | None, tls: Tls | None
) -> Iterator[DoctorCheck]:
    """Ports that the role opens; ``running``: the server found on this configuration's ports."""
    yield attempt("access", lambda: exposure(settings))
    for name, listener in opened_ports(settings.server):
        yield port(f"{name} port", listener, running, api_key, tls)
        if listener.tls is not None:
            yield attempt(f"{name} certificates", partial(certificates, name, listener))


def exposure(settings: Settings) -> DoctorCheck:
    from hps.config.auth import check_exposure

    check_exposure(settings)
    mode = settings.auth.mode
    if mode == "off":  # set explicitly
        return DoctorCheck(
            "access", "OK", "auth.mode off: any client that reaches the ports has access"
        )
    return DoctorCheck("access", "OK", f"auth.mode {mode or 'off, loopback only'}")


def port(
    name: str,
    at: Listener,
    running: RunningServer,
    api_key: str | None = None,
    tls: Tls | None = None,
) -> DoctorCheck:
    """Check that a port is free or used by this configuration's server, not by another process."""
    host, number = at.host, at.port
    if number == 0:
        return DoctorCheck(name, "OK", "any free one")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
            return DoctorCheck(name, "OK", f"{host}:{number} is free")
        except OSError as error:
            reason, number_of = error.strerror or str(error), error.errno
    setting = f"server.{name.split()[0]}"
    if number_of == errno.EACCES:
        remedy = f"set {setting}.port to one from 1024 on, or let this user have it"
        return DoctorCheck(name, "FAIL", f"{host}:{number} cannot be had: {reason}", remedy)
    if number_of == errno.EADDRNOTAVAIL:
        remedy = f"set {setting}.host to an address of this machine, or to 0.0.0.0"
        return DoctorCheck(name, "FAIL", f"{host} is no address of this machine", remedy)
    if running.is_own and number in running.ports:
        return DoctorCheck(name, "OK", f"{host}:{number} is served by this configuration's server")
    holder = _holder(name, at, api_key, tls)
    if holder is not None and holder.verdict != "OK":
        return holder
    remedy = f"stop what listens there, or set {setting}.port"
    if holder is None:
        return DoctorCheck(name, "FAIL", f"{host}:{number} cannot be had: {reason}", remedy)
    if running.is_own is None:
        return DoctorCheck(
            name, "WARN", f"{holder.found}, perhaps another one: {running.why}", remedy
        )
    return DoctorCheck(name, "FAIL", f"{holder.found}, another one: {running.why}", remedy)


def _holder(name: str, at: Listener, api_key: str | None, tls: Tls | None) -> DoctorCheck | None:
    """Owner of a port that is taken: OK for an hps server, None for any other."""
    place, setting = f"{at.host}:{at.port}", f"server.{name.split()[0]}"
    try:
        return (
            DoctorCheck(name, "OK", f"{place} is served by hps")
            if is_ours(at, api_key, tls)
            else None
        )
    except Unauthenticated:
        found = f"{place} is taken by a server that wants an API key"
        return DoctorCheck(name, "WARN", found, "give --api-key, to see whether it is hps")
    except Unsupported:  # a lookup node's gRPC port has another protocol
        return DoctorCheck(
            name, "OK", f"{place} is served by a lookup node, or another gRPC server"
        )
    except HpsError as error:
        if at.tls is not None:
            remedy = "give --tls, to see whether it is hps"
            return DoctorCheck(name, "WARN", f"{place} is taken: {error}", remedy)
        if isinstance(error, DeadlineExceeded):
            remedy = f"ask again, if that is hps at work; else stop it, or set {setting}.port"
            found = f"{place} is taken by what said nothing for {_TIMEOUT_S:g} s"
            return DoctorCheck(name, "WARN", found, remedy)
    return None


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The server at a configuration's admin port.

    ``is_own``: True if it runs this configuration; None if unknown, for the reason ``why``. ``ports``: all on
    which it listens."""

    is_own: bool | None
    why: str
    ports: frozenset[int] = frozenset()


def running_server(settings: Settings, api_key: str | None, tls: Tls | None) -> RunningServer:
    """Ask the admin port of the configuration which server it belongs to."""
    from hps.client import Admin
    from hps.config.effective_settings import deployment_identity

    at = settings.server.admin
    if at.port == 0:
        return RunningServer(False, "server.admin.port is 0, so its own cannot be asked")
    used = tls if at.tls else None
    try:
        with Admin(url_of(at), api_key=api_key, timeout_s=_TIMEOUT_S, tls=used) as admin:
            status = admin.status().get("server")
    except Unavailable:
        return RunningServer(False, "nothing answers at this configuration's admin port")
    except NotFound:
        return RunningServer(
            False, "what answers at this configuration's admin port is not its server"
        )
    except HpsError as error:
        return RunningServer(None, f"the admin port does not report it: {error}")
    if status is None:
        return RunningServer(None, "it is of an earlier release, which does not report its folders")
    for name, mine in deployment_identity(settings).items():
        if None not in (mine, status.get(name)) and mine != status[name]:
            return RunningServer(
                False, f"its {name} is {status[name]}, this configuration's is {mine}"
            )
    numbers = (int(url.rpartition(":")[2]) for url in status["urls"].values())
    return RunningServer(True, "", frozenset(numbers))


def certificates(name: str, at: Listener) -> DoctorCheck:
    """Check the files of the port's certificates, and their expiry. Raises ConfigError."""
    from services.frontend.certificates import server_context

    server_context(at, f"server.{name}")
    assert at.tls is not None
    return file(f"{name} certificates", at.tls.certificate_file)


def is_ours(at: Listener, api_key: str | None, tls: Tls | None) -> bool:
    """Check for an hps server at the address. Raises what ``Client`` raises."""
    from hps.client import Client

    used = tls if at.tls else None
    with Client(url_of(at), api_key=api_key, timeout_s=_TIMEOUT_S, retries=0, tls=used) as client:
        return client.is_hps()


def url_of(at: Listener) -> str:
    """The listener's address from this machine."""
    from hps.config.server_settings import GrpcListener

    host = "127.0.0.1" if at.host in ("0.0.0.0", "::") else at.host
    host = f"[{host}]" if ":" in host else host
    scheme = ("grpc" if isinstance(at, GrpcListener) else "http") + ("s" if at.tls else "")
    return f"{scheme}://{host}:{at.port}"

"""The ports: free or served by us, certificates, who may ask."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from hps.cli.diagnosis.check import Check, attempt
from hps.cli.diagnosis.validity import file
from hps.errors import DeadlineExceeded, HpsError, Unauthenticated, Unsupported

if TYPE_CHECKING:
    from hps.client import Tls
    from hps.config.schema import Settings
    from hps.config.server_settings import Listener

_PATIENCE_S = 5.0
_OPENED = {"lookup": ("grpc", "admin"), "ingest": ("admin",)}


def ports(settings: Settings, api_key: str | None, tls: Tls | None) -> Iterator[Check]:
    """Those that the role opens."""
    yield attempt("access", lambda: exposure(settings))
    for name in _OPENED.get(settings.server.role, ("http", "grpc", "admin")):
        listener = getattr(settings.server, name)
        if listener is not None:
            yield port(f"{name} port", listener, api_key, tls)
            if listener.tls is not None:
                yield attempt(f"{name} certificates", partial(certificates, name, listener))


def exposure(settings: Settings) -> Check:
    from hps.config.auth import check_exposure

    check_exposure(settings)
    mode = settings.auth.mode
    if mode == "off":  # stated, so meant
        return Check("access", "OK", "auth.mode off: whoever reaches the ports may ask")
    return Check("access", "OK", f"auth.mode {mode or 'off, loopback only'}")


def port(name: str, at: Listener, api_key: str | None = None, tls: Tls | None = None) -> Check:
    """Free, or taken by an hps server (which is as it should be), or taken by something else."""
    host, number = at.host, at.port
    if number == 0:
        return Check(name, "OK", "any free one")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
            return Check(name, "OK", f"{host}:{number} is free")
        except OSError as error:
            reason, number_of = error.strerror or str(error), error.errno
    setting = f"server.{name.split()[0]}"
    if number_of == errno.EACCES:
        mend = f"set {setting}.port to one from 1024 on, or let this user have it"
        return Check(name, "FAIL", f"{host}:{number} cannot be had: {reason}", mend)
    if number_of == errno.EADDRNOTAVAIL:
        mend = f"set {setting}.host to an address of this machine, or to 0.0.0.0"
        return Check(name, "FAIL", f"{host} is no address of this machine", mend)
    try:
        if is_ours(at, api_key, tls):
            return Check(name, "OK", f"{host}:{number} is served by hps")
    except Unauthenticated:
        found = f"{host}:{number} is taken by a server that wants an API key"
        return Check(name, "WARN", found, "give --api-key, to see whether it is hps")
    except Unsupported:  # a lookup node's gRPC port has another protocol
        return Check(
            name, "OK", f"{host}:{number} is served by a lookup node, or another gRPC server"
        )
    except HpsError as error:
        if at.tls is not None:
            mend = "give --tls, to see whether it is hps"
            return Check(name, "WARN", f"{host}:{number} is taken: {error}", mend)
        if isinstance(error, DeadlineExceeded):
            mend = f"ask again, if that is hps at work; else stop it, or set {setting}.port"
            found = f"{host}:{number} is taken by what said nothing for {_PATIENCE_S:g} s"
            return Check(name, "WARN", found, mend)
    mend = f"stop what listens there, or set {setting}.port"
    return Check(name, "FAIL", f"{host}:{number} cannot be had: {reason}", mend)


def certificates(name: str, at: Listener) -> Check:
    """Whether the files of the port's certificates can be used, and until when. Raises ConfigError."""
    from services.frontend.certificates import server_context

    server_context(at, f"server.{name}")
    assert at.tls is not None
    return file(f"{name} certificates", at.tls.certificate_file)


def is_ours(at: Listener, api_key: str | None, tls: Tls | None) -> bool:
    """Whether an hps server answers there. Raises what ``Client`` raises."""
    from hps.client import Client

    used = tls if at.tls else None
    with Client(url_of(at), api_key=api_key, timeout_s=_PATIENCE_S, retries=0, tls=used) as client:
        return client.is_hps()


def url_of(at: Listener) -> str:
    """Where it is asked on this machine."""
    from hps.config.server_settings import GrpcListener

    host = "127.0.0.1" if at.host in ("0.0.0.0", "::") else at.host
    host = f"[{host}]" if ":" in host else host
    scheme = ("grpc" if isinstance(at, GrpcListener) else "http") + ("s" if at.tls else "")
    return f"{scheme}://{host}:{at.port}"

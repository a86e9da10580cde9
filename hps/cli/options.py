"""Options that several commands share: server address, API key, certificates, configuration.

Every command that asks a server gets its address from ``--server``. Deprecated forms still work, hidden
and with a warning: ``--admin URL``, and an address as an argument. This module imports no NumPy, so
that commands start fast."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hps.errors import ConfigError

if TYPE_CHECKING:
    from hps.client import Admin, Tls
    from hps.node.node import Node

HTTP, ADMIN = "http://127.0.0.1:8000", "http://127.0.0.1:8002"
_FORMER = "hps.cli.options.former_admin"
# Matches addresses and files, never the name of a model, ours or another server's.
_TARGET = re.compile(r"://|:\d+$|\.(ya?ml|json)$")
RowsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Send keys from 0 up to this number (exclusive), with or without rows.",
        show_default="the server's hottest keys; without any, 100000",
    ),
]


def _server(context: typer.Context, value: str | None) -> str | None:
    """The address from ``--server``, or from the deprecated ``--admin``."""
    return str(context.meta[_FORMER]) if _FORMER in context.meta else value


def _former_admin(context: typer.Context, value: str | None) -> None:
    if value is not None:
        _deprecated("--admin URL")
        context.meta[_FORMER] = value


def _deprecated(form: str) -> None:
    from hps.tools.output import warn

    warn(f"{form} is deprecated; give --server URL instead")


_FLAGS = ("--server", "-s")
ServerOption = Annotated[
    str, typer.Option(*_FLAGS, metavar="URL", help="The server's address for requests.")
]
AdminOption = Annotated[
    str,
    typer.Option(*_FLAGS, metavar="URL", help="The server's admin address.", callback=_server),
]
SomeAdminOption = Annotated[
    str | None,
    typer.Option(*_FLAGS, metavar="URL", help="A running node's admin address.", callback=_server),
]
FormerAdminOption = Annotated[
    str | None, typer.Option("--admin", "-a", hidden=True, callback=_former_admin)
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="Open this configuration in this process instead of asking a server.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of --config, as in server.http.port=80; repeatable.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option("--api-key", envvar="HPS_API_KEY", help="API key, if the server requires one."),
]
TlsOption = Annotated[
    str | None,
    typer.Option(
        "--tls",
        envvar="HPS_TLS",
        metavar="ca=FILE,certificate=FILE,key=FILE",
        help="PEM files for https: trusted roots, and this client's certificate and key.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """An API key and certificates."""

    api_key: ApiKeyOption = None
    tls: TlsOption = None

    def client_tls(self) -> Tls | None:
        return tls_of(self.tls)


@dataclass(frozen=True, kw_only=True)
class AdminServer:
    """A server's admin port."""

    server: AdminOption = ADMIN
    _admin: FormerAdminOption = None
    credentials: Credentials

    def open(self) -> Admin:
        return open_admin(self.server, self.credentials)


def former_target(first: str | None, second: str | None) -> tuple[str | None, str | None]:
    """Split arguments of ``hps bench`` and ``hps profile`` into target and model.

    They are ``[MODEL]``, or in the deprecated form ``URL|FILE [MODEL]``."""
    if first is None or not _TARGET.search(first):
        if second is not None:
            raise ConfigError(f"expected one model; remove {second!r}")
        return None, first
    _deprecated(f"the argument {first}")
    return first, second


def former_urls(servers: list[str] | None, urls: list[str] | None) -> list[str]:
    """Addresses from ``--server`` and from deprecated arguments."""
    if urls:
        _deprecated(f"the argument {urls[0]}")
    return [*(servers or ()), *(urls or ())]


def open_admin(url: str, credentials: Credentials, *, timeout_s: float = 30.0) -> Admin:
    """A client of the admin port at ``url``."""
    from hps.client import Admin

    return Admin(
        url, api_key=credentials.api_key, tls=credentials.client_tls(), timeout_s=timeout_s
    )


def tls_of(given: str | None) -> Tls | None:
    """Parse ``--tls``; each of its parts may be left out. Raises ConfigError."""
    if not given:
        return None
    from hps.client import Tls

    files = dict(part.partition("=")[::2] for part in given.split(","))
    if not all(files.values()) or not files.keys() <= {"ca", "certificate", "key"}:
        raise ConfigError(
            f"--tls is {given!r}; it must look like ca=FILE,certificate=FILE,key=FILE"
        )
    return Tls(files.get("ca"), files.get("certificate"), files.get("key"))


def reject_overrides(overrides: list[str] | None) -> None:
    if overrides:
        raise ConfigError("--set changes a configuration; give --config FILE with it")


@contextmanager
def open_here(config: Path, overrides: list[str] | None) -> Iterator[Node]:
    """Open the node of a configuration file in this process; close it at the end."""
    from hps.cli.progress import ConsoleProgress
    from hps.config import load_config
    from hps.node.build import open_node
    from hps.tools.output import warn

    configuration = load_config(config, overrides or ())
    for warning in configuration.warnings:
        warn(warning)
    node = open_node(configuration, ConsoleProgress())
    try:
        yield node
    finally:
        node.close()

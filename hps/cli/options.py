"""Options that several commands share: output format, server address, API key, configuration.

Every command that asks a server gets its address from ``--server``. Deprecated forms still work, hidden
and with a warning: ``--admin URL``, and an address as an argument. This module imports no NumPy, so
that commands start fast."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from hps.cli.command_options import argument, option
from hps.errors import ConfigError
from hps.tools.output import print_json, warn

if TYPE_CHECKING:
    from hps.client import Admin, Client, Tls
    from hps.config import Configuration
    from hps.config.repository_uri import Location
    from hps.models.repository import Repository
    from hps.node.node import Node
    from hps.tools.bench.load import LoadRecipe

T = TypeVar("T")
DEFAULT_REPOSITORY = Path("models")

if TYPE_CHECKING:
    RepositoryLocation = Location
else:
    RepositoryLocation = str  # Typer takes no unions; `repository_option` parses the text


def repository_option(default: Any, *flags: str, metavar: str = "DIR|URI") -> Any:
    """An option that takes the folder of a model repository, or the URI of a remote one."""
    return option(default, *flags, metavar=metavar, parser=_parse_location)


def location_argument(default: Any) -> Any:
    """An argument that takes a file, or the URI of one in a store."""
    return argument(default, metavar="FILE|URI", parser=_parse_location)


def _parse_location(value: object) -> Location:
    from hps.config.repository_uri import parse_location

    return value if isinstance(value, Path) else parse_location(str(value))


def open_repository(location: Location) -> Repository:
    """The repository at ``location``; versions of a remote one go to the user's cache folder."""
    from hps.cli.progress import ConsoleProgress
    from hps.config.download_settings import DownloadSettings
    from hps.environment import user_cache_folder
    from hps.models import remote

    download = DownloadSettings(folder=user_cache_folder() / "hps" / "models")
    return remote.open_repository(location, download, ConsoleProgress())


HTTP, ADMIN = "http://127.0.0.1:8000", "http://127.0.0.1:8002"
_FORMER = "hps.cli.options.former_admin"
# Matches addresses and files, never the name of a model, ours or another server's.
_TARGET = re.compile(r"://|:\d+$|\.(ya?ml|json)$")


def _server(context: typer.Context, value: str | None) -> str | None:
    """The address from ``--server``, or from the deprecated ``--admin``."""
    return str(context.meta[_FORMER]) if _FORMER in context.meta else value


def _former_admin(context: typer.Context, value: str | None) -> None:
    if value is not None:
        _deprecated("--admin URL")
        context.meta[_FORMER] = value


def _deprecated(form: str) -> None:
    warn(f"{form} is deprecated; give --server URL instead")


_FLAGS = ("--server", "-s")


class OutputFormat(StrEnum):
    table = "table"
    json = "json"


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """The format of a command's result."""

    output: OutputFormat = option(OutputFormat.table, "--output", "-o")
    """table for people, json for programs."""

    @property
    def as_json(self) -> bool:
        return self.output is OutputFormat.json

    def report(self, data: T, show: Callable[[T], None]) -> None:
        """Print ``data`` as JSON, or let ``show`` print it for people."""
        if self.as_json:
            print_json(data)
        else:
            show(data)


@dataclass(frozen=True, kw_only=True)
class JsonReportOptions(ReportOptions):
    """The format of a command's result, with a short form."""

    json: bool = option(False)
    """The same as --output json."""

    @property
    def as_json(self) -> bool:
        return self.json or super().as_json


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting of --config, as in server.http.port=80; repeatable.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """An API key and certificates."""

    api_key: str | None = option(None, envvar="HPS_API_KEY")
    """API key, if the server requires one."""
    tls: str | None = option(None, envvar="HPS_TLS", metavar="ca=FILE,certificate=FILE,key=FILE")
    """PEM files for https: trusted roots, and this client's certificate and key."""

    def client_tls(self) -> Tls | None:
        return tls_of(self.tls)

    def client(self, url: str, *, timeout_s: float = 30.0) -> Client:
        """A client of the server at ``url``."""
        from hps.client import Client

        return Client(url, api_key=self.api_key, tls=self.client_tls(), timeout_s=timeout_s)


@dataclass(frozen=True, kw_only=True)
class LocalNode:
    """A configuration that is opened in this process instead of asking a server."""

    config: Path | None = option(None, "--config", "-c", metavar="FILE")
    """Open this configuration in this process instead of asking a server."""
    overrides: SetOption = None

    def open(self) -> AbstractContextManager[Node] | None:
        """The node of the configuration, closed at the end of the block; None without one."""
        if self.config is not None:
            return open_here(self.config, self.overrides)
        reject_overrides(self.overrides)
        return None


@dataclass(frozen=True, kw_only=True)
class OptionalAdminServer:
    """A node's admin port, if its address is given."""

    server: str | None = option(None, *_FLAGS, metavar="URL", callback=_server)
    """A running node's admin address."""
    _admin: str | None = option(None, "--admin", "-a", hidden=True, callback=_former_admin)
    credentials: Credentials


@dataclass(frozen=True, kw_only=True)
class AdminServer(OptionalAdminServer):
    """A server's admin port."""

    server: str = option(ADMIN, *_FLAGS, metavar="URL", callback=_server)
    """The server's admin address."""

    def open(self) -> Admin:
        return open_admin(self.server, self.credentials)


@dataclass(frozen=True, kw_only=True)
class RequestLoadOptions:
    """The requests that ``hps bench`` and ``hps profile`` send."""

    batch: int = option(1, min=1)
    """Samples per request."""
    keys: str = option("zipf:1.2")
    """Distribution of the keys: uniform, zipf:S, hot:SHARE,COVERAGE or trace:FILE.npy."""
    rows: int | None = option(
        None, min=1, show_default="the server's hottest keys; without any, 100000"
    )
    """Send keys from 0 up to this number (exclusive), with or without rows."""
    hotness: int = option(1, min=1)
    """Keys per sample of features for which the model does not fix it."""
    repository: RepositoryLocation | None = repository_option(None)
    """Model repository; send keys of the rows that the model has there."""
    requests: Path | None = option(None, metavar="FILE")
    """Send the requests of this file, written by hps generate requests."""
    seed: int = option(1, min=0)
    """Seed of the random requests; the same seed gives the same ones."""

    def recipe(self, distinct: int) -> LoadRecipe:
        """Recipe of ``distinct`` requests, if they are not read from a file."""
        from hps.tools.bench.load import LoadRecipe

        return LoadRecipe(distinct, self.batch, self.keys, self.rows, self.hotness, self.seed)


def only_model(names: Sequence[str], command: str) -> str:
    """The only one of a server's models. Raises ConfigError if it has none or several."""
    main = [name for name in names if not name.endswith(".lookup")] or list(names)
    if len(main) != 1:
        there = ", ".join(names) or "none"
        raise ConfigError(f"name the model: hps {command} MODEL; the server has {there}")
    return main[0]


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
    from hps.node.build import open_node

    with closing(open_node(load_with_warnings(config, overrides), ConsoleProgress())) as node:
        yield node


def load_with_warnings(config: Path, overrides: list[str] | None) -> Configuration:
    """Read a configuration file; print its warnings."""
    from hps.config import load_config

    configuration = load_config(config, overrides or ())
    for warning in configuration.warnings:
        warn(warning)
    return configuration

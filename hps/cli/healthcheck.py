"""``hps healthcheck``: readiness of the server on this machine, for container engines.

One GET to the admin port, which every role has and which reports health without a key. It loads neither
NumPy nor the client: engines run it every few seconds."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hps.cli.command_options import CommandApp, option
from hps.cli.options import SetOption, tls_of
from hps.errors import ConfigError, HpsError, Unavailable

if TYPE_CHECKING:
    from hps.config.server_settings import Listener

app = CommandApp(add_completion=False)

TIMEOUT_S = 2.0
_SELF = {"0.0.0.0": "127.0.0.1", "::": "::1"}

EXAMPLES = """\b
Examples:
  hps healthcheck --config hps.yaml
  hps healthcheck --live               # of the configuration in HPS_CONFIG
  HEALTHCHECK CMD ["hps", "healthcheck"] in a Dockerfile
"""


@dataclass(frozen=True, kw_only=True)
class HealthcheckOptions:
    config: Path | None = option(None, "--config", "-c", envvar="HPS_CONFIG", metavar="FILE")
    """The server's configuration; default: HPS_CONFIG, else the default settings."""
    live: bool = option(False)
    """Check that the server answers, not that it is ready."""
    overrides: SetOption = None
    tls: str | None = option(None, envvar="HPS_TLS", metavar="ca=FILE,certificate=FILE,key=FILE")
    """PEM files of this client's certificate and key, if the server requires them."""


@app.command(epilog=EXAMPLES)
def healthcheck(options: HealthcheckOptions) -> None:
    """Check whether the server on this machine is ready: exit code 0, else 1, within 2 s.

    For `hps serve` in any role and `hps ingest`. The address is server.admin of the configuration; give
    the server's --set options here, too. The server's certificate is not verified, since no secret is
    sent. If the server requires a client certificate, give one by --tls or HPS_TLS."""
    from hps.config import load_config

    try:
        at = load_config(options.config, options.overrides or ()).settings.server.admin
        status, reason = ask(at, "live" if options.live else "ready", options.tls)
        if status != 200:
            raise Unavailable(reason or f"the server answered with status {status}")
    except HpsError as error:
        # Not 2, as other commands: container engines define only 0 and 1.
        from hps.cli.main import print_error

        print_error(error)
        raise typer.Exit(1) from None


def ask(at: Listener, what: str, tls: str | None = None) -> tuple[int, str]:
    """Request the health; return the HTTP status, and the reason if it is not 200.

    Raises Unavailable, ConfigError."""
    if at.port == 0:
        raise ConfigError(
            "server.admin.port is 0 (any free port), so it is unknown here; set it to a number"
        )
    host = _SELF.get(at.host, at.host)
    end = time.monotonic() + TIMEOUT_S
    connection: http.client.HTTPConnection
    if at.tls is None:
        connection = http.client.HTTPConnection(host, at.port, timeout=TIMEOUT_S)
    else:
        context = _context(at, tls)
        connection = http.client.HTTPSConnection(host, at.port, timeout=TIMEOUT_S, context=context)
    try:
        connection.connect()
        connection.sock.settimeout(max(0.01, end - time.monotonic()))
        connection.request("GET", f"/v2/health/{what}", headers={"Connection": "close"})
        answer = connection.getresponse()
        return answer.status, _reason(answer.read(65_536))
    except (OSError, http.client.HTTPException) as error:
        why = str(error) or type(error).__name__
        raise Unavailable(f"no answer from {host}:{at.port} (server.admin): {why}") from None
    finally:
        connection.close()


def _context(at: Listener, tls: str | None) -> ssl.SSLContext:
    if tls:
        given = tls_of(tls)
        assert given is not None
        context = given.context()
    else:
        assert at.tls is not None
        if at.tls.client_ca_file is not None:
            raise ConfigError(
                "server.admin requires a client certificate; give --tls certificate=FILE,key=FILE, or HPS_TLS"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _reason(body: bytes) -> str:
    """The field ``error`` of a response body, or ""."""
    try:
        answer: Any = json.loads(body)
        return str(answer["error"])
    except (ValueError, KeyError, TypeError):
        return ""
